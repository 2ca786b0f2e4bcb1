"""Learning curves as a chart of characters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from feddbe.results.curves import Line, lines
from feddbe.results.document import RunDocument, labels, title

_ROWS = 9
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")

Cell = tuple[int, int]
Drawn = dict[Cell, tuple[str, str]]
"""By column and row: a character and its style."""


@dataclass(frozen=True)
class _Look:
    """The characters of a chart, and into how many dots (across, down) they divide a cell."""

    across: int
    down: int
    floor: str
    best: str
    end: str
    band: str
    wall: str
    tick: str
    corner: str
    ground: str

    def char(self, dots: set[tuple[int, int]], letter: str = "*") -> str:
        """The character that shows these dots (column, row) of a cell; without Unicode the line's letter."""
        if self.across == 1:
            return letter
        return chr(0x2800 + sum(_BRAILLE[row][column] for column, row in dots))


_UNICODE = _Look(2, 4, floor="┈", best="◆", end="×", band="░", wall="│", tick="┤", corner="└", ground="─")
_ASCII = _Look(1, 1, floor=".", best="O", end="x", band=":", wall="|", tick="+", corner="+", ground="-")


@dataclass(frozen=True)
class _Curves:
    """Learning curves that take the width of their console. One line has its best round marked; several have
    letters, by which they are told apart without colours."""

    documents: tuple[RunDocument, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        every = lines(self.documents)
        drawn = [line for line in every if line.rounds]
        floors = sorted({100 * document["floor"] for document in self.documents})
        if not drawn:
            for name, said in [(line.name, line.ending) for line in every] or [
                (name, "no round has been evaluated yet") for name in labels(self.documents)
            ]:
                yield Text(f"{name}: {said}")
            return
        look = _ASCII if options.ascii_only else _UNICODE
        columns = max(10, options.max_width - 5)
        values = [*floors, *(y for line in drawn for y in (*line.low, *line.high))]
        low = min(90, 10 * math.floor(min(values) / 10))
        high = max(10 * math.ceil(max(values) / 10), low + 10)
        xs = min(line.rounds[0] for line in drawn), max(line.rounds[-1] for line in drawn)
        plot = _Plot(look, columns, xs, (low, high))
        yield from _heading(self.documents, drawn)
        cells = _drawn(plot, drawn)
        dotted = {plot.cell(xs[0], floor)[1] for floor in floors}
        marks = {0: high, _ROWS // 2: (low + high) // 2, _ROWS - 1: low}
        for row in range(_ROWS):
            line = Text(f"{marks.get(row, ''):>3} {look.tick if row in marks else look.wall}", no_wrap=True)
            for column in range(columns):
                empty = (look.floor, "dim") if row in dotted else (" ", "")
                line.append(*cells.get((column, row), empty))
            yield line
        yield Text(f"    {look.corner}{look.ground * columns}", no_wrap=True)
        first, last = map(str, xs)
        yield Text(f"     {first}{'round':^{columns - len(first) - len(last)}}{last}", no_wrap=True)
        yield from _legend(look, every, floors)


def _heading(documents: Sequence[RunDocument], drawn: Sequence[Line]) -> Iterator[Text]:
    """What the runs are about, and what is drawn of them."""
    name = f"{drawn[0].name}: " if len(drawn) == 1 else ""
    moments = list(dict.fromkeys(line.moment for line in drawn))
    when = f" {moments[0]}" if len(moments) == 1 else ""
    yield Text.assemble((name, "bold"), title(documents))
    yield Text(f"test accuracy in %{when}, weighted by samples", style="dim")


def _drawn(plot: _Plot, drawn: Sequence[Line]) -> Drawn:
    """Bands below lines below marks; of two in one place the one that was named first."""
    look, alone, found = plot.look, len(drawn) == 1, Drawn()
    for index, line in reversed(list(enumerate(drawn))):
        colour = _COLOURS[index % len(_COLOURS)]
        found |= dict.fromkeys(plot.band(line) if line.runs > 1 else (), (look.band, f"{colour} dim"))
    for index, line in reversed(list(enumerate(drawn))):
        cells = plot.line(list(zip(line.rounds, line.mean, strict=True)))
        letter = "*" if alone else _letter(index).lower()
        colour = _COLOURS[index % len(_COLOURS)]
        found |= {cell: (look.char(dots, letter), colour) for cell, dots in cells.items()}
    for index, line in reversed(list(enumerate(drawn))):
        colour = "bold" if alone else f"bold {_COLOURS[index % len(_COLOURS)]}"
        last, best = plot.cell(line.rounds[-1], line.mean[-1]), plot.cell(*line.best)
        if not alone:
            found[last] = _letter(index).lower(), colour
        found[best] = look.best if alone else _letter(index), colour
        if line.ending:
            beside = min(last[0] + (last == best), plot.columns - 1), last[1]
            found[beside] = look.end, colour
    return found


def _letter(index: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[index % 26]


def _legend(look: _Look, every: Sequence[Line], floors: Sequence[float]) -> Iterator[Padding]:
    """Each line's letter, name and best round; of one line alone, it and the floor in one row."""
    floor = f"{look.floor * 3} clients' majority class {' or '.join(f'{floor:.2f}' for floor in floors)}"
    drawn = [line for line in every if line.rounds]
    if len(every) == 1:
        round, best = drawn[0].best
        end = f"   {look.end} {drawn[0].ending}" if drawn[0].ending else ""
        yield _beside(Text(f"{look.best} best {best:.2f} @{round}{end}   {floor}"))
        yield from _band(look, drawn)
        return
    moments = {line.moment for line in drawn}
    for index, line in enumerate(every):
        told = f"best {line.best[1]:.2f} @{line.best[0]}" if line.rounds else ""
        ended = f"{look.end} {line.ending}" if line.ending else ""
        words = filter(None, [told, line.moment if len(moments) > 1 else "", ended])
        key, colour = (_letter(index), _COLOURS[index % len(_COLOURS)]) if line.rounds else (" ", "")
        yield _beside(Text.assemble((f"{key} ", f"bold {colour}"), f"{line.name}: {', '.join(words)}"))
    yield from _band(look, drawn)
    yield _beside(Text(floor))


def _beside(text: Text) -> Padding:
    """Under the plot, also where it takes another line."""
    return Padding(text, (0, 0, 0, 5))


def _band(look: _Look, drawn: Sequence[Line]) -> Iterator[Padding]:
    if any(line.runs > 1 for line in drawn):
        yield _beside(Text(f"{look.band * 3} from the lowest seed to the highest; lines are means"))


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

    def cell(self, x: float, y: float) -> Cell:
        column, row = self._dot(x, y)
        return column // self.look.across, row // self.look.down

    def line(self, found: Sequence[tuple[int, float]]) -> dict[Cell, set[tuple[int, int]]]:
        """The dots of each cell that the line through the points crosses."""
        cells: dict[Cell, set[tuple[int, int]]] = {}
        dots = [self._dot(*point) for point in found]
        for (x0, y0), (x1, y1) in zip([dots[0], *dots], dots, strict=False):
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            for step in range(steps + 1):
                x, y = (math.floor(a + (b - a) * step / steps + 0.5) for a, b in ((x0, x1), (y0, y1)))
                inside = x % self.look.across, y % self.look.down
                cells.setdefault((x // self.look.across, y // self.look.down), set()).add(inside)
        return cells

    def band(self, line: Line) -> Iterator[Cell]:
        """The cells between the line's lowest and highest runs."""
        edges = [self.line(list(zip(line.rounds, values, strict=True))) for values in (line.high, line.low)]
        for column in {column for column, _ in edges[0]}:
            rows = [row for edge in edges for x, row in edge if x == column]
            yield from ((column, row) for row in range(min(rows), max(rows) + 1))


def curves(documents: Sequence[RunDocument]) -> RenderableType:
    """All learning curves in one chart of about a dozen lines, as wide as the console, in the order of the
    runs; the floor is a dotted line."""
    return _Curves(tuple(documents))
