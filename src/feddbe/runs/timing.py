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

from feddbe.data.split import RaggedArray, Split
from feddbe.methods.base import Method
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import RunStore
from feddbe.simulation import engines, loop
from feddbe.simulation.client import ClientResult, ClientTask, run_client
from feddbe.simulation.engines.base import Broadcasts, ClientStates, peak_memory_mb
from feddbe.state import decode, encode, nbytes
from feddbe.training.task import Task

CLIENTS = 2
PHASES = ("training", "evaluation", "states", "store")
ROUND = 2
"""The one that is measured; the first warms up."""


class Timing(NamedTuple):
    """What was found of both clients together."""

    seconds: dict[int, dict[str, float]]
    """By round (0: the preparation, 3: the call after the last) and phase: `training`, `evaluation` of what
    was received, `states` (made into bytes and back, messages), `store` (kept states read and written)."""
    server: float
    """Seconds of the last round besides: combine, write rows and the server's state."""
    up: int
    """Bytes of the largest upload."""
    kept_bytes: int
    """Bytes of the largest state that a client keeps."""
    split: Split
    """The part of their data."""
    trainers: list[str]
    remarks: list[str]

    def from_results(self, round: int) -> float:
        """Seconds of both clients in this round."""
        return sum(self.seconds[round].values())


