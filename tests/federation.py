"""A federation small enough to run in a test: real digits, three unequal clients, a perceptron."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from feddbe import engines, seeds
from feddbe.data.dataset import Dataset
from feddbe.data.published import digits
from feddbe.engines import ClientStates, Engine, Messages, Missing, Receipt, Serial
from feddbe.engines.client import Job, Reply
from feddbe.measures.rows import ALL
from feddbe.methods import ADDONS, METHODS
from feddbe.options.config import Config
from feddbe.results.document import Entry
from feddbe.runs import rounds
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import FILE, Store
from feddbe.state import State, decode, sha256

__all__ = [
    "COMBINATIONS",
    "ENGINES",
    "Elsewhere",
    "Forgetful",
    "Outcome",
    "Recorder",
    "carry_out",
    "experiment",
    "measured",
    "outcome",
    "same_bits",
    "samples",
    "states",
]

COMBINATIONS = [
    *METHODS,
    *(f"{name}+{a}" for name, m in METHODS.items() for a, parts in ADDONS.items()
      if not {p.name for p in parts} & {*m.refuses, *m.cannot}),
]  # fmt: skip
"""Every method, alone and with each add-on that it takes."""


def samples(sizes: Sequence[int] = (60, 44, 28)) -> Dataset:
    """The first digits, with a client column: sizes[i] samples for client i."""
    whole = digits.load()
    n = sum(sizes)
    client = np.repeat(np.arange(len(sizes)), sizes)
    return Dataset("tiny", whole.x[:n], whole.y[:n], whole.classes, whole.scale, whole.shift, client)


def _quick(fedgen: re.Match[str]) -> str:
    return f"fedgen({fedgen[1]},steps=2)" if fedgen[1] else "fedgen(steps=2)"


def experiment(name: str, dataset: Dataset | None = None, **options: Any) -> Experiment:
    """Two rounds of this method among the three clients, FedGen's generator with two steps unless said."""
    name = re.sub(r"^fedgen(?:\(((?!.*steps=)[^)]*)\))?(?=\+|$)", _quick, name)
    chosen = {"partition": "natural", "model": "mlp", "rounds": 2, "lr": 0.1, **options}
    return resolve(name, Config(**chosen), dataset=dataset or samples())


ENGINES = ["pool(workers=2)"]
"""Each must give the bits of `serial`."""


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
        store = Store.create(folder, {"config_hash": experiment.config_hash}, rounds.start(experiment))
    try:
        rounds.run(experiment, store, engine)
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


class Forgetful:
    """The serial engine, from which one client gets no job in each call: in round t, `forgotten(t)`."""

    def __init__(self, experiment: Experiment) -> None:
        self.serial = Serial(experiment.task, experiment.method)

    def forgotten(self, round: int) -> int:
        return int(seeds.stream(5, "forget", round).randint(self.serial.task.split.clients))

    def close(self) -> None:
        pass

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply | Missing]:
        for job in jobs:
            if job.client == self.forgotten(job.round):
                yield Missing(job.client, "forgotten")
            else:
                yield from self.serial.run([job], messages, states)


class Elsewhere(Forgetful):
    """Clients keep their states themselves, one for each round, and the run's file gets receipts. Of
    `forgotten` ones the answer is lost on its way: they have trained, and have a new state."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.kept: dict[tuple[int, int], bytes] = {}

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply | Missing]:
        for job in jobs:
            node = _Node(job, states, self.kept)
            answers = list(self.serial.run([job], messages, node))
            if job.client == self.forgotten(job.round):
                yield Missing(job.client, "its answer was lost")
                continue
            if node.receipt:
                states.stage(job.client, node.receipt.encode())
            yield from answers


class _Node:
    """Where one client keeps its states."""

    def __init__(self, job: Job, accepted: ClientStates, kept: dict[tuple[int, int], bytes]) -> None:
        self.job, self.accepted, self.kept = job, accepted, kept
        self.receipt: Receipt | None = None

    def read(self, client: int) -> bytes | None:
        found = self.accepted.read(client)
        if found is None:
            return None
        receipt = Receipt.decode(found)
        assert receipt is not None
        state = self.kept[client, receipt.round]
        assert sha256(decode(state)) == receipt.sha256
        return state

    def stage(self, client: int, state: bytes) -> None:
        self.kept[client, self.job.round] = state
        self.receipt = Receipt(self.job.round, sha256(decode(state)))


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
