"""The paper's tables and figures, each defined by a file in `paper_tables/` with its runs and settings.

A table consists of cells. The runs of a cell, one per trial, have the options of all experiments, of this
experiment, of the column and of the row; later options replace earlier ones. `paper_values.json` has the
paper's values.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from feddbe.errors import InvalidInputError, unknown_name
from feddbe.results.document import Accuracy, AnalysisDocument, RunDocument, at_moment
from feddbe.results.fairness import compute_overhead
from feddbe.runs.store import RunStore
from feddbe.studies.runner import RunSpec

NAMES = (
    "splitting-cnn", "splitting-resnet", "ablation", "noise", "traditional", "pathological", "practical",
    "clients-100", "heterogeneity", "personalized-mr", "overhead", "iterations", "new-clients", "epochs",
    "har", "convergence", "tsne", "distributions",
)  # fmt: skip
"""Names of the experiments in the order of the paper."""
_TABLES_DIR = files("feddbe.studies") / "paper_tables"
_TABLE_KEYS = {"title", "read", "against", "relative", "small", "method", "name"}
"""Keys of rows and columns that are not options of a run."""
MAX_TRIALS = 1000


class PaperRequest(TypedDict):
    """Arguments of `load_study`, and the selected cells, as a study's record stores them."""

    name: str
    trials: int
    rounds: int | None
    data: str | None
    small: bool
    only: NotRequired[list[str]]


class PaperValue(NamedTuple):
    """A value of the paper with its standard deviation; None is a dash."""

    value: float | None
    std: float | None = None


@dataclass(frozen=True)
class PaperRow:
    """A row of a table: a method and its options."""

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperColumn:
    """A column of a table: options of its runs, and the value that is read from them."""

    key: str
    """Name of the column in `paper_values.json`."""
    title: str
    read: str = "accuracy"
    """A key of `READINGS`, or `mdl@LAYER`."""
    against: str = ""
    """The method whose value is subtracted: its name, or `plain` for the row's method without add-ons."""
    relative: bool = False
    """True if the difference is in percent of that value."""
    method: str = ""
    """A method that replaces the row's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    replaced: str = ""
    """Data or model that replace the published ones, as text."""


@dataclass(frozen=True)
class TableCell:
    """A cell of a table."""

    row: PaperRow
    column: PaperColumn
    paper_value: PaperValue | None
    """None if the paper does not have this cell."""
    run_specs: tuple[RunSpec, ...]
    """A run per trial; none if the paper has a dash."""
    baseline_specs: tuple[RunSpec, ...] = ()
    """Runs with which they are compared, in the same order."""

    @property
    def name(self) -> str:
        return f"{self.row.name}/{self.column.title}"


@dataclass(frozen=True)
class PaperStudy:
    """A table or figure of the paper."""

    name: str
    title: str
    table: str
    """Name of the table in `paper_values.json`; empty for a figure."""
    figure: str
    """`curves`, `tsne` or `distributions`; empty for a table."""
    rows: tuple[PaperRow, ...]
    columns: tuple[PaperColumn, ...]
    left_out: Mapping[str, str]
    """Rows of the paper's table that are not run, with the reason."""
    note: str
    rounds: int
    """Published number of rounds."""
    table_cells: tuple[TableCell, ...]
    request: Mapping[str, Any]
    """Arguments of `load_study`, and as `only` the patterns of `select`."""
    is_small: bool = False
    """True for the small scale: digits, a small model, and the quick MDL."""

    def select(self, patterns: Sequence[str]) -> PaperStudy:
        """Return the study with the cells that match a pattern; all of them without patterns.

        Args:
            patterns: A row, a column, or ROW/COLUMN; * matches anything.
        """
        for pattern in patterns:
            if not any(_matches(cell, pattern) for cell in self.table_cells):
                names = {name for cell in self.table_cells for name in (cell.row.name, cell.column.title)}
                raise unknown_name(f"cell of {self.name}", pattern, names)
        cells = list(self.table_cells)
        if patterns:
            cells = [cell for cell in cells if any(_matches(cell, pattern) for pattern in patterns)]
        rows = tuple(row for row in self.rows if any(cell.row is row for cell in cells))
        columns = tuple(column for column in self.columns if any(cell.column is column for cell in cells))
        request = {**self.request, "only": list(patterns)}
        return replace(self, rows=rows, columns=columns, table_cells=tuple(cells), request=request)


def _matches(cell: TableCell, pattern: str) -> bool:
    pattern = pattern.lower().replace("[", "[[]")
    names = (cell.name, cell.row.name, cell.column.title)
    return any(fnmatchcase(name.lower(), pattern) for name in names)


@cache
def load_settings() -> dict[str, Any]:
    """Return the settings that all experiments share."""
    return tomllib.loads((_TABLES_DIR / "settings.toml").read_text(encoding="utf-8"))


