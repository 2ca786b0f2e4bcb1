"""Documents of runs and their clients, built from the run's file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypedDict, cast

from feddbe.errors import DivergenceError, truncate
from feddbe.metrics.client_values import ALL
from feddbe.metrics.representations.confusion import CONFUSION, check_values
from feddbe.metrics.representations.registry import ANALYSES
from feddbe.results.document import (
    AnalysisDocument,
    Divergence,
    NewClientsResult,
    RoundResult,
    RunDocument,
    build_new_clients_result,
    find_deployed_moment,
    result_at_deployment,
    selection_accuracy,
)
from feddbe.runs.analysis import META
from feddbe.runs.store import RunStore, corrupt_run_error
from feddbe.state import Receipt, decode


def load_document(folder: Path, *, hashes: bool = True) -> RunDocument:
    """Return the document of the run in `folder`; see `build_document`."""
    with closing(RunStore.open(folder)) as store:
        store.snapshot()
        return build_document(store, hashes=hashes)


def build_document(store: RunStore, *, hashes: bool = True) -> RunDocument:
    """Return the document of a run; without `hashes`, the states are not read, which may be large."""
    results = store.round_results()
    evaluated = [result for result in results if result["accuracy"]]
    last = evaluated[-1] if evaluated else None
    settings: Mapping[str, Any] = store.meta("config")
    server_hash, client_hashes = store.hashes() if hashes else ("", {})
    trained = [result for result in results if result["round"] > 0]
    participations = max(1, _count_participations(store))
    return {
        "method": settings["method"],
        "config": dict(settings),
        "config_hash": store.meta("config_hash"),
        "rounds": results,
        "best": max(evaluated, key=selection_accuracy, default=None),
        "last": last,
        "deployed_moment": find_deployed_moment(last),
        "test_samples": _count_test_samples(store, last) if last else 0,
        "majority_accuracy": store.meta("majority_accuracy"),
        "new_clients": read_new_clients(store),
        "analyses": _analyses(store),
        "bn_buffers": store.meta("bn_buffers"),
        "note": store.meta("note") or "",
        "remarks": _notes(store),
        "diverged": read_divergence(store),
        "trainers": store.meta("trainers") or [],
        "cost": {
            "up": sum(result["bytes_up"] for result in trained) / participations,
            "down": sum(result["bytes_down"] for result in trained) / participations,
            "seconds": median(result["seconds"] for result in trained) if trained else 0.0,
        },
        "label_names": store.meta("label_names") or [],
        "client_names": store.meta("client_names") or [],
        "shift_labels": store.meta("shift_labels") or [],
        "server_sha256": server_hash,
        "clients_sha256": client_hashes,
        "peak_rss_mb": store.meta("peak_rss_mb") or 0.0,
        "begun": store.meta("begun") or "",
        "versions": store.meta("versions") or {},
        "folder": str(store.folder),
    }


def describe_divergence(error: DivergenceError) -> Divergence:
    """Return the error as it is stored; its value is text because JSON has no nan."""
    return {"round": error.round, "client": error.client, "what": error.quantity, "value": str(error.value)}


def divergence_error(document: RunDocument) -> DivergenceError | None:
    """Return the error of a run that diverged, with the client's name if it has one; None for other runs."""
    divergence = document["diverged"]
    if divergence is None:
        return None
    client = divergence["client"]
    error = DivergenceError(client, divergence["round"], divergence["what"], float(divergence["value"]))
    if document["client_names"]:
        error.client_name = f"client '{document['client_names'][client]}'"
    return error


def read_divergence(store: RunStore) -> Divergence | None:
    """Return the divergence that ended the run, or None if there is none or later rounds are complete."""
    divergence: Divergence | None = store.meta("diverged")
    if divergence and divergence["round"] > store.last_round():
        return divergence
    return None


def read_new_clients(store: RunStore) -> NewClientsResult | None:
    """Return the results of the clients that joined after training, or None."""
    description = store.meta("new_clients")
    if not description:
        return None
    records = [record for record in store.aggregate_records() if record.round == description["round"]]
    try:
        return build_new_clients_result(description, records)
    except KeyError as error:
        raise corrupt_run_error(store.folder, f"records of new clients: no {error}") from None


_MAX_CLASSES = 1000
"""Labels of a matrix in a run that does not store how many there are."""


