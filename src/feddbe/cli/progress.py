"""What is seen while commands work, and what to say when they are stopped."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import Progress, TaskID

from feddbe import paths
from feddbe.callbacks.base import Several, Watch
from feddbe.callbacks.display import Bars as RunBars
from feddbe.callbacks.display import Lines, Pace, Remarks, columns
from feddbe.runs import summary
from feddbe.studies.runner import Board, Planned


class Following(Several):
    """Progress on standard error: bars on a terminal, else a line per round. It knows where the run is."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._last = _Last()
        super().__init__([self._last, Remarks() if quiet else RunBars() if sys.stderr.isatty() else Lines()])

    def root(self, *, single: bool) -> Path:
        """The folder of the run, or of the comparison that it belongs to."""
        folder = self._last.folder or paths.RUNS
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


class Bars(Board):
    """A bar for each run that goes on, and a line when it has ended."""

    def __init__(self, runs: int) -> None:
        self.runs, self.done = runs, 0
        self.shown: dict[Path, _Bar] = {}
        self.bars = Progress(
            *columns(),
            console=Console(stderr=True),
            auto_refresh=False,  # no thread of its own: processes are forked from this one
            disable=not sys.stderr.isatty(),
            transient=True,
            expand=True,
        )

    def watch(self, planned: Planned) -> Watch:
        bar = self.shown[planned.place] = _Bar(self, planned.place.name)
        return bar

    def ended(self, planned: Planned, error: Exception | None) -> None:
        self.done += 1
        bar = self.shown.pop(planned.place)
        bar.remove()
        how = f"{error}" if error else f"{bar.rounds} round{'s' * (bar.rounds != 1)}, {bar.accuracy}"
        self.say(f"{self.done} of {self.runs}: {planned.place.name}: {how}")

    def aside(self) -> _Bar:
        """Is told of what comes after the runs."""
        return _Bar(self, "")

    def say(self, text: str) -> None:
        self.bars.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Bar(Watch):
    """One run."""

    def __init__(self, board: Bars, name: str) -> None:
        self.board, self.name = board, name
        self.task: TaskID | None = None
        self.rounds, self.accuracy = 0, "not evaluated"

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.remove()
        self.rounds, self.pace = done, Pace(self.name or name, done, rounds)
        self.task = self.board.bars.add_task(self.name or name, total=rounds, completed=done, accuracy="")
        self.board.bars.refresh()

    def part(self, share: float) -> None:
        if self.task is not None:
            self.board.bars.update(self.task, completed=self.rounds + share)
            self.board.bars.refresh()
        if self.board.bars.disable and (said := self.pace.part(share)):
            self.board.say(said)

    def round(self, done: int, accuracy: float | None) -> None:
        self.rounds = done
        self.pace.round(done, accuracy)
        if accuracy is not None:
            self.accuracy = f"{100 * accuracy:.2f} %"
        if self.task is not None:
            self.board.bars.update(self.task, completed=done, accuracy=self.accuracy)
            self.board.bars.refresh()

    def remark(self, text: str) -> None:
        self.board.say(f"feddbe: {self.name}: {text}")

    def remove(self) -> None:
        if self.task is not None:
            self.board.bars.remove_task(self.task)
            self.task = None


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM ends it in the same good order as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
