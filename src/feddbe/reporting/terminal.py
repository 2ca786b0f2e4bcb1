"""Terminal charts of curves (`figure.py`): braille dots, or letters if the terminal supports ASCII only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

from feddbe.reporting.figure import Curves, Figure, Series

_ROWS = 9
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")

Cell = tuple[int, int]
CellContents = dict[Cell, tuple[str, str]]
"""A character and its style, by column and row."""


@dataclass(frozen=True)
class _Symbols:
    """The characters of a chart."""

    across: int
    """Dots of a cell in a row."""
    down: int
    """Dots of a cell in a column."""
    reference: str
    best: str
    end: str
    band: str
    axis: str
    tick: str
    corner: str
    base: str

    def char(self, dots: set[tuple[int, int]], letter: str = "*") -> str:
        """Return the character with these dots (column, row), or the letter without Unicode."""
        if self.across == 1:
            return letter
        return chr(0x2800 + sum(_BRAILLE[row][column] for column, row in dots))


_UNICODE = _Symbols(
    2, 4, reference="┈", best="◆", end="×", band="░", axis="│", tick="┤", corner="└", base="─"
)
_ASCII = _Symbols(1, 1, reference=".", best="O", end="x", band=":", axis="|", tick="+", corner="+", base="-")


@dataclass(frozen=True)
class CurveChart:
    """A chart of a figure's curves, as wide as the console and about a dozen lines high.

    The mark of a single curve is a symbol. Several curves have letters, which distinguish them without
    colors; a capital letter is the marked point.
    """

    figure: Figure

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        (panel,) = self.figure.panels
        assert isinstance(panel, Curves)
        drawn = [series for series in panel.series if series.x]
        if not drawn:
            yield from (Text(series.legend) for series in panel.series)
            return
        symbols = _ASCII if options.ascii_only else _UNICODE
        limits = _limits(panel)
        labels = _y_labels(*limits)
        margin = max(3, *map(len, labels.values()))
        columns = max(10, options.max_width - margin - 2)
        xs = min(series.x[0] for series in drawn), max(series.x[-1] for series in drawn)
        plot = _Plot(symbols, columns, xs, limits)
        name = f"{drawn[0].name}: " if len(drawn) == 1 else ""
        yield Text.assemble((name, "bold"), self.figure.title)
        yield Text(f"{panel.y_axis.label}. {self.figure.caption}".strip(), style="dim")
        for row, line in enumerate(_rows(plot, drawn, [reference.y for reference in panel.references])):
            axis = symbols.tick if row in labels else symbols.axis
            yield Text.assemble(f"{labels.get(row, ''):>{margin}} {axis}", line, no_wrap=True)
        yield Text(f"{' ' * margin} {symbols.corner}{symbols.base * columns}", no_wrap=True)
        first, last = (f"{x:g}" for x in xs)
        yield Text(
            f"{' ' * margin}  {first}{panel.x_axis.label:^{columns - len(first) - len(last)}}{last}",
            no_wrap=True,
        )
        for text in _legend(symbols, panel):
            yield Padding(text, (0, 0, 0, margin + 2))


def _limits(panel: Curves) -> tuple[float, float]:
    """Return round numbers around all values; for percentages multiples of ten from 0 to 100."""
    values = [y for series in panel.series for edge in (series.mean, series.low, series.high) for y in edge]
    values += [series.mark.y for series in panel.series if series.mark]
    values += [reference.y for reference in panel.references]
    is_percent = panel.y_axis.unit == "%"
    if is_percent:
        values = [min(100.0, max(0.0, value)) for value in values]
    step = 10.0 if is_percent else 10.0 ** math.floor(math.log10(max(max(values) - min(values), 1e-6)))
    low = step * math.floor(min(values) / step)
    high = step * math.ceil(max(values) / step)
    if low == high and is_percent and high == 100:
        low -= step
    elif low == high:
        high += step
    return low, high


def _y_labels(low: float, high: float) -> dict[int, str]:
    """Return the labels at the top, in the middle and at the bottom, by row."""
    return {row: f"{y:.3g}" for row, y in ((0, high), (_ROWS // 2, (low + high) / 2), (_ROWS - 1, low))}


def _rows(plot: _Plot, drawn: Sequence[Series], references: Sequence[float]) -> Iterator[Text]:
    """Yield the rows of the plot from the top."""
    cells = _cells(plot, drawn)
    reference_rows = {plot.cell(plot.xs[0], y)[1] for y in references}
    for row in range(_ROWS):
        line = Text(no_wrap=True)
        for column in range(plot.columns):
            empty = (plot.symbols.reference, "dim") if row in reference_rows else (" ", "")
            line.append(*cells.get((column, row), empty))
        yield line


def _cells(plot: _Plot, drawn: Sequence[Series]) -> CellContents:
    """Return the contents of cells: marks cover curves, curves cover bands, earlier series later ones."""
    symbols = plot.symbols
    is_single = len(drawn) == 1
    cells: CellContents = {}
    for index, series in reversed(list(enumerate(drawn))):
        cells |= dict.fromkeys(
            plot.band(series) if series.low else (), (symbols.band, f"{_color(index)} dim")
        )
    for index, series in reversed(list(enumerate(drawn))):
        letter = "*" if is_single else _letter(index).lower()
        crossed = plot.line(series.x, series.mean)
        cells |= {cell: (symbols.char(dots, letter), _color(index)) for cell, dots in crossed.items()}
    for index, series in reversed(list(enumerate(drawn))):
        style = "bold" if is_single else f"bold {_color(index)}"
        last = plot.cell(series.x[-1], series.mean[-1])
        marked = plot.cell(series.mark.x, series.mark.y) if series.mark else None
        if not is_single:
            cells[last] = _letter(index).lower(), style
        if marked:
            cells[marked] = symbols.best if is_single else _letter(index), style
        if series.ending:
            end_column = last[0] + 1 if last == marked else last[0]
            cells[min(end_column, plot.columns - 1), last[1]] = symbols.end, style
    return cells


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


def _letter(index: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[index % 26]


def _legend(symbols: _Symbols, panel: Curves) -> Iterator[Text]:
    """Yield each curve's key with its legend, then the meaning of the band and of dotted lines."""
    index = 0
    for series in panel.series:
        if len(panel.series) == 1:
            key, style, text = symbols.best, "bold", series.mark.text if series.mark else series.name
        elif series.x:
            key, style, text = _letter(index), f"bold {_color(index)}", series.name
            text += f": {series.mark.text}" if series.mark else ""
        else:
            key, style, text = " ", "", series.name
        index += bool(series.x)
        end = f", {symbols.end} {series.ending}" if series.ending else ""
        yield Text.assemble((f"{key} ", style), f"{text}{end}")
    if panel.band:
        yield Text(f"{symbols.band * 3} {panel.band}")
    for reference in panel.references:
        yield Text(f"{symbols.reference * 3} {reference.text}")


