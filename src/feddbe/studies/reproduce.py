"""Reproduction of the paper: its tables next to ours, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from feddbe.callbacks.base import Callback
from feddbe.callbacks.display import StudyBars
from feddbe.config.options import Config
from feddbe.data.federated import label_counts, load_federated_data
from feddbe.errors import InvalidInputError, StoreError, one_line
from feddbe.paths import RUNS_DIR
from feddbe.reporting.build_figures import analysis_figures, client_distribution, learning_curves
from feddbe.reporting.matplotlib_backend import draw
from feddbe.reporting.paper_table import MomentValue, PaperCell, PaperTable
from feddbe.results.document import Extent, RunDocument, describe_moment, has_completed, run_extent
from feddbe.results.repetitions import counted_runs, one_test_sample
from feddbe.results.statistics import (
    VERDICT_RULE,
    Comparison,
    judge_comparisons,
    mean_interval,
    paired_differences,
)
from feddbe.runs import analysis, folders
from feddbe.runs.analysis import AnalysisRequest
from feddbe.studies import paper, runner
from feddbe.studies.paper import PaperColumn, PaperStudy, TableCell
from feddbe.studies.runner import PlannedRun, RunSpec
from feddbe.studies.study_record import Purpose, StudyRecord, StudyRun, save_record

TSNE = AnalysisRequest(analyses=("tsne",), layers=("z_g", "z"))
"""Analyses for the figures of representations."""


def run_embedding_analyses(study: PaperStudy, plans: Plans, callback: Callback | None = None) -> None:
    """Compute the t-SNE embeddings that the study draws."""
    if study.figure == "tsne":
        for column in study.columns:
            for document in _documents(study, column, plans):
                analysis.run_analyses(Path(document["folder"]), TSNE, callback=callback)


def draw_study(study: PaperStudy, plans: Plans, folder: Path) -> dict[str, Path | str]:
    """Draw a figure for each column; return its path, or the reason why there is none, by title."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Path | str] = {}
    for column in study.columns:
        path = folder / f"{study.name}-{folders.slug(column.title.replace(' ', '-'))}.png"
        if study.figure == "distributions":
            figures[column.title] = _draw_distribution(path, column.options)
        else:
            figures[column.title] = _draw_column(study, column, plans, path)
    return figures


def _draw_column(study: PaperStudy, column: PaperColumn, plans: Plans, path: Path) -> Path | str:
    documents = _documents(study, column, plans)
    if not documents:
        cells = [cell for cell in study.table_cells if cell.column is column]
        reasons = [plans[spec].skip_reason for cell in cells for spec in cell.run_specs]
        return next(filter(None, reasons), "not run")
    if study.figure == "curves":
        draw(path, learning_curves(documents))
        return path
    tsne_documents: list[Any] = []
    for document in documents:
        analyses = [result for result in document["analyses"] if result["analysis"] == "tsne"]
        tsne_documents.append({**document, "analyses": analyses})
    figure = next(iter(analysis_figures(tsne_documents, analysis.load_embedding).values()), None)
    if figure is None:
        return "not measured"
    draw(path, figure)
    return path


def _documents(study: PaperStudy, column: PaperColumn, plans: Plans) -> list[RunDocument]:
    """Return the evaluated runs of one column; for t-SNE those of the first trial."""
    trials = 1 if study.figure == "tsne" else None
    cells = [cell for cell in study.table_cells if cell.column is column]
    documents = [plans[spec].document for cell in cells for spec in cell.run_specs[:trials]]
    return [document for document in documents if document and document["best"]]


def _draw_distribution(path: Path, options: Mapping[str, Any]) -> Path | str:
    keys = ("data", "partition", "partition_seed", "clients", "variant")
    try:
        federated = load_federated_data(Config(**{key: options[key] for key in keys if key in options}))
    except InvalidInputError as error:
        return str(error)
    title = f"{options['data']}, {federated.options.partition}, {federated.split.clients} clients"
    draw(path, client_distribution(label_counts(federated.dataset, federated.split), title))
    return path


