"""What all tables share: their look, and how names, shares, seconds and bytes are written."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from feddbe.errors import unknown


@dataclass(frozen=True)
class Name:
    """A name that, where it must, breaks before + and ( and after other punctuation rather than anywhere."""

    text: str
    style: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(len, _pieces(self.text)))
        return Measurement(min(longest, 12), max(1, len(self.text))).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(folded(self.text, options.max_width), style=self.style, overflow="fold")


def folded(text: str, width: int) -> str:
    """In lines of at most so many letters where there is a place to break."""
    lines = [""]
    for piece in _pieces(text):
        if len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines if line)


def _pieces(text: str) -> list[str]:
    return re.findall(r"[+(]?[^-+(,_/: ]*[-,_/: ]?", text)


def plain_table(gap: int) -> Table:
    """A table without edges, `gap` blanks between columns."""
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
        header_style="bold",
        caption_justify="left",
    )


def caption(words: str) -> Text:
    """As text, because in a plain string rich would take [brackets] for markup."""
    return Text(words, style="dim")


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f}"


def in_seconds(value: float) -> str:
    return f"{value:.{3 if value < 0.0995 else 2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def in_bytes(count: float) -> str:
    """Decimal units and three digits: 950 B, 81.6 kB, 2.33 MB."""
    unit, *larger = "B", "kB", "MB", "GB", "TB"
    while count >= 999.5 and larger:
        count, unit = count / 1000, larger.pop(0)
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


def _plain(value: Any) -> str:
    return "-" if value is None else str(value)


@dataclass(frozen=True)
class Column:
    """One column; without `key` it is for readers only, without `title` for programs only."""

    key: str
    """Its name for programs, such as `worst_tenth`."""
    title: str = ""
    """Its name for readers, such as `worst tenth`."""
    shown: Callable[[Any], str] = _plain
    """How a reader sees its values."""
    text: bool = False
    """Words, which begin on the left, where numbers end on the right."""
    spare: bool = False
    """A narrow terminal can do without."""


@dataclass(frozen=True)
class Grid:
    """A table: a value for each column in each row, and what a reader must know of it."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def read(self) -> tuple[list[Column], list[list[str]]]:
        """What readers see of it."""
        chosen = [index for index, column in enumerate(self.columns) if column.title]
        shown = [[_one_line(self.columns[index].shown(row[index])) for index in chosen] for row in self.rows]
        return [self.columns[index] for index in chosen], shown

    def titles(self) -> list[str]:
        """Of what readers see, each in a line."""
        return [_one_line(column.title) for column in self.columns if column.title]

    def records(self) -> list[dict[str, Any]]:
        """What programs see of it; what is no number, or endless, is None."""
        return [
            {
                column.key: _finite(value)
                for column, value in zip(self.columns, row, strict=True)
                if column.key
            }
            for row in self.rows
        ]


def render(grid: Grid, form: str) -> str:
    """The table in one of the `FORMATS`; it ends with a line's end."""
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    return FORMATS[form](grid)


def as_html(grid: Grid) -> str:
    """A table element as notebooks show it."""
    columns, rows = grid.read()

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = ("left" if column.text else "right" for column in columns)
        styled = (
            f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(styled)}</tr>"

    head, body = line("th", grid.titles()), (line("td", row) for row in rows)
    note = f"<p><small>{html.escape(grid.note)}</small></p>" if grid.note else ""
    return "\n".join(["<table>", f"<thead>{head}</thead>", "<tbody>", *body, "</tbody>", f"</table>{note}"])


def as_rich(grid: Grid) -> RenderableType:
    """For a terminal; where it is narrow, columns that can be spared are left out, the last ones first."""
    return _Terminal(grid)


@dataclass(frozen=True)
class _Terminal:
    grid: Grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, rows = self.grid.read()
        shown = list(range(len(columns)))
        while self._width(columns, rows, shown) > options.max_width:
            spare = [index for index in shown if columns[index].spare]
            if not spare:
                break
            shown.remove(spare[-1])
        table = plain_table(gap=2)
        for index in shown:
            text = columns[index].text
            table.add_column(
                columns[index].title, justify="left" if text else "right", no_wrap=not text, overflow="fold"
            )
        for row in rows:
            table.add_row(*(Name(row[index]) if columns[index].text else row[index] for index in shown))
        table.caption = caption(self.grid.note) if self.grid.note else None
        yield table

    @staticmethod
    def _width(columns: Sequence[Column], rows: Sequence[Sequence[str]], shown: Sequence[int]) -> int:
        """What it needs if names are broken where they must be."""
        widths = []
        for index in shown:
            longest = max(map(len, [*columns[index].title.split("\n"), *(row[index] for row in rows)]))
            widths.append(min(longest, _NAME) if columns[index].text else longest)
        return sum(widths) + 2 * (len(widths) - 1)


_NAME = 18
"""Letters of a name that should stay together."""


def _csv(grid: Grid) -> str:
    """A row is a line, whatever is in it."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.key for column in grid.columns if column.key])
    for record in grid.records():
        writer.writerow([_one_line(value) if isinstance(value, str) else value for value in record.values()])
    return file.getvalue()


def _json(grid: Grid) -> str:
    """A list of objects, one to a line."""
    return "[" + ",\n ".join(json.dumps(record, ensure_ascii=False) for record in grid.records()) + "]\n"


def _markdown(grid: Grid) -> str:
    columns, rows = grid.read()
    cells = [grid.titles(), *rows]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
    lines.insert(1, f"|{'|'.join('---' if column.text else '---:' for column in columns)}|")
    return "\n".join([*lines, *(["", grid.note] if grid.note else [])]) + "\n"


def _latex(grid: Grid) -> str:
    columns, rows = grid.read()
    lines = [f"{' & '.join(map(_escaped, row))} \\\\" for row in rows]
    return "\n".join([
        *([f"% {grid.note}"] if grid.note else []),
        r"\begin{tabular}{" + "".join("l" if column.text else "r" for column in columns) + "}",
        r"\toprule % of the package booktabs",
        f"{' & '.join(map(_escaped, grid.titles()))} \\\\",
        r"\midrule",
        *lines,
        r"\bottomrule",
        r"\end{tabular}",
    ]) + "\n"  # fmt: skip


_LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "<": r"\textless{}", ">": r"\textgreater{}", "−": "$-$",
}  # fmt: skip


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


FORMATS: dict[str, Callable[[Grid], str]] = {
    "csv": _csv, "json": _json, "latex": _latex, "markdown": _markdown,
}  # fmt: skip
