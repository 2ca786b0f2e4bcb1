"""What a run would be, and about what it would cost: its settings with their origins, time and memory.

The time is that of a few batches of two of its clients in two rounds of the method itself, scaled by the
samples that pass through the model. Nothing is left behind.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from feddbe import engines
from feddbe.data.ragged import Ragged
from feddbe.data.split import Split
from feddbe.engines import ClientStates, Messages, Serial
from feddbe.engines.client import Job, Reply
from feddbe.measures.memory import used_mb
from feddbe.methods import Method
from feddbe.runs import rounds, schedule
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import Store
from feddbe.state import nbytes
from feddbe.training.task import Task

__all__ = ["Estimate", "Preview", "preview"]

_BATCHES, _TESTED = 5, 100
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
        "estimate": _estimate(experiment),
    }


def _estimate(experiment: Experiment) -> Estimate:
    task, options, method = experiment.task, experiment.options, experiment.method
    seconds, server, up, probed = _probe(experiment)
    cohort = max(1, round(options.join * task.members))
    workers = min(engines.find(options.engine).processes(), task.split.clients)
    tested = len(schedule.who_evaluates(options.eval, 0, 1, task.members, range(cohort))) / task.members
    train, test = (int(part.sizes[: task.members].sum()) for part in (task.split.train, task.split.test))
    train, after = _TRAINING * options.epochs * train, test * options.eval_after
    unit = seconds[2] / probed / max(1, min(workers, cohort))
    each = unit * (options.join * (train + after) + tested * test) + server
    # before the first round and after the last all clients are asked, if they are asked
    ends = (seconds[0] * method.prepares + seconds[3]) / seconds[2] * unit * (train + after + test)
    new = sum(task.samples[task.members :])
    count = options.rounds or 0
    model = nbytes(task.model.parameters) + nbytes(task.model.buffers)
    held = workers * (_WORKER_MB * 1e6 + 3 * model) + cohort * up + 2 * model
    data = task.dataset.x.numel() * task.dataset.x.element_size()
    return {
        "seconds": count * each + ends + unit * _TRAINING * sum(range(options.adapt_epochs + 1)) * new,
        "seconds_per_round": each,
        "memory_mb": max(used_mb(), _PROGRAM_MB + data / 1e6) + held / 1e6,
        "workers": workers,
    }


def _probe(experiment: Experiment) -> tuple[dict[int, float], float, int, float]:
    """Two rounds of two clients of middling size with a few batches each: the clients' seconds by round (the
    call after the last is round 3), the server's in the last, bytes of an upload, predictions in a round."""
    task, options = experiment.task, experiment.options
    middle = sorted(range(task.members), key=lambda k: task.samples[k])[(task.members - 1) // 2 :][:2]
    split = dataclasses.replace(
        Split.of(
            [task.split.train[k][: _BATCHES * options.batch] for k in middle],
            [task.split.test[k][:_TESTED] for k in middle],
        ),
        validation=Ragged.of(task.split.validation[k][:_TESTED] for k in middle if task.split.validation),
    )
    training = dataclasses.replace(task.training, lr=1e-9)  # takes as long, and does not diverge
    small = dataclasses.replace(
        experiment,
        task=dataclasses.replace(task, split=split, training=training, rounds=2, newcomers=0),
        options=dataclasses.replace(options, join=1.0, eval="all", patience=None, newcomers=0),
    )
    engine = _Timed(small.task, small.method)
    with TemporaryDirectory(prefix="feddbe-") as folder:
        store = Store.create(Path(folder), {}, rounds.start(small))
        try:
            rounds.run(small, store, engine)
            server = store.entries()[2]["seconds"] - engine.seconds[2]
        finally:
            store.close()
    train, test = len(split.train.flat), len(split.test.flat)
    passes = _TRAINING * options.epochs * train + (1 + options.eval_after) * test
    return engine.seconds, server, engine.up, passes


class _Timed(Serial):
    """The serial engine, which notes what clients take in each round, and the largest upload."""

    def __init__(self, task: Task, method: Method) -> None:
        super().__init__(task, method)
        self.seconds, self.up = defaultdict[int, float](float), 0

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply]:
        for job in jobs:
            began = time.perf_counter()
            (reply,) = super().run([job], messages, states)
            self.seconds[job.round] += time.perf_counter() - began
            self.up = max(self.up, nbytes(reply.up))
            yield reply