Plans = dict[RunSpec, PlannedRun]
Repetition = tuple[int, Extent]
"""Seed and length of a run."""
_INTEGER_READINGS = ("mdl", "iterations", "prbm")


def study_specs(studies: Iterable[PaperStudy]) -> list[RunSpec]:
    """Return all runs of these tables and figures without duplicates; figures of distributions need none."""
    cells = [cell for study in studies if study.figure != "distributions" for cell in study.table_cells]
    return list(dict.fromkeys(spec for cell in cells for spec in (*cell.run_specs, *cell.baseline_specs)))


def plan_studies(
    studies: Iterable[PaperStudy], folder: Path, on_message: Callable[[str], None] = lambda text: None
) -> Plans:
    """Return the plans of all runs, with their present states in this folder."""
    specs = study_specs(studies)
    return dict(zip(specs, runner.plan_runs(specs, folder, on_message=on_message), strict=True))


def record_study(study: PaperStudy, plans: Plans, folder: Path) -> Path:
    """Write the record of a table or figure, and return its folder.

    Args:
        study: The table or figure.
        plans: The study's runs. Runs without data on this machine are left out.
        folder: Folder of the runs.
    """
    planned_runs = [plans[spec] for spec in study_specs([study])]
    runs = []
    for planned in planned_runs:
        if planned.experiment is not None:
            options = planned.experiment.options
            config_hash = planned.experiment.config_hash
            runs.append(StudyRun(str(planned.folder), config_hash, options.rounds or 0, options.patience))
    methods = tuple(dict.fromkeys(row.method for row in study.rows))
    record = StudyRecord(
        name="",
        purpose=Purpose.PAPER_TABLE,
        methods=methods,
        options=study.request,
        seeds=tuple(dict.fromkeys(planned.spec.seed for planned in planned_runs)),
        partition_seeds=(),
        baseline=methods[0],
        validation=None,
        runs=tuple(dict.fromkeys(runs)),
    )
    return save_record(record, folder, stem=study.name)


def reopen_study(record: StudyRecord, folder: Path) -> PaperStudy:
    """Return the table or figure of a record.

    Raises:
        StoreError: The record does not name one.
    """
    try:
        options: dict[str, Any] = {**msgspec.convert(dict(record.options), paper.PaperRequest)}
        only = options.pop("only", [])
        return paper.load_study(**options).select(only)
    except (TypeError, ValueError, InvalidInputError) as error:
        raise StoreError(f"'{folder}' does not name a table of the paper: {one_line(error)}") from error


def run_study_analyses(
    study: PaperStudy, plans: Plans, *, quick: bool, callback: Callback | None = None
) -> list[str]:
    """Compute the missing analyses of the study's runs; return a line for each that failed."""
    layers_by_folder: dict[Path, list[str]] = {}
    for cell in study.table_cells:
        for layer in paper.mdl_layers([cell.column.read]):
            for spec in (*cell.run_specs, *cell.baseline_specs):
                document = plans[spec].document
                if document and document["best"]:
                    layers_by_folder.setdefault(plans[spec].folder, []).append(layer)
    problems = []
    for folder, layers in layers_by_folder.items():
        unique_layers = tuple(dict.fromkeys(layers))
        request = AnalysisRequest(analyses=("mdl",), moments=("before",), layers=unique_layers, quick=quick)
        try:
            analysis.run_analyses(folder, request, callback=callback)
        except InvalidInputError as error:  # no model is deployed, or too few samples
            problems.append(f"{folder.name}: {error}")
    return problems


