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
from typing import NamedTuple

import numpy as np

from feddbe.data.ragged import Ragged
from feddbe.data.split import Split
from feddbe.engines import ClientStates, Messages
from feddbe.engines.client import Job, Reply, perform
from feddbe.methods import Method
from feddbe.runs import rounds
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import Store
from feddbe.state import decode, encode, nbytes
from feddbe.training.task import Task

__all__ = ["CLIENTS", "Probe", "probe"]

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
        store = Store.create(Path(folder), {}, rounds.start(small))
        try:
            rounds.run(small, store, engine)
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
