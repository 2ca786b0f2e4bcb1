"""Several seeds and several values: a grid of cells, run where they are missing, and looked at together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from feddbe import paths
from feddbe.callbacks.base import Callback, StudyCallback
from feddbe.config.options import SweepSpec
from feddbe.data.dataset import Dataset
from feddbe.errors import DivergenceError, InvalidInputError
from feddbe.models.registry import ModelSource
from feddbe.paths import expand_path
from feddbe.results.document import RunDocument
from feddbe.runs import folders
from feddbe.runs.store import RunStore
from feddbe.studies import runner
from feddbe.studies.runner import PlannedRun, RunSpec, run_grid
from feddbe.studies.tune import VALIDATION

_NOT_OF_A_CELL = ("out", "resume", "json", "quiet")


class RunCounter(StudyCallback):
    """Progress as the number of runs that are done."""

    def __init__(self, plans: Sequence[PlannedRun], shown: Callback) -> None:
        self._shown, self._done = shown, 0
        missing = {planned.folder for planned in plans if planned.is_missing}
        shown.on_run_begin(f"{len(missing)} runs", plans[0].folder.parent, 0, len(missing))

    def on_run_end(self, folder: Path, error: Exception | None) -> None:
        self._done += 1
        self._shown.on_round_end(self._done, None)


def with_validation(spec: SweepSpec, remark: Callable[[str], None] = lambda text: None) -> SweepSpec:
    """A choice among values is made on data that is held out for it; `remark` is told if none was given."""
    if not spec.is_grid:
        return spec
    share = spec.options.get("validation")
    if share is None:
        remark(f"values are chosen on a share of the training data, held out: --validation {VALIDATION:g}")
        return dataclasses.replace(spec, options={**spec.options, "validation": VALIDATION})
    if isinstance(share, list) or not share:
        raise InvalidInputError(
            f"validation = {share}; values are never chosen on test data: hold out one share, such as "
            f"--validation {VALIDATION:g}"
        )
    return spec


def sweep_specs(spec: SweepSpec) -> list[RunSpec]:
    """All runs that are wanted, by method, value and seed."""
    options = {key: value for key, value in spec.options.items() if key not in (*_NOT_OF_A_CELL, "seed")}
    names = [name for variants in spec.methods for name in variants]
    if len({folders.slug(name) for name in names}) < len(names):
        raise InvalidInputError(f"the same method twice: {', '.join(names)}")
    return run_grid(names, options, spec.seeds or [0])


def plan_sweep(
    spec: SweepSpec,
    remark: Callable[[str], None] = lambda text: None,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
) -> list[PlannedRun]:
    """What there is of a study in its folder, and what is missing; a mistake is found before a run begins."""
    folder = sweep_folder(spec)
    if RunStore.is_run(folder):
        raise InvalidInputError(
            f"'{folder}' holds one run; several need a folder of their own, choose another --out"
        )
    if not spec.methods:
        raise InvalidInputError("no method given; name one, as in fedavg+dbe (feddbe methods lists them)")
    plans = runner.plan_runs(sweep_specs(spec), folder, remark=remark, dataset=dataset, model=model)
    for planned in plans:
        if planned.experiment is None:
            raise InvalidInputError(planned.skip_reason)
    return plans


def sweep_folder(spec: SweepSpec) -> Path:
    """The folder of a study: `out`, or one for all studies of the data, where their runs are found again."""
    data = spec.options.get("data") or "digits"
    stem = "several" if isinstance(data, list) else Path(str(data)).stem.split("(")[0]
    return expand_path(spec.options.get("out") or str(paths.RUNS_DIR / f"study-{stem}"))


def run_sweep(
    plans: Sequence[PlannedRun], board: StudyCallback | None = None
) -> tuple[list[PlannedRun], dict[Path, Exception]]:
    """Run what is missing; the plans with what there is then, and why others failed than by diverging."""
    failed = runner.run_missing(plans, board)
    others: dict[Path, Exception] = {p: e for p, e in failed.items() if not isinstance(e, DivergenceError)}
    return runner.refresh_plans(plans), others


def sweep_documents(plans: Sequence[PlannedRun], failed: dict[Path, Exception]) -> list[RunDocument]:
    """The documents of all cells, if none failed."""
    for error in failed.values():
        raise error
    return [planned.document for planned in plans if planned.document]