def compare_with_paper(study: PaperStudy, plans: Plans) -> PaperTable:
    """Return the paper's table and ours.

    Args:
        study: A table of the paper.
        plans: The study's runs.
    """
    notes = []
    replacement = _describe_replacement(study)
    if replacement:
        notes.append(f"Run {replacement}; the paper's numbers are for orientation.")
    if study.note:
        notes.append(study.note)
    notes += [f"Left out: {row} ({reason})." for row, reason in study.left_out.items()]
    notes += _refusals(study, plans)
    notes += _addon_gains(study, plans)
    rows = tuple(row.name for row in study.rows)
    titles = tuple(column.title for column in study.columns)
    cells = tuple(_paper_cell(study, cell, plans) for cell in study.table_cells)
    return PaperTable(study.name, study.title, rows, titles, cells, tuple(notes))


def _describe_replacement(study: PaperStudy) -> str:
    """Return the data, model and rounds that replace the published ones, or an empty text."""
    if study.is_small:
        settings = paper.load_settings()["small"]
        return f"on {settings['data']} with model {settings['model']}, {settings['rounds']} rounds"
    data = study.request["data"]
    return f"on {data}" if data else ""


def _paper_cell(study: PaperStudy, cell: TableCell, plans: Plans) -> PaperCell:
    column = cell.column
    published = cell.paper_value.value if cell.paper_value else None
    values = _values(cell, plans)
    ours = mean_interval(list(values.values())) if values else None
    difference = None
    if ours and published is not None and not column.replaced:
        difference = ours.mean - published
    moments = _moment_values(study, cell, plans) if ours and _has_moments(column) else ()
    is_integer = column.relative is False and column.read.partition("@")[0] in _INTEGER_READINGS
    return PaperCell(
        cell.row.name,
        column.title,
        ours,
        published,
        difference,
        _deviations(study, cell, plans, values) if values else (),
        _status(cell, plans),
        0 if is_integer else 2,
        moments,
    )


def _has_moments(column: PaperColumn) -> bool:
    """Return True if the column is an accuracy that exists before and after local training."""
    return column.read in ("accuracy", "best") and not column.against


def _moment_values(study: PaperStudy, cell: TableCell, plans: Plans) -> tuple[MomentValue, ...]:
    """Return the accuracy that is compared with the paper, and that after local training."""
    documents = _counted_documents(cell.run_specs, plans)
    published = paper.published_moment(next(iter(documents.values())))
    baseline = next((other for other in study.table_cells if _is_fedavg_of(other, cell)), None)
    values = []
    for moment in (published, "after"):
        ours = _accuracies(cell, moment, plans)
        if not ours:
            continue
        gain = None
        if baseline and moment in ("before", "after"):  # FedAvg is not adapted
            gain = paired_differences(ours, _accuracies(baseline, moment, plans))
        values.append(MomentValue(moment, mean_interval(list(ours.values())), gain))
    return tuple(values)


def _accuracies(cell: TableCell, moment: str, plans: Plans) -> dict[Repetition, float]:
    """Return each trial's accuracy in percent: after local training, or as the paper reports it."""
    if moment != "after":
        return _read_values(cell.column.read, cell.run_specs, plans)
    values = {}
    for seed, document in _counted_documents(cell.run_specs, plans).items():
        accuracy = paper.accuracy_after_training(document)
        if accuracy is not None:
            values[seed, run_extent(document)] = accuracy
    return values


def _is_fedavg_of(other: TableCell, cell: TableCell) -> bool:
    """Return True if `other` is plain FedAvg in the same column, and not the cell itself."""
    is_fedavg = other.row.method == "fedavg" and not other.row.options and not other.column.method
    return is_fedavg and other.column is cell.column and other is not cell


def _values(cell: TableCell, plans: Plans) -> dict[Repetition, float]:
    """Return the value of each trial; differences only for trials that both methods have."""
    column = cell.column
    ours = _read_values(column.read, cell.run_specs, plans)
    if not column.against:
        return ours
    baseline = _read_values(column.read, cell.baseline_specs, plans)
    differences = {trial: value - baseline[trial] for trial, value in ours.items() if trial in baseline}
    if not column.relative:
        return differences
    return {trial: 100 * difference / baseline[trial] for trial, difference in differences.items()}


