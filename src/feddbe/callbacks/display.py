"""Progress displays of runs and studies: bars on a terminal, log lines elsewhere, a line in a notebook."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
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
from feddbe.errors import replace_controls
from feddbe.paths import RUNS_DIR


def default_callback(*, quiet: bool = False) -> Callback:
    """Return the display of progress: in a notebook a line per run, otherwise that of the command line.

    This is bars on a terminal, and a line per round on standard error elsewhere. With `quiet` nothing is
    shown.
    """
    if quiet:
        return Callback()
    if is_notebook():
        return NotebookProgress()
    return ProgressBars() if _has_terminal() else ProgressLines()


def _has_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class _NarrowProgress(Progress):
    """Bars that leave room for the `^C` that a terminal prints, which would otherwise wrap the line."""

    def get_renderable(self) -> RenderableType:
        return _NarrowRenderable(super().get_renderable())


@dataclasses.dataclass(frozen=True)
class _NarrowRenderable:
    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update_width(options.max_width - 3))


def bar_columns() -> list[ProgressColumn]:
    """Return the columns of a bar: name, progress, rounds, accuracy, elapsed and remaining time."""
    return [
        TextColumn("{task.description}", table_column=Column(ratio=3, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=None, table_column=Column(ratio=2)),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}", table_column=Column(width=8, justify="right")),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    ]


class ProgressBars(Callback):
    """Progress bars on a terminal, one per run; they are removed when all runs end."""

    def __enter__(self) -> Self:
        self._bars = _NarrowProgress(
            *bar_columns(),
            TextColumn("left"),
            console=Console(stderr=True),
            auto_refresh=False,  # no refresh thread: workers are forked from this process
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
        self._rounds = self._bars.add_task(replace_controls(name), total=rounds, completed=done, accuracy="")
        self._bars.refresh()

    def on_client_end(self, done: int, total: int) -> None:
        self._bars.update(self._rounds, completed=self._done + done / total)
        self._bars.refresh()

    def on_analysis_progress(self, fraction: float) -> None:
        self._bars.update(self._rounds, completed=self._done + fraction)
        self._bars.refresh()

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self._done = done
        percent = "" if accuracy is None else f"{100 * accuracy:.2f} %"
        self._bars.update(self._rounds, completed=done, accuracy=percent)
        self._bars.refresh()

    def on_message(self, text: str) -> None:
        self._bars.console.print(
            f"feddbe: {replace_controls(text)}", markup=False, highlight=False, soft_wrap=True
        )


def _print_line(text: str) -> None:
    """Print to standard error; if it is closed, the run continues."""
    with suppress(OSError, ValueError):
        print(replace_controls(text), file=sys.stderr, flush=True)


class MessagesOnly(Callback):
    """Messages on standard error, without progress."""

    def on_message(self, text: str) -> None:
        _print_line(f"feddbe: {text}")


class ProgressLines(MessagesOnly):
    """A line per round on standard error: round, accuracy, elapsed and remaining time."""

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._estimate = TimeEstimate(name, done, rounds)

    def on_analysis_progress(self, fraction: float) -> None:
        line = self._estimate.describe_step(fraction)
        if line:
            _print_line(line)

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        line = self._estimate.describe_round(done, accuracy)
        if line:
            _print_line(line)


def is_notebook() -> bool:
    """Return True if this process is the kernel of a notebook; IPython in a terminal is not."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


class NotebookProgress(Callback):
    """A line per run in a notebook, updated in place; the saved notebook contains its last text."""

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._estimate = TimeEstimate(name, done, rounds)
        self._handle = _show_in_notebook(f"{name}: begins", None)

    def on_analysis_progress(self, fraction: float) -> None:
        line = self._estimate.describe_step(fraction)
        if line:
            _show_in_notebook(line, self._handle)

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        line = self._estimate.describe_round(done, accuracy)
        if line:
            _show_in_notebook(line, self._handle)

    def on_message(self, text: str) -> None:
        _show_in_notebook(f"feddbe: {text}", None)


