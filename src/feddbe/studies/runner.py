"""Run what is missing of a study: cells whose runs are in a folder already are known by their configuration's
hash, whatever their folders are called; others are begun or continued, several side by side.

A run is written after every round and can be continued, so a study can be stopped, or killed, at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from feddbe import api, data
from feddbe.data.dataset import Dataset
from feddbe.engines.pool import cores
from feddbe.errors import BadInput, FeddbeError, StoreError
from feddbe.models import ModelSource
from feddbe.options.config import Asked, Config
from feddbe.paths import expand
from feddbe.results.document import RunDocument, ending
from feddbe.results.extent import cut, last_round, reached
from feddbe.runs import folders
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import FILE, Store
from feddbe.runs.summary import load
from feddbe.runs.watch import Watch
from feddbe.studies.cells import Cell
from feddbe.studies.side_by_side import carry_on_all

__all__ = ["Board", "Planned", "plan", "refresh", "run"]

Remark = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """A cell and what there is of it."""

    cell: Cell
    experiment: Experiment | None
    """With all choices made; None: it cannot be, `refused` says why."""
    place: Path
    """Where its run is, or will be."""
    found: RunDocument | None = None
    """The run, as far as it has been carried on, and no further than the cell asks for."""
    refused: str = ""
    """Why there is nothing to carry on: the data is not here, the method does not take it, it diverged."""

    @property
    def done(self) -> bool:
        """Whether it needs no more rounds."""
        asked = self.experiment and self.experiment.options
        return bool(asked and self.found and reached(self.found, asked.rounds or 0, asked.patience))

    @property
    def missing(self) -> bool:
        """Whether there is something to run."""
        return not self.refused and not self.done


class Board:
    """Is told how a study goes on; this one does nothing with it."""

    def watch(self, planned: Planned) -> Watch:
        """This cell is carried on now; its run tells this one."""
        return Watch()

    def ended(self, planned: Planned, error: Exception | None) -> None:
        """It is done, or this is why not."""


def plan(
    cells: Sequence[Cell],
    folder: Path,
    *,
    remark: Remark = lambda text: None,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
) -> list[Planned]:
    """What each cell is and what there is of it in `folder`, in their order. Nothing is run or written.

    `remark` is told of runs there that are damaged. `dataset` and `model`: of all cells, if they were given
    as Python objects.
    """
    there = _runs_in(folder, remark)
    loaded: dict[tuple[str, str | None], Dataset] = {}
    found: list[Planned | None] = [None] * len(cells)
    for group in _alike(cells):
        try:
            some = [cells[i] for i in group]
            experiments: Sequence[Experiment | BadInput] = _resolve(some, loaded, dataset, model)
        except BadInput as error:
            experiments = [error] * len(group)
        for index, experiment in zip(group, experiments, strict=True):
            found[index] = _planned(cells[index], experiment, folder, there)
    return [planned for planned in found if planned]


def run(plans: Sequence[Planned], board: Board | None = None) -> dict[Path, FeddbeError]:
    """Carry on what is missing, each run once; by the place of a run that failed, why.

    With cores to spare, runs go side by side, each on one of them; one alone has all.
    """
    board = board or Board()
    by_rounds = sorted((p for p in plans if p.missing and p.experiment), key=_rounds)
    wanted = {planned.place: planned for planned in by_rounds}  # of equal cells the one with most rounds
    missing = [planned for planned in plans if wanted.get(planned.place) is planned]
    work = [(planned.experiment, planned.place) for planned in missing if planned.experiment]
    failed: dict[Path, FeddbeError] = {}
    if len(work) > 1 and cores() > 1:
        with closing(carry_on_all(work, cores(), lambda i: board.watch(missing[i]))) as ended:
            for index, error in ended:
                board.ended(missing[index], error)
                if error:
                    failed[missing[index].place] = error
        return failed
    for planned, (experiment, place) in zip(missing, work, strict=True):
        failure: FeddbeError | None = None
        try:
            api.carry_on(experiment, place, board.watch(planned))
        except FeddbeError as error:
            failure = failed[place] = error
        board.ended(planned, failure)
    return failed


def refresh(plans: Iterable[Planned]) -> list[Planned]:
    """The same, with what there is of their runs by now."""
    return [
        planned if planned.experiment is None else _look(planned.cell, planned.experiment, planned.place)
        for planned in plans
    ]


def _rounds(planned: Planned) -> int:
    return planned.experiment.options.rounds or 0 if planned.experiment else 0


def _alike(cells: Sequence[Cell]) -> Iterable[list[int]]:
    """Cells with the same options, of which data, split and model are made once."""
    groups: dict[str, list[int]] = {}
    for index, cell in enumerate(cells):
        groups.setdefault(repr(sorted(cell.options.items())), []).append(index)
    return groups.values()


def _resolve(
    cells: Sequence[Cell],
    loaded: dict[tuple[str, str | None], Dataset],
    dataset: Dataset | None,
    model: ModelSource | None,
) -> list[Experiment | BadInput]:
    """The experiments of cells that have the same options; or of one alone, why it cannot be."""
    names = list(dict.fromkeys(cell.method for cell in cells))
    _, options, origins = cells[0].asked(resume=True)
    held = _load(options, loaded) if dataset is None else dataset
    try:
        found = api.resolve(Asked(names, options, origins), single=False, dataset=held, model=model)
    except BadInput as error:
        if len(names) == 1:
            return [error] * len(cells)
        return [one for cell in cells for one in _resolve([cell], loaded, dataset, model)]
    by_name = dict(zip(names, found, strict=True))
    return [by_name[cell.method] for cell in cells]


def _load(options: Config, loaded: dict[tuple[str, str | None], Dataset]) -> Dataset:
    """The data as it is read, before it is arranged; each once."""
    known = data.find(options.data)
    where = known.name if known else options.data, options.data_dir
    if where not in loaded:
        directory = expand(options.data_dir) if options.data_dir else None
        loaded[where] = data.SOURCES[known.name].load(directory) if known else data.load(where[0], directory)
    return loaded[where]


def _runs_in(folder: Path, remark: Remark) -> dict[str, Path]:
    """Configuration's hash -> folder of its run; of several, that with the most rounds."""
    found: dict[str, tuple[int, Path]] = {}
    for path in sorted(folder.glob(f"*/{FILE}")):
        try:
            store = Store.open(path.parent)
        except StoreError as error:
            remark(f"passed over: {error}")
            continue
        key, rounds = store.meta("config_hash"), store.last_round()
        store.close()
        found[key] = max(found.get(key, (-2, path.parent)), (rounds, path.parent))
    return {key: place for key, (_, place) in found.items()}