def _read_values(read: str, specs: Iterable[RunSpec], plans: Plans) -> dict[Repetition, float]:
    """Return the values of the counted runs."""
    values = {}
    for seed, document in _counted_documents(specs, plans).items():
        value = paper.read_value(read, document)
        if value is not None:
            values[seed, run_extent(document)] = value
    return values


def _counted_documents(specs: Iterable[RunSpec], plans: Plans) -> dict[int, RunDocument]:
    """Return the runs over which a mean is computed, by seed."""
    documents = {spec.seed: document for spec in specs if (document := plans[spec].document)}
    counted = {id(document) for document in counted_runs(list(documents.values()))}
    return {seed: document for seed, document in documents.items() if id(document) in counted}


def _status(cell: TableCell, plans: Plans) -> str:
    """Return the text of a cell that has no value."""
    if not cell.run_specs:
        return "-"
    planned_runs = [plans[spec] for spec in (*cell.run_specs, *cell.baseline_specs)]
    if any(planned.experiment is None for planned in planned_runs):
        is_data_missing = any(planned.is_data_missing for planned in planned_runs)
        return "no data" if is_data_missing else "refused"
    documents = [planned.document for planned in planned_runs if planned.document]
    if any(document["diverged"] for document in documents):
        return "diverged"
    return "not measured" if documents else "not run"


def _deviations(
    study: PaperStudy, cell: TableCell, plans: Plans, values: Mapping[Repetition, float]
) -> tuple[str, ...]:
    """Return the ways in which this value is not comparable with the published one."""
    specs = (*cell.run_specs, *cell.baseline_specs)
    seeds = {seed for seed, _ in values}
    used = [plans[spec] for spec in specs if spec.seed in seeds]
    documents = [planned.document for planned in used if planned.document]
    all_documents = [plans[spec].document for spec in specs]
    diverged = [document for document in all_documents if document and document["diverged"]]
    deviations = []
    if cell.column.replaced:
        deviations.append(cell.column.replaced)
    if not all(_is_complete(study, planned) for planned in used):
        deviations.append(_describe_rounds(study, used))
    if diverged:
        deviations.append(f"a trial diverged after round {_rounds_done(diverged[0])}, and is not counted")
    if len(values) < len(cell.run_specs):
        deviations.append(f"{len(values)} of {len(cell.run_specs)} trials")
    deviations += sorted({document["note"] for document in documents} - {""})
    analyses = [paper.find_mdl(cell.column.read, document) for document in documents]
    if any(mdl and mdl["quick"] for mdl in analyses):
        deviations.append("quick MDL")
    return tuple(deviations)


def _is_complete(study: PaperStudy, planned: PlannedRun) -> bool:
    """Return True if the run has as many rounds as the published ones."""
    if planned.skip_reason:
        return True
    patience = planned.experiment.options.patience if planned.experiment else None
    return bool(planned.document and has_completed(planned.document, study.rounds, patience))


def _describe_rounds(study: PaperStudy, used: Sequence[PlannedRun]) -> str:
    documents = [planned.document for planned in used if not _is_complete(study, planned)]
    rounds = sorted({_rounds_done(document) for document in documents if document})
    text = " to ".join(map(str, dict.fromkeys([rounds[0], rounds[-1]])))
    return f"{text} round{'s' * (text != '1')} of up to {study.rounds}"


def _rounds_done(document: RunDocument) -> int:
    return document["rounds"][-1]["round"] if document["rounds"] else 0


def _refusals(study: PaperStudy, plans: Plans) -> list[str]:
    """Return a note for each reason for which runs are impossible, other than missing data."""
    planned_runs = [
        plans[spec] for cell in study.table_cells for spec in (*cell.run_specs, *cell.baseline_specs)
    ]
    refused = [run for run in planned_runs if run.experiment is None and not run.is_data_missing]
    return [f"Refused: {reason}." for reason in dict.fromkeys(run.skip_reason for run in refused)]


