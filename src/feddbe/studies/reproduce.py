"""The paper's figures: learning curves, t-SNE, who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from feddbe.callbacks.base import Watch
from feddbe.config.options import Config
from feddbe.data.federated import label_counts, load_data
from feddbe.errors import BadInput
from feddbe.reporting.build_figures import analysis_figures, client_distribution, learning_curves
from feddbe.reporting.matplotlib_backend import draw as draw_figure
from feddbe.reporting.paper_table import Compared, Place
from feddbe.results.document import Extent, RunDocument, extent, reached
from feddbe.results.seeds import counted
from feddbe.results.statistics import RULE, Comparison, interval, judge, paired
from feddbe.runs import analysis, folders
from feddbe.runs.analysis import Question
from feddbe.studies import paper, runner
from feddbe.studies.paper import Column, Slot, Study
from feddbe.studies.runner import Cell, Planned

TSNE = Question(what=("tsne",), places=("z_g", "z"))
"""What a picture of representations needs."""


def measure_embeddings(study: Study, plans: Plans, watch: Watch | None = None) -> None:
    """Lay out the representations that the study draws."""
    if study.figure == "tsne":
        for column in study.columns:
            for document in _documents(study, column, plans):
                analysis.answer(Path(document["folder"]), TSNE, watch=watch)


def draw(study: Study, plans: Plans, folder: Path) -> dict[str, Path | str]:
    """A picture for each column: its path in `folder`, or why there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path | str] = {}
    for column in study.columns:
        path = folder / f"{study.name}-{folders.slug(column.title.replace(' ', '-'))}.png"
        if study.figure == "distributions":
            found[column.title] = _bubbles(path, column.options)
        elif not (documents := _documents(study, column, plans)):
            cells = [cell for slot in study.slots if slot.column is column for cell in slot.cells]
            found[column.title] = next((plans[c].refused for c in cells if plans[c].refused), "not run")
        elif study.figure == "curves":
            draw_figure(path, learning_curves(documents))
            found[column.title] = path
        else:
            tsne: list[Any] = [
                {**d, "measured": [one for one in d["measured"] if one["what"] == "tsne"]} for d in documents
            ]
            figure = next(iter(analysis_figures(tsne, analysis.layout).values()), None)
            if figure is not None:
                draw_figure(path, figure)
            found[column.title] = "not measured" if figure is None else path
    return found


def _documents(study: Study, column: Column, plans: Plans) -> list[RunDocument]:
    """Runs of one column that have something to show; of t-SNE those of the first trial."""
    slots = [slot for slot in study.slots if slot.column is column]
    cells = [cell for slot in slots for cell in (slot.cells[:1] if study.figure == "tsne" else slot.cells)]
    return [found for cell in cells if (found := plans[cell].found) and found["best"]]


def _bubbles(path: Path, options: Mapping[str, Any]) -> Path | str:
    wanted = ("data", "partition", "partition_seed", "clients", "variant")
    try:
        held = load_data(Config(**{key: options[key] for key in wanted if key in options}))
    except BadInput as error:
        return str(error)
    title = f"{options['data']}, {held.options.partition}, {held.split.clients} clients"
    draw_figure(path, client_distribution(label_counts(held.dataset, held.split), title))
    return path


Plans = dict[Cell, Planned]
Trial = tuple[int, Extent]
"""Seed and length of a run."""
_DIGITS = {"mdl": 0, "iterations": 0, "prbm": 0}


def cells_of(studies: Iterable[Study]) -> list[Cell]:
    """All runs that these tables and figures are made of, each once; who holds what needs none."""
    slots = [slot for study in studies if study.figure != "distributions" for slot in study.slots]
    return list(dict.fromkeys(cell for slot in slots for cell in (*slot.cells, *slot.base)))


def plan(studies: Iterable[Study], folder: Path, remark: Callable[[str], None] = lambda text: None) -> Plans:
    """What there is of them in this folder."""
    cells = cells_of(studies)
    return dict(zip(cells, runner.plan(cells, folder, remark=remark), strict=True))


def measure(study: Study, plans: Plans, *, quick: bool, watch: Watch | None = None) -> list[str]:
    """Take what the study wants to know of the representations in its runs; what is there already is not
    taken twice. Why something could not be taken, a line each."""
    wanted: dict[Path, list[str]] = {}
    for slot in study.slots:
        for place in paper.places([slot.column.read]):
            for cell in (*slot.cells, *slot.base):
                if (found := plans[cell].found) and found["best"]:
                    wanted.setdefault(plans[cell].place, []).append(place)
    problems = []
    for folder, places in wanted.items():
        question = Question(
            what=("mdl",), moments=("before",), places=tuple(dict.fromkeys(places)), quick=quick
        )
        try:
            analysis.answer(folder, question, watch=watch)
        except BadInput as error:  # no model is deployed, too few samples
            problems.append(f"{folder.name}: {error}")
    return problems


def compared(study: Study, plans: Plans, *, instead: str = "") -> Compared:
    """The table of the paper and ours. `instead`: on what the study was run, if not as published."""
    places = tuple(_place(study, slot, plans) for slot in study.slots)
    notes = [f"Run {instead}; the paper's numbers are for orientation."] if instead else []
    notes += [study.note] if study.note else []
    notes += [f"Left out: {row} ({why})." for row, why in study.left_out.items()]
    titles = tuple(column.title for column in study.columns)
    rows = tuple(row.name for row in study.rows)
    return Compared(study.name, study.title, rows, titles, places, (*notes, *_gains(study, plans)))


