"""The engine of a federation: each client's task is executed by the node that holds its data.

Private states never arrive here. A client's state in the run's file is a receipt (round, sha256), and its
next task names the last accepted one. A task is a pure function of the task, the message and that state, so
that it may be sent and executed twice.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from feddbe.data.split import RaggedArray, Split
from feddbe.errors import DivergenceError, FeddbeError, InvalidInputError, StoreError
from feddbe.federation import protocol
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.node import NodeSummary, make_recipe
from feddbe.federation.protocol import MARGIN, Message, NodeError, Transport
from feddbe.methods.base import Method
from feddbe.runs.experiment import Experiment
from feddbe.runs.reopen import Checkpoint
from feddbe.runs.store import RunStore
from feddbe.simulation.client import ClientResult, ClientTask, MissingClient, run_client
from feddbe.simulation.engines.base import Broadcasts, ClientStates, TimeoutPolicy
from feddbe.simulation.engines.ray import versions
from feddbe.state import Receipt, State, encode
from feddbe.training.task import Task

MAX_FAILURES = 3
"""Failed replies of a node in one call, after which it counts as missing."""
MAX_LOST = 10
"""Lost connections of a node in one call, after which it counts as missing: the task may kill its process."""
SEND_MODELS_SECONDS = 300.0
"""Seconds in which connected nodes may confirm their model at the end of a run; Flower may need a minute."""


@dataclass(frozen=True)
class _Request:
    """A message that a node has not answered yet."""

    client: int
    connected: float
    """Time at which the node's connection began; another time means that this one was lost."""
    is_check: bool = False
    """True for the question about the node's data, which precedes tasks on every connection."""


@dataclass
class _Call:
    """The state of one call of `FederationEngine.run`."""

    waiting: dict[int, ClientTask]
    requests: dict[str, _Request] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    reasons: dict[int, str] = field(default_factory=dict)
    """Problems of clients that have been connected."""
    started: float = field(default_factory=time.monotonic)
    next_warning: float = 0.0

    def reason(self, client: int) -> str:
        """Return the reason why the client has not replied."""
        return self.reasons.get(client, "no reply yet" if self.is_working(client) else "not connected")

    def is_working(self, client: int) -> bool:
        """Return True if the client has a message that it has not answered yet."""
        return any(request.client == client for request in self.requests.values())