def time_clients(experiment: Experiment, batches: int, tested: int) -> Timing:
    """With at most so many batches and test samples of each client."""
    task, options = experiment.task, experiment.options
    sizes = task.split.train.sizes[: task.members]
    middle = np.argsort(sizes, kind="stable")[(task.members - 1) // 2 :][:CLIENTS].tolist()
    split = dataclasses.replace(
        Split.from_arrays(
            [task.split.train[k][: batches * options.batch_size] for k in middle],
            [task.split.test[k][:tested] for k in middle],
        ),
        validation=RaggedArray.from_lists(
            task.split.validation[k][:tested] for k in middle if task.split.validation
        ),
    )
    training = dataclasses.replace(task.training, lr=1e-9)  # takes as long, and does not diverge
    quiet = dataclasses.replace(
        options,
        participation=1.0,
        eval="all",
        eval_after=False,
        patience=None,
        new_clients=0,
        min_replies=None,
    )
    small = dataclasses.replace(
        experiment,
        task=dataclasses.replace(task, split=split, training=training, rounds=ROUND, new_clients=0),
        options=quiet,
    )
    engine = _TimedEngine(small.task, small.method)
    with TemporaryDirectory(prefix="feddbe-") as folder:
        store = RunStore.create(Path(folder), {}, loop.initial_server_state(small))
        try:
            loop.run_experiment(small, store, engine)
            server = store.round_results()[ROUND]["seconds"] - sum(engine.seconds[ROUND].values())
            said = store.meta("trainers") or [], store.meta("remarks") or []
        finally:
            store.close()
    return Timing(engine.seconds, server, engine.up, engine.kept, split, *said)


class _TimedEngine:
    """The serial engine, which does the two halves of a job apart and notes what each takes."""

    def __init__(self, task: Task, method: Method) -> None:
        self.task, self.method = task, method
        self.seconds = defaultdict[int, dict[str, float]](lambda: defaultdict[str, float](float))
        self.up = self.kept = 0

    @contextmanager
    def _clock(self, client_task: ClientTask, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[client_task.round][phase] += time.perf_counter() - began

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        for job in tasks:
            with self._clock(job, "store"):
                kept = states.read(job.client)
            with self._clock(job, "states"):
                message, private = messages.message_for(job.client), None if kept is None else decode(kept)
            reply = ClientResult(job.client)
            if job.evaluate:
                look = dataclasses.replace(job, work="none")
                with self._clock(job, "evaluation"):
                    reply = run_client(self.task, self.method, look, message, private)
            if job.work != "none":
                work = dataclasses.replace(job, evaluate=False)
                with self._clock(job, "training"):
                    done = run_client(self.task, self.method, work, message, private)
                reply = dataclasses.replace(done, metrics=reply.metrics)
            with self._clock(job, "states"):
                new = encode(reply.private) if reply.private else None
                encode(reply.upload)  # as it would travel
            self.up = max(self.up, nbytes(reply.upload))
            if new is not None:
                with self._clock(job, "store"):
                    states.write_pending(job.client, new)
                self.kept = max(self.kept, len(new))
            yield dataclasses.replace(reply, private=None)

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


class ClientCost(TypedDict):
    """Cost of one round for a client of middling size."""

    steps: int
    predictions: int
    milliseconds: dict[str, float]
    """By phase: `training`, `evaluation`, `states` (to bytes and back), `store` (kept states)."""
    bytes_up: int
    bytes_kept: int


class Preview(TypedDict):
    """A run that was not run."""

    method: str
    config_hash: str
    settings: dict[str, dict[str, Any]]
    """Every option and hyper-parameter: its `value`, and where it is `from`."""
    remarks: list[str]
    """With the reason if a faster trainer does not take the model."""
    trainers: list[str]
    estimate: Estimate
    client: ClientCost


def preview_run(experiment: Experiment) -> Preview:
    """What this experiment is, and what it would cost."""
    found = time_clients(experiment, BATCHES, TESTED)
    return {
        "method": experiment.name,
        "config_hash": experiment.config_hash,
        "settings": {k: {"value": s.value, "from": s.origin} for k, s in experiment.settings.items()},
        "remarks": list(dict.fromkeys([*experiment.notes, *found.remarks])),
        "trainers": found.trainers,
        "estimate": estimate_cost(experiment, found),
        "client": _client_cost(experiment, found),
    }


def _client_cost(experiment: Experiment, found: Timing) -> ClientCost:
    """Return the cost of the first probed client's round, extrapolated to all of its data."""
    task, options = experiment.task, experiment.options
    client = sorted(range(task.members), key=lambda k: task.samples[k])[(task.members - 1) // 2]
    size, used = task.samples[client], len(found.split.train[0])
    batches = size // min(options.batch_size, size)
    predictions = (1 + options.eval_after) * len(task.split.test[client])
    seconds = {phase: found.seconds[ROUND].get(phase, 0.0) / CLIENTS for phase in PHASES}
    seconds["training"] *= batches / max(1, used // min(options.batch_size, used))
    seconds["evaluation"] *= predictions / max(1, len(found.split.test[0]))
    return {
        "steps": options.local_epochs * batches,
        "predictions": predictions,
        "milliseconds": {phase: 1000 * taken for phase, taken in seconds.items()},
        "bytes_up": found.up,
        "bytes_kept": found.kept_bytes,
    }


def estimate_cost(experiment: Experiment, found: Timing) -> Estimate:
    """What the run would cost, from what two of its clients did."""
    task, options, method = experiment.task, experiment.options, experiment.method
    probed = _TRAINING * options.local_epochs * len(found.split.train.flat) + len(found.split.test.flat)
    cohort = max(1, round(options.participation * task.members))
    workers = min(engines.find_engine(options.engine).processes(), task.split.clients)
    tested = len(loop.sample_evaluators(options.eval, 0, 1, task.members, range(cohort))) / task.members
    train, test = (int(part.sizes[: task.members].sum()) for part in (task.split.train, task.split.test))
    train, after = _TRAINING * options.local_epochs * train, test * options.eval_after
    unit = found.from_results(2) / probed / max(1, min(workers, cohort))
    each = unit * (options.participation * (train + after) + tested * test) + found.server
    # before the first round and after the last all clients are asked, if they are asked
    first = len(loop.setup_participants(method, task.seed, task.members)) / task.members
    ends = (
        (found.from_results(0) * first + found.from_results(3))
        / found.from_results(2)
        * unit
        * (train + after + test)
    )
    new = sum(task.samples[task.members :])
    count = options.rounds or 0
    model = nbytes(task.model.parameters) + nbytes(task.model.buffers)
    held = workers * (_WORKER_MB * 1e6 + 3 * model) + cohort * found.up + 2 * model
    data = task.dataset.x.numel() * task.dataset.x.element_size()
    return {
        "seconds": count * each + ends + unit * _TRAINING * sum(range(options.adapt_epochs + 1)) * new,
        "seconds_per_round": each,
        "memory_mb": max(peak_memory_mb(), _PROGRAM_MB + data / 1e6) + held / 1e6,
        "workers": workers,
    }
