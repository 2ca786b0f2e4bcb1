"""Tables of the paper next to ours."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase

from feddbe.reporting.table import TEXT, Column, Kind, Narrow, Table, render
from feddbe.results.statistics import Interval


@dataclass(frozen=True)
class PaperCell:
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
class PaperTable:
    """A table of the paper and ours."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[PaperCell, ...]
    notes: tuple[str, ...] = ()

    def letters(self) -> dict[str, str]:
        """A letter for each mark, in the order in which they appear."""
        marks = list(dict.fromkeys(mark for place in self.cells for mark in place.marks))
        return {mark: _letter(index) for index, mark in enumerate(marks)}

    def legend(self) -> str:
        """What the numbers are, what letters mean, and the notes; a sentence each."""
        interval = any(place.ours and place.ours.n > 1 for place in self.cells)
        words = [f"Ours{' ± 95 % interval over trials' if interval else ''}, the paper's, the difference."]
        words += [f"{letter}: {mark}." for mark, letter in self.letters().items()]
        return " ".join([*words, *self.notes])

    def at(self, row: str, column: str) -> PaperCell | None:
        return next((p for p in self.cells if (p.row, p.column) == (row, column)), None)


def paper_table(compared: PaperTable) -> Table:
    """Return the table as the paper prints it, for readers: a record for each of its rows."""
    letters = compared.letters()
    kind = Kind(
        lambda place: _one_line(place, letters),
        sort_value=lambda place: place.ours.mean if place.ours else None,
        terminal_format=lambda place: _two_lines(place, letters),
    )
    columns = [
        Column("row", "method", TEXT, lambda row: row),
        *(Column(f"column_{index}", name, kind, lambda row, name=name: compared.at(row, name))  # type: ignore[misc]
          for index, name in enumerate(compared.columns)),
    ]  # fmt: skip
    heading = f"{compared.name}: {compared.title}"
    return Table.from_sources(
        columns, compared.rows, title=heading, note=compared.legend(), narrow=Narrow.STACK_BLOCKS
    )


def paper_records_table(compared: PaperTable) -> Table:
    """Return the table for programs: a record for each number of the paper."""
    columns = [
        Column("table", value=lambda place: compared.name),
        Column("row", value=lambda place: place.row),
        Column("column", value=lambda place: place.column),
        Column("ours", value=lambda place: place.ours.mean if place.ours else None),
        Column("half_width", value=lambda place: place.ours.half if place.ours else None),
        Column("trials", value=lambda place: place.ours.n if place.ours else 0),
        Column("paper", value=lambda place: place.theirs),
        Column("difference", value=lambda place: place.difference),
        Column("marks", value=lambda place: "; ".join(place.marks) or ("" if place.ours else place.state)),
    ]
    return Table.from_sources(columns, compared.cells)


def render_paper_table(compared: PaperTable, form: str) -> str:
    """Return the table in one of `FORMATS`: as the paper's for readers, a number to a record for programs."""
    is_for_readers = form in ("markdown", "latex")
    return render(paper_table(compared) if is_for_readers else paper_records_table(compared), form)


def _two_lines(place: PaperCell | None, letters: dict[str, str]) -> str:
    """Return ours above the paper's number and the difference."""
    if place is None:
        return ""
    return f"{_ours(place, letters)}\n{'  '.join(_paper(place))}"


def _one_line(place: PaperCell | None, letters: dict[str, str]) -> str:
    """Return ours, and in brackets the paper's number and the difference."""
    if place is None:
        return ""
    paper = _paper(place)
    return f"{_ours(place, letters)} ({', '.join(paper)})" if paper else _ours(place, letters)


def _ours(place: PaperCell, letters: dict[str, str]) -> str:
    text = place.ours.format(place.digits) if place.ours else place.state
    return f"{text} {','.join(letters[mark] for mark in place.marks)}".strip()


def _paper(place: PaperCell) -> list[str]:
    """Return the paper's number and the difference, as far as there are any."""
    texts = [] if place.theirs is None else [f"{place.theirs:.{place.digits}f}"]
    return texts + ([] if place.difference is None else [f"{place.difference:+.{place.digits}f}"])


def _letter(index: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    first, second = divmod(index, len(ascii_lowercase))
    return (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[second]
