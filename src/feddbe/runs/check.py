"""What of a run's file is whole, part by part, and from which round it can go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from feddbe import data, models
from feddbe.errors import FeddbeError, StoreError
from feddbe.runs import rounds
from feddbe.runs.experiment import resolve
from feddbe.runs.revisit import stored_options
from feddbe.runs.store import Store

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
            "model": lambda: _check_model(store),
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


def _check_model(store: Store) -> str:
    """Whether the server's state is that of the model; else why that was not looked at. Only what feddbe has
    itself is built: a run may come from elsewhere, and a model's file is a program."""
    settings = store.meta("config") or {}
    options = stored_options(settings)
    try:
        if not (options.data and data.find(options.data) and options.model and models.find(options.model)):
            return "not compared: data or model are the user's own"
        experiment = resolve(settings["method"], options)
        if experiment.config_hash != store.meta("config_hash"):
            return "not compared: data or model are something else on this machine"
        start = rounds.start(experiment)
    except FeddbeError as error:
        return f"not compared: {error}"
    rounds.check_fits(store.server(), start, store.folder)
    return ""
