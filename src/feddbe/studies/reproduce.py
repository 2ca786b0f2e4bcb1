"""The paper's figures: learning curves, t-SNE, who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from feddbe.callbacks.base import Callback
from feddbe.config.options import Config
from feddbe.data.federated import label_counts, load_federated_data
from feddbe.errors import InvalidInputError
from feddbe.reporting.build_figures import analysis_figures, client_distribution, learning_curves
from feddbe.reporting.matplotlib_backend import draw as draw_figure
from feddbe.reporting.paper_table import PaperCell, PaperTable
from feddbe.results.document import Extent, RunDocument, has_completed, run_extent
from feddbe.results.seeds import counted_runs
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

TSNE = AnalysisRequest(analyses=("tsne",), layers=("z_g", "z"))
"""What a picture of representations needs."""


def run_embedding_analyses(study: PaperStudy, plans: Plans, callback: Callback | None = None) -> None:
    """Lay out the representations that the study draws."""
    if study.figure == "tsne":
        for column in study.columns:
            for document in _documents(study, column, plans):
                analysis.run_analyses(Path(document["folder"]), TSNE, callback=callback)


def draw_study(study: PaperStudy, plans: Plans, folder: Path) -> dict[str, Path | str]:
    """A picture for each column: its path in `folder`, or why there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path | str] = {}
    for column in study.columns:
        path = folder / f"{study.name}-{folders.slug(column.title.replace(' ', '-'))}.png"
        if study.figure == "distributions":
            found[column.title] = _bubbles(path, column.options)
        elif not (documents := _documents(study, column, plans)):
            cells = [cell for slot in study.table_cells if slot.column is column for cell in slot.run_specs]
            found[column.title] = next(
                (plans[c].skip_reason for c in cells if plans[c].skip_reason), "not run"
            )
        elif study.figure == "curves":
            draw_figure(path, learning_curves(documents))
            found[column.title] = path
        else:
            tsne: list[Any] = [
                {**d, "analyses": [one for one in d["analyses"] if one["analysis"] == "tsne"]}
                for d in documents
            ]
            figure = next(iter(analysis_figures(tsne, analysis.load_embedding).values()), None)
            if figure is not None:
                draw_figure(path, figure)
            found[column.title] = "not measured" if figure is None else path
    return found


def _documents(study: PaperStudy, column: PaperColumn, plans: Plans) -> list[RunDocument]:
    """Runs of one column that have something to show; of t-SNE those of the first trial."""
    slots = [slot for slot in study.table_cells if slot.column is column]
    cells = [
        cell for slot in slots for cell in (slot.run_specs[:1] if study.figure == "tsne" else slot.run_specs)
    ]
    return [found for cell in cells if (found := plans[cell].document) and found["best"]]


def _bubbles(path: Path, options: Mapping[str, Any]) -> Path | str:
    wanted = ("data", "partition", "partition_seed", "clients", "variant")
    try:
        held = load_federated_data(Config(**{key: options[key] for key in wanted if key in options}))
    except InvalidInputError as error:
        return str(error)
    title = f"{options['data']}, {held.options.partition}, {held.split.clients} clients"
    draw_figure(path, client_distribution(label_counts(held.dataset, held.split), title))
    return path


Plans = dict[RunSpec, PlannedRun]
Trial = tuple[int, Extent]
"""Seed and length of a run."""
_DIGITS = {"mdl": 0, "iterations": 0, "prbm": 0}


def study_runs(studies: Iterable[PaperStudy]) -> list[RunSpec]:
    """All runs that these tables and figures are made of, each once; who holds what needs none."""
    slots = [slot for study in studies if study.figure != "distributions" for slot in study.table_cells]
    return list(dict.fromkeys(cell for slot in slots for cell in (*slot.run_specs, *slot.base)))


def plan_studies(
    studies: Iterable[PaperStudy], folder: Path, remark: Callable[[str], None] = lambda text: None
) -> Plans:
    """What there is of them in this folder."""
    cells = study_runs(studies)
    return dict(zip(cells, runner.plan_runs(cells, folder, remark=remark), strict=True))


def run_study_analyses(
    study: PaperStudy, plans: Plans, *, quick: bool, callback: Callback | None = None
) -> list[str]:
    """Take what the study wants to know of the representations in its runs; what is there already is not
    taken twice. Why something could not be taken, a line each."""
    wanted: dict[Path, list[str]] = {}
    for slot in study.table_cells:
        for place in paper.decimal_places([slot.column.read]):
            for cell in (*slot.run_specs, *slot.base):
                if (found := plans[cell].document) and found["best"]:
                    wanted.setdefault(plans[cell].folder, []).append(place)
    problems = []
    for folder, places in wanted.items():
        question = AnalysisRequest(
            analyses=("mdl",), moments=("before",), layers=tuple(dict.fromkeys(places)), quick=quick
        )
        try:
            analysis.run_analyses(folder, question, callback=callback)
        except InvalidInputError as error:  # no model is deployed, too few samples
            problems.append(f"{folder.name}: {error}")
    return problems


def compare_with_paper(study: PaperStudy, plans: Plans, *, instead: str = "") -> PaperTable:
    """The table of the paper and ours. `instead`: on what the study was run, if not as published."""
    places = tuple(_place(study, slot, plans) for slot in study.table_cells)
    notes = [f"Run {instead}; the paper's numbers are for orientation."] if instead else []
    notes += [study.note] if study.note else []
    notes += [f"Left out: {row} ({why})." for row, why in study.left_out.items()]
    titles = tuple(column.title for column in study.columns)
    rows = tuple(row.name for row in study.rows)
    return PaperTable(study.name, study.title, rows, titles, places, (*notes, *_gains(study, plans)))


