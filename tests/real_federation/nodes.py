"""Nodes in this process, a transport that can change their replies, and the same run by the serial engine."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddbe.callbacks.base import Callback
from feddbe.config.options import Config
from feddbe.data.builtin import digits
from feddbe.data.dataset import Dataset
from feddbe.data.federated import load_federated_data
from feddbe.data.registry import load_dataset
from feddbe.data.split import Split
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.node import Node, make_recipe
from feddbe.federation.protocol import Message, task_message
from feddbe.federation.server import NAME, FederationData
from feddbe.results.document import RunDocument
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.start import run_or_resume
from feddbe.runs.store import RunStore
from feddbe.simulation import loop
from feddbe.simulation.client import ClientResult, ClientTask, MissingClient
from feddbe.simulation.engines.base import Broadcasts, ClientStates
from feddbe.simulation.engines.registry import SerialEngine
from feddbe.simulation.loop import build_broadcast
from feddbe.state import encode
from feddbe.training.task import Context

OPTIONS: dict[str, Any] = {"model": "mlp", "rounds": 3, "lr": 0.05, "trainer": "autograd"}
NAMES = ("anna", "bert", "cleo")
Change = Callable[[str, dict[str, Any], Message], "Message | str | list[Message]"]
"""Function of (node, task, reply) that returns the reply that arrives, several, none, or a reason."""


def make_files(folder: Path, sizes: Sequence[int] = (120, 88, 56)) -> dict[str, Path]:
    """Write a file for each node; each has only some of the digits, and so numbers them differently."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = digits.load()
    x, y = whole.x.numpy(), whole.y.numpy()
    start, files = 0, {}
    for name, size, lowest in zip(NAMES, sizes, (0, 3, 4), strict=True):
        selected = np.flatnonzero((y >= lowest) & (y < lowest + 6))[start : start + size]
        start += size // 2
        files[name] = folder / f"{name}.npz"
        np.savez(files[name], x=x[selected], y=y[selected])
    return files


def make_spec(folder: Path) -> DataSpec:
    """Return the form of these files: images of 8x8, labels 0 to 9."""
    whole = digits.load()
    path = folder / "example.npz"
    np.savez(path, x=whole.x.numpy()[:100], y=whole.y.numpy()[:100])
    return DataSpec.from_example(str(path))


def pool_datasets(files: Mapping[str, Path | str], spec: DataSpec) -> Dataset:
    """Return all rows in one data set; each client has the rows that its node trains and tests on."""
    parts: list[Dataset] = []
    train, test = [], []
    start = 0
    for name in sorted(files):
        conformed = spec.conform(load_dataset(str(files[name])))
        options = Config(data=str(files[name]), partition="iid", clients=1)
        dataset, split, _ = load_federated_data(options, conformed)
        train.append(split.train[0] + start)
        test.append(split.test[0] + start)
        parts.append(dataset)
        start += len(dataset)
    return replace(
        parts[0],
        name=NAME,
        x=torch.cat([part.x for part in parts]),
        y=torch.cat([part.y for part in parts]),
        client=None,
        split=Split.from_arrays(train, test),
        client_names=tuple(sorted(files)),
    )


class SerialWithAbsence(SerialEngine):
    """The serial engine without one client in some rounds."""

    def __init__(self, experiment: Experiment, client: int, rounds: Sequence[int]) -> None:
        super().__init__(experiment.task, experiment.method)
        self.client, self.rounds = client, rounds

    def run(  # type: ignore[override]
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]:
        for task in tasks:
            if task.client == self.client and task.round in self.rounds:
                yield MissingClient(task.client, "absent")
            else:
                yield from super().run([task], messages, states)


