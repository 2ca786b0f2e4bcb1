"""Tables of the paper next to ours."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase

from feddbe.reporting.table import TEXT, Column, Kind, Narrow, Table, render
from feddbe.results.statistics import Interval


@dataclass(frozen=True)
class MomentValue:
    """Our accuracy at one moment: `before`, `adapted` or `after` local training."""

    moment: str
    value: Interval
    gain: Interval | None = None
    """Paired difference to FedAvg at the same moment; None in FedAvg's row, or without that row."""


@dataclass(frozen=True)
class PaperCell:
    """A cell of the table: our value, the paper's, and their difference."""

    row: str
    column: str
    ours: Interval | None
    """The value that is compared with the paper's."""
    theirs: float | None
    """The paper's value; None if it has none."""
    difference: float | None
    """Ours - theirs, if both use the same data and model."""
    marks: tuple[str, ...] = ()
    """Footnotes."""
    status: str = "-"
    """Text instead of our value while there is none."""
    digits: int = 2
    moments: tuple[MomentValue, ...] = ()
    """Our accuracy at each moment, the compared one first; empty for other quantities."""


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
        if any(cell.moments for cell in self.cells):
            sentences += [_MOMENTS_LEGEND, *self._agreements()]
        sentences += [f"{letter}: {mark}." for mark, letter in self.letters().items()]
        return " ".join([*sentences, *self.notes])

    def _agreements(self) -> list[str]:
        """Return a sentence on how many cells agree with the paper at each moment, if any can be compared."""
        comparable = [cell for cell in self.cells if cell.moments and cell.difference is not None]
        if not comparable:
            return []
        compared = sum(_agrees(cell, cell.moments[0]) for cell in comparable)
        text = (
            f"Within {AGREEMENT:g} point of the paper: {compared} of {len(comparable)} cells before local "
            "training (or adapted)"
        )
        trained = [cell for cell in comparable if len(cell.moments) > 1]
        if trained:
            after = sum(_agrees(cell, cell.moments[1]) for cell in trained)
            text += f", {after} of {len(trained)} after it"
        return [f"{text}."]

    def find_cell(self, row: str, column: str) -> PaperCell | None:
        """Return the cell in a row and column, or None."""
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)


AGREEMENT = 1.0
"""Largest difference, in points, at which an accuracy counts as reproduced."""
_MOMENTS_LEGEND = (
    "Before and after local training, in parentheses the difference to FedAvg at the same moment. The first "
    "is compared with the paper, because the published code evaluates before local training; methods that "
    "adapt the model to each client are evaluated adapted."
)


def _agrees(cell: PaperCell, moment_value: MomentValue) -> bool:
    return cell.theirs is not None and abs(moment_value.value.mean - cell.theirs) <= AGREEMENT


def paper_table(table: PaperTable) -> Table:
    """Return the table for readers, laid out as in the paper: a record for each of its rows."""
    letters = table.letters()
    kind = Kind(
        lambda cell: _format_in_one_line(cell, letters),
        sort_value=lambda cell: cell.ours.mean if cell.ours else None,
        terminal_format=lambda cell: _format_in_lines(cell, letters),
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
        Column("moment", value=lambda cell: cell.moments[0].moment if cell.moments else None),
        Column("gain", value=lambda cell: _gain(cell, 0)),
        Column("after", value=lambda cell: cell.moments[-1].value.mean if len(cell.moments) > 1 else None),
        Column("gain_after", value=lambda cell: _gain(cell, 1)),
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


def _gain(cell: PaperCell, index: int) -> float | None:
    """Return the difference to FedAvg at a cell's first or second moment, if it has one."""
    if len(cell.moments) <= index:
        return None
    gain = cell.moments[index].gain
    return gain.mean if gain else None


def _format_in_lines(cell: PaperCell | None, letters: dict[str, str]) -> str:
    """Return ours at each moment, then the paper's number and the difference, each in a line."""
    if cell is None:
        return ""
    return "\n".join([*_format_ours(cell, letters), "  ".join(_format_paper(cell))])


def _format_in_one_line(cell: PaperCell | None, letters: dict[str, str]) -> str:
    """Return ours, then the paper's number and the difference in parentheses."""
    if cell is None:
        return ""
    ours = "; ".join(_format_ours(cell, letters))
    paper = _format_paper(cell)
    if not paper:
        return ours
    return f"{ours}; {', '.join(paper)}" if cell.moments else f"{ours} ({', '.join(paper)})"


def _format_ours(cell: PaperCell, letters: dict[str, str]) -> list[str]:
    """Return ours, for an accuracy at each moment; the first has the letters of the footnotes."""
    if cell.moments:
        texts = [_format_moment(moment_value, cell.digits) for moment_value in cell.moments]
    else:
        texts = [cell.ours.format(cell.digits) if cell.ours else cell.status]
    marks = ",".join(letters[mark] for mark in cell.marks)
    return [f"{texts[0]} {marks}".strip(), *texts[1:]]


def _format_moment(moment_value: MomentValue, digits: int) -> str:
    text = f"{moment_value.moment} {moment_value.value.format(digits)}"
    gain = moment_value.gain
    return f"{text} ({gain.mean:+.{digits}f})" if gain else text


def _format_paper(cell: PaperCell) -> list[str]:
    """Return the paper's number and the difference, if they exist."""
    texts = []
    if cell.theirs is not None:
        label = "paper " if cell.moments else ""
        texts.append(f"{label}{cell.theirs:.{cell.digits}f}")
    if cell.difference is not None:
        texts.append(f"{cell.difference:+.{cell.digits}f}")
    return texts


def _letter(index: int) -> str:
    """Return a, b, ..., z, aa, ab, ..."""
    first, second = divmod(index, len(ascii_lowercase))
    return (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[second]