class FederationEngine:
    """Engine whose clients are the nodes of a federation."""

    def __init__(
        self,
        transport: Transport,
        experiment: Experiment,
        spec: DataSpec,
        summaries: Mapping[str, NodeSummary],
        timeouts: TimeoutPolicy,
    ) -> None:
        """Prepare the run's tasks.

        Args:
            transport: Carrier of messages.
            experiment: The run, whose clients are the nodes in the order of their names.
            spec: Form of the nodes' data.
            summaries: The nodes' data at the run's start.
            timeouts: Seconds after which nodes count as missing, and the function that receives warnings.

        Raises:
            InvalidInputError: The run needs something that never leaves a node, or cannot be sent.
        """
        if experiment.in_memory - {"data"}:
            raise InvalidInputError(
                "nodes cannot receive Python objects; name a built-in model and method, or files"
            )
        self.transport, self.timeouts = transport, timeouts
        self.task, self.method = experiment.task, experiment.method
        self.names = experiment.task.dataset.client_names
        self.summaries = summaries
        self._recipes = [make_recipe(experiment, spec, client) for client in range(len(self.names))]
        self._expected: dict[str, State] = {}
        self._checked: dict[int, float] = {}
        """Connection of each client whose data was compared with that at the run's start."""
        self._reported: dict[int, str] = {}
        """Differences of versions that were reported, by client."""

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]:
        call = _Call({task.client: task for task in tasks})
        call.next_warning = call.started + self.timeouts.warn_after
        shared = encode(messages.shared) if messages.per_client is None else b""

        def message_for(client: int) -> bytes:
            return shared or encode(messages.message_for(client))

        while call.waiting:
            # 1. Send: first the question about the data, then the task, again after a lost connection.
            connected = self.transport.nodes()
            self._drop_lost_requests(call, connected)
            self._send(call, connected, message_for, messages, states)

            # 2. Receive. A reply counts once, and only if this call requested it.
            received = self.transport.receive(self._seconds_to_wait(call))
            request = call.requests.pop(received[0], None) if received else None
            if received and request and request.client in call.waiting:
                result = self._read(call, request, received[1], messages, states)
                if result is not None:
                    yield result

            # 3. Give up clients that are too late, or fail again and again.
            for client in self._missing(call):
                del call.waiting[client]
                yield MissingClient(client, f"node '{self.names[client]}': {call.reason(client)}")

    def close(self) -> None:
        """Keep the connections, for the next run."""

    def _send(
        self,
        call: _Call,
        connected: Mapping[str, float],
        message_for: Callable[[int], bytes],
        messages: Broadcasts,
        states: ClientStates,
    ) -> None:
        """Send each connected client that has no request its next message."""
        busy = {request.client for request in call.requests.values()}
        for client, task in call.waiting.items():
            name = self.names[client]
            if client in busy or name not in connected:
                continue
            connection = connected[name]
            if self._checked.get(client) == connection:
                message = self._task_message(task, message_for(client), states)
                limit = protocol.reply_limit(self._expected_upload(task, messages))
            else:
                message, limit = Message.build("describe", {}), MARGIN
            identifier = self.transport.send(name, message, limit)
            if identifier is not None:
                is_check = self._checked.get(client) != connection
                call.requests[identifier] = _Request(client, connection, is_check)

    def _drop_lost_requests(self, call: _Call, connected: Mapping[str, float]) -> None:
        for identifier, request in list(call.requests.items()):
            name = self.names[request.client]
            if connected.get(name) != request.connected:
                del call.requests[identifier]
                call.lost[request.client] += 1
                call.reasons[request.client] = "connection lost"
                self.timeouts.warn(f"node '{name}': connection lost; its task is sent again when it is back")

    def _read(
        self,
        call: _Call,
        request: _Request,
        reply: Message | str,
        messages: Broadcasts,
        states: ClientStates,
    ) -> ClientResult | None:
        """Return the result in a reply; None if the reply is another one, or is not valid."""
        client = request.client
        task = call.waiting[client]
        try:
            if isinstance(reply, str):
                raise NodeError(reply)
            if request.is_check:
                self._check_node(client, reply)
                self._checked[client] = request.connected
                return None
            has_validation = bool(self.task.split.validation)
            expected = self._expected_upload(task, messages)
            result, receipt = protocol.read_result(reply, task, expected, has_validation=has_validation)
        except DivergenceError:
            raise
        except FeddbeError as error:
            is_permanent = getattr(error, "is_permanent", False)
            call.failures[client] += MAX_FAILURES if is_permanent else 1
            call.reasons[client] = str(error)
            self.timeouts.warn(f"node '{self.names[client]}': {error}")
            return None
        if receipt is not None:
            states.write_pending(client, receipt.encode())
        del call.waiting[client]
        return result

    def _check_node(self, client: int, reply: Message) -> None:
        """Compare a node's data with that at the run's start; warn of other versions."""
        header = reply.read("summary")
        if NodeSummary.from_json(header.get("summary")) != self.summaries[self.names[client]]:
            raise NodeError("its data has changed since the run began", is_permanent=True)
        difference = describe_versions(header.get("versions"))
        if difference and self._reported.get(client) != difference:
            self._reported[client] = difference
            self.timeouts.warn(f"node '{self.names[client]}' has other versions: {difference}")

    def _seconds_to_wait(self, call: _Call) -> float:
        """Return the seconds until a time limit or the next warning; a warning that is due is issued."""
        moment = time.monotonic()
        if moment >= call.next_warning:
            call.next_warning = moment + self.timeouts.warn_after
            names = ", ".join(f"'{self.names[client]}' ({call.reason(client)})" for client in call.waiting)
            seconds = moment - call.started
            self.timeouts.warn(f"waiting for {names} for {seconds:.0f} s; --worker-timeout sets a limit")
        wait = call.next_warning - moment
        if self.timeouts.timeout is not None:
            wait = min(wait, call.started + self.timeouts.timeout - moment)
        return max(0.0, wait)

    def _missing(self, call: _Call) -> list[int]:
        """Return the clients that count as missing in this call."""
        timeout = self.timeouts.timeout
        is_late = timeout is not None and time.monotonic() - call.started >= timeout
        for client in call.waiting:
            if is_late and call.is_working(client) and client not in call.reasons:
                call.reasons[client] = f"no reply in {timeout:g} s"
        return [
            client
            for client in call.waiting
            if is_late or call.failures[client] >= MAX_FAILURES or call.lost[client] >= MAX_LOST
        ]

    def _task_message(self, task: ClientTask, body: bytes, states: ClientStates) -> Message:
        stored = states.read(task.client)
        base = None if stored is None else Receipt.decode(stored)
        if stored is not None and base is None:
            raise StoreError("another engine started the run: its file has the clients' states themselves")
        receipts = [Receipt.decode(state) for state in states.referenced(task.client)]
        keep = sorted({receipt.round for receipt in receipts if receipt})
        recipe = self._recipes[task.client]
        return protocol.task_message(
            task, {"run": states.run_id, "recipe": recipe, "base": base, "keep": keep}, body
        )

    def _expected_upload(self, task: ClientTask, messages: Broadcasts) -> State:
        """Return an upload with the right names, shapes and types, from a rehearsal on zeros."""
        if task.work == "none":
            return {}
        if task.work not in self._expected:
            plain = ClientTask(task.client, task.round, task.work)
            received = messages.message_for(task.client)
            self._expected[task.work] = rehearse(self.task, self.method, plain, received)
        return self._expected[task.work]


