"""Tables as values: typed columns and records by key, with a renderer for each output.

A table is declared as a list of `Column`s, each with a function of the record's source. Adding a column
to that list shows it in the terminal, on the report page, in notebooks, Markdown, LaTeX, CSV, JSON and
pandas. `reporting/build_tables.py` declares the tables. A rich console lays a table out for its width.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from feddbe.errors import unknown_name
from feddbe.results.fairness import PairedClients
from feddbe.results.statistics import Interval

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Name:
    """A name that is broken only before + and (, and after other punctuation."""

    text: str
    style: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(len, break_points(self.text)))
        return Measurement(min(longest, 12), max(1, len(self.text))).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(fold_text(self.text, options.max_width), style=self.style, overflow="fold")


def fold_text(text: str, width: int) -> str:
    """Return the text in lines of at most `width` letters, as far as it can be broken."""
    lines = [""]
    for piece in break_points(text):
        if len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines if line)


def break_points(text: str) -> list[str]:
    """Return the pieces of a name that stay together."""
    return re.findall(r"[+(]?[^-+(,_/: ]*[-,_/: ]?", text)


def format_percent(fraction: float | None) -> str:
    """Return a fraction of one in percent with two digits, or a dash."""
    return "-" if fraction is None else f"{100 * fraction:.2f}"


def format_seconds(value: float) -> str:
    """Return seconds with three significant digits."""
    if value < 0.0995:
        return f"{value:.3f}"
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def format_bytes(count: float) -> str:
    """Return bytes in decimal units with three digits: 950 B, 81.6 kB, 2.33 MB."""
    unit, *larger_units = "B", "kB", "MB", "GB", "TB"
    while count >= 999.5 and larger_units:
        count /= 1000
        unit = larger_units.pop(0)
    if unit == "B" or count >= 99.95:
        return f"{count:.0f} {unit}"
    return f"{count:.1f} {unit}" if count >= 9.995 else f"{count:.2f} {unit}"


Record = Mapping[str, Any]


class Output(Flag):
    """Kinds of output that can show a column."""

    TERMINAL = auto()
    DOCUMENT = auto()
    """Markdown, LaTeX and notebooks."""
    PAGE = auto()
    """The report page, whose tables scroll."""
    PROGRAM = auto()
    """CSV, JSON and pandas."""
    READER = TERMINAL | DOCUMENT | PAGE
    WIDE = DOCUMENT | PAGE
    ALL = READER | PROGRAM


class Priority(Enum):
    """Importance of a column in a narrow terminal."""

    REQUIRED = auto()
    USEFUL = auto()
    """Dropped if the table does not fit even with broken names."""
    OPTIONAL = auto()
    """Dropped before names are broken, the last column first."""


class Narrow(Enum):
    """Layout of a table that is wider than the terminal."""

    DROP_COLUMNS = auto()
    """Names are broken, too; a table that still does not fit is transposed."""
    STACK_BLOCKS = auto()
    """Groups of columns that fit, below each other; each repeats the first column."""
    TRANSPOSE = auto()
    """A row for each column and a column for each record, in blocks that fit; names are not broken."""
    LIST_RECORDS = auto()
    """Each record is a paragraph; the first column is never broken, because users type it."""


class Progress(NamedTuple):
    """A count, and the planned total."""

    done: int
    total: int

    def __str__(self) -> str:
        return str(self.done) if self.done == self.total else f"{self.done} of {self.total}"


def _format_plain(value: Any) -> str:
    return "-" if value is None else str(value)


def _program_value(key: str, value: Any) -> dict[str, Any]:
    return {key: value}


@dataclass(frozen=True)
class Kind:
    """Type of the values of a column: their text, their order and their form for programs."""

    format: Callable[[Any], str] = _format_plain
    is_text: bool = False
    """Text is aligned to the left and may be broken; numbers are aligned to the right."""
    sort_value: Callable[[Any], float | None] = lambda value: value
    program_values: Callable[[str, Any], dict[str, Any]] = _program_value
    terminal_format: Callable[[Any], str] | None = None
    """Text in a terminal, possibly in several lines; None: `format`."""
    narrow_format: Callable[[Any], str] | None = None
    """A shorter text for narrow terminals."""


def _format_interval(value: Interval | None) -> str:
    return "-" if value is None else value.format()


def _format_metric(value: Interval | None) -> str:
    return "-" if value is None else value.format(4)


def _format_difference(value: Interval | None) -> str:
    return "" if value is None else value.format(sign=True)


def _interval_values(key: str, value: Interval | None) -> dict[str, Any]:
    """Return mean and half width as fractions of one, as all accuracies for programs."""
    if value is None:
        return {key: None, f"{key}_half": None}
    return {key: value.mean / 100, f"{key}_half": value.half_width / 100}


def _metric_values(key: str, value: Interval | None) -> dict[str, Any]:
    return {key: value and value.mean, f"{key}_half": value and value.half_width}


def _interval_mean(value: Interval | None) -> float | None:
    return None if value is None else value.mean


def _format_pairs(value: PairedClients | None) -> str:
    return "" if value is None else f"{value['better']}/{value['equal']}/{value['worse']}"


def _pair_values(key: str, value: PairedClients | None) -> dict[str, Any]:
    counts: dict[str, Any] = {**value} if value else {}
    return {f"{key}_{outcome}": counts.get(outcome) for outcome in ("better", "equal", "worse")}


def _optional(format_value: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else format_value(value)


TEXT = Kind(is_text=True)
NUMBER = Kind()
"""A number or a short text that is aligned like one."""
COUNT = Kind(_optional("{:,}".format))
DECIMAL = Kind(_optional(lambda value: f"{value:#.4g}".rstrip(".")))
"""A number with four significant digits, zeros included, so that a column has equal decimals."""
PERCENT = Kind(format_percent)
"""A fraction of one."""
SECONDS = Kind(_optional(format_seconds))
BYTES = Kind(_optional(format_bytes))
FLAG = Kind(lambda value: "*" if value else "", sort_value=lambda value: float(bool(value)))
PROGRESS = Kind(
    sort_value=lambda value: value.done, program_values=lambda key, value: {key: value and value.done}
)
INTERVAL = Kind(_format_interval, sort_value=_interval_mean, program_values=_interval_values)
"""A mean over seeds in percent, with its 95 % interval."""
METRIC = Kind(_format_metric, sort_value=_interval_mean, program_values=_metric_values)
"""A mean over seeds of a metric without unit, with its 95 % interval."""
DIFFERENCE = Kind(_format_difference, sort_value=_interval_mean, program_values=_interval_values)
PAIRS = Kind(_format_pairs, sort_value=lambda value: value and value["helped"], program_values=_pair_values)
"""Numbers of clients with higher, equal and lower accuracy than with a baseline."""
TIME = Kind(
    lambda value: value[:16].replace("T", " ") or "-",
    is_text=True,
    narrow_format=lambda value: value[5:16].replace("T", " ") or "-",
)
"""An ISO date and time; a narrow terminal does not show the year."""


@dataclass(frozen=True)
class Column:
    """One column of a table, for all outputs.

    Attributes:
        key: Identifies the column; its name for programs.
        title: Its name for readers, by default the key with spaces. The terminal keeps line breaks in it.
        kind: Type of its values.
        value: Computes the value from a record's source.
        outputs: Outputs that show it.
        priority: Importance in a narrow terminal.
        hide_empty: If True, readers do not see it if no record has a value.
        note: A sentence for the caption, if the column is shown.
        stack: In a terminal, columns with the same `stack` are one column with this title, below each other.
        line: Within a stack, the name of the column's line; see `Table.line_stack`.
    """

    key: str
    title: str = ""
    kind: Kind = NUMBER
    value: Callable[[Any], Any] = lambda source: None
    outputs: Output = Output.ALL
    priority: Priority = Priority.REQUIRED
    hide_empty: bool = False
    note: str = ""
    stack: str = ""
    line: str = ""

    @property
    def reader_title(self) -> str:
        """The title in one line."""
        return _one_line(self.title or self.key.replace("_", " "))


@dataclass(frozen=True)
class Table:
    """A table as a value: columns, records by column key, and text around them.

    Attributes:
        columns: All columns of all outputs.
        records: A value for each column key.
        title: Heading above the table.
        note: First sentences of the caption, which continues with the notes of the columns shown.
        footer: Records below a line in a terminal and on the page, such as totals; missing keys are blank.
        narrow: Layout in a terminal that is too narrow.
        line_stack: The stack whose cells begin with the names of the lines, as in `best @4`.
    """

    columns: Sequence[Column]
    records: Sequence[Record]
    title: str = ""
    note: str = ""
    footer: Sequence[Record] = field(default=())
    narrow: Narrow = Narrow.DROP_COLUMNS
    line_stack: str = ""

    @classmethod
    def from_sources(cls, columns: Sequence[Column], sources: Sequence[Any], **fields: Any) -> Table:
        """Return the table with one record for each source, computed by the columns' functions."""
        records = [{column.key: column.value(source) for column in columns} for source in sources]
        return cls(columns, records, **fields)

    def visible_columns(self, output: Output) -> list[Column]:
        """Return the columns that an output shows."""
        columns = [column for column in self.columns if output in column.outputs]
        if output is Output.PROGRAM:
            return columns
        return [column for column in columns if not (column.hide_empty and self._is_empty(column))]

    def _is_empty(self, column: Column) -> bool:
        return all(record[column.key] in (None, "") for record in self.records)

    def caption(self, columns: Sequence[Column]) -> str:
        """Return the note, followed by the notes of these columns."""
        return " ".join(filter(None, [self.note, *dict.fromkeys(column.note for column in columns)]))

    def texts(self, columns: Sequence[Column]) -> list[list[str]]:
        """Return each record's values as readers see them, each in one line."""
        return [
            [_one_line(column.kind.format(record[column.key])) for column in columns]
            for record in self.records
        ]

    def __rich__(self) -> RenderableType:
        """Return the table for a terminal, laid out for the width of the console that prints it."""
        return _TerminalTable(self)

    def to_records(self) -> list[dict[str, Any]]:
        """Return the records for programs; a number that is not finite is None."""
        columns = self.visible_columns(Output.PROGRAM)
        return [
            {
                key: _finite_or_none(value)
                for column in columns
                for key, value in column.kind.program_values(column.key, record[column.key]).items()
            }
            for record in self.records
        ]

    def to_pandas(self) -> DataFrame:
        """Return the records for programs as a frame."""
        from pandas import DataFrame

        return DataFrame(self.to_records())


def to_csv(table: Table) -> str:
    """Return the records for programs, each in one line."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_program_keys(table))
    for record in table.to_records():
        writer.writerow([_one_line(value) if isinstance(value, str) else value for value in record.values()])
    return file.getvalue()


def _program_keys(table: Table) -> list[str]:
    if table.records:
        return list(table.to_records()[0])
    return [column.key for column in table.visible_columns(Output.PROGRAM)]


def to_json(table: Table) -> str:
    """Return a list of objects, one per line."""
    lines = [json.dumps(record, ensure_ascii=False) for record in table.to_records()]
    return "[" + ",\n ".join(lines) + "]\n"


def to_markdown(table: Table) -> str:
    """Return a Markdown table with its title above and its caption below."""
    columns = table.visible_columns(Output.DOCUMENT)
    cells = [[column.reader_title for column in columns], *table.texts(columns)]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
    lines.insert(1, f"|{'|'.join('---' if column.kind.is_text else '---:' for column in columns)}|")
    caption = table.caption(columns)
    heading = [f"**{table.title}**", ""] if table.title else []
    return "\n".join([*heading, *lines, *(["", caption] if caption else [])]) + "\n"


def to_latex(table: Table) -> str:
    """Return a tabular for the package booktabs; title and caption are comments."""
    columns = table.visible_columns(Output.DOCUMENT)
    titles = [column.reader_title for column in columns]
    comments = [f"% {text}" for text in (table.title, table.caption(columns)) if text]
    return "\n".join([
        *comments,
        r"\begin{tabular}{" + "".join("l" if column.kind.is_text else "r" for column in columns) + "}",
        r"\toprule % of the package booktabs",
        f"{' & '.join(map(_escape_latex, titles))} \\\\",
        r"\midrule",
        *(f"{' & '.join(map(_escape_latex, row))} \\\\" for row in table.texts(columns)),
        r"\bottomrule",
        r"\end{tabular}",
    ]) + "\n"  # fmt: skip


_LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "<": r"\textless{}", ">": r"\textgreater{}", "−": "$-$",
}  # fmt: skip


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def to_html(table: Table) -> str:
    """Return a table element for notebooks."""
    columns = table.visible_columns(Output.DOCUMENT)

    def row(tag: str, cells: Sequence[str]) -> str:
        sides = ("left" if column.kind.is_text else "right" for column in columns)
        styled = (
            f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(styled)}</tr>"

    head = row("th", [column.reader_title for column in columns])
    body = [row("td", cells) for cells in table.texts(columns)]
    caption = table.caption(columns)
    note = f"<p><small>{html.escape(caption)}</small></p>" if caption else ""
    return "\n".join(["<table>", f"<thead>{head}</thead>", "<tbody>", *body, "</tbody>", f"</table>{note}"])


def to_page_block(table: Table, id_: str, *, has_filter: bool = False) -> dict[str, Any]:
    """Return the table as the report page's JSON.

    A text cell is a string. A number is an object with its `text` and its `value`, which sorts the table.
    The first cell names the row. Cells of the footer, which is not sorted, are texts.
    """
    columns = table.visible_columns(Output.PAGE)
    rows = [
        [_page_cell(column, record[column.key], text) for column, text in zip(columns, texts, strict=True)]
        for record, texts in zip(table.records, table.texts(columns), strict=True)
    ]
    return {
        "kind": "table",
        "id": id_,
        "caption": table.caption(columns),
        "columns": [column.reader_title for column in columns],
        "rows": rows,
        "footer": [[_footer_text(column, record) for column in columns] for record in table.footer],
        "filter": has_filter,
        "heading": table.title,
    }


def _page_cell(column: Column, value: Any, text: str) -> str | dict[str, Any]:
    if column.kind.is_text:
        return text
    number = None if value is None else _finite_or_none(column.kind.sort_value(value))
    return {"text": text, "value": round(float(number), 4) if isinstance(number, int | float) else None}


def _footer_text(column: Column, record: Record) -> str:
    return _one_line(column.kind.format(record[column.key])) if column.key in record else ""


FORMATS: dict[str, Callable[[Table], str]] = {
    "csv": to_csv, "json": to_json, "latex": to_latex, "markdown": to_markdown,
}  # fmt: skip


def render(table: Table, format_name: str) -> str:
    """Return the table in one of the `FORMATS`, with a line end."""
    if format_name not in FORMATS:
        raise unknown_name("format", format_name, FORMATS)
    return FORMATS[format_name](table)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The terminal


_WHOLE_NAME = 18
"""Letters of a name that stay together while columns can be dropped instead."""
_BROKEN_NAME = 12
"""Maximum number of letters of a name that stay together if nothing else fits."""


@dataclass(frozen=True)
class _TerminalTable:
    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.table
        if table.title:
            yield Text(table.title, style="bold")
        layout = _choose_layout(table, options.max_width)
        is_too_wide = layout.width() > options.max_width
        if table.narrow is Narrow.LIST_RECORDS and is_too_wide:
            yield from _list_records(layout)
        elif table.narrow is Narrow.STACK_BLOCKS:
            for number, block in enumerate(layout.blocks(options.max_width)):
                if number:
                    yield Text()
                yield block.render()
        elif is_too_wide:
            yield from _transpose(layout, options.max_width)
        else:
            yield layout.render()
        columns = [column for stack in layout.stacks for column in stack.columns]
        caption = table.caption(columns)
        if caption:
            yield Text(caption, style="dim")


@dataclass(frozen=True)
class _Stack:
    """A column of the terminal: one of the table's, or several below each other."""

    title: str
    columns: tuple[Column, ...]

    @property
    def is_text(self) -> bool:
        return self.columns[0].kind.is_text

    @property
    def priority(self) -> Priority:
        return self.columns[0].priority


@dataclass(frozen=True)
class _Layout:
    """A selection of columns, with the space between them and the width of names."""

    table: Table
    stacks: tuple[_Stack, ...]
    is_narrow: bool = False
    name_width: int | None = _WHOLE_NAME
    """Minimum width of a text column; None: names are not broken."""

    def cell(self, stack: _Stack, record: Record) -> str:
        """Return the text of a record in a column, with a line for each column of the stack."""
        texts: list[str] = []
        for line in self._lines(record):
            column = next((c for c in stack.columns if c.line == line), None)
            if column is None and not stack.columns[0].line and not texts:
                column = stack.columns[0]  # a column without lines is in the first line
            texts.append(self._line_text(stack, line, column, record))
        return "\n".join(texts).rstrip("\n")

    def _lines(self, record: Record) -> list[str]:
        """Return the names of the lines of a record; the first is always shown."""
        columns = [column for stack in self.stacks for column in stack.columns if column.line]
        names = dict.fromkeys(column.line for column in columns)
        is_used = {
            name: any(
                column.key in record and not (column.hide_empty and record[column.key] is None)
                for column in columns
                if column.line == name
            )
            for name in names
        }
        return [name for index, name in enumerate(names) if index == 0 or is_used[name]] or [""]

    def _line_text(self, stack: _Stack, line: str, column: Column | None, record: Record) -> str:
        is_blank = column is None or column.key not in record
        if self.table.line_stack and stack.title == self.table.line_stack:
            if all(column.key not in record for column in stack.columns):
                return ""  # a footer
            return line if is_blank or record[column.key] is None else f"{line} @{record[column.key]}"  # type: ignore[union-attr]
        if is_blank:
            return ""
        assert column is not None
        kind = column.kind
        formats = (kind.narrow_format if self.is_narrow else None, kind.terminal_format, kind.format)
        format_value = next(candidate for candidate in formats if candidate)
        return format_value(record[column.key])

    def heading(self, stack: _Stack) -> str:
        """Return the title, broken to the width of the values below it."""
        title = stack.title
        if stack.is_text or "\n" in title:
            return title
        width = max((len(line) for cell in self.cells(stack) for line in cell.split("\n")), default=0)
        pieces = break_points(title) if self.is_narrow else title.split(" ")
        return fold_text(title, max(width + 1, *(len(piece.rstrip()) for piece in pieces)))

    def heading_text(self, stack: _Stack) -> str:
        """Return the title in one line."""
        return _one_line(stack.title)

    def cells(self, stack: _Stack) -> list[str]:
        return [self.cell(stack, record) for record in (*self.table.records, *self.table.footer)]

    def width(self) -> int:
        """Return the width that this layout needs."""
        widths = map(self.column_width, self.stacks)
        return sum(widths) + (1 if self.is_narrow else 2) * (len(self.stacks) - 1)

    def column_width(self, stack: _Stack) -> int:
        lines = [line for cell in self.cells(stack) for line in cell.split("\n")]
        longest = max((len(line) for line in (*lines, *self.heading(stack).split("\n"))), default=0)
        if not stack.is_text or self.name_width is None:
            return longest
        pieces = [len(piece.rstrip()) for line in lines for piece in break_points(line)]
        shortest = max(pieces, default=0) if self.name_width == _BROKEN_NAME else longest
        return min(shortest, self.name_width)

    def blocks(self, max_width: int) -> Iterator[_Layout]:
        """Yield layouts with groups of columns that fit, without records that have no value in them."""
        first, *others = self.stacks
        group: list[_Stack] = []
        for stack in others:
            if group and replace(self, stacks=(first, *group, stack)).width() > max_width:
                yield self._block(first, group)
                group = []
            group.append(stack)
        yield self._block(first, group)

    def _block(self, first: _Stack, group: Sequence[_Stack]) -> _Layout:
        keys = [column.key for stack in group for column in stack.columns]
        records = [record for record in self.table.records if any(record[key] is not None for key in keys)]
        return replace(self, table=replace(self.table, records=records), stacks=(first, *group))

    def render(self) -> RichTable:
        grid = _rich_grid(gap=1 if self.is_narrow else 2)
        for stack in self.stacks:
            justify: Any = "left" if stack.is_text or stack.title == self.table.line_stack else "right"
            grid.add_column(
                Text(self.heading(stack)), justify=justify, no_wrap=not stack.is_text, overflow="fold"
            )
        for record in self.table.records:
            grid.add_row(*self._rich_cells(record, "bold"))
        grid.add_section()
        for record in self.table.footer:
            grid.add_row(*self._rich_cells(record, ""), style="dim")
        return grid

    def _rich_cells(self, record: Record, name_style: str) -> Iterator[RenderableType]:
        for index, stack in enumerate(self.stacks):
            cell = self.cell(stack, record)
            is_whole = self.name_width is None or not stack.is_text
            yield Text(cell) if is_whole else Name(cell, "" if index else name_style)


def _choose_layout(table: Table, max_width: int) -> _Layout:
    """Return the first layout that fits: all columns, fewer columns, narrow columns, broken names."""
    stacks = _stacks(table)
    is_list = table.narrow in (Narrow.LIST_RECORDS, Narrow.TRANSPOSE)
    whole = None if is_list else _WHOLE_NAME
    attempts = [
        _Layout(table, kept, is_narrow, whole)
        for is_narrow in (False, True)
        for kept in _drop_columns(stacks, Priority.OPTIONAL)
    ]
    required = attempts[-1].stacks
    name_width = None if is_list else _BROKEN_NAME
    attempts += [_Layout(table, kept, True, name_width) for kept in _drop_columns(required, Priority.USEFUL)]
    fitting = (layout for layout in attempts if layout.width() <= max_width)
    if table.narrow is Narrow.STACK_BLOCKS:
        return attempts[0]
    return next(fitting, replace(attempts[-1], stacks=stacks))


def _stacks(table: Table) -> tuple[_Stack, ...]:
    groups: dict[str, list[Column]] = {}
    for column in table.visible_columns(Output.TERMINAL):
        groups.setdefault(column.stack or column.key, []).append(column)
    return tuple(
        _Stack(columns[0].stack or columns[0].title or columns[0].key.replace("_", " "), tuple(columns))
        for columns in groups.values()
    )


def _drop_columns(stacks: tuple[_Stack, ...], priority: Priority) -> Iterator[tuple[_Stack, ...]]:
    """Yield all columns, then all but the last one of this priority, all but the last two, and so on."""
    yield stacks
    for dropped in reversed([stack for stack in stacks if stack.priority is priority]):
        stacks = tuple(stack for stack in stacks if stack is not dropped)
        yield stacks


def _list_records(layout: _Layout) -> Iterator[RenderableType]:
    """Yield for each record its first value as a heading, and the others below it, numbers with titles."""
    first, *others = (stack.columns[0] for stack in replace(layout, is_narrow=False).stacks)
    for record in layout.table.records:
        yield Text(first.kind.format(record[first.key]), style="bold", overflow="ignore", no_wrap=True)
        texts = []
        for column in others:
            text = column.kind.format(record[column.key])
            is_named = text and not column.kind.is_text
            texts.append(f"{column.reader_title} {text}" if is_named else text)
        yield Padding(Text(", ".join(filter(None, texts))), (0, 0, 0, 2))


def _transpose(layout: _Layout, max_width: int) -> Iterator[RenderableType]:
    """Yield blocks of records next to each other, with the titles of the columns on the left."""
    first, *others = layout.stacks
    titles = [layout.heading_text(stack) for stack in others]
    title_width = max(map(len, titles), default=0)
    block: list[_TransposedRecord] = []
    width = title_width
    is_first = True
    for record in (*layout.table.records, *layout.table.footer):
        name = fold_text(layout.cell(first, record), max(_WHOLE_NAME, max_width - title_width - 2))
        cells = [layout.cell(stack, record) for stack in others]
        column = _TransposedRecord(name, cells)
        if block and width + 2 + column.width > max_width:
            yield from _transposed_block(titles, block, is_first=is_first)
            block, width, is_first = [], title_width, False
        block.append(column)
        width += 2 + column.width
    if block:
        yield from _transposed_block(titles, block, is_first=is_first)


class _TransposedRecord(NamedTuple):
    """A record as a column: its name, and a cell for each row."""

    name: str
    cells: list[str]

    @property
    def width(self) -> int:
        return max(len(line) for text in (self.name, *self.cells) for line in text.split("\n"))


def _transposed_block(
    titles: Sequence[str], block: Sequence[_TransposedRecord], *, is_first: bool
) -> Iterator[RenderableType]:
    """Yield the rows in which a record of the block has a value."""
    if not is_first:
        yield Text()
    grid = _rich_grid(gap=2)
    grid.add_column("", no_wrap=True)
    for record in block:
        grid.add_column(Text(record.name), justify="right", no_wrap=True)
    for row, title in enumerate(titles):
        cells = [record.cells[row] for record in block]
        if any(cells):
            grid.add_row(Text(title, style="bold"), *map(Text, cells))
    yield grid


def _rich_grid(gap: int) -> RichTable:
    """Return a rich table without edges, with `gap` spaces between columns."""
    return RichTable(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
        header_style="bold",
    )
