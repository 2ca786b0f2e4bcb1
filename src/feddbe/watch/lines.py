"""A line per round, where nobody sees bars: in files, pipes and batch systems."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from feddbe.runs.watch import Watch
from feddbe.watch.pace import Pace

__all__ = ["Lines", "Remarks"]


def _say(text: str) -> None:
    """On standard error; that nobody reads it any more is no reason to stop."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class Remarks(Watch):
    """Only what a person should know, on standard error."""

    def remark(self, text: str) -> None:
        _say(f"feddbe: {text}")


class Lines(Remarks):
    """A line per round on standard error: how far it is, accuracy, time passed and time left."""

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._pace = Pace(name, done, rounds)

    def part(self, share: float) -> None:
        if said := self._pace.part(share):
            _say(said)

    def round(self, done: int, accuracy: float | None) -> None:
        if said := self._pace.round(done, accuracy):
            _say(said)
