"""A table of the paper beside ours: in a terminal, in Markdown or LaTeX for readers, as CSV or JSON for
programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from feddbe.reporting.formatting import Column, Grid, Name, caption, plain_table, render
from feddbe.results.statistics import Interval


@dataclass(frozen=True)
class Place:
    """One place of the table."""

    row: str
    column: str
    ours: Interval | None
    theirs: float | None
    """None: the paper has a dash there, or nothing."""
    difference: float | None
    """Ours - theirs, where both are of the same data and model."""
    marks: tuple[str, ...] = ()
    """What a reader must know of it."""
    state: str = "-"
    """What stands for ours while there is none."""
    digits: int = 2


@dataclass(frozen=True)
class Compared:
    """A table of the paper and ours."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    places: tuple[Place, ...]
    notes: tuple[str, ...] = ()

    def letters(self) -> dict[str, str]:
        """A letter for each mark, in the order in which they appear."""
        marks = list(dict.fromkeys(mark for place in self.places for mark in place.marks))
        return {mark: _letter(index) for index, mark in enumerate(marks)}

    def legend(self) -> str:
        """What the numbers are, what letters mean, and the notes; a sentence each."""
        interval = any(place.ours and place.ours.n > 1 for place in self.places)
        words = [f"Ours{' ± 95 % interval over trials' if interval else ''}, the paper's, the difference."]
        words += [f"{letter}: {mark}." for mark, letter in self.letters().items()]
        return " ".join([*words, *self.notes])

    def at(self, row: str, column: str) -> Place | None:
        return next((p for p in self.places if (p.row, p.column) == (row, column)), None)


def compared_table(found: Compared) -> RenderableType:
    """For a terminal: ours above the paper's number and the difference; as many columns beside each other as
    there is room for."""
    return _Table(found)


@dataclass(frozen=True)
class _Table:
    """A class because what there is room for depends on the console's width."""

    found: Compared

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found, letters = self.found, self.found.letters()
        yield Text(f"{found.name}: {found.title}", style="bold")
        cells = {
            column: [_two_lines(found.at(row, column), letters) for row in found.rows]
            for column in found.columns
        }
        widths = {
            column: max(len(line) for text in [column, *texts] for line in text.split("\n"))
            for column, texts in cells.items()
        }
        names = max(len(row) for row in found.rows)
        for number, block in enumerate(
            _blocks(found.columns, widths, options.max_width - min(names, 20) - 2)
        ):
            if number:
                yield Text()
            table = plain_table(gap=2)
            table.add_column("", overflow="fold")
            for column in block:
                table.add_column(column, justify="right", no_wrap=True)
            for index, row in enumerate(found.rows):
                if any(cells[column][index] for column in block):
                    table.add_row(Name(row, "bold"), *(cells[column][index] for column in block))
            yield table
        yield caption(found.legend())


def _blocks(columns: Sequence[str], widths: dict[str, int], room: int) -> list[list[str]]:
    """The columns in groups that fit beside each other."""
    blocks: list[list[str]] = [[]]
    for column in columns:
        if blocks[-1] and sum(widths[c] + 2 for c in [*blocks[-1], column]) > room:
            blocks.append([])
        blocks[-1].append(column)
    return blocks


def written_out(found: Compared, form: str) -> str:
    """The table in one of `FORMATS`: as the paper's for readers, a place to a line for programs."""
    grid = _matrix(found) if form in ("markdown", "latex") else _records(found)
    head = {"markdown": f"**{found.name}: {found.title}**\n\n", "latex": f"% {found.name}: {found.title}\n"}
    return head.get(form, "") + render(grid, form)


def _matrix(found: Compared) -> Grid:
    letters = found.letters()
    rows = [[row, *(one_line(found.at(row, c), letters) for c in found.columns)] for row in found.rows]
    columns = [Column("", "method", text=True), *(Column("", column) for column in found.columns)]
    return Grid(columns, rows, found.legend())


def _records(found: Compared) -> Grid:
    keys = ("table", "row", "column", "ours", "half_width", "trials", "paper", "difference", "marks")
    rows = [
        [
            found.name, p.row, p.column,
            *(p.ours if p.ours else (None, None, 0)),
            p.theirs, p.difference, "; ".join(p.marks) or ("" if p.ours else p.state),
        ]
        for p in found.places
    ]  # fmt: skip
    return Grid([Column(key, key) for key in keys], rows)


def _two_lines(place: Place | None, letters: dict[str, str]) -> str:
    if place is None:
        return ""
    return f"{_ours(place, letters)}\n{'  '.join(_paper(place))}"


def one_line(place: Place | None, letters: dict[str, str]) -> str:
    """Ours, and in brackets the paper's and the difference."""
    if place is None:
        return ""
    paper = _paper(place)
    return f"{_ours(place, letters)} ({', '.join(paper)})" if paper else _ours(place, letters)


def _ours(place: Place, letters: dict[str, str]) -> str:
    text = place.ours.shown(place.digits) if place.ours else place.state
    return f"{text} {','.join(letters[mark] for mark in place.marks)}".strip()


def _paper(place: Place) -> list[str]:
    """What the paper has, and the difference."""
    found = [] if place.theirs is None else [f"{place.theirs:.{place.digits}f}"]
    return found + ([] if place.difference is None else [f"{place.difference:+.{place.digits}f}"])


def _letter(index: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    first, second = divmod(index, len(ascii_lowercase))
    return (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[second]
