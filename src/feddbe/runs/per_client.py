"""What a run's file has of single clients: their accuracies, and how much they keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from feddbe.measures.rows import ALL
from feddbe.results.document import Entry, RunDocument
from feddbe.runs.store import Store
from feddbe.state import Receipt, decode

__all__ = ["Client", "accuracies", "each", "history", "kept"]


class Client(TypedDict):
    """A client of a run: its accuracy in the best and in the last round; None where it was not evaluated."""

    client: int
    name: str
    """As the data calls it; its number where that has no names."""
    samples: int
    """Of its test data."""
    best: float | None
    last: float | None


def each(document: RunDocument) -> list[Client]:
    """The clients of a run that were evaluated in its best or its last round, in their order."""
    store, found = Store.open(Path(document["folder"])), dict[int, Client]()
    try:
        names = dict(enumerate(document["client_names"]))
        for which, entry in (("best", document["best"]), ("last", document["last"])):
            for row in store.rows(entry["round"]) if entry else ():
                if row.client == ALL or row[2:4] != (entry and entry["when"], "accuracy"):
                    continue
                who = row.client
                blank = Client(
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


def accuracies(folder: Path, entry: Entry | None) -> dict[int, float]:
    """Each client's accuracy in this entry of the run, at the moment that counts; newcomers are no part."""
    if entry is None:
        return {}
    store = Store.open(folder)
    try:
        return _accuracies(store, entry)
    finally:
        store.close()


def history(folder: Path, entries: Sequence[Entry], clients: Sequence[int]) -> list[dict[int, float]]:
    """The accuracies of these clients in each of these entries; one that was not evaluated is not there."""
    store = Store.open(folder)
    try:
        some = f"AND client IN ({', '.join(map(str, map(int, clients)))})"
        return [_accuracies(store, entry, some) for entry in entries]
    finally:
        store.close()


def _accuracies(store: Store, entry: Entry, some: str = "") -> dict[int, float]:
    rows = store.rows(entry["round"], f"AND moment = ? AND name = 'accuracy' {some}", entry["when"])
    return {row.client: row.value for row in rows if row.client != ALL and row.value is not None}


def kept(folder: Path) -> int | None:
    """How many numbers a client keeps (all keep as many, so one is looked at); None: it does so elsewhere."""
    store = Store.open(folder)
    try:
        first = f"AND client = (SELECT min(client) FROM rows WHERE round = 1 AND client != {ALL})"
        client = next((row.client for row in store.rows(1, first)), 0)
        state = store.read(client)
        if state is not None and Receipt.decode(state):
            return None
        return sum(tensor.numel() for tensor in decode(state).values()) if state else 0
    finally:
        store.close()