def _planned(cell: Cell, experiment: Experiment | BadInput, folder: Path, there: dict[str, Path]) -> Planned:
    if isinstance(experiment, BadInput):
        return Planned(cell, None, folder, refused=str(experiment))
    stem, digest = Path(experiment.task.dataset.name).stem, experiment.config_hash
    name = f"{stem}-{folders.slug(cell.method)}-seed{cell.seed}-{digest[:8]}"
    return _look(cell, experiment, there.get(digest, folder / name))


def _look(cell: Cell, experiment: Experiment, place: Path) -> Planned:
    if not Store.is_run(place):
        return Planned(cell, experiment, place)
    stored = load(place, hashes=False)
    rounds, patience = experiment.options.rounds or 0, experiment.options.patience
    found = cut(stored, rounds, patience)
    ends_with_more = experiment.method.adapts == "last" or experiment.options.newcomers > 0
    if ends_with_more and len(found["rounds"]) < len(stored["rounds"]):
        problem = (
            f"'{place}' has {last_round(stored)} rounds, and was fine-tuned or joined by newcomers after the "
            f"last, not after {last_round(found)}; ask for as many rounds, or choose another --out"
        )
        return Planned(cell, None, place, refused=problem)
    return Planned(cell, experiment, place, found, ending(found))