def _analyses(store: RunStore) -> list[AnalysisDocument]:
    """Return the analyses of representations, from their records."""
    descriptions: dict[str, dict[str, Any]] = store.meta(META) or {}
    rounds = {description["round"] for description in descriptions.values()}
    records = {round_: store.records(round_) for round_ in rounds}
    labels = store.meta("labels")
    classes = len(labels[0]) if labels else _MAX_CLASSES
    documents = []
    for key, description in descriptions.items():
        name = key.split("/", 2)[2]
        if description["analysis"] not in ANALYSES:
            raise corrupt_run_error(store.folder, f"its metadata: {META}: unknown analysis")
        values: dict[int, dict[str, float | None]] = {}
        for record in records[description["round"]]:
            base, _, reading = record.name.partition("/")
            if base == name and record.moment == description["moment"]:
                is_finite = record.value is not None and math.isfinite(record.value)
                client_values = values.setdefault(record.client, {})
                client_values[reading or "value"] = record.value if is_finite else None
        overall = values.pop(ALL, {})
        if description["analysis"] == CONFUSION.name:
            try:
                check_values(overall, classes)
            except ValueError as error:
                raise corrupt_run_error(store.folder, f"records of {truncate(key)}: {error}") from None
        clients = {str(client): readings for client, readings in sorted(values.items())}
        documents.append({**description, "overall": overall, "clients": clients})
    return cast(list[AnalysisDocument], documents)


def _count_participations(store: RunStore) -> int:
    """Return how often clients took part in rounds, summed over clients."""
    weights = [
        record.weight
        for record in store.aggregate_records()
        if record.round > 0 and (record.moment, record.name) == ("round", "seconds")
    ]
    return int(sum(weights))


def _count_test_samples(store: RunStore, result: RoundResult) -> int:
    """Return the number of test samples of the clients that were evaluated in a round."""
    key = (result["round"], result["moment"], "accuracy")
    weights = [r.weight for r in store.aggregate_records() if (r.round, r.moment, r.name) == key]
    return int(weights[0])


def _notes(store: RunStore) -> list[str]:
    missing = [
        record.value
        for record in store.aggregate_records()
        if (record.moment, record.name) == ("round", "missing") and record.value
    ]
    notes = list(store.meta("remarks") or [])
    if missing:
        notes.append(f"{sum(missing):g} replies are missing, in {len(missing)} rounds")
    return notes


class ClientRecord(TypedDict):
    """A client's accuracy in the best and in the last round; None if it was not evaluated."""

    client: int
    name: str
    """Name of the client in the data; its number if the data has no names."""
    samples: int
    """Number of test samples."""
    best: float | None
    last: float | None


def client_records(document: RunDocument) -> list[ClientRecord]:
    """Return the clients that were evaluated in the best or the last round, in client order."""
    names = dict(enumerate(document["client_names"]))
    clients: dict[int, ClientRecord] = {}
    rounds: tuple[Literal["best", "last"], ...] = ("best", "last")
    with closing(RunStore.open(Path(document["folder"]))) as store:
        for which in rounds:
            result = document[which]
            if result is None:
                continue
            for record in store.records(result["round"]):
                client = record.client
                is_accuracy = (record.moment, record.name) == (result["moment"], "accuracy")
                if client == ALL or not is_accuracy:
                    continue
                if client not in clients:
                    clients[client] = ClientRecord(
                        client=client,
                        name=names.get(client, str(client)),
                        samples=int(record.weight),
                        best=None,
                        last=None,
                    )
                clients[client][which] = record.value
    return [clients[client] for client in sorted(clients)]


def client_accuracies(folder: Path, result: RoundResult | None) -> dict[int, float]:
    """Return each client's accuracy with the model that it deploys, without new clients.

    It is the model of this round; if the method adapts only after the last round, it is that of the last.
    """
    if result is None:
        return {}
    with closing(RunStore.open(folder)) as store:
        last = [entry for entry in store.round_results() if entry["accuracy"]][-1]
        return _accuracies(store, result_at_deployment(result, last, find_deployed_moment(last)))


def accuracy_history(
    folder: Path, results: Sequence[RoundResult], clients: Sequence[int]
) -> list[dict[int, float]]:
    """Return the accuracies of these clients for each round; clients that were not evaluated are left out."""
    condition = f"AND client IN ({', '.join(map(str, map(int, clients)))})"
    with closing(RunStore.open(folder)) as store:
        return [_accuracies(store, result, condition) for result in results]


def _accuracies(store: RunStore, result: RoundResult, condition: str = "") -> dict[int, float]:
    condition = f"AND moment = ? AND name = 'accuracy' {condition}"
    records = store.records(result["round"], condition, result["moment"])
    return {r.client: r.value for r in records if r.client != ALL and r.value is not None}


def count_private_values(folder: Path) -> int | None:
    """Return the number of values in a client's private state; None if clients keep it elsewhere.

    All clients keep the same number of values, so one of them is read.
    """
    with closing(RunStore.open(folder)) as store:
        first = f"AND client = (SELECT min(client) FROM rows WHERE round = 1 AND client != {ALL})"
        client = next((record.client for record in store.records(1, first)), 0)
        state = store.read(client)
        if not state:
            return 0
        if Receipt.decode(state):
            return None
        return sum(tensor.numel() for tensor in decode(state).values())
