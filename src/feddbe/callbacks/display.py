"""Progress of runs and studies: bars by rich on a terminal, lines elsewhere, a line in a notebook."""

from __future__ import annotations

import dataclasses
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from feddbe.callbacks.base import Callback, CallbackList, StudyCallback
from feddbe.paths import RUNS_DIR


def default_callback(*, quiet: bool = False) -> Callback:
    """What a person can look at while Python works: bars on a terminal, a cell's output in a notebook, and
    nothing elsewhere."""
    if quiet:
        return Callback()
    if in_notebook():
        return Notebook()
    return Bars() if sys.stderr is not None and sys.stderr.isatty() else Callback()


class _Lines(Progress):
    """Bars that leave room for the ^C which a terminal writes: it must not begin a new line."""

    def get_renderable(self) -> RenderableType:
        return _Narrow(super().get_renderable())


@dataclasses.dataclass(frozen=True)
class _Narrow:
    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update_width(options.max_width - 3))


def bar_columns() -> list[ProgressColumn]:
    """What a run that goes on shows: its name, how far it is, its accuracy, the time, and what is left."""
    return [
        TextColumn("{task.description}", table_column=Column(ratio=3, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=None, table_column=Column(ratio=2)),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}", table_column=Column(width=8, justify="right")),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    ]


class Bars(Callback):
    """A bar for each run; they go when all are over."""

    def __enter__(self) -> Self:
        self._bars = _Lines(
            *bar_columns(),
            TextColumn("left"),
            console=Console(stderr=True),
            auto_refresh=False,  # no thread of its own: workers are forked from this process
            transient=True,
            expand=True,
        )
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._done = done
        self._rounds = self._bars.add_task(name, total=rounds, completed=done, accuracy="")
        self._bars.refresh()

    def on_client_end(self, done: int, of: int) -> None:
        self._bars.update(self._rounds, completed=self._done + done / of)
        self._bars.refresh()

    def on_analysis_progress(self, share: float) -> None:
        self._bars.update(self._rounds, completed=self._done + share)
        self._bars.refresh()

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self._done = done
        shown = "" if accuracy is None else f"{100 * accuracy:.2f} %"
        self._bars.update(self._rounds, completed=done, accuracy=shown)
        self._bars.refresh()

    def on_message(self, text: str) -> None:
        self._bars.console.print(f"feddbe: {text}", markup=False, highlight=False, soft_wrap=True)


def _say(text: str) -> None:
    """On standard error; that nobody reads it any more is no reason to stop."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class MessagesOnly(Callback):
    """Only what a person should know, on standard error."""

    def on_message(self, text: str) -> None:
        _say(f"feddbe: {text}")


class Lines(MessagesOnly):
    """A line per round on standard error: how far it is, accuracy, time passed and time left."""

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._pace = TimeEstimate(name, done, rounds)

    def on_analysis_progress(self, share: float) -> None:
        if said := self._pace.part(share):
            _say(said)

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        if said := self._pace.round(done, accuracy):
            _say(said)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython in a terminal is a terminal."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


class Notebook(Callback):
    """A line for each run that says how far it is; the saved notebook has the last of them."""

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._pace = TimeEstimate(name, done, rounds)
        self._line = _show(f"{name}: begins", None)

    def on_analysis_progress(self, share: float) -> None:
        if said := self._pace.part(share):
            _show(said, self._line)

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        if said := self._pace.round(done, accuracy):
            _show(said, self._line)

    def on_message(self, text: str) -> None:
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


_FIRST, _EVERY = 2.0, 15.0
"""Seconds until the first line about a part, and between two."""
_SURE = 0.01
"""Share of a part from which on its pace says how long the rest takes."""


class TimeEstimate:
    """One run's rounds against the clock."""

    def __init__(self, name: str, done: int, rounds: int) -> None:
        self._name, self._rounds = name, rounds
        self._first = self._done = done
        self._began = self._part_began = time.monotonic()
        self._next_line = self._began + _FIRST

    def round(self, done: int, accuracy: float | None) -> str:
        """What to say when a round is written; nothing before there is something to say."""
        of = done if done == self._done else done - 1  # only the last one is told twice
        self._done = done
        self._part_began = time.monotonic()
        if accuracy is None:
            return ""
        passed = self._part_began - self._began
        words = [f"{self._name}: round {done} of {self._rounds}", f"{100 * accuracy:.2f} % in round {of}"]
        words.append(str(timedelta(seconds=round(passed))))
        if done > self._first and self._rounds > done:
            left = passed / (done - self._first) * (self._rounds - done)
            words.append(f"{timedelta(seconds=round(left))} left")
        return ", ".join(words)

    def part(self, share: float) -> str:
        """Return a line on the part that is under way, if the last one is old; parts are taken for equal."""
        now = time.monotonic()
        if now < self._next_line:
            return ""
        self._next_line = now + _EVERY
        words = [f"{self._name}: {share:.0%} of step {self._done + 1} of {self._rounds}"]
        words.append(str(timedelta(seconds=round(now - self._began))))
        if share >= _SURE:
            left = (now - self._part_began) / share * (self._rounds - self._done - share)
            words.append(f"about {timedelta(seconds=round(left))} left")
        return ", ".join(words)


class CliProgress(CallbackList):
    """Progress on standard error: bars on a terminal, else a line per round; it knows where the run is."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._last = _LastFolder()
        display: Callback = Bars() if sys.stderr.isatty() else Lines()
        super().__init__([self._last, MessagesOnly() if quiet else display])

    @property
    def folder(self) -> Path | None:
        """The folder of the run that began last; None before the first."""
        return self._last.folder

    def root(self, *, single: bool) -> Path:
        """Return the folder of the run, or of the comparison that it belongs to."""
        folder = self.folder or RUNS_DIR
        return folder if single else folder.parent


class _LastFolder(Callback):
    """Remembers the folder of the run that began last."""

    folder: Path | None = None

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.folder = folder


class StudyBars(StudyCallback):
    """A bar for each run that goes on, and a line when it has ended."""

    def __init__(self, runs: int) -> None:
        self.runs, self.done = runs, 0
        self.shown: dict[Path, _Bar] = {}
        self.bars = Progress(
            *bar_columns(),
            console=Console(stderr=True),
            auto_refresh=False,  # no thread of its own: processes are forked from this one
            disable=not sys.stderr.isatty(),
            transient=True,
            expand=True,
        )

    def run_callback(self, folder: Path) -> Callback:
        bar = self.shown[folder] = _Bar(self, folder.name)
        return bar

    def on_run_end(self, folder: Path, error: Exception | None) -> None:
        self.done += 1
        bar = self.shown.pop(folder)
        bar.remove()
        how = f"{error}" if error else f"{bar.rounds} round{'s' * (bar.rounds != 1)}, {bar.accuracy}"
        self.say(f"{self.done} of {self.runs}: {folder.name}: {how}")

    def aside(self) -> _Bar:
        """Is told of what comes after the runs."""
        return _Bar(self, "")

    def say(self, text: str) -> None:
        self.bars.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Bar(Callback):
    """One run."""

    def __init__(self, board: StudyBars, name: str) -> None:
        self.board, self.name = board, name
        self.task: TaskID | None = None
        self.rounds, self.accuracy = 0, "not evaluated"

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.remove()
        self.rounds, self.pace = done, TimeEstimate(self.name or name, done, rounds)
        self.task = self.board.bars.add_task(self.name or name, total=rounds, completed=done, accuracy="")
        self.board.bars.refresh()

    def on_analysis_progress(self, share: float) -> None:
        if self.task is not None:
            self.board.bars.update(self.task, completed=self.rounds + share)
            self.board.bars.refresh()
        if self.board.bars.disable and (said := self.pace.part(share)):
            self.board.say(said)

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self.rounds = done
        self.pace.round(done, accuracy)
        if accuracy is not None:
            self.accuracy = f"{100 * accuracy:.2f} %"
        if self.task is not None:
            self.board.bars.update(self.task, completed=done, accuracy=self.accuracy)
            self.board.bars.refresh()

    def on_message(self, text: str) -> None:
        self.board.say(f"feddbe: {self.name}: {text}")

    def remove(self) -> None:
        if self.task is not None:
            self.board.bars.remove_task(self.task)
            self.task = None
