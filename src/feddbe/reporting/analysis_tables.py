"""Analyses of representations: those that runs have, and their tables."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

from feddbe.metrics.representations.points import AnalysisColumn
from feddbe.metrics.representations.registry import ANALYSES
from feddbe.reporting.table import TEXT, Column, Kind, Narrow, Table, format_percent
from feddbe.results.document import AnalysisDocument, RunDocument, run_labels
from feddbe.results.statistics import crossed_interval

NamedAnalyses = list[tuple[str, AnalysisDocument]]
"""Analyses of one kind, each with the name of its run."""


_ON_TITLES = {"own": "each client's own samples", "all": "all samples under each client's model"}
_ON_DESCRIPTIONS = {
    "own": "Each sample is represented by its client's own model.",
    "all": "Each client's model represents the samples of all clients; mean over clients' models.",
}


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
    for change_kind, pairs in _paired_values(documents).items():
        if change_kind.analysis in analyses:
            tables.append(_change_table(change_kind, pairs))
    return tables


class _ChangeKind(NamedTuple):
    """An analysis of all samples under each client's model, in both moments."""

    analysis: str
    quick: bool


class _Pair(NamedTuple):
    """The main value under one client's model, before and after local training."""

    seed: int
    client: str
    before: float
    after: float


def _paired_values(
    documents: Sequence[RunDocument],
) -> dict[_ChangeKind, dict[tuple[str, str], list[_Pair]]]:
    """Return the values under each client's model by method and layer, over all seeds."""
    pairs: dict[_ChangeKind, dict[tuple[str, str], list[_Pair]]] = {}
    labels = run_labels(documents, seed=False)
    for label, document in zip(labels, documents, strict=True):
        of_all = [analysis for analysis in document["analyses"] if analysis["on"] == "all"]
        before = {_view(analysis): analysis for analysis in of_all if analysis["moment"] == "before"}
        for after in of_all:
            earlier = before.get(_view(after))
            if after["moment"] != "after" or earlier is None or ANALYSES[after["analysis"]].compares_clients:
                continue
            kind = _ChangeKind(after["analysis"], after["quick"])
            group = pairs.setdefault(kind, {}).setdefault((label, after["layer"]), [])
            for client, values in after["clients"].items():
                first, second = earlier["clients"][client].get("value"), values.get("value")
                if first is not None and second is not None:
                    group.append(_Pair(document["config"]["seed"], client, first, second))
    return pairs


def _view(analysis: AnalysisDocument) -> tuple[str, str, bool, int, int]:
    return (
        analysis["analysis"], analysis["layer"], analysis["quick"], analysis["round"], analysis["samples"],
    )  # fmt: skip


def _change_table(kind: _ChangeKind, pairs_by_view: Mapping[tuple[str, str], Sequence[_Pair]]) -> Table:
    """Return a table of the change by local training, paired by client and seed."""
    column = ANALYSES[kind.analysis].columns[0]
    scale = 100 if column.unit == "%" else 1
    digits = 1 if column.digits == 0 else column.digits or 2

    def format_mean(values: Iterable[float]) -> str:
        return f"{scale * mean(values):.{digits}f}"

    def change(pairs: Sequence[_Pair]) -> str:
        differences = [scale * (pair.after - pair.before) for pair in pairs]
        factors: list[list[Hashable]] = [[pair.seed for pair in pairs], [pair.client for pair in pairs]]
        return crossed_interval(differences, factors).format(digits, sign=True)

    def rises(pairs: Sequence[_Pair]) -> str:
        return f"{sum(pair.after > pair.before for pair in pairs)} of {len(pairs)}"

    columns = [
        Column("method", kind=TEXT, value=lambda row: row[0][0]),
        Column("layer", kind=TEXT, value=lambda row: row[0][1]),
        Column("before", kind=TEXT, value=lambda row: format_mean(pair.before for pair in row[1])),
        Column("after", kind=TEXT, value=lambda row: format_mean(pair.after for pair in row[1])),
        Column("change", kind=TEXT, value=lambda row: change(row[1])),
        Column("rises", kind=TEXT, value=lambda row: rises(row[1])),
    ]
    quick = " (quick)" if kind.quick else ""
    unit = f" in {column.unit}" if column.unit else ""
    note = (
        f"{column.label[0].upper()}{column.label[1:]}{unit} of all clients' test samples, represented by "
        "each client's model before and after its local training. Change: mean over clients and seeds, "
        "with its 95 % interval; values of one seed or one client may be correlated."
    )
    title = f"change of {kind.analysis} by local training{quick}"
    return Table.from_sources(columns, list(pairs_by_view.items()), title=title, note=note)


def class_names(documents: Sequence[RunDocument]) -> list[str]:
    """Return the names of the classes; empty if the runs have none, or different ones."""
    names = [document["label_names"] for document in documents]
    return names[0] if all(other == names[0] for other in names) else []


def group_analyses(
    documents: Sequence[RunDocument], run_names: Sequence[str]
) -> Iterator[tuple[str, NamedAnalyses]]:
    """Yield the analyses of each kind, in order of appearance; samples, quick and per-client are separate."""
    by_kind: dict[str, NamedAnalyses] = {}
    for run, document in zip(run_names, documents, strict=True):
        for analysis in document["analyses"]:
            kind = analysis["analysis"]
            if analysis["on"] == "all":
                kind += "-all"
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
    on = ""
    if len(ANALYSES[analysis["analysis"]].on) > 1:
        on = f", {_ON_TITLES[analysis['on']]}"
    return f"{ANALYSES[analysis['analysis']].title}{on}{per_client}{quick}"


def analysis_caption(named_analyses: NamedAnalyses) -> str:
    """Return the meaning of the numbers of one kind of analysis, and its samples."""
    analysis = named_analyses[0][1]
    sentences = [
        ANALYSES[analysis["analysis"]].description,
        *([_ON_DESCRIPTIONS[analysis["on"]]] if len(ANALYSES[analysis["analysis"]].on) > 1 else []),
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
