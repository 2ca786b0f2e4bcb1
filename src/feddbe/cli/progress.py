"""Bars on standard error while runs go on, and what to say when they are stopped."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from feddbe import api
from feddbe.runs import folders
from feddbe.runs.rounds import Watch

__all__ = ["Bars"]


class _Lines(Progress):
    """Bars that leave room for the ^C which a terminal writes: it must not begin a new line."""

    def get_renderable(self) -> RenderableType:
        return _Narrow(super().get_renderable())


@dataclasses.dataclass(frozen=True)
class _Narrow:
    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update_width(options.max_width - 3))


class Bars(Watch):
    """A bar for each run on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self.bars = _Lines(
            TextColumn("{task.description}", table_column=Column(ratio=3, no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=None, table_column=Column(ratio=2)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}", table_column=Column(width=8, justify="right")),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            TextColumn("left"),
            console=Console(stderr=True),
            auto_refresh=False,  # no thread of its own: workers are forked from this process
            disable=not sys.stderr.isatty(),
            transient=True,
            expand=True,
        )
        self._folder: Path | None = None
        self._done = 0

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._folder, self._done = folder, done
        self._rounds = self.bars.add_task(name, total=rounds, completed=done, accuracy="")
        self.bars.refresh()

    def client(self, done: int, of: int) -> None:
        self.bars.update(self._rounds, completed=self._done + done / of)
        self.bars.refresh()

    def round(self, done: int, accuracy: float | None) -> None:
        self._done = done
        shown = "" if accuracy is None else f"{100 * accuracy:.2f} %"
        self.bars.update(self._rounds, completed=done, accuracy=shown)
        self.bars.refresh()

    def remark(self, text: str) -> None:
        self.bars.console.print(f"feddbe: {text}", markup=False, highlight=False, soft_wrap=True)

    def root(self, *, single: bool) -> Path:
        """The folder of the run, or of the comparison that it belongs to."""
        folder = self._folder or folders.RUNS
        return folder if single else folder.parent

    def stopped(self, given: Sequence[str], *, single: bool) -> str:
        """What to say after Ctrl-C: how far it is, by what was written, and how to go on."""
        if self._folder is None:
            return "stopped before anything was written"
        rounds = api.load(self._folder, hashes=False)["rounds"]
        far = f"after round {rounds[-1]['round']}, which is kept" if rounds else "before the first round"
        words = [word for word in given if word != "--resume"]
        if not any(word.split("=")[0] == "--out" for word in words):
            words += ["--out", str(self.root(single=single))]
        return f"stopped {far}; continue with: {shlex.join(['feddbe', *words, '--resume'])}"
