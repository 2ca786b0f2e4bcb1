"""What of a run's file is whole, part by part, and from which round it can go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from feddbe.errors import StoreError
from feddbe.runs.store import Store
from feddbe.simulation.layout import check_stored


class PartStatus(Enum):
    """Result of reading one part of a run's file."""

    WHOLE = "whole"
    SKIPPED = "skipped"
    DAMAGED = "damaged"


class Part(NamedTuple):
    """One part of a run's file: its status, and as text what is wrong or why the part was not compared."""

    status: PartStatus
    text: str = "whole"


@dataclass(frozen=True)
class Checked:
    """Result of checking one run.

    Attributes:
        folder: the run's folder.
        round: the last finished round, from which the run can continue; -1 before the preparation, None if
            the run cannot continue.
        parts: every part that was read, by name.
    """

    folder: str
    round: int | None
    parts: dict[str, Part]

    @property
    def whole(self) -> bool:
        """Whether no part is damaged."""
        return all(part.status is not PartStatus.DAMAGED for part in self.parts.values())

    def texts(self, status: PartStatus) -> list[str]:
        """Return the texts of the parts with this status."""
        return [part.text for part in self.parts.values() if part.status is status]

    def as_json(self) -> dict[str, Any]:
        """Return the values that JSON can hold, each part as its text."""
        parts = {name: part.text for name, part in self.parts.items()}
        return {"folder": self.folder, "whole": self.whole, "round": self.round, "parts": parts}


def check(folder: Path) -> Checked:
    """Read all of a run's file and return the status of its parts; nothing is repaired."""
    try:
        store = Store.open(folder)
    except StoreError as error:
        return Checked(str(folder), None, {"file": Part(PartStatus.DAMAGED, str(error))})
    try:
        checks: dict[str, Callable[[], object]] = {
            "SQLite": store.check_pages,
            "rows": store.check_rows,
            "states": store.check_states,
            "rounds": store.entries,
        }
        parts = {"meta": Part(PartStatus.WHOLE)}  # otherwise the file could not have been opened
        for name, read in checks.items():
            try:
                read()
                parts[name] = Part(PartStatus.WHOLE)
            except StoreError as error:
                parts[name] = Part(PartStatus.DAMAGED, str(error))
        parts["model"] = _check_layout(store)
        found = Checked(str(folder), None, parts)
        return replace(found, round=store.last_round()) if found.whole else found
    finally:
        store.close()


def _check_layout(store: Store) -> Part:
    """Compare the server's states with the layout that the run's file states. Nothing that a run names is
    built, read or executed."""
    try:
        layout = store.meta("layout")
        if not isinstance(layout, dict):
            return Part(PartStatus.SKIPPED, "not compared: the run does not say what its model is like")
        for which in ("last", "best"):
            if store.round_of(which) is not None:
                check_stored(store.server(which), layout, store.folder)
    except StoreError as error:
        return Part(PartStatus.DAMAGED, str(error))
    return Part(PartStatus.WHOLE)
