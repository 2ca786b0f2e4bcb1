"""Messages between the server and a node, and the interface of what carries them.

A message is a JSON header and a body of safetensors bytes; nothing is pickled. The receiver checks every
field. Kinds: `describe` -> `summary`, `task` -> `result`, `keep_model` -> `kept`. Any request may be answered
by `error`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from feddbe import metrics
from feddbe.errors import DivergenceError, FeddbeError, InvalidInputError
from feddbe.metrics.client_values import MetricValues
from feddbe.simulation.client import ClientResult, ClientTask
from feddbe.state import Receipt, State, decode, encode, nbytes
from feddbe.training import backends

VERSION = 1
MAX_HEADER = 2**20
"""Bytes of a message's header."""
MARGIN = 16 * 2**20
"""Bytes of a message that its limit allows in addition to a multiple of the expected tensors."""
MAX_SAMPLES = 10**8
"""Samples of a node: each takes 8 bytes on the server."""
COSTS = ("loss", "seconds", "bytes_up", "bytes_down")
"""Metrics of local training that every result has."""
_MAX_NUMBER = 2**53
"""Largest weight, time or size in a message: sums of some of them stay finite."""


class ProtocolError(FeddbeError):
    """Error for a message that does not have the agreed form."""


class NodeError(FeddbeError):
    """Error for a request that a node did not fulfil; details are in the node's own log."""

    def __init__(self, reason: str, *, is_permanent: bool = False) -> None:
        super().__init__(reason)
        self.is_permanent = is_permanent
        """True if the same request would fail again."""


class InitialModelError(InvalidInputError):
    """Error of a node whose initial model differs from the server's."""


class PrivateStateError(FeddbeError):
    """Error of a node that does not have the private state from which a task starts."""


class NotAllowedError(InvalidInputError):
    """Error of a node for a request that its owner does not allow."""


class DataMismatchError(InvalidInputError):
    """Error of a node whose data is not that of the run."""


_REASONS = {
    InitialModelError.__name__: "its initial model differs from the server's: other versions of packages",
    PrivateStateError.__name__: "its private state of this run is missing or was changed",
    NotAllowedError.__name__: "its owner does not allow this task",
    DataMismatchError.__name__: "its data is not that with which the run began",
}
"""Reasons by the type of a node's error. Only the type crosses the wire: the text may quote data."""


class Message(NamedTuple):
    """A header in JSON, and a body."""

    header: bytes
    body: bytes = b""

    @classmethod
    def build(cls, kind: str, fields: Mapping[str, Any], body: bytes = b"") -> Message:
        """Return a message of this kind with these fields in its header."""
        return cls(json.dumps({"version": VERSION, "kind": kind, **fields}).encode(), body)

    def read(self, *kinds: str) -> dict[str, Any]:
        """Return the header.

        Raises:
            ProtocolError: The message is of another kind or version.
            NodeError: The message reports an error.
            DivergenceError: The message reports that training diverged.
        """
        try:
            header = json.loads(self.header)
        except (ValueError, RecursionError) as error:
            raise ProtocolError("its header is not JSON") from error
        if not isinstance(header, dict) or header.get("version") != VERSION:
            raise ProtocolError("it speaks another version of the protocol")
        if header.get("kind") == "error":
            raise _read_error(header)
        if header.get("kind") not in kinds:
            raise ProtocolError(f"its message is not a {' or '.join(kinds)}")
        return header


class Transport(Protocol):
    """Carrier of messages between the server and the nodes: `grpc_transport.py`, and those of tests."""

    def nodes(self) -> Mapping[str, float]:
        """Return the connected nodes by name, with the time at which each connected."""

    def send(self, node: str, message: Message, max_reply: int) -> str | None:
        """Send a request.

        Args:
            node: Name of the node.
            message: The request.
            max_reply: Bytes of the body of the largest allowed reply.

        Returns:
            The identifier under which the reply arrives, or None if the node is not connected.
        """

    def receive(self, timeout: float) -> tuple[str, Message | str] | None:
        """Return the next reply with its identifier; instead of a reply, the reason why there is none.

        It returns None after `timeout` seconds, and earlier if a node connected or disconnected.
        """


