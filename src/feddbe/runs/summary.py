"""The document that describes a run, from its file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, cast

from feddbe.errors import DivergenceError
from feddbe.metrics.records import ALL
from feddbe.results.document import (
    AnalysisDocument,
    Divergence,
    NewClientsResult,
    RoundResult,
    RunDocument,
    selection_accuracy,
)
from feddbe.results.document import build_new_clients_result as about_newcomers
from feddbe.runs.analysis import META
from feddbe.runs.store import RunStore
from feddbe.state import Receipt, decode


def load_document(folder: Path, *, hashes: bool = True) -> RunDocument:
    """The document of the run in this folder; without `hashes` its states are not read."""
    store = RunStore.open(folder)
    try:
        store.snapshot()
        return build_document(store, hashes=hashes)
    finally:
        store.close()


def build_document(store: RunStore, *, hashes: bool = True) -> RunDocument:
    """All of it; without `hashes` the states, which may be large, are not read."""
    entries = store.round_results()
    known = [e for e in entries if e["accuracy"]]
    settings: Mapping[str, Any] = store.meta("config")
    server, clients = store.hashes() if hashes else ("", {})
    rounds = [e for e in entries if e["round"] > 0]
    calls = max(1, _calls(store))
    return {
        "method": settings["method"],
        "config": dict(settings),
        "config_hash": store.meta("config_hash"),
        "rounds": entries,
        "best": max(known, key=selection_accuracy, default=None),
        "last": known[-1] if known else None,
        "majority_accuracy": store.meta("majority_accuracy"),
        "new_clients": read_new_clients(store),
        "analyses": _analyses(store),
        "bn_buffers": store.meta("bn_buffers"),
        "note": store.meta("note") or "",
        "remarks": _remarks(store),
        "diverged": is_diverged(store),
        "trainers": store.meta("trainers") or [],
        "cost": {
            "up": sum(e["bytes_up"] for e in rounds) / calls,
            "down": sum(e["bytes_down"] for e in rounds) / calls,
            "seconds": median(e["seconds"] for e in rounds) if rounds else 0.0,
        },
        "label_names": store.meta("label_names") or [],
        "client_names": store.meta("client_names") or [],
        "shift_labels": store.meta("shift_labels") or [],
        "server_sha256": server,
        "clients_sha256": clients,
        "peak_rss_mb": store.meta("peak_rss_mb") or 0.0,
        "begun": store.meta("begun") or "",
        "versions": store.meta("versions") or {},
        "folder": str(store.folder),
    }


def read_divergence(error: DivergenceError) -> Divergence:
    """What is written about a run that ends with this error; JSON has no number for its value."""
    return {"round": error.round, "client": error.client, "what": error.quantity, "value": str(error.value)}


def is_diverged(store: RunStore) -> Divergence | None:
    """Where it ended because training diverged, unless it has gone on since."""
    mark: Divergence | None = store.meta("diverged")
    return mark if mark and mark["round"] > store.last_round() else None


def read_new_clients(store: RunStore) -> NewClientsResult | None:
    """What the clients that joined at the end measured."""
    about = store.meta("new_clients")
    return about and about_newcomers(
        about, [row for row in store.aggregate_records() if row.round == about["round"]]
    )


def _analyses(store: RunStore) -> list[AnalysisDocument]:
    """What was measured of representations, from its rows."""
    known: dict[str, dict[str, Any]] = store.meta(META) or {}
    rows = {round: store.records(round) for round in {about["round"] for about in known.values()}}
    found = []
    for key, about in known.items():
        name, read = key.split("/", 2)[2], dict[int, dict[str, float | None]]()
        for row in rows[about["round"]]:
            base, _, reading = row.name.partition("/")
            if base == name and row.moment == about["moment"]:
                finite = row.value is not None and math.isfinite(row.value)
                read.setdefault(row.client, {})[reading or "value"] = row.value if finite else None
        overall = read.pop(ALL, {})
        found.append({**about, "overall": overall, "clients": {str(c): r for c, r in sorted(read.items())}})
    return cast(list[AnalysisDocument], found)


def _calls(store: RunStore) -> int:
    """How often a client took part in a round."""
    whole = (row for row in store.aggregate_records() if row.round > 0 and row[2:4] == ("round", "seconds"))
    return int(sum(row.weight for row in whole))


def _remarks(store: RunStore) -> list[str]:
    missing = [
        row.value for row in store.aggregate_records() if row[2:4] == ("round", "missing") and row.value
    ]
    remarks = list(store.meta("remarks") or [])
    if missing:
        remarks.append(f"{sum(missing):g} replies are missing, in {len(missing)} rounds")
    return remarks


class ClientRecord(TypedDict):
    """A client of a run: its accuracy in the best and in the last round; None where it was not evaluated."""

    client: int
    name: str
    """As the data calls it; its number where that has no names."""
    samples: int
    """Of its test data."""
    best: float | None
    last: float | None


def client_records(document: RunDocument) -> list[ClientRecord]:
    """The clients of a run that were evaluated in its best or its last round, in their order."""
    store, found = RunStore.open(Path(document["folder"])), dict[int, ClientRecord]()
    try:
        names = dict(enumerate(document["client_names"]))
        for which, entry in (("best", document["best"]), ("last", document["last"])):
            for row in store.records(entry["round"]) if entry else ():
                if row.client == ALL or row[2:4] != (entry and entry["moment"], "accuracy"):
                    continue
                who = row.client
                blank = ClientRecord(
                    client=who,
                    name=names.get(who, str(who)),
                    samples=int(row.weight),
                    best=None,
                    last=None,
                )
                found.setdefault(who, blank)["best" if which == "best" else "last"] = row.value
    finally:
        store.close()
    return [found[client] for client in sorted(found)]


def client_accuracies(folder: Path, entry: RoundResult | None) -> dict[int, float]:
    """Each client's accuracy in this entry of the run, at the moment that counts; newcomers are no part."""
    if entry is None:
        return {}
    store = RunStore.open(folder)
    try:
        return _accuracies(store, entry)
    finally:
        store.close()


def accuracy_history(
    folder: Path, entries: Sequence[RoundResult], clients: Sequence[int]
) -> list[dict[int, float]]:
    """The accuracies of these clients in each of these entries; one that was not evaluated is not there."""
    store = RunStore.open(folder)
    try:
        some = f"AND client IN ({', '.join(map(str, map(int, clients)))})"
        return [_accuracies(store, entry, some) for entry in entries]
    finally:
        store.close()


def _accuracies(store: RunStore, result: RoundResult, some: str = "") -> dict[int, float]:
    rows = store.records(result["round"], f"AND moment = ? AND name = 'accuracy' {some}", result["moment"])
    return {row.client: row.value for row in rows if row.client != ALL and row.value is not None}


def retained_rounds(folder: Path) -> int | None:
    """How many numbers a client keeps (all keep as many, so one is looked at); None: it does so elsewhere."""
    store = RunStore.open(folder)
    try:
        first = f"AND client = (SELECT min(client) FROM rows WHERE round = 1 AND client != {ALL})"
        client = next((row.client for row in store.records(1, first)), 0)
        state = store.read(client)
        if state is not None and Receipt.decode(state):
            return None
        return sum(tensor.numel() for tensor in decode(state).values()) if state else 0
    finally:
        store.close()
