"""The federation of `feddbe.testing`, every combination of method and add-on, and engines with faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from feddbe import seeds, testing
from feddbe.data.dataset import Dataset
from feddbe.methods.registry import METHODS, supported_addons
from feddbe.runs.experiment import Experiment
from feddbe.simulation.client import ClientResult, ClientTask, MissingClient
from feddbe.simulation.engines.base import Broadcasts, ClientStates
from feddbe.simulation.engines.registry import SerialEngine
from feddbe.state import Receipt, decode, sha256
from feddbe.testing import (
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
    "EngineWithMissingClients",
    "MessageRecorder",
    "Outcome",
    "RemoteStateEngine",
    "are_identical",
    "client_values",
    "experiment",
    "make_dataset",
    "read_states",
    "run_outcome",
    "run_recorded",
    "shorten_fedgen",
]

COMBINATIONS = [
    *METHODS,
    *(f"{name}+{a}" for name, method in METHODS.items() for a in supported_addons(method)),
]
"""Every method, without and with each supported add-on."""
ENGINES = ["pool(workers=2)"]
"""Engines that must be bit-identical to `serial`."""


def shorten_fedgen(name: str) -> str:
    """Return the method with two steps of FedGen's generator, unless it sets `steps`."""

    def shorten(fedgen: re.Match[str]) -> str:
        return f"fedgen({fedgen[1]},steps=2)" if fedgen[1] else "fedgen(steps=2)"

    return re.sub(r"^fedgen(?:\(((?!.*steps=)[^)]*)\))?(?=\+|$)", shorten, name)


def experiment(name: str, dataset: Dataset | None = None, **options: Any) -> Experiment:
    """Return two rounds of this method with three clients."""
    return testing.make_experiment(shorten_fedgen(name), dataset, **options)


class EngineWithMissingClients:
    """A serial engine that skips client `missing_client(t)` in round t."""

    def __init__(self, experiment: Experiment) -> None:
        self.serial = SerialEngine(experiment.task, experiment.method)

    def missing_client(self, round_: int) -> int:
        return int(seeds.make_rng(5, "forget", round_).randint(self.serial.task.split.clients))

    def close(self) -> None:
        pass

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]:
        for client_task in tasks:
            if client_task.client == self.missing_client(client_task.round):
                yield MissingClient(client_task.client, "skipped")
            else:
                yield from self.serial.run([client_task], messages, states)


class RemoteStateEngine(EngineWithMissingClients):
    """An engine whose clients keep their states, one for each round; the run's file has receipts.

    The result of a missing client is lost: it has trained, and has a new state.
    """

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.kept: dict[tuple[int, int], bytes] = {}

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]:
        for client_task in tasks:
            client, round_ = client_task.client, client_task.round
            node = _Node(round_, states, self.kept)
            results = list(self.serial.run([client_task], messages, node))
            if client == self.missing_client(round_):
                yield MissingClient(client, "its result was lost")
                continue
            if node.receipt:
                states.write_pending(client, node.receipt.encode())
            yield from results


class _Node(ClientStates):
    """A client's states by client and round; `accepted` has their receipts."""

    def __init__(self, round_: int, accepted: ClientStates, kept: dict[tuple[int, int], bytes]) -> None:
        self.round = round_
        self.accepted = accepted
        self.kept = kept
        self.receipt: Receipt | None = None

    def read(self, client: int) -> bytes | None:
        encoded = self.accepted.read(client)
        if encoded is None:
            return None
        receipt = Receipt.decode(encoded)
        assert receipt is not None
        state = self.kept[client, receipt.round]
        assert sha256(decode(state)) == receipt.sha256
        return state

    def write_pending(self, client: int, state: bytes) -> None:
        self.kept[client, self.round] = state
        self.receipt = Receipt(self.round, sha256(decode(state)))

    def version(self, client: int) -> None:
        pass
