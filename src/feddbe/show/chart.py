"""The learning curve as a chart of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from feddbe.results.document import RunDocument, moment, points

__all__ = ["curve"]


_ROWS = 9
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True)
class _Look:
    """The characters of a curve, and into how many dots (across, down) they divide a cell."""

    across: int
    down: int
    floor: str
    best: str
    wall: str
    tick: str
    corner: str
    ground: str

    def char(self, dots: set[tuple[int, int]]) -> str:
        """The character that shows these dots (column, row) of a cell."""
        if self.across == 1:
            return "*"
        return chr(0x2800 + sum(_BRAILLE[row][column] for column, row in dots))


_UNICODE = _Look(2, 4, floor="┈", best="◆", wall="│", tick="┤", corner="└", ground="─")
_ASCII = _Look(1, 1, floor=".", best="O", wall="|", tick="+", corner="+", ground="-")


@dataclass(frozen=True)
class _Curve:
    """A learning curve that takes the width of its console."""

    document: RunDocument

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found, floor, name = points(self.document), 100 * self.document["floor"], self.document["method"]
        if not found:
            yield Text(f"{name}: no round has been evaluated yet")
            return
        look = _ASCII if options.ascii_only else _UNICODE
        columns = max(10, options.max_width - 5)
        low = min(90, 10 * math.floor(min(floor, *(y for _, y in found)) / 10))
        high = max(10 * math.ceil(max(floor, *(y for _, y in found)) / 10), low + 10)
        plot = _Plot(look, columns, (found[0][0], found[-1][0]), (low, high))
        cells = plot.line(found)
        best = max(found, key=lambda point: point[1])  # of equal ones the first
        best_cell, floor_row = plot.cell(*best), plot.cell(found[0][0], floor)[1]

        when = next(entry["when"] for entry in self.document["rounds"] if entry["accuracy"])
        yield Text.assemble((name, "bold"), f": test accuracy in % {moment(when)}, weighted by samples")
        marks = {0: high, _ROWS // 2: (low + high) // 2, _ROWS - 1: low}
        for row in range(_ROWS):
            line = Text(f"{marks.get(row, ''):>3} {look.tick if row in marks else look.wall}", no_wrap=True)
            for column in range(columns):
                if (column, row) == best_cell:
                    line.append(look.best, "bold")
                elif (column, row) in cells:
                    line.append(look.char(cells[column, row]), "cyan")
                else:
                    line.append(*((look.floor, "dim") if row == floor_row else (" ", "")))
            yield line
        yield Text(f"    {look.corner}{look.ground * columns}", no_wrap=True)
        first, last = f"{found[0][0]}", f"{found[-1][0]}"
        yield Text(f"     {first}{'round':^{columns - len(first) - len(last)}}{last}", no_wrap=True)
        mark, level = f"{look.best} best {best[1]:.2f} @{best[0]}", f"clients' majority class {floor:.2f}"
        yield Text(f"     {mark}   {look.floor * 3} {level}")


@dataclass(frozen=True)
class _Plot:
    """Where a point falls in a grid of characters; rows count from the top."""

    look: _Look
    columns: int
    xs: tuple[int, int]
    ys: tuple[int, int]

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        """The limits of y lie in the middle of the lowest and the highest row, beside their labels."""
        across, down = self.look.across * self.columns - 1, self.look.down * (_ROWS - 1)
        right = (x - self.xs[0]) / max(1, self.xs[1] - self.xs[0])
        up = (y - self.ys[0]) / (self.ys[1] - self.ys[0])
        return math.floor(right * across + 0.5), math.floor((1 - up) * down + self.look.down / 2)

    def cell(self, x: float, y: float) -> tuple[int, int]:
        column, row = self._dot(x, y)
        return column // self.look.across, row // self.look.down

    def line(self, found: Sequence[tuple[int, float]]) -> dict[tuple[int, int], set[tuple[int, int]]]:
        """The dots of each cell that the line through the points crosses."""
        cells: dict[tuple[int, int], set[tuple[int, int]]] = {}
        dots = [self._dot(*point) for point in found]
        for (x0, y0), (x1, y1) in zip([dots[0], *dots], dots, strict=False):
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            for step in range(steps + 1):
                x, y = (math.floor(a + (b - a) * step / steps + 0.5) for a, b in ((x0, x1), (y0, y1)))
                inside = x % self.look.across, y % self.look.down
                cells.setdefault((x // self.look.across, y // self.look.down), set()).add(inside)
        return cells


def curve(document: RunDocument) -> RenderableType:
    """The learning curve in about a dozen lines, as wide as the console; the floor is a dotted line."""
    return _Curve(document)