@cache
def load_paper_values() -> dict[str, dict[str, dict[str, PaperValue]]]:
    """Return the paper's values by table, row and column."""
    tables = json.loads((_TABLES_DIR / "paper_values.json").read_text(encoding="utf-8"))
    return {
        table: {
            row: {column: _parse_paper_value(value) for column, value in columns.items()}
            for row, columns in rows.items()
        }
        for table, rows in tables.items()
    }


def _parse_paper_value(value: Any) -> PaperValue:
    return PaperValue(*value) if isinstance(value, list) else PaperValue(value)


def load_study(
    name: str, *, trials: int = 3, rounds: int | None = None, data: str | None = None, small: bool = False
) -> PaperStudy:
    """Return the experiment of this name.

    Args:
        name: One of `NAMES`.
        trials: Number of seeds.
        rounds: Maximum number of rounds.
        data: Data that replaces the published data.
        small: Use digits and a small model.
    """
    if name not in NAMES:
        raise unknown_name("experiment", name, NAMES)
    if not 1 <= trials <= MAX_TRIALS:
        raise InvalidInputError(f"trials = {trials}; allowed: a whole number from 1 to {MAX_TRIALS}")
    definition = tomllib.loads((_TABLES_DIR / f"{name}.toml").read_text(encoding="utf-8"))
    settings = load_settings()
    replacements: dict[str, Any] = {}
    if small:
        replacements = {**settings["small"], **definition.get("small", {})}
    elif data:
        replacements = {"data": data}
    published = {**settings["published"], **definition.get("options", {})}
    table = definition.get("table", "")
    rows = tuple(_build_rows(definition["rows"], small))
    columns = tuple(_build_columns(definition["columns"], published, replacements, small))
    paper_values = load_paper_values().get(table, {})
    cells = []
    for row in rows:
        for column in columns:
            paper_value = paper_values.get(row.name, {}).get(column.key)
            if paper_values and paper_value is None and row.name not in definition.get("extra", ()):
                continue
            specs: tuple[RunSpec, ...] = ()
            baseline_specs: tuple[RunSpec, ...] = ()
            is_dash = paper_value is not None and paper_value.value is None
            if not is_dash:
                specs, baseline_specs = _build_specs(row, column, range(trials), rounds)
            cells.append(TableCell(row, column, paper_value, specs, baseline_specs))
    return PaperStudy(
        name=name,
        title=definition["title"],
        table=table,
        figure=definition.get("figure", ""),
        rows=rows,
        columns=tuple(column for column in columns if any(cell.column is column for cell in cells)),
        left_out=definition.get("left_out", {}),
        note=definition.get("note_small", "") if small else "",
        rounds=replacements.get("rounds", published["rounds"]),
        table_cells=tuple(cells),
        request={"name": name, "trials": trials, "rounds": rounds, "data": data, "small": small},
        is_small=small,
    )


def _select_scale(definition: Mapping[str, Any], small: bool) -> dict[str, Any] | None:
    """Return a row or column at this scale; None if it is left out at the small scale."""
    values = dict(definition)
    small_values = values.pop("small", {})
    if not small:
        return values
    return None if small_values is False else values | small_values


def _build_rows(definitions: Sequence[Any], small: bool) -> Iterator[PaperRow]:
    """Yield the rows; a row that is only a name has the method of that name."""
    for definition in definitions:
        values = _select_scale({"name": definition} if isinstance(definition, str) else definition, small)
        if values is None:
            continue
        method = values.get("method", values["name"].lower().replace("-", ""))
        options = {key: value for key, value in values.items() if key not in _TABLE_KEYS}
        yield PaperRow(values["name"], method, options)


def _build_columns(
    definitions: Mapping[str, Any], published: Mapping[str, Any], replacements: Mapping[str, Any], small: bool
) -> Iterator[PaperColumn]:
    """Yield the columns; of columns that the replacements make equal, the first."""
    known = []
    for key, definition in definitions.items():
        values = _select_scale(definition, small)
        if values is None:
            continue
        own_options = {name: value for name, value in values.items() if name not in _TABLE_KEYS}
        published_options = {**published, **own_options}
        options = {**published_options, **replacements}
        replaced = ", ".join(
            f"{options[name]} instead of {published_options[name]}"
            for name in ("data", "model")
            if name in published_options and published_options[name] != options[name]
        )
        fields = {name: values[name] for name in ("read", "against", "relative", "method") if name in values}
        if (fields, options) not in known:
            known.append((fields, options))
            yield PaperColumn(key, values.get("title", key), options=options, replaced=replaced, **fields)


def _build_specs(
    row: PaperRow, column: PaperColumn, seeds: Sequence[int], rounds: int | None
) -> tuple[tuple[RunSpec, ...], tuple[RunSpec, ...]]:
    """Return the runs of a cell, and the runs with which they are compared."""
    method = column.method or row.method
    baseline = method.partition("+")[0] if column.against == "plain" else column.against
    specs = [_build_spec(method, {**column.options, **row.options}, seed, rounds) for seed in seeds]
    baseline_specs = [_build_spec(baseline, column.options, seed, rounds) for seed in seeds if baseline]
    return tuple(specs), tuple(baseline_specs)