class _PlainText:
    """Text that a notebook displays without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _show_in_notebook(text: str, handle: Any) -> Any:
    """Display a new line, or update the line of `handle`; return its handle."""
    from IPython.display import display

    if handle is None:
        return display(_PlainText(text), display_id=True)  # type: ignore[no-untyped-call]
    handle.update(_PlainText(text))
    return handle


_SECONDS_TO_FIRST_LINE = 2.0
_SECONDS_BETWEEN_LINES = 15.0
_SMALLEST_FRACTION = 0.01
"""Fraction of a step from which its remaining time is extrapolated."""


class TimeEstimate:
    """Elapsed and remaining time of one run, as log lines."""

    def __init__(self, name: str, done: int, rounds: int) -> None:
        self._name = name
        self._rounds = rounds
        self._first = self._done = done
        self._started = self._step_started = time.monotonic()
        self._next_line = self._started + _SECONDS_TO_FIRST_LINE

    def describe_round(self, done: int, accuracy: float | None) -> str:
        """Return the line of a written round; it is empty before the first accuracy is known."""
        evaluated_round = done if done == self._done else done - 1  # only the last round is reported twice
        self._done = done
        self._step_started = time.monotonic()
        if accuracy is None:
            return ""
        elapsed = self._step_started - self._started
        parts = [
            f"{self._name}: round {done} of {self._rounds}",
            f"{100 * accuracy:.2f} % in round {evaluated_round}",
            str(timedelta(seconds=round(elapsed))),
        ]
        if done > self._first and self._rounds > done:
            remaining = elapsed / (done - self._first) * (self._rounds - done)
            parts.append(f"{timedelta(seconds=round(remaining))} left")
        return ", ".join(parts)

    def describe_step(self, fraction: float) -> str:
        """Return a line on the present step, or nothing if the last line is recent; steps count as equal."""
        time_now = time.monotonic()
        if time_now < self._next_line:
            return ""
        self._next_line = time_now + _SECONDS_BETWEEN_LINES
        parts = [
            f"{self._name}: {fraction:.0%} of step {self._done + 1} of {self._rounds}",
            str(timedelta(seconds=round(time_now - self._started))),
        ]
        if fraction >= _SMALLEST_FRACTION:
            steps_left = self._rounds - self._done - fraction
            remaining = (time_now - self._step_started) / fraction * steps_left
            parts.append(f"about {timedelta(seconds=round(remaining))} left")
        return ", ".join(parts)


class CliProgress(CallbackList):
    """Progress of the command line on standard error: bars on a terminal, otherwise a line per round."""

    def __init__(self, callbacks: Sequence[Callback] = (), *, quiet: bool = False) -> None:
        self._last = _LastFolder()
        super().__init__([self._last, *callbacks, MessagesOnly() if quiet else default_callback()])

    @property
    def folder(self) -> Path | None:
        """The folder of the run that began last; None before the first."""
        return self._last.folder

    def output_dir(self, *, single: bool) -> Path:
        """Return the folder of the run, or of the comparison that it belongs to."""
        folder = self.folder or RUNS_DIR
        return folder if single else folder.parent


class _LastFolder(Callback):
    """Remembers the folder of the run that began last."""

    folder: Path | None = None

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.folder = folder


class StudyBars(StudyCallback):
    """A bar for each run in progress, and a line when it ends."""

    def __init__(self, runs: int = 0, *, quiet: bool = False) -> None:
        self.runs = runs
        self.done = 0
        self.run_bars: dict[Path, RunBar] = {}
        self.bars = Progress(
            *bar_columns(),
            console=Console(stderr=True, quiet=quiet or sys.stderr is None),
            auto_refresh=False,  # no refresh thread: child processes are forked from this process
            disable=not _has_terminal(),
            transient=True,
            expand=True,
        )

    def run_callback(self, folder: Path) -> Callback:
        bar = RunBar(self, folder.name)
        self.run_bars[folder] = bar
        return bar

    def on_run_end(self, folder: Path, error: Exception | None) -> None:
        self.done += 1
        bar = self.run_bars.pop(folder)
        bar.remove()
        outcome = f"{error}" if error else f"{bar.rounds} round{'s' * (bar.rounds != 1)}, {bar.accuracy}"
        self.print_line(f"{self.done} of {self.runs}: {folder.name}: {outcome}")

    def analysis_callback(self) -> RunBar:
        """Return the callback of the analyses that follow the runs."""
        return RunBar(self, "")

    def on_message(self, text: str) -> None:
        """Print a note on the study."""
        self.print_line(f"feddbe: {text}")

    def print_line(self, text: str) -> None:
        self.bars.console.print(replace_controls(text), markup=False, highlight=False, soft_wrap=True)


class RunBar(Callback):
    """The bar of one run of a study."""

    def __init__(self, study_bars: StudyBars, name: str) -> None:
        self.study_bars = study_bars
        self.name = name
        self.task: TaskID | None = None
        self.rounds = 0
        self.accuracy = "not evaluated"

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.remove()
        title = self.name or name
        self.rounds = done
        self.estimate = TimeEstimate(title, done, rounds)
        self.task = self.study_bars.bars.add_task(
            replace_controls(title), total=rounds, completed=done, accuracy=""
        )
        self.study_bars.bars.refresh()

    def on_analysis_progress(self, fraction: float) -> None:
        if self.task is not None:
            self.study_bars.bars.update(self.task, completed=self.rounds + fraction)
            self.study_bars.bars.refresh()
        if self.study_bars.bars.disable:
            line = self.estimate.describe_step(fraction)
            if line:
                self.study_bars.print_line(line)

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self.rounds = done
        self.estimate.describe_round(done, accuracy)
        if accuracy is not None:
            self.accuracy = f"{100 * accuracy:.2f} %"
        if self.task is not None:
            self.study_bars.bars.update(self.task, completed=done, accuracy=self.accuracy)
            self.study_bars.bars.refresh()

    def on_message(self, text: str) -> None:
        self.study_bars.print_line(f"feddbe: {self.name}: {text}")

    def remove(self) -> None:
        """Remove the bar from the display."""
        if self.task is not None:
            self.study_bars.bars.remove_task(self.task)
            self.task = None