@dataclass(frozen=True)
class _Plot:
    """The grid of characters with its axes; rows count from the top."""

    symbols: _Symbols
    columns: int
    xs: tuple[float, float]
    ys: tuple[float, float]

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        """Return the dot of a point; values beyond the limits are drawn at the limits.

        The limits of y are in the middle of the lowest and the highest row, next to their labels.
        """
        low, high = self.ys
        across = self.symbols.across * self.columns - 1
        down = self.symbols.down * (_ROWS - 1)
        right = (x - self.xs[0]) / max(1, self.xs[1] - self.xs[0])
        up = (min(high, max(low, y)) - low) / (high - low)
        return math.floor(right * across + 0.5), math.floor((1 - up) * down + self.symbols.down / 2)

    def cell(self, x: float, y: float) -> Cell:
        """Return the cell of a point."""
        column, row = self._dot(x, y)
        return column // self.symbols.across, row // self.symbols.down

    def line(self, x: Sequence[float], y: Sequence[float]) -> dict[Cell, set[tuple[int, int]]]:
        """Return the dots of each cell that the line through the points crosses."""
        cells: dict[Cell, set[tuple[int, int]]] = {}
        dots = list(map(self._dot, x, y))
        for (x0, y0), (x1, y1) in zip([dots[0], *dots], dots, strict=False):
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            for step in range(steps + 1):
                across, down = (math.floor(a + (b - a) * step / steps + 0.5) for a, b in ((x0, x1), (y0, y1)))
                inside = across % self.symbols.across, down % self.symbols.down
                cells.setdefault((across // self.symbols.across, down // self.symbols.down), set()).add(
                    inside
                )
        return cells

    def band(self, series: Series) -> Iterator[Cell]:
        """Yield the cells between the edges of the band."""
        edges = [self.line(series.x, series.high), self.line(series.x, series.low)]
        for column in {column for column, _ in edges[0]}:
            rows = [row for edge in edges for x, row in edge if x == column]
            yield from ((column, row) for row in range(min(rows), max(rows) + 1))