# --- errors


def error_message(error: Exception) -> Message:
    """Return the message about a node's error: its type, or the numbers of a divergence."""
    is_permanent = isinstance(error, FeddbeError)
    fields: dict[str, Any] = {"type": type(error).__name__, "is_permanent": is_permanent}
    if isinstance(error, DivergenceError):
        fields["divergence"] = [error.client, error.round, error.quantity, str(error.value)]
    return Message.build("error", fields)


def _read_error(header: Mapping[str, Any]) -> FeddbeError:
    match header:
        case {"divergence": [int(client), int(round_), str(quantity), str(value)]} if _is_word(quantity):
            try:
                return DivergenceError(client, round_, quantity, float(value))
            except ValueError:
                pass
        case {"type": str(name)} if name.isidentifier():
            reason = _REASONS.get(name, f"{name[:60]}, see the node's log")
            return NodeError(reason, is_permanent=header.get("is_permanent") is True)
    return ProtocolError("its error has no type")


# --- tasks


def read_task(header: Mapping[str, Any]) -> ClientTask:
    """Return the task of a `task` message if a node may execute it.

    Raises:
        NotAllowedError: The task requests representations of samples, which never leave a node.
        ProtocolError: A field has a value that is not allowed.
    """
    try:
        fields = dict(header["task"])
        names = tuple(fields["metrics"])
        task = ClientTask(**fields | {"metrics": names, "layers": tuple(fields["layers"])})
    except (TypeError, KeyError, ValueError) as error:
        raise ProtocolError("a field of the task is missing or unknown") from error
    if task.layers or task.sample_indices is not None:
        raise NotAllowedError("the task requests representations of private samples")
    check_metrics(names)
    epochs = task.adapt_epochs
    _require(all(type(n) is int and 0 <= n < 2**31 for n in (task.client, task.round)))
    _require(epochs is None or (type(epochs) is int and 0 <= epochs < 2**31))
    _require(task.work in ("prepare", "train", "none"))
    return task


def check_metrics(names: Collection[str]) -> None:
    """Raise an error if a metric is unknown, or needs samples or representations of other clients."""
    for name in names:
        metrics.parse_metrics(str(name), always=())  # raises an error for an unknown name
        inputs = metrics.required_inputs([name])
        if inputs & {*metrics.POOLED_INPUTS, "global_logits", "global_y"}:
            raise NotAllowedError(
                f"metric {name} needs samples or representations of all clients, which never leave a node"
            )


# --- results


def result_message(result: ClientResult, receipt: Receipt | None) -> Message:
    """Return the message of a result, without the private state, whose receipt replaces it."""
    fields = {
        "client": result.client,
        "metrics": {moment: _to_json(values) for moment, values in result.metrics.items()},
        "training_metrics": _to_json(result.training_metrics),
        "trainers": sorted(result.trainers),
        "receipt": receipt,
    }
    return Message.build("result", fields, encode(result.tensors()))


def reply_limit(expected: State) -> int:
    """Return the bytes of the largest allowed body of a result."""
    return 4 * nbytes(expected) + MARGIN


