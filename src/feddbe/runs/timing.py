"""Timing of an experiment without running it, for `--dry-run`.

Two clients of median size run two rounds of the method with a part of their data, in a temporary folder.
"""

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
from feddbe.errors import InvalidInputError
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
"""The timed round; the first warms up."""


class Timing(NamedTuple):
    """Measured cost of the two clients together."""

    seconds: dict[int, dict[str, float]]
    """Seconds by round (0: the setup, 3: the call after the last round) and phase: `training`, `evaluation`
    of the received model, `states` (encoding, messages), `store` (private states read and written)."""
    server_seconds: float
    """Seconds of the server in the last round: aggregation, records and the server's state."""
    upload_bytes: int
    """Bytes of the largest upload."""
    kept_bytes: int
    """Bytes of the largest private state."""
    split: Split
    """The part of the clients' data that was used."""
    trainers: list[str]
    remarks: list[str]

    def round_seconds(self, round_: int) -> float:
        """Return the seconds of both clients in this round."""
        return sum(self.seconds[round_].values())


def time_clients(experiment: Experiment, batches: int, test_samples: int) -> Timing:
    """Run two rounds of two clients and return their timing.

    Args:
        experiment: The experiment to be timed.
        batches: Maximum number of training batches per client.
        test_samples: Maximum number of test samples per client.
    """
    task = experiment.task
    options = experiment.options
    sizes = task.split.train.sizes[: task.members]
    clients = np.argsort(sizes, kind="stable")[(task.members - 1) // 2 :][:CLIENTS].tolist()
    split = dataclasses.replace(
        Split.from_arrays(
            [task.split.train[client][: batches * options.batch_size] for client in clients],
            [task.split.test[client][:test_samples] for client in clients],
        ),
        validation=RaggedArray.from_lists(
            task.split.validation[client][:test_samples] for client in clients if task.split.validation
        ),
    )
    training = dataclasses.replace(task.training, lr=1e-9)  # as slow as any rate, and does not diverge
    small = dataclasses.replace(
        experiment,
        task=dataclasses.replace(task, split=split, training=training, rounds=ROUND, new_clients=0),
        options=dataclasses.replace(
            options,
            participation=1.0,
            eval="all",
            eval_after=False,
            patience=None,
            new_clients=0,
            min_replies=None,
        ),
    )
    engine = _TimedEngine(small.task, small.method)
    with TemporaryDirectory(prefix="feddbe-") as folder:
        store = RunStore.create(Path(folder), {}, loop.initial_server_state(small))
        try:
            loop.run_experiment(small, store, engine)
            round_seconds = store.round_results()[ROUND]["seconds"]
            trainers = store.meta("trainers") or []
            remarks = store.meta("remarks") or []
        finally:
            store.close()
    return Timing(
        seconds=engine.seconds,
        server_seconds=round_seconds - sum(engine.seconds[ROUND].values()),
        upload_bytes=engine.upload_bytes,
        kept_bytes=engine.kept_bytes,
        split=split,
        trainers=trainers,
        remarks=remarks,
    )


class _TimedEngine:
    """A serial engine that runs and times evaluation and training of each task separately."""

    def __init__(self, task: Task, method: Method) -> None:
        self.task = task
        self.method = method
        self.seconds = defaultdict[int, dict[str, float]](lambda: defaultdict[str, float](float))
        self.upload_bytes = 0
        self.kept_bytes = 0

    @contextmanager
    def _time(self, client_task: ClientTask, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[client_task.round][phase] += time.perf_counter() - started

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        for task in tasks:
            with self._time(task, "store"):
                stored = states.read(task.client)
            with self._time(task, "states"):
                message = messages.message_for(task.client)
                private = None if stored is None else decode(stored)
            result = ClientResult(task.client)
            if task.evaluate:
                evaluation = dataclasses.replace(task, work="none")
                with self._time(task, "evaluation"):
                    result = run_client(self.task, self.method, evaluation, message, private)
            if task.work != "none":
                training = dataclasses.replace(task, evaluate=False)
                with self._time(task, "training"):
                    trained = run_client(self.task, self.method, training, message, private)
                result = dataclasses.replace(trained, metrics=result.metrics)
            with self._time(task, "states"):
                new_state = encode(result.private) if result.private else None
                encode(result.upload)  # as it would be sent
            self.upload_bytes = max(self.upload_bytes, nbytes(result.upload))
            if new_state is not None:
                with self._time(task, "store"):
                    states.write_pending(task.client, new_state)
                self.kept_bytes = max(self.kept_bytes, len(new_state))
            yield dataclasses.replace(result, private=None)

    def close(self) -> None:
        pass


BATCHES = 5
TEST_SAMPLES = 100
_TRAINING_COST = 3
"""Cost of training on a sample, in predictions; approximate."""
_PROGRAM_MB = 300
"""Memory of the program without data; measured."""
_WORKER_MB = 70
"""Memory of each worker process; measured."""


class Estimate(TypedDict):
    """Rough estimate of a run; its first rounds are more accurate."""

    seconds: float
    seconds_per_round: float
    memory_mb: float
    workers: int
    """Number of worker processes; 0: clients run in the main process."""


class ClientCost(TypedDict):
    """Cost of one round for a client of median size."""

    steps: int
    predictions: int
    milliseconds: dict[str, float]
    """By phase: `training`, `evaluation`, `states` (encoding and decoding), `store` (private states)."""
    bytes_up: int
    bytes_kept: int


class Preview(TypedDict):
    """Resolved settings and estimated cost of a run that was not started."""

    method: str
    config_hash: str
    settings: dict[str, dict[str, Any]]
    """`value` of every option and hyperparameter, and its origin as `from`."""
    remarks: list[str]
    """Notes, including the reason if a faster training backend was rejected."""
    trainers: list[str]
    estimate: Estimate
    client: ClientCost


def preview_run(experiment: Experiment) -> Preview:
    """Return the settings of the experiment and its estimated cost; nothing is run to its end or kept."""
    if experiment.task.dataset.remote:
        raise InvalidInputError(f"--dry-run: '{experiment.config['data']}' has no rows here to time a client")
    timing = time_clients(experiment, BATCHES, TEST_SAMPLES)
    settings = {
        key: {"value": setting.value, "from": setting.origin} for key, setting in experiment.settings.items()
    }
    return {
        "method": experiment.name,
        "config_hash": experiment.config_hash,
        "settings": settings,
        "remarks": list(dict.fromkeys([*experiment.notes, *timing.remarks])),
        "trainers": timing.trainers,
        "estimate": estimate_cost(experiment, timing),
        "client": _client_cost(experiment, timing),
    }


def _client_cost(experiment: Experiment, timing: Timing) -> ClientCost:
    """Return the cost of a round of the first timed client, extrapolated to all of its data."""
    task = experiment.task
    options = experiment.options
    client = sorted(range(task.members), key=lambda k: task.samples[k])[(task.members - 1) // 2]
    size = task.samples[client]
    timed_size = len(timing.split.train[0])
    batches = size // min(options.batch_size, size)
    timed_batches = timed_size // min(options.batch_size, timed_size)
    predictions = (1 + options.eval_after) * len(task.split.test[client])
    seconds = {phase: timing.seconds[ROUND].get(phase, 0.0) / CLIENTS for phase in PHASES}
    seconds["training"] *= batches / max(1, timed_batches)
    seconds["evaluation"] *= predictions / max(1, len(timing.split.test[0]))
    return {
        "steps": options.local_epochs * batches,
        "predictions": predictions,
        "milliseconds": {phase: 1000 * value for phase, value in seconds.items()},
        "bytes_up": timing.upload_bytes,
        "bytes_kept": timing.kept_bytes,
    }


def estimate_cost(experiment: Experiment, timing: Timing) -> Estimate:
    """Return the estimated time and memory of the run, extrapolated from two of its clients.

    Work is counted in predictions; training on a sample costs `_TRAINING_COST` of them.
    """
    task = experiment.task
    options = experiment.options
    cohort_size = max(1, round(options.participation * task.members))
    workers = min(engines.find_engine(options.engine).processes(), task.split.clients)
    evaluators = loop.sample_evaluators(options.eval, 0, 1, task.members, range(cohort_size))
    evaluated_share = len(evaluators) / task.members

    # 1. Seconds per prediction, from the timed clients.
    timed_work = _TRAINING_COST * options.local_epochs * len(timing.split.train.flat)
    timed_work += len(timing.split.test.flat)
    parallel = max(1, min(workers, cohort_size))
    seconds_per_prediction = timing.round_seconds(ROUND) / timed_work / parallel

    # 2. A round: the cohort trains, the evaluators predict.
    train_samples = int(task.split.train.sizes[: task.members].sum())
    evaluation = int(task.split.test.sizes[: task.members].sum())
    training = _TRAINING_COST * options.local_epochs * train_samples
    evaluation_after = evaluation * options.eval_after
    round_work = options.participation * (training + evaluation_after) + evaluated_share * evaluation
    seconds_per_round = seconds_per_prediction * round_work + timing.server_seconds

    # 3. The setup before the first round and the evaluation after the last.
    setup_clients = loop.setup_participants(experiment.method, task.seed, task.members)
    setup_share = len(setup_clients) / task.members
    relative_cost = timing.round_seconds(0) * setup_share + timing.round_seconds(ROUND + 1)
    relative_cost /= timing.round_seconds(ROUND)
    end_seconds = relative_cost * seconds_per_prediction * (training + evaluation_after + evaluation)

    # 4. New clients, which are evaluated after each epoch of adaptation.
    new_samples = sum(task.samples[task.members :])
    adaptation = _TRAINING_COST * sum(range(options.adapt_epochs + 1)) * new_samples

    model_bytes = nbytes(task.model.parameters) + nbytes(task.model.buffers)
    data_bytes = task.dataset.x.numel() * task.dataset.x.element_size()
    extra_bytes = workers * (_WORKER_MB * 1e6 + 3 * model_bytes)
    extra_bytes += cohort_size * timing.upload_bytes + 2 * model_bytes
    return {
        "seconds": (options.rounds or 0) * seconds_per_round
        + end_seconds
        + seconds_per_prediction * adaptation,
        "seconds_per_round": seconds_per_round,
        "memory_mb": max(peak_memory_mb(), _PROGRAM_MB + data_bytes / 1e6) + extra_bytes / 1e6,
        "workers": workers,
    }
