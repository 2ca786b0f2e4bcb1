"""Several seeds and several values: a grid of cells, run where they are missing, and looked at together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from feddbe import api, paths
from feddbe.callbacks.base import Watch
from feddbe.callbacks.display import progress
from feddbe.config.options import Several, given, several
from feddbe.data.dataset import Dataset
from feddbe.data.registry import in_memory
from feddbe.errors import BadInput, Diverged
from feddbe.methods.base import Method
from feddbe.methods.registry import spelled
from feddbe.models.registry import ModelSource
from feddbe.paths import expand
from feddbe.reporting.run import Run, Runs, Sweep
from feddbe.results.document import RunDocument
from feddbe.runs import folders
from feddbe.runs.store import Store
from feddbe.studies import runner
from feddbe.studies.runner import Board, Planned
from feddbe.studies.spec import Cell, grid
from feddbe.studies.tune import VALIDATION

_NOT_OF_A_CELL = ("out", "resume", "json", "quiet")


def compare(
    methods: Sequence[str | Method] = (),
    *,
    data: Any = None,
    model: ModelSource | None = None,
    watch: Watch | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
    **options: Any,
) -> Runs:
    """Run several methods on the same data, split, model and seed, one folder each in a common one.

    `seeds` (how many, or a list) runs each with these seeds; a list of values (`lr=[0.01, 0.1]`, or in a
    method's brackets) with each of them, and a `Sweep` is returned, which has the ones that were chosen on
    validation data. Then what is in the folder `out` already is not run again, and runs go side by side. The
    document of one that diverged says so in `diverged`. `code` and `trust`: as in `run`.
    """
    dataset = in_memory(data)
    source = data if dataset is None else dataset
    names = [one if isinstance(one, str) else spelled(one) for one in methods]
    told = {
        "data": dataset.name if dataset else data if isinstance(data, list) else data and str(data),
        "model": model if isinstance(model, str | list) else None,
    }
    wanted = several(given(names, options | told))
    if wanted is None:
        return api.compare(names, data=source, model=model, watch=watch, code=code, trust=trust, **options)
    if watch is not None:
        raise BadInput("watch: several seeds or values run side by side, which nobody can watch as one run")
    plans = plan(validated(wanted), dataset=dataset, model=None if told["model"] else model)
    with progress(quiet=wanted.options.get("quiet") is True) as shown:
        documents = found(*carry_out(plans, _Counted(plans, shown)))
    return (Sweep if wanted.grid else Runs)(Run(document) for document in documents)


class _Counted(Board):
    """Shows how many of the runs are done."""

    def __init__(self, plans: Sequence[Planned], shown: Watch) -> None:
        self._shown, self._done = shown, 0
        missing = {planned.place for planned in plans if planned.missing}
        shown.begin(f"{len(missing)} runs", plans[0].place.parent, 0, len(missing))

    def ended(self, planned: Planned, error: Exception | None) -> None:
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
    plans: Sequence[Planned], board: Board | None = None
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
