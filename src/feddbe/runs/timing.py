"""What clients of an experiment take: two of them, of middling size, in two rounds of the method itself with
a part of their data. Nothing is left behind."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypedDict

import numpy as np

from feddbe.data.split import Ragged, Split
from feddbe.methods.base import Method
from feddbe.metrics.memory import used_mb
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import Store
from feddbe.simulation import engines, loop, participation
from feddbe.simulation.client import Job, Reply, perform
from feddbe.simulation.engines.base import ClientStates, Messages
from feddbe.state import decode, encode, nbytes
from feddbe.training.task import Task

__all__ = ["CLIENTS", "Bench", "Estimate", "Preview", "Probe", "bench", "estimate", "preview", "probe"]

CLIENTS = 2
ROUND = 2
"""The one that is measured; the first warms up."""


class Probe(NamedTuple):
    """What was found of both clients together."""

    seconds: dict[int, dict[str, float]]
    """By round (0: the preparation, 3: the call after the last) and phase: `training`, `evaluation` of what
    was received, `states` (made into bytes and back, messages), `store` (kept states read and written)."""
    server: float
    """Seconds of the last round besides: combine, write rows and the server's state."""
    up: int
    """Bytes of the largest upload."""
    kept: int
    """Bytes of the largest state that a client keeps."""
    split: Split
    """The part of their data."""
    trainers: list[str]
    remarks: list[str]

    def of(self, round: int) -> float:
        """Seconds of both clients in this round."""
        return sum(self.seconds[round].values())


def probe(experiment: Experiment, batches: int, tested: int) -> Probe:
    """With at most so many batches and test samples of each client."""
    task, options = experiment.task, experiment.options
    sizes = task.split.train.sizes[: task.members]
    middle = np.argsort(sizes, kind="stable")[(task.members - 1) // 2 :][:CLIENTS].tolist()
    split = dataclasses.replace(
        Split.of(
            [task.split.train[k][: batches * options.batch] for k in middle],
            [task.split.test[k][:tested] for k in middle],
        ),
        validation=Ragged.of(task.split.validation[k][:tested] for k in middle if task.split.validation),
    )
    training = dataclasses.replace(task.training, lr=1e-9)  # takes as long, and does not diverge
    quiet = dataclasses.replace(
        options, join=1.0, eval="all", eval_after=False, patience=None, newcomers=0, min_replies=None
    )
    small = dataclasses.replace(
        experiment,
        task=dataclasses.replace(task, split=split, training=training, rounds=ROUND, newcomers=0),
        options=quiet,
    )
    engine = _Timed(small.task, small.method)
    with TemporaryDirectory(prefix="feddbe-") as folder:
        store = Store.create(Path(folder), {}, loop.initial_server_state(small))
        try:
            loop.run_experiment(small, store, engine)
            server = store.entries()[ROUND]["seconds"] - sum(engine.seconds[ROUND].values())
            said = store.meta("trainers") or [], store.meta("remarks") or []
        finally:
            store.close()
    return Probe(engine.seconds, server, engine.up, engine.kept, split, *said)


class _Timed:
    """The serial engine, which does the two halves of a job apart and notes what each takes."""

    def __init__(self, task: Task, method: Method) -> None:
        self.task, self.method = task, method
        self.seconds = defaultdict[int, dict[str, float]](lambda: defaultdict[str, float](float))
        self.up = self.kept = 0

    @contextmanager
    def _clock(self, job: Job, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[job.round][phase] += time.perf_counter() - began

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply]:
        for job in jobs:
            with self._clock(job, "store"):
                kept = states.read(job.client)
            with self._clock(job, "states"):
                message, private = messages.to(job.client), None if kept is None else decode(kept)
            reply = Reply(job.client)
            if job.evaluate:
                look = dataclasses.replace(job, work="none")
                with self._clock(job, "evaluation"):
                    reply = perform(self.task, self.method, look, message, private)
            if job.work != "none":
                work = dataclasses.replace(job, evaluate=False)
                with self._clock(job, "training"):
                    done = perform(self.task, self.method, work, message, private)
                reply = done._replace(measured=reply.measured)
            with self._clock(job, "states"):
                new = encode(reply.private) if reply.private else None
                encode(reply.up)  # as it would travel
            self.up = max(self.up, nbytes(reply.up))
            if new is not None:
                with self._clock(job, "store"):
                    states.stage(job.client, new)
                self.kept = max(self.kept, len(new))
            yield reply._replace(private=None)

    def close(self) -> None:
        pass


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
    tested = len(participation.who_evaluates(options.eval, 0, 1, task.members, range(cohort))) / task.members
    train, test = (int(part.sizes[: task.members].sum()) for part in (task.split.train, task.split.test))
    train, after = _TRAINING * options.epochs * train, test * options.eval_after
    unit = found.of(2) / probed / max(1, min(workers, cohort))
    each = unit * (options.join * (train + after) + tested * test) + found.server
    # before the first round and after the last all clients are asked, if they are asked
    first = len(participation.who_prepares(method, task.seed, task.members)) / task.members
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


_BATCHES, _TESTED = 50, 1000


class Bench(TypedDict):
    """What a client of middling size takes in a round."""

    method: str
    model: str
    parameters: int
    trainers: list[str]
    """Who trained."""
    remarks: list[str]
    """Why it was not another one, and what else a reader must know."""
    engine: str
    """What `auto` stands for here."""
    steps: int
    """Of the client's training in a round."""
    tested: int
    """Samples that it predicts in a round."""
    milliseconds: dict[str, float]
    """Its `training`, `evaluation`, `states` (made into bytes and back), `store` (what it keeps is read and
    written)."""
    server: float
    """Milliseconds of the server in a round of two clients: combine, write rows and its own state."""
    bytes: dict[str, int]
    """`up`: what it sends; `kept`: what stays with it."""
    estimate: Estimate


def bench(experiment: Experiment) -> Bench:
    """Measured with a part of the data, told for all of it."""
    task, options = experiment.task, experiment.options
    found = probe(experiment, _BATCHES, _TESTED)
    middle = sorted(range(task.members), key=lambda k: task.samples[k])[(task.members - 1) // 2]
    size, tests = task.samples[middle], len(task.split.test[middle])
    used, batch = len(found.split.train[0]), min(options.batch, size)
    seconds = {phase: taken / CLIENTS for phase, taken in found.seconds[ROUND].items()}
    seconds["training"] *= (size // batch) / max(1, used // min(options.batch, used))
    seconds["evaluation"] *= (1 + options.eval_after) * tests / max(1, len(found.split.test[0]))
    workers = min(engines.find(options.engine).processes(), task.split.clients)
    return {
        "method": experiment.name,
        "model": str(options.model),
        "parameters": sum(p.numel() for p in task.model.parameters.values()),
        "trainers": found.trainers,
        "remarks": [*experiment.remarks, *found.remarks],
        "engine": f"pool(workers={workers})" if workers > 1 else "serial",
        "steps": options.epochs * (size // batch),
        "tested": (1 + options.eval_after) * tests,
        "milliseconds": {phase: 1000 * taken for phase, taken in seconds.items()},
        "server": 1000 * found.server,
        "bytes": {"up": found.up, "kept": found.kept},
        "estimate": estimate(experiment, found),
    }