def _place(study: PaperStudy, cell: TableCell, plans: Plans) -> PaperCell:
    column, theirs = cell.column, cell.paper_value.value if cell.paper_value else None
    found = _values(cell, plans)
    ours = mean_interval(list(found.values())) if found else None
    published = not column.replaced
    difference = ours.mean - theirs if ours and theirs is not None and published else None
    return PaperCell(
        cell.row.name, column.title, ours, theirs, difference,
        _marks(study, cell, plans, found) if found else (), _state(cell, plans),
        0 if column.relative is False and column.read.partition("@")[0] in _DIGITS else 2,
    )  # fmt: skip


def _values(cell: TableCell, plans: Plans) -> dict[Trial, float]:
    """By trial, what is read of its runs; of a difference, in trials that both have."""
    column = cell.column
    ours = _read(column.read, cell.run_specs, plans)
    if not column.against:
        return ours
    base = _read(column.read, cell.base, plans)
    return {
        trial: 100 * (value - base[trial]) / base[trial] if column.relative else value - base[trial]
        for trial, value in ours.items()
        if trial in base
    }


def _read(read: str, cells: Iterable[RunSpec], plans: Plans) -> dict[Trial, float]:
    """Return the values of the runs that are counted."""
    documents = _counted(cells, plans)
    read_values = {
        (seed, run_extent(document)): paper.compute_value(read, document)
        for seed, document in documents.items()
    }
    return {trial: value for trial, value in read_values.items() if value is not None}


def _counted(cells: Iterable[RunSpec], plans: Plans) -> dict[int, RunDocument]:
    """Return the runs that a mean is over, by seed."""
    documents = {cell.seed: document for cell in cells if (document := plans[cell].document)}
    means = {id(document) for document in counted_runs(list(documents.values()))}
    return {seed: document for seed, document in documents.items() if id(document) in means}


def _state(slot: TableCell, plans: Plans) -> str:
    """What to say of a place that has no number."""
    if not slot.run_specs:
        return "-"
    planned = [plans[cell] for cell in (*slot.run_specs, *slot.base)]
    if any(one.experiment is None for one in planned):
        return "no data" if any(one.is_data_missing for one in planned) else "refused"
    documents = [one.document for one in planned if one.document]
    if any(document["diverged"] for document in documents):
        return "diverged"
    return "not measured" if documents else "not run"


def _marks(study: PaperStudy, slot: TableCell, plans: Plans, found: Mapping[Trial, float]) -> tuple[str, ...]:
    """In which way this number is not the published one's equal."""
    cells, seeds = (*slot.run_specs, *slot.base), {seed for seed, _ in found}
    used = [plans[cell] for cell in cells if cell.seed in seeds]
    documents = [one.document for one in used if one.document]
    diverged = [one for cell in cells if (one := plans[cell].document) and one["diverged"]]
    marks = [slot.column.replaced] if slot.column.replaced else []
    marks += [_rounds(study, used)] if not all(_ended(study, one) for one in used) else []
    marks += [f"a trial diverged after round {_far(one)}, and is not counted" for one in diverged][:1]
    if len(found) < len(slot.run_specs):
        marks.append(f"{len(found)} of {len(slot.run_specs)} trials")
    marks += sorted({document["note"] for document in documents} - {""})
    mdls = [paper.mdl_of(slot.column.read, document) for document in documents]
    if any(mdl and mdl["quick"] for mdl in mdls):
        marks.append("quick MDL")
    return tuple(marks)


def _ended(study: PaperStudy, planned: PlannedRun) -> bool:
    """Whether this run went as far as the published ones."""
    patience = planned.experiment.options.patience if planned.experiment else None
    return bool(planned.skip_reason) or bool(
        planned.document and has_completed(planned.document, study.rounds, patience)
    )


def _rounds(study: PaperStudy, used: Sequence[PlannedRun]) -> str:
    far = sorted({_far(one.document) for one in used if one.document and not _ended(study, one)})
    some = " to ".join(map(str, dict.fromkeys([far[0], far[-1]])))
    return f"{some} round{'s' * (some != '1')} of up to {study.rounds}"


def _far(found: RunDocument | None) -> int:
    return found["rounds"][-1]["round"] if found and found["rounds"] else 0


def _gains(study: PaperStudy, plans: Plans) -> list[str]:
    """Say where an add-on makes a method better or worse, judged over all such places of the table."""
    names, comparisons = [], []
    for slot in study.table_cells:
        base = next((other for other in study.table_cells if _is_plain(other, slot)), None)
        difference = base and paired_differences(_values(slot, plans), _values(base, plans))
        if base and difference:
            runs = [*_counted(slot.run_specs, plans).values(), *_counted(base.run_specs, plans).values()]
            on_test = any(paper.is_chosen_on_test(slot.column.read, run) for run in runs)
            shown = difference.format(sign=True)
            names.append(f"{slot.row.name} against {base.row.name}, {slot.column.title}: {shown}")
            comparisons.append(Comparison(difference, on_test))
    by_verdict: dict[str, list[str]] = {}
    for name, verdict in zip(names, judge_comparisons(comparisons), strict=True):
        words = verdict.outcome or f"no verdict ({verdict.reason})"
        by_verdict.setdefault(words.capitalize(), []).append(name)
    gains = [f"{verdict}: {'; '.join(those)}." for verdict, those in by_verdict.items()]
    return [*gains, VERDICT_RULE] if gains else []


def _is_plain(other: TableCell, cell: TableCell) -> bool:
    """Whether it is the same place of the method without its add-ons."""
    method, _, addon = cell.row.method.partition("+")
    column = cell.column
    counts = paper.is_accuracy(column.read) and not column.against and not column.method
    alike = other.column is column and other.row.method == method and not other.row.options
    return bool(addon) and counts and alike