def run_serial(
    method: str,
    dataset: Dataset,
    folder: Path,
    absence: tuple[int, Sequence[int]] | None = None,
    **options: Any,
) -> RunDocument:
    """Run the method in this process; `absence` is a client and the rounds in which it is absent."""
    config = Config(**{"engine": "serial", "data": NAME, **OPTIONS, **options})
    experiment = resolve(method, config, dataset=dataset)
    if absence is None:
        return run_or_resume(experiment, folder, Callback(), hashes=True)
    server_state = loop.initial_server_state(experiment)
    store = RunStore.create(folder, {"config_hash": experiment.config_hash}, server_state)
    try:
        loop.run_experiment(experiment, store, SerialWithAbsence(experiment, *absence))
        server, clients = store.hashes()
    finally:
        store.close()
    return {"server_sha256": server, "clients_sha256": clients}  # type: ignore[typeddict-item]


def hashes(document: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the hashes of the server's and the clients' states."""
    return document["server_sha256"], document["clients_sha256"]


class LocalTransport:
    """A transport to nodes in this process."""

    def __init__(self, nodes: Mapping[str, Node], change: Change) -> None:
        self.local_nodes, self.change = dict(nodes), change
        self.connected = dict.fromkeys(nodes, 0.0)
        self.count = 0
        self.inbox = deque[tuple[str, Message | str]]()

    def nodes(self) -> Mapping[str, float]:
        return dict(self.connected)

    def send(self, node: str, message: Message, max_reply: int) -> str | None:
        self.count += 1
        task = json.loads(message.header).get("task", {})
        replies = self.change(node, task, self.local_nodes[node].reply_to(message))
        identifier = str(self.count)
        if isinstance(replies, list):
            self.inbox.extend((identifier, reply) for reply in replies)
        else:
            self.inbox.append((identifier, replies))
        return identifier

    def receive(self, timeout: float) -> tuple[str, Message | str] | None:
        return self.inbox.popleft() if self.inbox else None


def unchanged(name: str, task: dict[str, Any], reply: Message) -> Message:
    """Return the reply."""
    return reply


class Messages(Callback):
    """Callback that collects messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


class LocalFederation:
    """A federation whose nodes are in this process."""

    def __init__(
        self, files: Mapping[str, Path | str], spec: DataSpec, root: Path, change: Change = unchanged
    ) -> None:
        self.files, self.spec, self.root = files, spec, root
        self.nodes = {name: Node(root / name, str(path), spec) for name, path in files.items()}
        self.transport = LocalTransport(self.nodes, change)
        self.messages = Messages()

    def dataset(self) -> Dataset:
        """Return the data set without rows."""
        summaries = {name: node.summary for name, node in self.nodes.items()}
        return FederationData(self.transport, self.spec, summaries).dataset()

    def experiment(self, method: str, **options: Any) -> Experiment:
        """Return the experiment of the server."""
        return resolve(method, Config(**{"data": NAME, **OPTIONS, **options}), dataset=self.dataset())

    def run(self, method: str, **options: Any) -> RunDocument:
        """Run or resume the method in the folder `run`."""
        experiment = self.experiment(method, **options)
        return run_or_resume(experiment, self.root / "run", self.messages, hashes=True)

    def build_request(
        self,
        task: ClientTask | None = None,
        method: str = "fedavg",
        base: Any = None,
        recipe: dict[str, Any] | None = None,
        run: str = "r",
        **options: Any,
    ) -> Message:
        """Return a task for client 0 of a server that changed the recipe or its options."""
        task = task or ClientTask(0, 1, "train", evaluate=True)
        experiment = self.experiment(method)
        changed = make_recipe(experiment, self.spec, task.client) | (recipe or {})
        changed["options"] = changed["options"] | options
        initial = experiment.task.model.parameters
        server = experiment.method.server_init(Context(experiment.task, 0))
        context = Context(experiment.task, task.round, lambda client: initial)
        broadcast = build_broadcast(experiment.method, context, server)
        fields = {"run": run, "recipe": changed, "base": base, "keep": []}
        return task_message(task, fields, encode(broadcast.message_for(task.client)))

    def request(self, *arguments: Any, **changes: Any) -> Message:
        """Return anna's reply to `build_request`."""
        return self.nodes["anna"].reply_to(self.build_request(*arguments, **changes))


def kind_and_type(reply: Message) -> tuple[str, str | None]:
    """Return the kind of a reply, and the type of its error."""
    header = json.loads(reply.header)
    return header["kind"], header.get("type")
