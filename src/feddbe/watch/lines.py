"""A line per round, where nobody sees bars: in files, pipes and batch systems."""

from __future__ import annotations

import sys
from pathlib import Path

from feddbe.runs.watch import Watch
from feddbe.watch.pace import Pace

__all__ = ["Lines", "Remarks"]


class Remarks(Watch):
    """Only what a person should know, on standard error."""

    def remark(self, text: str) -> None:
        print(f"feddbe: {text}", file=sys.stderr, flush=True)


class Lines(Remarks):
    """A line per round on standard error: how far it is, accuracy, time passed and time left."""

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._pace = Pace(name, done, rounds)

    def round(self, done: int, accuracy: float | None) -> None:
        if said := self._pace.round(done, accuracy):
            print(said, file=sys.stderr, flush=True)