def rehearse(task: Task, method: Method, client_task: ClientTask, received: State) -> State:
    """Return the upload of a client task that is executed here with zeros as samples."""
    batch_size, clients = task.training.batch_size, task.split.clients
    rows = max(2, min(batch_size, task.samples[client_task.client]))
    x = task.dataset.x.new_zeros((rows, *task.dataset.x.shape[1:]))
    dataset = replace(task.dataset, x=x, y=torch.zeros(rows, dtype=torch.int64), remote=None)
    indices = RaggedArray.from_lists([np.arange(rows)] * clients)
    validation = indices if task.split.validation else RaggedArray.from_lists(())
    split = Split(indices, indices, validation=validation)
    training = replace(task.training, local_epochs=1, trainer="autograd")
    rehearsal = replace(task, dataset=dataset, split=split, training=training)
    return run_client(rehearsal, method, client_task, received, None).upload


def describe_versions(reported: Any) -> str:
    """Return the differences between a node's versions, which are not trusted, and those of this machine."""
    if not isinstance(reported, dict):
        return "unknown"
    return ", ".join(
        f"{name} {str(reported.get(name, 'none'))[:40]!r} there, {value!r} here"
        for name, value in versions().items()
        if reported.get(name) != value
    )


def send_models(
    transport: Transport,
    experiment: Experiment,
    spec: DataSpec,
    store: RunStore,
    on_message: Callable[[str], None],
) -> None:
    """Send each node the message of the best round; with its own state of that round it is the node's model.

    Args:
        transport: Carrier of messages.
        experiment: The run.
        spec: Form of the nodes' data.
        store: The run's file.
        on_message: Receives the names of nodes that did not confirm.
    """
    which = "best" if store.meta("keeps_best") and store.round_of("best") is not None else "last"
    checkpoint = Checkpoint(store, experiment, which)
    broadcasts = checkpoint.broadcasts()
    names = experiment.task.dataset.client_names[: experiment.task.members]
    requests: dict[str, str] = {}
    for client, name in enumerate(names):
        state = checkpoint.read(client)
        fields = {
            "run": store.run_id, "client": client, "recipe": make_recipe(experiment, spec, client),
            "round": checkpoint.round, "adapt_epochs": checkpoint.adapt_epochs(),
            "base": None if state is None else Receipt.decode(state),
        }  # fmt: skip
        message = Message.build("keep_model", fields, encode(broadcasts.message_for(client)))
        identifier = transport.send(name, message, MARGIN)
        if identifier is not None:
            requests[identifier] = name
    confirmed = _collect_confirmations(transport, requests, on_message)
    missing = [name for name in names if name not in confirmed]
    if missing:
        on_message(
            f"without the model of round {checkpoint.round}: {', '.join(missing)}; "
            "resume the run to send it again"
        )


def _collect_confirmations(
    transport: Transport, requests: dict[str, str], on_message: Callable[[str], None]
) -> set[str]:
    """Return the nodes that stored their model."""
    end = time.monotonic() + SEND_MODELS_SECONDS
    confirmed = set[str]()
    while requests and time.monotonic() < end:
        received = transport.receive(end - time.monotonic())
        name = requests.pop(received[0], None) if received else None
        if received and name:
            try:
                if isinstance(received[1], str):
                    raise NodeError(received[1])
                received[1].read("kept")
                confirmed.add(name)
            except FeddbeError as error:
                on_message(f"node '{name}' did not store its model: {error}")
        connected = transport.nodes()
        requests = {identifier: name for identifier, name in requests.items() if name in connected}
    return confirmed
