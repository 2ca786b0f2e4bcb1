"""A federation small enough to run in a test: real digits, three unequal clients, a perceptron."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from feddbe.config.options import Config
from feddbe.data.builtin import digits
from feddbe.data.dataset import Dataset
from feddbe.metrics.records import ALL
from feddbe.results.document import Entry
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import FILE, Store
from feddbe.simulation import engines, loop
from feddbe.simulation.client import Job, Reply
from feddbe.simulation.engines.base import ClientStates, Engine, Messages
from feddbe.simulation.engines.serial import Serial
from feddbe.state import State, decode


def samples(sizes: Sequence[int] = (60, 44, 28)) -> Dataset:
    """The first digits, with a client column: sizes[i] samples for client i."""
    whole = digits.load()
    n = sum(sizes)
    client = np.repeat(np.arange(len(sizes)), sizes)
    return Dataset("tiny", whole.x[:n], whole.y[:n], whole.classes, whole.scale, whole.shift, client)


def experiment(name: str, dataset: Dataset | None = None, **options: Any) -> Experiment:
    """Two rounds of this method among the three clients."""
    chosen = {"partition": "natural", "model": "mlp", "rounds": 2, "lr": 0.1, **options}
    return resolve(name, Config(**chosen), dataset=dataset or samples())


class Outcome(NamedTuple):
    """What a run leaves."""

    server: State
    clients: dict[int, State]
    entries: list[Entry]


def carry_out(experiment: Experiment, folder: Path, engine: Engine) -> Outcome:
    """Begin the run in `folder`, or continue it, with this engine."""
    if Store.is_run(folder):
        store = Store.open(folder)
    else:
        store = Store.create(
            folder, {"config_hash": experiment.config_hash}, loop.initial_server_state(experiment)
        )
    try:
        loop.run_experiment(experiment, store, engine)
        return Outcome(store.server(), dict(store.clients()), store.entries())
    finally:
        store.close()


def outcome(experiment: Experiment, folder: Path, engine: str = "serial") -> Outcome:
    """The same with an engine made for it."""
    made = engines.make(engine, experiment.task, experiment.method)
    try:
        return carry_out(experiment, folder, made)
    finally:
        made.close()


def measured(
    store: Store, round: int, name: str = "accuracy", moment: str = "before"
) -> dict[int, float | None]:
    """What each client measured."""
    rows = [row for row in store.rows(round) if (row.moment, row.name) == (moment, name)]
    return {row.client: row.value for row in rows if row.client != ALL}


def states(folder: Path) -> list[tuple[Any, ...]]:
    """All states in a run's file as they lie there: the server's, the clients', those of the best entry."""
    db = sqlite3.connect(folder / FILE)
    found = db.execute("SELECT kind, client, round, crc, state FROM states ORDER BY kind, client").fetchall()
    db.close()
    return found


def same_bits(a: State, b: State) -> bool:
    """Names, types and all bits equal."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


class Recorder(Serial):
    """The serial engine, which remembers every message and every private state."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment.task, experiment.method)
        self.messages: list[State] = []
        self.private: list[State] = []

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply]:
        self.messages += [messages.to(job.client) for job in jobs]
        for reply in super().run(jobs, messages, _Tap(states, self.private.append)):
            self.messages.append(reply.up)
            yield reply


class _Tap:
    def __init__(self, inner: ClientStates, tell: Callable[[State], None]) -> None:
        self.inner, self.tell = inner, tell

    def read(self, client: int) -> bytes | None:
        return self.inner.read(client)

    def stage(self, client: int, state: bytes) -> None:
        self.tell(decode(state))
        self.inner.stage(client, state)

    def stamp(self, client: int) -> Hashable:
        return self.inner.stamp(client)