def _addon_gains(study: PaperStudy, plans: Plans) -> list[str]:
    """Return notes on where an add-on improves or worsens a method, judged over the whole table."""
    names = []
    comparisons = []
    for cell in study.table_cells:
        base = next((other for other in study.table_cells if _is_plain_method(other, cell)), None)
        if base is None:
            continue
        documents = [
            *_counted_documents(cell.run_specs, plans).values(),
            *_counted_documents(base.run_specs, plans).values(),
        ]
        if not documents:
            continue
        moments = [paper.published_moment(documents[0])]
        if _has_moments(cell.column):
            moments.append("after")
        for moment in moments:
            difference = paired_differences(
                _accuracies(cell, moment, plans), _accuracies(base, moment, plans)
            )
            if difference is None:
                continue
            on_test = any(paper.is_chosen_on_test(cell.column.read, document) for document in documents)
            gain = difference.format(sign=True)
            label = f"{cell.column.title}, {describe_moment(moment)}"
            names.append(f"{cell.row.name} against {base.row.name}, {label}: {gain}")
            comparisons.append(Comparison(difference, on_test, one_sample=one_test_sample(documents)))
    names_by_verdict: dict[str, list[str]] = {}
    for name, verdict in zip(names, judge_comparisons(comparisons), strict=True):
        outcome = verdict.outcome or f"no verdict ({verdict.reason})"
        names_by_verdict.setdefault(outcome.capitalize(), []).append(name)
    gains = [f"{outcome}: {'; '.join(cell_names)}." for outcome, cell_names in names_by_verdict.items()]
    return [*gains, VERDICT_RULE] if gains else []


def _is_plain_method(other: TableCell, cell: TableCell) -> bool:
    """Return True if `other` is the accuracy of the cell's method without its add-ons."""
    method, _, addon = cell.row.method.partition("+")
    column = cell.column
    has_accuracy = paper.is_accuracy(column.read) and not column.against and not column.method
    is_same_setting = other.column is column and other.row.method == method and not other.row.options
    return bool(addon) and has_accuracy and is_same_setting


def load_studies(
    names: Iterable[str],
    *,
    trials: int | None,
    only: Sequence[str],
    rounds: int | None,
    data: str | None,
    small: bool,
) -> list[PaperStudy]:
    """Return the experiments with these names; the arguments are those of `feddbe.reproduce`."""
    if rounds is not None and rounds < 1:
        raise InvalidInputError(f"rounds = {rounds}; allowed: a whole number >= 1")
    if small and data:
        raise InvalidInputError(f"--data {data}: --scale small has its own data, digits")
    count = trials if trials is not None else 1 if small else 3
    return [
        paper.load_study(name, trials=count, rounds=rounds, data=data, small=small).select(only)
        for name in dict.fromkeys(names)
    ]


def study_folder(*, small: bool) -> Path:
    """Return the default folder of the runs."""
    return RUNS_DIR / ("reproduce-small" if small else "reproduce")


def run_studies(studies: Sequence[PaperStudy], plans: Plans, bars: StudyBars) -> Plans:
    """Run the missing runs and analyses of these experiments, and return the refreshed plans."""
    runner.run_missing(list(plans.values()), bars)
    plans = _refresh(plans)
    analysis_bar = bars.analysis_callback()
    for study in studies:
        for problem in run_study_analyses(study, plans, quick=study.is_small, callback=analysis_bar):
            bars.print_line(f"feddbe: not analyzed: {problem}")
        run_embedding_analyses(study, plans, analysis_bar)
    analysis_bar.remove()
    return _refresh(plans)


def _refresh(plans: Plans) -> Plans:
    return dict(zip(plans, runner.refresh_plans(plans.values()), strict=True))
