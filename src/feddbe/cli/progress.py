"""What is seen while commands work, and what to say when they are stopped."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from feddbe.runs import folders, summary
from feddbe.runs.watch import Several, Watch
from feddbe.watch import Bars, Lines, Remarks

__all__ = ["Following"]


class Following(Several):
    """Progress on standard error: bars on a terminal, else a line per round. It knows where the run is."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._last = _Last()
        super().__init__([self._last, Remarks() if quiet else Bars() if sys.stderr.isatty() else Lines()])

    def root(self, *, single: bool) -> Path:
        """The folder of the run, or of the comparison that it belongs to."""
        folder = self._last.folder or folders.RUNS
        return folder if single else folder.parent

    def stopped(self, given: Sequence[str], *, single: bool) -> str:
        """What to say after Ctrl-C: how far it is, by what was written, and how to go on."""
        if self._last.folder is None:
            return "stopped before anything was written"
        rounds = summary.load(self._last.folder, hashes=False)["rounds"]
        far = f"after round {rounds[-1]['round']}, which is kept" if rounds else "before the first round"
        words = [word for word in given if word != "--resume"]
        if not any(word.split("=")[0] == "--out" for word in words):
            words += ["--out", str(self.root(single=single))]
        return f"stopped {far}; continue with: {shlex.join(['feddbe', *words, '--resume'])}"


class _Last(Watch):
    """Remembers the folder of the run that began last."""

    folder: Path | None = None

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.folder = folder
