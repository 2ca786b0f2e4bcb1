"""Tables of the paper next to ours."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase

from feddbe.reporting.table import TEXT, Column, Kind, Narrow, Table, render
from feddbe.results.statistics import Interval


@dataclass(frozen=True)
class PaperCell:
    """A cell of the table: our value, the paper's, and their difference."""

    row: str
    column: str
    ours: Interval | None
    theirs: float | None
    """The paper's value; None if it has none."""
    difference: float | None
    """Ours - theirs, if both use the same data and model."""
    marks: tuple[str, ...] = ()
    """Footnotes."""
    status: str = "-"
    """Text instead of our value while there is none."""
    digits: int = 2


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper with our values."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[PaperCell, ...]
    notes: tuple[str, ...] = ()

    def letters(self) -> dict[str, str]:
        """Return a letter for each footnote, in order of appearance."""
        marks = list(dict.fromkeys(mark for cell in self.cells for mark in cell.marks))
        return {mark: _letter(index) for index, mark in enumerate(marks)}

    def legend(self) -> str:
        """Return the meaning of numbers and letters, and the notes; a sentence each."""
        has_intervals = any(cell.ours and cell.ours.n > 1 for cell in self.cells)
        ours = "Ours ± 95 % interval over trials" if has_intervals else "Ours"
        sentences = [f"{ours}, the paper's, the difference."]
        sentences += [f"{letter}: {mark}." for mark, letter in self.letters().items()]
        return " ".join([*sentences, *self.notes])

    def find_cell(self, row: str, column: str) -> PaperCell | None:
        """Return the cell in a row and column, or None."""
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)


def paper_table(table: PaperTable) -> Table:
    """Return the table for readers, laid out as in the paper: a record for each of its rows."""
    letters = table.letters()
    kind = Kind(
        lambda cell: _format_in_one_line(cell, letters),
        sort_value=lambda cell: cell.ours.mean if cell.ours else None,
        terminal_format=lambda cell: _format_in_two_lines(cell, letters),
    )
    columns = [
        Column("row", "method", TEXT, lambda row: row),
        *(Column(f"column_{index}", name, kind, lambda row, name=name: table.find_cell(row, name))  # type: ignore[misc]
          for index, name in enumerate(table.columns)),
    ]  # fmt: skip
    heading = f"{table.name}: {table.title}"
    return Table.from_sources(
        columns, table.rows, title=heading, note=table.legend(), narrow=Narrow.STACK_BLOCKS
    )


def paper_records_table(table: PaperTable) -> Table:
    """Return the table for programs: a record for each number of the paper."""
    columns = [
        Column("table", value=lambda cell: table.name),
        Column("row", value=lambda cell: cell.row),
        Column("column", value=lambda cell: cell.column),
        Column("ours", value=lambda cell: cell.ours.mean if cell.ours else None),
        Column("half_width", value=lambda cell: cell.ours.half_width if cell.ours else None),
        Column("trials", value=lambda cell: cell.ours.n if cell.ours else 0),
        Column("paper", value=lambda cell: cell.theirs),
        Column("difference", value=lambda cell: cell.difference),
        Column("marks", value=lambda cell: "; ".join(cell.marks) or ("" if cell.ours else cell.status)),
    ]
    return Table.from_sources(columns, table.cells)


def render_paper_table(table: PaperTable, format_name: str) -> str:
    """Return the table in one of `FORMATS`.

    Markdown and LaTeX are laid out as in the paper; CSV and JSON have a record for each number.
    """
    is_for_readers = format_name in ("markdown", "latex")
    rendered = paper_table(table) if is_for_readers else paper_records_table(table)
    return render(rendered, format_name)


def _format_in_two_lines(cell: PaperCell | None, letters: dict[str, str]) -> str:
    """Return ours above the paper's number and the difference."""
    if cell is None:
        return ""
    return f"{_format_ours(cell, letters)}\n{'  '.join(_format_paper(cell))}"


def _format_in_one_line(cell: PaperCell | None, letters: dict[str, str]) -> str:
    """Return ours, then the paper's number and the difference in parentheses."""
    if cell is None:
        return ""
    paper = _format_paper(cell)
    return f"{_format_ours(cell, letters)} ({', '.join(paper)})" if paper else _format_ours(cell, letters)


def _format_ours(cell: PaperCell, letters: dict[str, str]) -> str:
    text = cell.ours.format(cell.digits) if cell.ours else cell.status
    return f"{text} {','.join(letters[mark] for mark in cell.marks)}".strip()


def _format_paper(cell: PaperCell) -> list[str]:
    """Return the paper's number and the difference, if they exist."""
    texts = []
    if cell.theirs is not None:
        texts.append(f"{cell.theirs:.{cell.digits}f}")
    if cell.difference is not None:
        texts.append(f"{cell.difference:+.{cell.digits}f}")
    return texts


def _letter(index: int) -> str:
    """Return a, b, ..., z, aa, ab, ..."""
    first, second = divmod(index, len(ascii_lowercase))
    return (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[second]
