"""Results as rows of values, for every format: a row per run, or a row per client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from feddbe.results.document import Entry, RunDocument, ending, labels, moment, title
from feddbe.runs.per_client import Client
from feddbe.show.cells import in_bytes, in_seconds, percent
from feddbe.show.formats import Column, Grid

__all__ = ["clients_grid", "clients_side_by_side", "results_grid", "rounds_grid"]

_READINGS = ("weighted", "mean", "worst_tenth")
_SETTINGS = ("data", "partition", "clients", "seed", "lr")


def results_grid(documents: Sequence[RunDocument]) -> Grid:
    """A run to a row: its best and its last round, and what a round costs."""
    entries = [
        Column(f"{which}_{key}", f"{which} {key.replace('_', ' ')}", percent)
        for which in ("best", "last")
        for key in _READINGS
    ]
    columns = [
        Column("run", "method", text=True), Column("method"), *map(Column, _SETTINGS),
        Column("best_round", "best round"), *entries[:3], Column("last_round", "last round"), *entries[3:],
        Column("seconds", "s per round", lambda value: "-" if value is None else in_seconds(value)),
        Column("bytes_up", "up", in_bytes), Column("bytes_down", "down", in_bytes),
        Column("floor"), Column("when"), Column("diverged"), Column("folder"),
    ]  # fmt: skip
    rows = [_row(document, name) for document, name in zip(documents, labels(documents), strict=True)]
    whens = " or ".join(dict.fromkeys(moment(d["last"]["when"]) for d in documents if d["last"]))
    floors = ", ".join(dict.fromkeys(percent(d["floor"]) for d in documents))
    return Grid(
        columns,
        rows,
        f"{title(documents)}. Test accuracy in % {whens}: weighted by samples, mean of clients, mean of the "
        f"worst tenth of clients; of each client's majority class {floors}. Up, down: bytes per client and "
        "round.",
    )


def _row(document: RunDocument, name: str) -> list[Any]:
    seconds = [entry["seconds"] for entry in document["rounds"] if entry["round"] >= 1]
    ended = document["diverged"]
    return [
        f"{name} ({ending(document)})" if ended else name,
        document["method"],
        *(_setting(document, key) for key in _SETTINGS),
        *_entry(document["best"]),
        *_entry(document["last"]),
        median(seconds) if seconds else None,
        document["cost"]["up"],
        document["cost"]["down"],
        document["floor"],
        document["last"]["when"] if document["last"] else None,
        ended["round"] if ended else None,
        document["folder"],
    ]


def _setting(document: RunDocument, key: str) -> Any:
    value = document["config"].get(key)
    return Path(value).name if key == "data" and value else value


def _entry(entry: Entry | None) -> list[Any]:
    if entry is None or entry["accuracy"] is None:
        return [None] * (1 + len(_READINGS))
    found: dict[str, Any] = {**entry["accuracy"]}
    return [entry["round"], *(found[key] for key in _READINGS)]


def rounds_grid(document: RunDocument) -> Grid:
    """A round to a row, of one run."""
    readings = (*_READINGS, "std")
    rest = ("auc", "train_loss", "seconds", "bytes_up", "bytes_down")
    rows: list[list[Any]] = []
    for entry in document["rounds"]:
        found: dict[str, Any] = {**entry}
        accuracy, validation = found["accuracy"] or {}, found["validation"] or {}
        values = [accuracy.get(key) for key in readings] + [validation.get("weighted")]
        rows.append([entry["round"], entry["when"], *values, *(found[key] for key in rest)])
    names = ("accuracy", "accuracy_mean", "accuracy_worst_tenth", "accuracy_std", "validation")
    return Grid([Column(key, key) for key in ("round", "when", *names, *rest)], rows)


def clients_grid(documents: Sequence[RunDocument], clients: Sequence[Sequence[Client]]) -> Grid:
    """For programs: a client of a run to a row."""
    rows = [
        [name, document["method"], document["config"].get("seed"), *client.values()]
        for document, name, those in zip(documents, labels(documents), clients, strict=True)
        for client in those
    ]
    return Grid([Column(key) for key in ("run", "method", "seed", *Client.__annotations__)], rows)


def clients_side_by_side(documents: Sequence[RunDocument], clients: Sequence[Sequence[Client]]) -> Grid:
    """For readers: a client to a row; of one run the best and the last round, of several the best of each."""
    about = {client["client"]: client for those in clients for client in those}
    named = any(client["name"] != str(number) for number, client in about.items())
    found = [{client["client"]: client["best"] for client in those} for those in clients]
    titles = labels(documents)
    if len(documents) == 1:
        found.append({client["client"]: client["last"] for client in clients[0]})
        entries = {"best": documents[0]["best"], "last": documents[0]["last"]}
        titles = [f"{which} @{entry['round']}" if entry else which for which, entry in entries.items()]
    columns = [Column("", "client"), *[Column("", "name", text=True)] * named, Column("", "test samples")]
    rows = [
        [number, *[one["name"]] * named, one["samples"], *(those.get(number) for those in found)]
        for number, one in sorted(about.items())
    ]
    which = "" if len(documents) == 1 else " in the best round of each run"
    return Grid(
        [*columns, *(Column("", name, percent) for name in titles)],
        rows,
        f"{title(documents)}. Test accuracy in % of each client{which}.",
    )
