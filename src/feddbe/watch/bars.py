"""Bars on standard error while runs go on, if that is a terminal."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from feddbe.runs.watch import Watch

__all__ = ["Bars", "columns"]


class _Lines(Progress):
    """Bars that leave room for the ^C which a terminal writes: it must not begin a new line."""

    def get_renderable(self) -> RenderableType:
        return _Narrow(super().get_renderable())


@dataclasses.dataclass(frozen=True)
class _Narrow:
    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update_width(options.max_width - 3))


def columns() -> list[ProgressColumn]:
    """What a run that goes on shows: its name, how far it is, its accuracy, the time, and what is left."""
    return [
        TextColumn("{task.description}", table_column=Column(ratio=3, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=None, table_column=Column(ratio=2)),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}", table_column=Column(width=8, justify="right")),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    ]


class Bars(Watch):
    """A bar for each run; they go when all are over."""

    def __enter__(self) -> Self:
        self._bars = _Lines(
            *columns(),
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

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._done = done
        self._rounds = self._bars.add_task(name, total=rounds, completed=done, accuracy="")
        self._bars.refresh()

    def client(self, done: int, of: int) -> None:
        self._bars.update(self._rounds, completed=self._done + done / of)
        self._bars.refresh()

    def part(self, share: float) -> None:
        self._bars.update(self._rounds, completed=self._done + share)
        self._bars.refresh()

    def round(self, done: int, accuracy: float | None) -> None:
        self._done = done
        shown = "" if accuracy is None else f"{100 * accuracy:.2f} %"
        self._bars.update(self._rounds, completed=done, accuracy=shown)
        self._bars.refresh()

    def remark(self, text: str) -> None:
        self._bars.console.print(f"feddbe: {text}", markup=False, highlight=False, soft_wrap=True)
