"""Several seeds and several values: a grid of cells, run where they are missing, and looked at together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from feddbe import paths
from feddbe.callbacks.base import StudyCallback, Watch
from feddbe.config.options import Several
from feddbe.data.dataset import Dataset
from feddbe.errors import BadInput, Diverged
from feddbe.models.registry import ModelSource
from feddbe.paths import expand
from feddbe.results.document import RunDocument
from feddbe.runs import folders
from feddbe.runs.store import Store
from feddbe.studies import runner
from feddbe.studies.runner import Cell, Planned, grid
from feddbe.studies.tune import VALIDATION

_NOT_OF_A_CELL = ("out", "resume", "json", "quiet")


class RunCounter(StudyCallback):
    """Progress as the number of runs that are done."""

    def __init__(self, plans: Sequence[Planned], shown: Watch) -> None:
        self._shown, self._done = shown, 0
        missing = {planned.place for planned in plans if planned.missing}
        shown.begin(f"{len(missing)} runs", plans[0].place.parent, 0, len(missing))

    def ended(self, folder: Path, error: Exception | None) -> None:
        self._done += 1
        self._shown.round(self._done, None)


def validated(wanted: Several, remark: Callable[[str], None] = lambda text: None) -> Several:
    """A choice among values is made on data that is held out for it; `remark` is told if none was given."""
    if not wanted.grid:
        return wanted
    share = wanted.options.get("validation")
    if share is None:
        remark(f"values are chosen on a share of the training data, held out: --validation {VALIDATION:g}")
        return dataclasses.replace(wanted, options={**wanted.options, "validation": VALIDATION})
    if isinstance(share, list) or not share:
        raise BadInput(
            f"validation = {share}; values are never chosen on test data: hold out one share, such as "
            f"--validation {VALIDATION:g}"
        )
    return wanted


def cells(wanted: Several) -> list[Cell]:
    """All runs that are wanted, by method, value and seed."""
    options = {key: value for key, value in wanted.options.items() if key not in (*_NOT_OF_A_CELL, "seed")}
    names = [name for variants in wanted.methods for name in variants]
    if len({folders.slug(name) for name in names}) < len(names):
        raise BadInput(f"the same method twice: {', '.join(names)}")
    return grid(names, options, wanted.seeds or [0])


def plan(
    wanted: Several,
    remark: Callable[[str], None] = lambda text: None,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
) -> list[Planned]:
    """What there is of a study in its folder, and what is missing; a mistake is found before a run begins."""
    folder = place(wanted)
    if Store.is_run(folder):
        raise BadInput(f"'{folder}' holds one run; several need a folder of their own, choose another --out")
    if not wanted.methods:
        raise BadInput("no method given; name one, as in fedavg+dbe (feddbe methods lists them)")
    plans = runner.plan(cells(wanted), folder, remark=remark, dataset=dataset, model=model)
    for planned in plans:
        if planned.experiment is None:
            raise BadInput(planned.refused)
    return plans


def place(wanted: Several) -> Path:
    """The folder of a study: `out`, or one for all studies of the data, where their runs are found again."""
    data = wanted.options.get("data") or "digits"
    stem = "several" if isinstance(data, list) else Path(str(data)).stem.split("(")[0]
    return expand(wanted.options.get("out") or str(paths.RUNS / f"study-{stem}"))


def carry_out(
    plans: Sequence[Planned], board: StudyCallback | None = None
) -> tuple[list[Planned], dict[Path, Exception]]:
    """Run what is missing; the plans with what there is then, and why others failed than by diverging."""
    failed = runner.run(plans, board)
    others: dict[Path, Exception] = {p: e for p, e in failed.items() if not isinstance(e, Diverged)}
    return runner.refresh(plans), others


def found(plans: Sequence[Planned], failed: dict[Path, Exception]) -> list[RunDocument]:
    """The documents of all cells, if none failed."""
    for error in failed.values():
        raise error
    return [planned.found for planned in plans if planned.found]