def _place(study: Study, slot: Slot, plans: Plans) -> Place:
    column, theirs = slot.column, slot.printed.value if slot.printed else None
    found = _values(slot, plans)
    ours = interval(list(found.values())) if found else None
    published = not column.replaced
    difference = ours.mean - theirs if ours and theirs is not None and published else None
    return Place(
        slot.row.name, column.title, ours, theirs, difference,
        _marks(study, slot, plans, found) if found else (), _state(slot, plans),
        0 if column.relative is False and column.read.partition("@")[0] in _DIGITS else 2,
    )  # fmt: skip


def _values(slot: Slot, plans: Plans) -> dict[Trial, float]:
    """By trial, what is read of its runs; of a difference, in trials that both have."""
    column = slot.column
    ours = _read(column.read, slot.cells, plans)
    if not column.against:
        return ours
    base = _read(column.read, slot.base, plans)
    return {
        trial: 100 * (value - base[trial]) / base[trial] if column.relative else value - base[trial]
        for trial, value in ours.items()
        if trial in base
    }


def _read(read: str, cells: Iterable[Cell], plans: Plans) -> dict[Trial, float]:
    """Return the values of the runs that are counted."""
    documents = _counted(cells, plans)
    read_values = {
        (seed, extent(document)): paper.value(read, document) for seed, document in documents.items()
    }
    return {trial: value for trial, value in read_values.items() if value is not None}


def _counted(cells: Iterable[Cell], plans: Plans) -> dict[int, RunDocument]:
    """Return the runs that a mean is over, by seed."""
    documents = {cell.seed: document for cell in cells if (document := plans[cell].found)}
    means = {id(document) for document in counted(list(documents.values()))}
    return {seed: document for seed, document in documents.items() if id(document) in means}


def _state(slot: Slot, plans: Plans) -> str:
    """What to say of a place that has no number."""
    if not slot.cells:
        return "-"
    planned = [plans[cell] for cell in (*slot.cells, *slot.base)]
    if any(one.experiment is None for one in planned):
        return "no data" if any(one.is_data_missing for one in planned) else "refused"
    documents = [one.found for one in planned if one.found]
    if any(document["diverged"] for document in documents):
        return "diverged"
    return "not measured" if documents else "not run"


def _marks(study: Study, slot: Slot, plans: Plans, found: Mapping[Trial, float]) -> tuple[str, ...]:
    """In which way this number is not the published one's equal."""
    cells, seeds = (*slot.cells, *slot.base), {seed for seed, _ in found}
    used = [plans[cell] for cell in cells if cell.seed in seeds]
    documents = [one.found for one in used if one.found]
    diverged = [one for cell in cells if (one := plans[cell].found) and one["diverged"]]
    marks = [slot.column.replaced] if slot.column.replaced else []
    marks += [_rounds(study, used)] if not all(_ended(study, one) for one in used) else []
    marks += [f"a trial diverged after round {_far(one)}, and is not counted" for one in diverged][:1]
    if len(found) < len(slot.cells):
        marks.append(f"{len(found)} of {len(slot.cells)} trials")
    marks += sorted({document["note"] for document in documents} - {""})
    mdls = [paper.mdl_of(slot.column.read, document) for document in documents]
    if any(mdl and mdl["quick"] for mdl in mdls):
        marks.append("quick MDL")
    return tuple(marks)


def _ended(study: Study, planned: Planned) -> bool:
    """Whether this run went as far as the published ones."""
    patience = planned.experiment.options.patience if planned.experiment else None
    return bool(planned.refused) or bool(planned.found and reached(planned.found, study.rounds, patience))


def _rounds(study: Study, used: Sequence[Planned]) -> str:
    far = sorted({_far(one.found) for one in used if one.found and not _ended(study, one)})
    some = " to ".join(map(str, dict.fromkeys([far[0], far[-1]])))
    return f"{some} round{'s' * (some != '1')} of up to {study.rounds}"


def _far(found: RunDocument | None) -> int:
    return found["rounds"][-1]["round"] if found and found["rounds"] else 0


def _gains(study: Study, plans: Plans) -> list[str]:
    """Say where an add-on makes a method better or worse, judged over all such places of the table."""
    names, comparisons = [], []
    for slot in study.slots:
        base = next((other for other in study.slots if _is_plain(other, slot)), None)
        difference = base and paired(_values(slot, plans), _values(base, plans))
        if base and difference:
            runs = [*_counted(slot.cells, plans).values(), *_counted(base.cells, plans).values()]
            on_test = any(paper.is_chosen_on_test(slot.column.read, run) for run in runs)
            shown = difference.shown(sign=True)
            names.append(f"{slot.row.name} against {base.row.name}, {slot.column.title}: {shown}")
            comparisons.append(Comparison(difference, on_test))
    by_verdict: dict[str, list[str]] = {}
    for name, verdict in zip(names, judge(comparisons), strict=True):
        words = verdict.outcome or f"no verdict ({verdict.reason})"
        by_verdict.setdefault(words.capitalize(), []).append(name)
    gains = [f"{verdict}: {'; '.join(those)}." for verdict, those in by_verdict.items()]
    return [*gains, RULE] if gains else []


def _is_plain(other: Slot, slot: Slot) -> bool:
    """Whether it is the same place of the method without its add-ons."""
    method, _, addon = slot.row.method.partition("+")
    column = slot.column
    counts = paper.is_accuracy(column.read) and not column.against and not column.method
    alike = other.column is column and other.row.method == method and not other.row.options
    return bool(addon) and counts and alike
