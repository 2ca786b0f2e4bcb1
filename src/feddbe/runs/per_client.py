"""What a run's file has of single clients: their accuracies, and how much they keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from feddbe.measures.rows import ALL
from feddbe.results.document import Entry
from feddbe.runs.store import Store
from feddbe.state import Receipt, decode

__all__ = ["accuracies", "history", "kept"]


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
