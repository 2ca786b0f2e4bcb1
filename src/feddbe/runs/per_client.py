"""What a run's file has of single clients: their accuracies, and how much they keep."""

from __future__ import annotations

from pathlib import Path

from feddbe.measures.rows import ALL
from feddbe.results.document import Entry
from feddbe.runs.store import Store
from feddbe.state import Receipt, decode

__all__ = ["accuracies", "kept"]


def accuracies(folder: Path, entry: Entry | None) -> dict[int, float]:
    """Each client's accuracy in this entry of the run, at the moment that counts; newcomers are no part."""
    if entry is None:
        return {}
    store = Store.open(folder)
    try:
        return {
            row.client: row.value
            for row in store.rows(entry["round"])
            if row.client != ALL and row[2:4] == (entry["when"], "accuracy") and row.value is not None
        }
    finally:
        store.close()


def kept(folder: Path) -> int | None:
    """How many numbers a client keeps (all keep as many, so one is looked at); None: it does so elsewhere."""
    store = Store.open(folder)
    try:
        client = min((row.client for row in store.rows(1) if row.client != ALL), default=0)
        state = store.read(client)
        if state is not None and Receipt.decode(state):
            return None
        return sum(tensor.numel() for tensor in decode(state).values()) if state else 0
    finally:
        store.close()
