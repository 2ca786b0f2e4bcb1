"""Analyses of representations: which ones runs have, and their tables."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from feddbe.metrics.representations.points import AnalysisColumn as AnalysisColumn
from feddbe.metrics.representations.registry import ANALYSES
from feddbe.reporting.formatting import format_percent
from feddbe.reporting.table import TEXT, Column, Kind, Narrow, Table
from feddbe.results.document import AnalysisDocument, RunDocument, run_labels

FoundAnalyses = list[tuple[str, AnalysisDocument]]
"""Measurements of one kind, each with the name of its run."""


def analysis_tables(documents: Sequence[RunDocument], what: Container[str] = ANALYSES) -> list[Table]:
    """Return a table for each kind of analysis that has numbers; quick ones are separate, and marked."""
    tables = []
    for kind, found in analysis_groups(documents, run_labels(documents)):
        name = found[0][1]["analysis"]
        if name in what and ANALYSES[name].columns:
            tables.append(_table(kind, found))
    return tables


def analysis_groups(
    documents: Sequence[RunDocument], names: Sequence[str]
) -> Iterator[tuple[str, FoundAnalyses]]:
    """Measurements of the same kind together, in the order in which they were first asked for."""
    kinds: dict[str, FoundAnalyses] = {}
    for run, document in zip(names, documents, strict=True):
        for one in document["analyses"]:
            name = f"{one['analysis']}{'-clients' * one['per_client']}{'-quick' * one['quick']}"
            kinds.setdefault(name, []).append((run, one))
    yield from kinds.items()


def is_first_result(one: AnalysisDocument, found: FoundAnalyses) -> bool:
    """Not the same numbers as an earlier one's, as at z without PRBM."""
    earlier = [other for _, other in found]
    return not any(one["clients"] == other["clients"] for other in earlier[: earlier.index(one)])


def column_title(run: str, one: AnalysisDocument) -> str:
    return f"{run}, {one['moment']} @{one['round']}"


def describe_samples(found: FoundAnalyses) -> str:
    counts = " or ".join(map(str, sorted({one["samples"] for _, one in found})))
    whose = "of each client alone" if found[0][1]["per_client"] else "of all clients"
    return f"{counts} test samples {whose}"


def analysis_title(found: FoundAnalyses) -> str:
    """Return the title of a section about measurements of one kind."""
    one = found[0][1]
    alone = ", of each client alone" if one["per_client"] else ""
    quick = " (quick)" if one["quick"] else ""
    return f"{ANALYSES[one['analysis']].title}{alone}{quick}"


def analysis_caption(found: FoundAnalyses) -> str:
    """Return what measurements of one kind mean, and of which samples they are."""
    one = found[0][1]
    quick = " QUICK: fewer sizes, seeds and steps than the full measure." if one["quick"] else ""
    text = f"{describe_samples(found).capitalize()}; before and after local training, @ round."
    return f"{ANALYSES[one['analysis']].description} {text}{quick}"


def _table(kind: str, found: FoundAnalyses) -> Table:
    """Return the table of an analysis: a record for each place and number, a column per run and moment."""
    numbers = ANALYSES[found[0][1]["analysis"]].columns
    views = dict.fromkeys((run, one["moment"], one["round"]) for run, one in found)
    by_view = {(run, one["moment"], one["round"], one["layer"]): one for run, one in found}
    columns = [
        Column("layer", kind=TEXT,
               value=lambda row: row[0] if len(numbers) == 1 else f"{row[0]} {row[1].key}"),
        *(Column(f"view_{index}", f"{run}\n{moment} @{round_}", _NUMBER,
                 lambda row, view=(run, moment, round_): _number(by_view.get((*view, row[0])), row[1]))  # type: ignore[misc]
          for index, (run, moment, round_) in enumerate(views)),
    ]  # fmt: skip
    places = dict.fromkeys(one["layer"] for _, one in found)
    rows = [(place, number) for place in places for number in numbers]
    return Table.from_sources(
        columns, rows, title=kind, note=analysis_caption(found), narrow=Narrow.STACK_BLOCKS
    )


class _Number(NamedTuple):
    """A number of an analysis with its standard deviation."""

    value: float
    spread: float | None
    column: AnalysisColumn


def _number(one: AnalysisDocument | None, column: AnalysisColumn) -> _Number | None:
    value = one["overall"].get(column.key) if one else None
    return None if one is None or value is None else _Number(value, one["overall"].get(column.spread), column)


def _format_number(number: _Number | None) -> str:
    if number is None:
        return "-"
    digits = number.column.digits
    if number.column.unit == "%":
        return format_percent(number.value)
    if digits is None:
        return f"{number.value:.3g}"
    text = f"{number.value:.{digits}f}"
    return text if number.spread is None else f"{text} ± {number.spread:.{digits}f}"


_NUMBER = Kind(
    _format_number,
    sort_value=lambda number: number.value,
    program_values=lambda key, number: {key: number.value if number else None},
)