def _build_spec(method: str, options: Mapping[str, Any], seed: int, rounds: int | None) -> RunSpec:
    """Return one run of a cell."""
    run_options = {**options, "seed": seed}
    if rounds is not None:
        run_options["rounds"] = min(rounds, options["rounds"])
    return RunSpec(method, run_options)


Reading = Callable[[RunDocument], float | None]


def read_value(read: str, document: RunDocument) -> float | None:
    """Return the value of a run for a column; None if the run does not have it yet."""
    if read.startswith("mdl@"):
        mdl = find_mdl(read, document)
        return mdl["overall"]["value"] if mdl else None  # nats
    return READINGS[read](document)


def mdl_layers(reads: Iterable[str]) -> list[str]:
    """Return the layers at which these readings need MDL."""
    return list(dict.fromkeys(read.removeprefix("mdl@") for read in reads if read.startswith("mdl@")))


def is_accuracy(read: str) -> bool:
    """Return True if the reading is an accuracy."""
    return read in ("accuracy", "best", "new-clients")


def is_chosen_on_test(read: str, document: RunDocument) -> bool:
    """Return True if the reading is from a round that was chosen by test accuracy."""
    of_best_round = read == "best" or (read == "accuracy" and _fine_tuned_accuracy(document) is None)
    return of_best_round and not (document["best"] and document["best"]["validation"])


def published_moment(document: RunDocument) -> str:
    """Return the moment of `published_accuracy`: the published code evaluates before local training.

    Exceptions are methods that adapt the model to the client first (Per-FedAvg, FedBABU).
    """
    if document["last"] is None:
        return "before"
    return "adapted" if _fine_tuned_accuracy(document) else document["last"]["moment"]


def accuracy_after_training(document: RunDocument) -> float | None:
    """Return the best accuracy of clients' models after local training, in percent."""
    return _best(at_moment(document, "after"))


def published_accuracy(document: RunDocument) -> Accuracy | None:
    """Return the accuracy that the paper reports: of the best round, or after final fine-tuning (FedBABU)."""
    return _fine_tuned_accuracy(document) or (document["best"] and document["best"]["accuracy"])


def _accuracy(document: RunDocument) -> float | None:
    """Return the published accuracy in percent."""
    return _percent(published_accuracy(document))


def _fine_tuned_accuracy(document: RunDocument) -> Accuracy | None:
    """Return the accuracy after the fine-tuning that follows the last round, if the method has it."""
    last = document["last"]
    return last["adapted"] if last and last["moment"] != "adapted" else None


def _best(document: RunDocument) -> float | None:
    return _percent(document["best"] and document["best"]["accuracy"])


def _new_clients_accuracy(document: RunDocument) -> float | None:
    """Return the accuracy of new clients after adaptation in percent."""
    return _percent(document["new_clients"] and document["new_clients"]["adapted"])


def _iterations(document: RunDocument) -> float | None:
    """Return the best round; the paper's numbers are too small for the round at which training stopped."""
    return document["best"] and document["best"]["round"]


def _minutes(document: RunDocument) -> float | None:
    return document["cost"]["seconds"] / 60 if len(document["rounds"]) > 1 else None


def _minutes_to_best(document: RunDocument) -> float | None:
    seconds = compute_overhead(document, None)["seconds_to_best"]
    return None if seconds is None else seconds / 60


def _prbm(document: RunDocument) -> float | None:
    """Return the number of values in p_i; None before the first round, after which clients have states."""
    if "prbm" not in document["config"]["method_options"]:
        return 0
    with closing(RunStore.open(Path(document["folder"]))) as store:
        return next((state["prbm"].numel() for _, state in store.private_states()), None)


def find_mdl(read: str, document: RunDocument) -> AnalysisDocument | None:
    """Return the analysis of `mdl@LAYER` in the best round before local training; full rather than quick.

    It is the generic quality that the paper means: each client's model represents the samples of all clients.
    """
    best = document["best"]
    layer = read.partition("@")[2]
    key = ("mdl", layer, "before", "all", False, best and best["round"])
    analyses = [
        analysis
        for analysis in document["analyses"]
        if (
            analysis["analysis"],
            analysis["layer"],
            analysis["moment"],
            analysis["on"],
            analysis["per_client"],
            analysis["round"],
        )
        == key
    ]
    return min(analyses, key=lambda analysis: analysis["quick"], default=None)


def _percent(accuracy: Accuracy | None) -> float | None:
    return 100 * accuracy["weighted"] if accuracy else None


READINGS: Mapping[str, Reading] = {
    "accuracy": _accuracy,
    "best": _best,
    "new-clients": _new_clients_accuracy,
    "iterations": _iterations,
    "minutes": _minutes,
    "minutes_to_best": _minutes_to_best,
    "prbm": _prbm,
}
"""Functions of the readings, except `mdl@LAYER`."""
