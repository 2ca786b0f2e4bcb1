"""Progress in a notebook: a line in the cell's output for each run, which changes in place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from feddbe.runs.watch import Watch
from feddbe.watch.pace import Pace

__all__ = ["Notebook", "in_notebook"]


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython in a terminal is a terminal."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


class Notebook(Watch):
    """A line for each run that says how far it is; the saved notebook has the last of them."""

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._pace = Pace(name, done, rounds)
        self._line = _show(f"{name}: begins", None)

    def part(self, share: float) -> None:
        if said := self._pace.part(share):
            _show(said, self._line)

    def round(self, done: int, accuracy: float | None) -> None:
        if said := self._pace.round(done, accuracy):
            _show(said, self._line)

    def remark(self, text: str) -> None:
        _show(f"feddbe: {text}", None)


class _Plain:
    """Text that is shown without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _show(text: str, line: Any) -> Any:
    """In a new line of the output, or in place of what is there."""
    from IPython.display import display

    if line is None:
        return display(_Plain(text), display_id=True)  # type: ignore[no-untyped-call]
    line.update(_Plain(text))
    return line
