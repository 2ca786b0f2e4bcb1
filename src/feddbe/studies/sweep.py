"""Sweeps and comparisons: runs of several methods, values and seeds in one folder, and their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from feddbe import paths
from feddbe.callbacks.base import StudyCallback
from feddbe.config.options import RawOptions, SweepSpec
from feddbe.data.dataset import Dataset
from feddbe.errors import DivergenceError, InvalidInputError
from feddbe.models.registry import ModelSource
from feddbe.paths import expand_path
from feddbe.results.document import RunDocument
from feddbe.runs import folders
from feddbe.runs.store import RunStore
from feddbe.studies import runner
from feddbe.studies.runner import PlannedRun, RunSpec, expand_grid
from feddbe.studies.study_record import (
    RECORD_FILE,
    Purpose,
    StudyRecord,
    StudyRun,
    as_study_run,
    check_name,
    save_record,
)
from feddbe.studies.tune import VALIDATION

_SWEEP_OPTIONS = ("out", "resume", "json", "quiet")
"""Options of the sweep rather than of its runs."""


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
    """Return all runs of the sweep, by method, value, partition and seed."""
    excluded = (*_SWEEP_OPTIONS, "seed", "partition_seed")
    options = {key: value for key, value in spec.options.items() if key not in excluded}
    if spec.partition_seeds:
        options["partition_seed"] = spec.partition_seeds
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
    if spec.study_name is not None:
        check_name(spec.study_name)
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
    _require_different_partitions(plans)
    return plans


def _require_different_partitions(plans: Sequence[PlannedRun]) -> None:
    """Raise an error if the data has one split, which no seed changes: its runs would be counted twice."""
    seeds: dict[Path, set[int]] = {}
    for planned in plans:
        seeds.setdefault(planned.folder, set()).add(planned.spec.options.get("partition_seed", 1))
    for equal_seeds in seeds.values():
        if len(equal_seeds) > 1:
            seeds_text = ", ".join(map(str, sorted(equal_seeds)))
            raise InvalidInputError(
                f"partition_seeds = {seeds_text}; all give the same clients: the data has its own partition. "
                "Leave them out, or choose a --partition"
            )


def sweep_folder(spec: SweepSpec) -> Path:
    """Return the folder of the sweep: `out`, or a folder that all sweeps of the data share."""
    data = spec.options.get("data") or "digits"
    stem = "several" if isinstance(data, list) else Path(str(data)).stem.split("(")[0]
    return expand_path(spec.options.get("out") or str(paths.RUNS_DIR / f"study-{stem}"))


def record_sweep(spec: SweepSpec, plans: Sequence[PlannedRun]) -> Path:
    """Write the record of the study and return its folder; the runs need not exist yet."""
    runs = []
    for planned in plans:
        assert planned.experiment
        options = planned.experiment.options
        config_hash = planned.experiment.config_hash
        runs.append(StudyRun(str(planned.folder), config_hash, options.rounds or 0, options.patience))
    purpose = Purpose.SWEEP if spec.is_grid else Purpose.COMPARISON
    share = spec.options.get("validation")
    record = StudyRecord(
        name="",
        purpose=purpose,
        methods=tuple(spec.names),
        options={key: value for key, value in spec.options.items() if key not in _SWEEP_OPTIONS},
        seeds=tuple(spec.seeds or [0]),
        partition_seeds=tuple(spec.partition_seeds),
        baseline=spec.methods[0][0],
        validation=share or None,
        runs=tuple(dict.fromkeys(runs)),
    )
    return save_record(record, sweep_folder(spec), stem=purpose, name=spec.study_name)


def name_folder(raw: RawOptions) -> RawOptions:
    """Return the options of a comparison with one run per method, in which the study's name is its folder.

    With `out`, the runs are there, and the name is only that of the study.
    """
    if raw.name is None:
        return raw
    out = raw.values.get("out") or str(paths.RUNS_DIR / check_name(raw.name))
    return raw._replace(values={**raw.values, "out": out}, name=None)


def record_comparison(raw: RawOptions, documents: Sequence[RunDocument]) -> Path:
    """Write the record of a comparison with one run per method, and return its folder.

    Runs that are resumed without naming methods are recorded only if the folder has a record already.

    Args:
        raw: Methods and options from the user.
        documents: The runs, in subfolders of one folder.
    """
    root = Path(documents[0]["folder"]).parent
    if not raw.names and not (root / RECORD_FILE).is_file():
        return root
    methods = tuple(raw.names) or tuple(document["method"] for document in documents)
    config = documents[0]["config"]
    record = StudyRecord(
        name="",
        purpose=Purpose.COMPARISON,
        methods=methods,
        options={key: value for key, value in raw.values.items() if key not in _SWEEP_OPTIONS},
        seeds=(config["seed"],),
        partition_seeds=(),
        baseline=methods[0],
        validation=config.get("validation") or None,
        runs=tuple(map(as_study_run, documents)),
    )
    return save_record(record, root, name=raw.name)


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
