"""What of a run's file is whole, part by part, and from which round it can go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from feddbe.errors import StoreError
from feddbe.runs.store import Store
from feddbe.simulation.layout import check_stored

__all__ = ["Checked", "check"]


class Checked(TypedDict):
    """What was found of one run."""

    folder: str
    whole: bool
    round: int | None
    """The last one that is finished, from which it can go on; -1 before the preparation, None: it cannot."""
    parts: dict[str, str]
    """Part -> `whole`, what is wrong with it, or why it was not looked at."""


def check(folder: Path) -> Checked:
    """Read all of it; nothing is repaired."""
    found: Checked = {"folder": str(folder), "whole": False, "round": None, "parts": {}}
    parts = found["parts"]
    try:
        store = Store.open(folder)
    except StoreError as error:
        parts["file"] = str(error)
        return found
    try:
        looks: dict[str, Callable[[], object]] = {
            "SQLite": store.check_pages,
            "rows": store.check_rows,
            "states": store.check_states,
            "rounds": store.entries,
            "model": lambda: _check_layout(store),
        }
        parts["meta"] = "whole"  # or it could not have been opened
        wrong = False
        for part, look in looks.items():
            try:
                said = look()
                parts[part] = said if isinstance(said, str) and said else "whole"
            except StoreError as error:
                parts[part], wrong = str(error), True
        if not wrong:
            found |= {"whole": True, "round": store.last_round()}
        return found
    finally:
        store.close()


def _check_layout(store: Store) -> str:
    """Compare the server's states with what the run began with, which its file says: nothing that a run names
    is built, read or executed here. Return why they were not compared, if so."""
    layout = store.meta("layout")
    if not isinstance(layout, dict):
        return "not compared: the run does not say what its model is like"
    for which in ("last", "best"):
        if store.round_of(which) is not None:
            check_stored(store.server(which), layout, store.folder)
    return ""
