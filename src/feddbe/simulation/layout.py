"""Names, shapes and types of the server's state: all that it begins with must stay in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from feddbe.errors import FeddbeError, StoreError, short
from feddbe.state import State

Layout = Mapping[str, str]
"""Name of a tensor -> its shape and type in words; a plain value, which a run stores."""


def layout_of(state: State) -> dict[str, str]:
    """Return the layout of a state."""
    return {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in state.items()}


def check_stored(state: State, wanted: Layout, folder: Path) -> None:
    """Refuse a stored server state that lacks part of what its run began with; a method may add to it."""
    if misfit := _misfit(state, wanted):
        raise StoreError(
            f"the server's state in '{folder}' is of another model: it should have {misfit}; restore it "
            "from a copy or start again"
        )


def check_combined(state: State, wanted: Layout, method: str, round_: int) -> None:
    """Refuse what a method made of the server's state if part of what it began with is lost.

    Training would continue without that part, and the run could not be resumed.
    """
    if misfit := _misfit(state, wanted):
        function = "combine" if round_ else "prepared"
        raise FeddbeError(
            f"{method}: {function} loses part of the server's state in round {round_}: it should have "
            f"{misfit}; return all that server_init begins with, as in server | {{...}}; the round is "
            "not written"
        )


def _misfit(state: State, wanted: Layout) -> str:
    """Name the first tensor that is missing or has another shape or type."""
    there = layout_of(state)
    for name, form in wanted.items():
        if there.get(name) != form:
            return f"'{short(name)}' of {short(form)}, and has {there.get(name, 'none')}"
    return ""
