"""The federation of `feddbe.testing`, every combination of method and add-on, and engines with faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from feddbe import seeds
from feddbe.data.dataset import Dataset
from feddbe.methods.registry import METHODS, supported_addons
from feddbe.runs.experiment import Experiment
from feddbe.simulation.client import ClientResult, ClientTask, MissingClient
from feddbe.simulation.engines.base import Broadcasts, ClientStates
from feddbe.simulation.engines.registry import Serial
from feddbe.state import Receipt, decode, sha256
from feddbe.testing import contract
from feddbe.testing.contract import (
    MessageRecorder,
    Outcome,
    are_identical,
    client_values,
    make_dataset,
    read_states,
    run_outcome,
    run_recorded,
)

__all__ = [
    "COMBINATIONS",
    "ENGINES",
    "Elsewhere",
    "Forgetful",
    "MessageRecorder",
    "Outcome",
    "are_identical",
    "client_values",
    "experiment",
    "make_dataset",
    "quick",
    "read_states",
    "run_outcome",
    "run_recorded",
]

COMBINATIONS = [
    *METHODS,
    *(f"{name}+{a}" for name, method in METHODS.items() for a in supported_addons(method)),
]
"""Every method, alone and with each add-on that it takes."""
ENGINES = ["pool(workers=2)"]
"""Each must give the bits of `serial`."""


def quick(name: str) -> str:
    """FedGen's generator with two steps unless said."""

    def shorter(fedgen: re.Match[str]) -> str:
        return f"fedgen({fedgen[1]},steps=2)" if fedgen[1] else "fedgen(steps=2)"

    return re.sub(r"^fedgen(?:\(((?!.*steps=)[^)]*)\))?(?=\+|$)", shorter, name)


def experiment(name: str, dataset: Dataset | None = None, **options: Any) -> Experiment:
    """Two rounds of this method among the three clients."""
    return contract.make_experiment(quick(name), dataset, **options)


class Forgetful:
    """The serial engine, from which one client gets no job in each call: in round t, `forgotten(t)`."""

    def __init__(self, experiment: Experiment) -> None:
        self.serial = Serial(experiment.task, experiment.method)

    def forgotten(self, round: int) -> int:
        return int(seeds.make_rng(5, "forget", round).randint(self.serial.task.split.clients))

    def close(self) -> None:
        pass

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]:
        for job in tasks:
            if job.client == self.forgotten(job.round):
                yield MissingClient(job.client, "forgotten")
            else:
                yield from self.serial.run([job], messages, states)


class Elsewhere(Forgetful):
    """Clients keep their states themselves, one for each round, and the run's file gets receipts. Of
    `forgotten` ones the answer is lost on its way: they have trained, and have a new state."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.kept: dict[tuple[int, int], bytes] = {}

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]:
        for job in tasks:
            node = _Node(job, states, self.kept)
            answers = list(self.serial.run([job], messages, node))
            if job.client == self.forgotten(job.round):
                yield MissingClient(job.client, "its answer was lost")
                continue
            if node.receipt:
                states.write_pending(job.client, node.receipt.encode())
            yield from answers


class _Node(ClientStates):
    """Where one client keeps its states."""

    def __init__(
        self, client_task: ClientTask, accepted: ClientStates, kept: dict[tuple[int, int], bytes]
    ) -> None:
        self.job, self.accepted, self.kept = client_task, accepted, kept
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

    def write_pending(self, client: int, state: bytes) -> None:
        self.kept[client, self.job.round] = state
        self.receipt = Receipt(self.job.round, sha256(decode(state)))

    def version(self, client: int) -> None:
        pass