def read_result(
    message: Message, task: ClientTask, expected: State, *, has_validation: bool
) -> tuple[ClientResult, Receipt | None]:
    """Return the result of a task if every part of it has the right form.

    Args:
        message: The node's reply.
        task: The task that it was sent.
        expected: An upload with the right names, shapes and types.
        has_validation: True if clients hold out training data.

    Raises:
        DivergenceError: The client's own training diverged in this round.
        NodeError: The node reports another error.
        ProtocolError: The reply does not have the right form.
    """
    try:
        header = message.read("result")
    except DivergenceError as error:  # it ends the run, so it must be this client's
        if (error.client, error.round) != (task.client, task.round):
            raise ProtocolError("its divergence is that of another client or round") from None
        raise
    try:
        _require(header["client"] == task.client)
        _require(header["metrics"].keys() <= _evaluation_moments(task, has_validation=has_validation))
        values = {
            moment: _read_metrics(numbers, task.metrics) for moment, numbers in header["metrics"].items()
        }
        training = _read_metrics(header["training_metrics"], (*task.metrics, *COSTS))
        if task.work != "none":  # the loop needs these
            _require(all(0 <= training[name][0] <= _MAX_NUMBER for name in COSTS[1:]))
        trainers = {name: "" for name in header["trainers"] if _require(name in backends.MODULES)}
        receipt = _read_receipt(header["receipt"], task)
        tensors = decode(message.body)
    except Exception as error:  # safetensors has its own errors
        raise ProtocolError("its reply does not have the right form") from error
    result = ClientResult(task.client, metrics=values, training_metrics=training, trainers=trainers)
    result = result.with_tensors(tensors)
    if result.representations or len(result.upload) != len(tensors):
        raise ProtocolError("its reply has tensors that were not requested")
    _check_upload(result.upload, expected)
    return result, receipt


def _read_receipt(value: Any, task: ClientTask) -> Receipt | None:
    if value is None:
        return None
    round_, digest = value
    _require(round_ == task.round and task.work != "none")
    _require(isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None)
    return Receipt(round_, digest)


def _check_upload(upload: State, expected: State) -> None:
    for name in sorted(upload.keys() ^ expected.keys()):
        problem = "lacks" if name in expected else "must not have"
        raise ProtocolError(f"its upload {problem} '{name[:100]}'")
    for name, tensor in upload.items():
        template = expected[name]
        if (tensor.shape, tensor.dtype) != (template.shape, template.dtype):
            actual, required = (f"{tuple(t.shape)} {t.dtype}" for t in (tensor, template))
            raise ProtocolError(f"its upload '{name}' is {actual}; expected {required}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ProtocolError(f"its upload '{name}' has values that are not finite")


def _to_json(values: MetricValues) -> dict[str, list[float]]:
    """Return numbers; a fraction stays a fraction, so that accuracies are pooled exactly."""
    return {
        name: [value.numerator, value.denominator, weight] if isinstance(value, Fraction) else [value, weight]
        for name, (value, weight) in values.items()
    }


def _read_metrics(numbers: Mapping[str, Any], allowed: Collection[str]) -> MetricValues:
    """Return values that can be aggregated and stored; accuracies are fractions, others may be nan."""
    values: MetricValues = {}
    for name, parts in numbers.items():
        _require(name in allowed and len(parts) == (3 if name == "accuracy" else 2))
        _require(all(type(part) in (int, float) for part in parts))
        weight = parts[-1]
        _require(0 <= weight <= _MAX_NUMBER)
        value: float | Fraction = parts[0]
        if len(parts) == 3:
            _require(0 <= parts[0] <= parts[1] <= _MAX_NUMBER)
            value = Fraction(parts[0], parts[1])
        float(value)  # raises an error for an integer that is too large
        values[name] = value, weight
    return values


def _evaluation_moments(task: ClientTask, *, has_validation: bool) -> set[str]:
    """Return the moments at which the task evaluates a model."""
    moments = {"before"} if task.evaluate else set[str]()
    if task.evaluate and has_validation:
        moments.add("validation")
    if task.evaluate and task.adapt_epochs is not None:
        moments.add("adapted")
        if task.is_new_client:
            moments |= {f"adapted {epochs}" for epochs in range(1, task.adapt_epochs)}
    if task.evaluate_after:
        moments.add("after")
    return moments


def _is_word(text: Any) -> bool:
    return isinstance(text, str) and len(text) < 100 and text.isprintable()


def _require(condition: bool) -> bool:
    if not condition:
        raise ProtocolError("a field has a value that is not allowed")
    return True


def task_message(task: ClientTask, fields: Mapping[str, Any], body: bytes) -> Message:
    """Return the message of a task; `fields` are run, recipe, base and keep, see `engine.py`."""
    return Message.build("task", {"task": dataclasses.asdict(task), **fields}, body)
