"""What a run would be, and about what it would cost: its settings with their origins, time and memory.

The time is that of a few batches of two of its clients (`probe.py`), scaled by the samples that pass through
the model.
"""

from __future__ import annotations

from typing import Any, TypedDict

from feddbe import engines
from feddbe.measures.memory import used_mb
from feddbe.runs import schedule
from feddbe.runs.experiment import Experiment
from feddbe.runs.probe import Probe, probe
from feddbe.state import nbytes

__all__ = ["Estimate", "Preview", "estimate", "preview"]

BATCHES, TESTED = 5, 100
"""What each of the two clients trains on and is tested with."""
_TRAINING = 3
"""Training on a sample costs about so many predictions."""
_PROGRAM_MB, _WORKER_MB = 300, 70
"""What the program needs without data, and each worker process of its own; measured."""


class Estimate(TypedDict):
    """Rough: the first rounds of a run tell more."""

    seconds: float
    seconds_per_round: float
    memory_mb: float
    workers: int
    """Processes that clients are trained in; 0: the one that runs everything."""


class Preview(TypedDict):
    """A run that was not run."""

    method: str
    config_hash: str
    settings: dict[str, dict[str, Any]]
    """Every option and hyper-parameter: its `value`, and where it is `from`."""
    remarks: list[str]
    estimate: Estimate


def preview(experiment: Experiment) -> Preview:
    """What this experiment is, and what it would cost."""
    return {
        "method": experiment.name,
        "config_hash": experiment.config_hash,
        "settings": {k: {"value": s.value, "from": s.origin} for k, s in experiment.settings.items()},
        "remarks": experiment.remarks,
        "estimate": estimate(experiment, probe(experiment, BATCHES, TESTED)),
    }


def estimate(experiment: Experiment, found: Probe) -> Estimate:
    """What the run would cost, from what two of its clients did."""
    task, options, method = experiment.task, experiment.options, experiment.method
    probed = _TRAINING * options.epochs * len(found.split.train.flat) + len(found.split.test.flat)
    cohort = max(1, round(options.join * task.members))
    workers = min(engines.find(options.engine).processes(), task.split.clients)
    tested = len(schedule.who_evaluates(options.eval, 0, 1, task.members, range(cohort))) / task.members
    train, test = (int(part.sizes[: task.members].sum()) for part in (task.split.train, task.split.test))
    train, after = _TRAINING * options.epochs * train, test * options.eval_after
    unit = found.of(2) / probed / max(1, min(workers, cohort))
    each = unit * (options.join * (train + after) + tested * test) + found.server
    # before the first round and after the last all clients are asked, if they are asked
    first = len(schedule.who_prepares(method, task.seed, task.members)) / task.members
    ends = (found.of(0) * first + found.of(3)) / found.of(2) * unit * (train + after + test)
    new = sum(task.samples[task.members :])
    count = options.rounds or 0
    model = nbytes(task.model.parameters) + nbytes(task.model.buffers)
    held = workers * (_WORKER_MB * 1e6 + 3 * model) + cohort * found.up + 2 * model
    data = task.dataset.x.numel() * task.dataset.x.element_size()
    return {
        "seconds": count * each + ends + unit * _TRAINING * sum(range(options.adapt_epochs + 1)) * new,
        "seconds_per_round": each,
        "memory_mb": max(used_mb(), _PROGRAM_MB + data / 1e6) + held / 1e6,
        "workers": workers,
    }
