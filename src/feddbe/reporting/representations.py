"""Analyses of representations: those that runs have, and their tables."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from feddbe.metrics.representations.points import AnalysisColumn
from feddbe.metrics.representations.registry import ANALYSES
from feddbe.reporting.table import TEXT, Column, Kind, Narrow, Table, format_percent
from feddbe.results.document import AnalysisDocument, RunDocument, run_labels

NamedAnalyses = list[tuple[str, AnalysisDocument]]
"""Analyses of one kind, each with the name of its run."""


def analysis_tables(documents: Sequence[RunDocument], analyses: Container[str] = ANALYSES) -> list[Table]:
    """Return a table for each kind of analysis that has numbers.

    Args:
        documents: The runs.
        analyses: Names of the analyses to show.
    """
    tables = []
    for kind, named_analyses in group_analyses(documents, run_labels(documents)):
        name = named_analyses[0][1]["analysis"]
        if name in analyses and ANALYSES[name].columns:
            tables.append(_analysis_table(kind, named_analyses, class_names(documents)))
    return tables


def class_names(documents: Sequence[RunDocument]) -> list[str]:
    """Return the names of the classes; empty if the runs have none, or different ones."""
    names = [document["label_names"] for document in documents]
    return names[0] if all(other == names[0] for other in names) else []


def group_analyses(
    documents: Sequence[RunDocument], run_names: Sequence[str]
) -> Iterator[tuple[str, NamedAnalyses]]:
    """Yield the analyses of each kind, in order of appearance; quick and per-client ones are separate."""
    by_kind: dict[str, NamedAnalyses] = {}
    for run, document in zip(run_names, documents, strict=True):
        for analysis in document["analyses"]:
            kind = analysis["analysis"]
            if analysis["per_client"]:
                kind += "-clients"
            if analysis["quick"]:
                kind += "-quick"
            by_kind.setdefault(kind, []).append((run, analysis))
    yield from by_kind.items()


def is_first_result(analysis: AnalysisDocument, named_analyses: NamedAnalyses) -> bool:
    """Return False if an earlier analysis has the same numbers, as for z without PRBM."""
    documents = [document for _, document in named_analyses]
    earlier = documents[: documents.index(analysis)]
    return not any(analysis["clients"] == other["clients"] for other in earlier)


def describe_view(run: str, analysis: AnalysisDocument) -> str:
    """Return run, moment and round, as in `fedavg, before @12`."""
    return f"{run}, {analysis['moment']} @{analysis['round']}"


def describe_samples(named_analyses: NamedAnalyses) -> str:
    """Return the number of test samples, as in `1000 test samples of all clients`."""
    counts = " or ".join(map(str, sorted({analysis["samples"] for _, analysis in named_analyses})))
    clients = "each client" if named_analyses[0][1]["per_client"] else "all clients"
    return f"{counts} test samples of {clients}"


def analysis_title(named_analyses: NamedAnalyses) -> str:
    """Return the title of a section about analyses of one kind."""
    analysis = named_analyses[0][1]
    per_client = ", by client" if analysis["per_client"] else ""
    quick = " (quick)" if analysis["quick"] else ""
    return f"{ANALYSES[analysis['analysis']].title}{per_client}{quick}"


def analysis_caption(named_analyses: NamedAnalyses) -> str:
    """Return the meaning of the numbers of one kind of analysis, and its samples."""
    analysis = named_analyses[0][1]
    sentences = [
        ANALYSES[analysis["analysis"]].description,
        f"{describe_samples(named_analyses).capitalize()}; before and after local training, @ round.",
    ]
    if analysis["quick"]:
        sentences.append("QUICK: fewer sizes, seeds and steps than the full analysis.")
    return " ".join(sentences)


def _analysis_table(kind: str, named_analyses: NamedAnalyses, classes: Sequence[str]) -> Table:
    """Return a table with a record for each layer and number, and a column for each run, moment and round.

    Args:
        kind: Title of the table.
        named_analyses: Analyses of one kind.
        classes: Names of the classes; empty if they have numbers only.
    """
    numbers = [
        number
        for column in ANALYSES[named_analyses[0][1]["analysis"]].columns
        for number in _expand_classes(column, named_analyses, classes)
    ]
    views = dict.fromkeys((run, analysis["moment"], analysis["round"]) for run, analysis in named_analyses)
    by_view = {
        (run, analysis["moment"], analysis["round"], analysis["layer"]): analysis
        for run, analysis in named_analyses
    }
    columns = [
        Column("layer", kind=TEXT,
               value=lambda row: row[0] if len(numbers) == 1 else f"{row[0]} {row[1].name}"),
        *(Column(f"view_{index}", f"{run}\n{moment} @{round_}", _NUMBER,
                 lambda row, view=(run, moment, round_):  # type: ignore[misc]
                 _read_number(by_view.get((*view, row[0])), row[1].column))
          for index, (run, moment, round_) in enumerate(views)),
    ]  # fmt: skip
    layers = dict.fromkeys(analysis["layer"] for _, analysis in named_analyses)
    rows = [(layer, number) for layer in layers for number in numbers]
    return Table.from_sources(
        columns, rows, title=kind, note=analysis_caption(named_analyses), narrow=Narrow.STACK_BLOCKS
    )


class _NumberName(NamedTuple):
    """A number of an analysis, and its name in the table."""

    name: str
    column: AnalysisColumn


def _expand_classes(
    column: AnalysisColumn, named_analyses: NamedAnalyses, classes: Sequence[str]
) -> Iterator[_NumberName]:
    """Yield the column, or for `recall:*` a column for each class that any of the analyses has."""
    if not column.key.endswith("*"):
        yield _NumberName(column.key, column)
        return
    prefix = column.key.removesuffix("*")
    keys = {key for _, analysis in named_analyses for key in analysis["overall"] if key.startswith(prefix)}
    for label in sorted(int(key.removeprefix(prefix)) for key in keys):
        name = classes[label] if classes else str(label)
        yield _NumberName(f"{column.label} {name}", replace(column, key=f"{prefix}{label}"))


class _Number(NamedTuple):
    """A number of an analysis with its standard deviation."""

    value: float
    spread: float | None
    column: AnalysisColumn


def _read_number(analysis: AnalysisDocument | None, column: AnalysisColumn) -> _Number | None:
    value = analysis["overall"].get(column.key) if analysis else None
    if analysis is None or value is None:
        return None
    return _Number(value, analysis["overall"].get(column.spread), column)


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
