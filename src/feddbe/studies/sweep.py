"""Sweeps: runs of several methods, values and seeds in one folder."""

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
from feddbe.studies.runner import PlannedRun, RunSpec, expand_grid
from feddbe.studies.tune import VALIDATION

_SWEEP_OPTIONS = ("out", "resume", "json", "quiet")
"""Options of the sweep rather than of its runs."""


class RunCounter(StudyCallback):
    """Progress as the number of finished runs."""

    def __init__(self, plans: Sequence[PlannedRun], callback: Callback) -> None:
        self._callback = callback
        self._done = 0
        missing = {planned.folder for planned in plans if planned.is_missing}
        callback.on_run_begin(f"{len(missing)} runs", plans[0].folder.parent, 0, len(missing))

    def on_run_end(self, folder: Path, error: Exception | None) -> None:
        self._done += 1
        self._callback.on_round_end(self._done, None)


def require_validation(spec: SweepSpec, on_message: Callable[[str], None] = lambda text: None) -> SweepSpec:
    """Return the sweep with validation data, on which values are chosen.

    Args:
        spec: The sweep.
        on_message: Called with a message if the default share is used.
    """
    if not spec.is_grid:
        return spec
    share = spec.options.get("validation")
    if share is None:
        on_message(f"values are chosen on held-out training data: --validation {VALIDATION:g}")
        return dataclasses.replace(spec, options={**spec.options, "validation": VALIDATION})
    if isinstance(share, list) or not share:
        raise InvalidInputError(
            f"validation = {share}; values are never chosen on test data: hold out one share, such as "
            f"--validation {VALIDATION:g}"
        )
    return spec


def expand_sweep(spec: SweepSpec) -> list[RunSpec]:
    """Return all runs of the sweep, by method, value and seed."""
    options = {key: value for key, value in spec.options.items() if key not in (*_SWEEP_OPTIONS, "seed")}
    names = [name for variants in spec.methods for name in variants]
    if len({folders.slug(name) for name in names}) < len(names):
        raise InvalidInputError(f"the same method twice: {', '.join(names)}")
    return expand_grid(names, options, spec.seeds or [0])


def plan_sweep(
    spec: SweepSpec,
    on_message: Callable[[str], None] = lambda text: None,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
) -> list[PlannedRun]:
    """Return the plans of all runs; an invalid run is reported before any run starts."""
    folder = sweep_folder(spec)
    if RunStore.is_run(folder):
        raise InvalidInputError(
            f"'{folder}' contains one run; a sweep needs its own folder, choose another --out"
        )
    if not spec.methods:
        raise InvalidInputError("no method given; name one, as in fedavg+dbe (feddbe methods lists them)")
    plans = runner.plan_runs(expand_sweep(spec), folder, on_message=on_message, dataset=dataset, model=model)
    for planned in plans:
        if planned.experiment is None:
            raise InvalidInputError(planned.skip_reason)
    return plans


def sweep_folder(spec: SweepSpec) -> Path:
    """Return the folder of the sweep: `out`, or a folder that all sweeps of the data share."""
    data = spec.options.get("data") or "digits"
    stem = "several" if isinstance(data, list) else Path(str(data)).stem.split("(")[0]
    return expand_path(spec.options.get("out") or str(paths.RUNS_DIR / f"study-{stem}"))


def run_sweep(
    plans: Sequence[PlannedRun], callback: StudyCallback | None = None
) -> tuple[list[PlannedRun], dict[Path, Exception]]:
    """Run what is missing.

    Returns:
        The refreshed plans, and by folder the errors of failed runs, except divergence.
    """
    errors = runner.run_missing(plans, callback)
    failures: dict[Path, Exception] = {
        folder: error for folder, error in errors.items() if not isinstance(error, DivergenceError)
    }
    return runner.refresh_plans(plans), failures


def sweep_documents(plans: Sequence[PlannedRun], failures: dict[Path, Exception]) -> list[RunDocument]:
    """Return the documents of all runs; raise the first failure."""
    for error in failures.values():
        raise error
    return [planned.document for planned in plans if planned.document]
