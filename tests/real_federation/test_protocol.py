"""The engine with nodes in this process and a transport that can do anything to their replies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from feddbe.data.dataset import Dataset
from feddbe.errors import DivergenceError, FeddbeError, InvalidInputError
from feddbe.export import load_client_model
from feddbe.federation import protocol
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.engine import MAX_FAILURES
from feddbe.federation.node import Node, make_recipe
from feddbe.federation.protocol import Message, error_message
from feddbe.federation.server import collect_summaries
from feddbe.runs.store import RunStore
from feddbe.state import decode, encode
from tests.real_federation.nodes import (
    LocalFederation,
    hashes,
    kind_and_type,
    pool_datasets,
    run_serial,
)


@pytest.fixture(scope="module")
def pooled(files: dict[str, Path], spec: DataSpec) -> Dataset:
    return pool_datasets(files, spec)


@pytest.fixture(scope="module")
def serial(pooled: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return hashes(run_serial("scaffold+dbe", pooled, tmp_path_factory.mktemp("serial")))


@pytest.fixture(scope="module")
def serial_without_bert(pooled: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("serial")
    return hashes(run_serial("scaffold+dbe", pooled, folder, absence=(1, [2]), min_replies=2))


# --- garbage


def change_header(reply: Message, **fields: Any) -> Message:
    return Message(json.dumps({**json.loads(reply.header), **fields}).encode(), reply.body)


def change_training(reply: Message, **values: Any) -> Message:
    return change_header(reply, training_metrics=json.loads(reply.header)["training_metrics"] | values)


def change_body(reply: Message, change: Callable[[dict[str, torch.Tensor]], object]) -> Message:
    state = decode(reply.body)
    change(state)
    return Message(reply.header, encode(state))


def first(state: dict[str, torch.Tensor]) -> str:
    return next(name for name in state if name.startswith("upload/"))


PICKLE = b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94."
GARBAGE: dict[str, Callable[[Message], Message]] = {
    "nothing": lambda reply: Message(b""),
    "not JSON": lambda reply: Message(b"\x80\x04\x95", reply.body),
    "deep JSON": lambda reply: Message(b"[" * 100_000, reply.body),
    "another version": lambda reply: change_header(reply, version=99),
    "another kind": lambda reply: change_header(reply, kind="summary"),
    "another client": lambda reply: change_header(reply, client=0),
    "text for a number": lambda reply: change_header(reply, training_metrics={"seconds": ["a", 1]}),
    "accuracy of 2": lambda reply: change_header(reply, metrics={"before": {"accuracy": [20, 10, 10]}}),
    "negative weight": lambda reply: change_header(reply, metrics={"before": {"loss": [1.0, -5]}}),
    "infinite weight": lambda reply: change_header(reply, metrics={"before": {"loss": [1.0, math.inf]}}),
    "unlimited weight": lambda reply: change_header(
        reply, metrics={"before": {"accuracy": [1, 2, 1e308]}, "after": {"accuracy": [1, 2, 1e308]}}
    ),
    "accuracy that is not a fraction": lambda reply: change_header(
        reply, metrics={"before": {"accuracy": [math.nan, 10]}}
    ),
    "number that no float can have": lambda reply: change_training(reply, loss=[10**400, 1]),
    "unlimited seconds": lambda reply: change_training(reply, seconds=[1e300, 1]),
    "negative bytes": lambda reply: change_training(reply, bytes_up=[-1, 1]),
    "moment that was not requested": lambda reply: change_header(
        reply, metrics={"validation": {"accuracy": [10, 10, 10]}}
    ),
    "another trainer": lambda reply: change_header(reply, trainers=["Ann"]),
    "another metric": lambda reply: change_header(reply, metrics={"before": {"name of Ann": [1.0, 1]}}),
    "another moment": lambda reply: change_header(reply, metrics={"name of Ann": {"loss": [1.0, 1]}}),
    "receipt of another round": lambda reply: change_header(reply, receipt=[7, "0" * 64]),
    "receipt without hash": lambda reply: change_header(reply, receipt=[2, "x"]),
    "divergence of another client": lambda reply: error_message(DivergenceError(0, 2, "loss", math.nan)),
    "no tensors": lambda reply: Message(reply.header, b"garbage"),
    "truncated": lambda reply: Message(reply.header, reply.body[:-7]),
    "a pickle": lambda reply: Message(reply.header, PICKLE),
    "a name missing": lambda reply: change_body(reply, lambda s: s.pop(first(s))),
    "a name too many": lambda reply: change_body(reply, lambda s: s.update({"upload/prbm": torch.zeros(3)})),
    "an unknown name": lambda reply: change_body(reply, lambda s: s.update({"other": torch.zeros(3)})),
    "representations": lambda reply: change_body(
        reply, lambda s: s.update({"representations/before/z_g": torch.zeros(3)})
    ),
    "another shape": lambda reply: change_body(reply, lambda s: s.update({first(s): torch.zeros(1)})),
    "another type": lambda reply: change_body(reply, lambda s: s.update({first(s): s[first(s)].double()})),
    "NaN": lambda reply: change_body(reply, lambda s: s[first(s)].fill_(math.nan)),
    "infinite": lambda reply: change_body(reply, lambda s: s[first(s)].view(-1)[:1].fill_(math.inf)),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_counts_as_missing(
    kind: str, files: dict[str, Path], spec: DataSpec, serial_without_bert: tuple[Any, Any], tmp_path: Path
) -> None:
    def change(name: str, task: dict[str, Any], reply: Message) -> Message:
        return GARBAGE[kind](reply) if name == "bert" and task.get("round") == 2 else reply

    federation = LocalFederation(files, spec, tmp_path, change)
    document = federation.run("scaffold+dbe", min_replies=2)
    assert hashes(document) == serial_without_bert
    assert len(federation.messages.texts) == MAX_FAILURES
    assert all("bert" in text and "Ann" not in text for text in federation.messages.texts)


def test_garbage_stops_a_run_that_needs_all_and_the_run_resumes(
    files: dict[str, Path], spec: DataSpec, serial: tuple[Any, Any], tmp_path: Path
) -> None:
    def change(name: str, task: dict[str, Any], reply: Message) -> Message:
        return GARBAGE["NaN"](reply) if task.get("round") == 2 else reply

    federation = LocalFederation(files, spec, tmp_path, change)
    with pytest.raises(FeddbeError, match=r"node '.*values that are not finite.*--resume continues"):
        federation.run("scaffold+dbe")
    federation.transport.change = lambda name, task, reply: reply
    assert hashes(federation.run("scaffold+dbe", resume=True)) == serial


# --- repeated and lost replies


def test_repeated_and_lost_replies(
    files: dict[str, Path], spec: DataSpec, serial: tuple[Any, Any], tmp_path: Path
) -> None:
    lost = set[str]()

    def change(name: str, task: dict[str, Any], reply: Message) -> Message | str | list[Message]:
        if name == "cleo" and task.get("round") == 2 and name not in lost:
            lost.add(name)
            return "node unavailable"
        return [reply, reply]

    federation = LocalFederation(files, spec, tmp_path, change)
    assert hashes(federation.run("scaffold+dbe")) == serial
    assert federation.messages.texts == ["node 'cleo': node unavailable"]


def test_task_of_a_lost_connection_is_sent_again(
    files: dict[str, Path], spec: DataSpec, serial: tuple[Any, Any], tmp_path: Path
) -> None:
    tasks_of_anna = []

    def change(name: str, task: dict[str, Any], reply: Message) -> Message | list[Message]:
        if name == "anna" and task.get("round") == 1:
            tasks_of_anna.append(task)
            if len(tasks_of_anna) == 1:  # its process died with the reply, and is back
                federation.transport.connected["anna"] += 1
                return []
        return reply

    federation = LocalFederation(files, spec, tmp_path, change)
    assert hashes(federation.run("scaffold+dbe")) == serial
    assert len(tasks_of_anna) == 2
    assert len(federation.messages.texts) == 1


def test_node_that_connects_again_before_the_run_is_described_again(
    files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    """A reply of the earlier connection is lost in one case, and arrived in the other."""
    replies = list[str]()

    def change(name: str, task: dict[str, Any], reply: Message) -> Message | list[Message]:
        replies.append(name)
        is_first = replies.count(name) == 1
        if name == "anna" and is_first:  # another process replaces it
            federation.transport.connected["anna"] += 1
            return []
        if name == "bert" and is_first:
            return change_header(reply, summary={**json.loads(reply.header)["summary"], "test": 10**6})
        if name == "cleo":
            federation.transport.connected["bert"] += 1
        return reply

    federation = LocalFederation(files, spec, tmp_path, change)
    summaries = collect_summaries(federation.transport, sorted(files), {}, 5.0, lambda text: None)
    assert summaries == {name: node.summary for name, node in federation.nodes.items()}


@pytest.mark.parametrize(
    "changes",
    [{"train": 2**39}, {"test": -1}, {"majority_hits": 10**6}, {"fingerprint": "Ann"}, {"name": "Ann"}],
)
def test_summary_of_another_form_is_refused(
    changes: dict[str, Any], files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    """A run would need 4 TB for the first."""

    def change(name: str, task: dict[str, Any], reply: Message) -> Message:
        return change_header(reply, summary=json.loads(reply.header)["summary"] | changes)

    federation = LocalFederation(files, spec, tmp_path, change)
    with pytest.raises(InvalidInputError, match=r"^node '[a-z]*' cannot take part: its summary "):
        collect_summaries(federation.transport, sorted(files), {}, 5.0, lambda text: None)


def test_node_keeps_the_states_to_which_the_run_refers(
    files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    document = federation.run("ditto", rounds=6)
    assert document["best"]
    with_store = RunStore.open(tmp_path / "run")
    run = with_store.run_id
    with_store.close()
    for node in federation.nodes.values():
        assert {5, 6} <= set(node.store.rounds(run)) <= {document["best"]["round"], 5, 6}


@pytest.mark.parametrize(
    "change",
    ["DELETE FROM states", "UPDATE states SET state = (SELECT state FROM states ORDER BY round LIMIT 1)"],
    ids=["missing", "of another round"],
)
def test_missing_or_changed_private_state_is_named(
    change: str, files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    federation.run("ditto", rounds=2)
    federation.nodes["cleo"].store._db.execute(change)
    message = r"client 'cleo' .*node 'cleo': its private state .* --resume continues"
    with pytest.raises(FeddbeError, match=message):
        federation.run("ditto", resume=True)


def test_changed_data_of_a_node_is_named_when_a_run_is_resumed(
    files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    federation.run("ditto", rounds=2)
    dataset = federation.dataset()
    changed = dict(np.load(files["bert"]))
    changed["x"][0] += 1
    np.savez(tmp_path / "changed.npz", **changed)
    bert = federation.nodes["bert"]
    federation.transport.local_nodes["bert"] = Node(tmp_path / "bert", str(tmp_path / "changed.npz"), spec)
    federation.dataset = lambda: dataset  # type: ignore[method-assign]
    with pytest.raises(FeddbeError, match="node 'bert': its data has changed since the run began"):
        federation.run("ditto", resume=True)
    bert.store.close()


def test_divergence_crosses_the_wire_and_no_other_text_does(
    files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    with pytest.raises(DivergenceError, match="at client"):
        LocalFederation(files, spec, tmp_path).run("fedavg", lr=1e30)
    header = error_message(ValueError("the name of the patient is Ann")).header
    assert b"Ann" not in header
    assert b"ValueError" in header


def test_other_versions_are_named(files: dict[str, Path], spec: DataSpec, tmp_path: Path) -> None:
    def change(name: str, task: dict[str, Any], reply: Message) -> Message:
        header = json.loads(reply.header)
        if header["kind"] == "summary" and name == "bert":
            return change_header(reply, versions={**header["versions"], "torch": "1.0"})
        return reply

    federation = LocalFederation(files, spec, tmp_path, change)
    federation.run("fedavg", rounds=1)
    (text,) = federation.messages.texts
    assert text.startswith("node 'bert' has other versions: torch '1.0' there, ")


def test_initial_model_that_differs_is_named(files: dict[str, Path], spec: DataSpec, tmp_path: Path) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    reply = federation.request(recipe={"initial_model": "0" * 64})
    with pytest.raises(protocol.NodeError, match="its initial model differs from the server's"):
        reply.read("result")

    def change(name: str, task: dict[str, Any], reply: Message) -> Message:
        return error_message(protocol.InitialModelError()) if name == "bert" and task else reply

    federation.transport.change = change
    with pytest.raises(FeddbeError, match=r"node 'bert': its initial model differs .* versions of packages"):
        federation.run("fedavg")


# --- the owner of a node decides


MODEL_FILE = """
from torch import nn

def build(shape, classes):
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
    return nn.Sequential(hidden, nn.Linear(16, classes))
"""


def test_owner_allows_a_file_by_content(
    files: dict[str, Path], spec: DataSpec, pooled: Dataset, tmp_path: Path
) -> None:
    """The node executes its own copy, under another name, and only if the content is equal."""
    (tmp_path / "server").mkdir()
    server_file, node_file = tmp_path / "server" / "model.py", tmp_path / "copy.py"
    server_file.write_text(MODEL_FILE)
    node_file.write_text(MODEL_FILE)
    options: dict[str, Any] = {"model": f"{server_file}:build", "bn_buffers": "average"}
    federation = LocalFederation(files, spec, tmp_path)
    for node in federation.nodes.values():
        node.allowed_files = (str(node_file),)
    document = federation.run("fedavg+dbe", **options)
    assert hashes(document) == hashes(run_serial("fedavg+dbe", pooled, tmp_path / "serial", **options))

    node_file.write_text(MODEL_FILE + "# edited\n")
    edited = LocalFederation(files, spec, tmp_path / "edited")
    edited.nodes["anna"].allowed_files = (str(node_file),)
    with pytest.raises(FeddbeError, match=r"node '.*': its owner does not allow this task"):
        edited.run("fedavg+dbe", **options)


def test_owner_chooses_methods(files: dict[str, Path], spec: DataSpec, tmp_path: Path) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    federation.nodes["anna"].methods = frozenset({"fedrep"})
    assert kind_and_type(federation.request()) == ("error", "NotAllowedError")
    federation.nodes["anna"].methods = frozenset({"fedavg"})
    assert kind_and_type(federation.request()) == ("result", None)


@pytest.mark.parametrize("sizes", [[90, 2, 1], [90, -1, 1], [90, 10**12, 1]])
def test_node_refuses_sizes_of_others(
    sizes: list[int], files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    """Each sample takes memory on the node."""
    federation = LocalFederation(files, spec, tmp_path)
    for method in ("fedavg", "apple"):
        recipe = make_recipe(federation.experiment(method), spec, 0)
        changed = {"sizes": recipe["sizes"] | {"train": sizes}}
        reply = federation.request(method=method, run=method, recipe=changed)
        is_allowed = method == "apple" and sizes[1] == 2
        assert kind_and_type(reply) == (("result", None) if is_allowed else ("error", "ProtocolError"))


def test_only_apple_sends_sample_counts_of_others(
    files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    sizes = {
        method: make_recipe(federation.experiment(method), spec, 1)["sizes"]["train"]
        for method in ("fedavg+dbe", "fedfomo", "apple")
    }
    assert sizes == {"fedavg+dbe": [1, 66, 1], "fedfomo": [1, 66, 1], "apple": [90, 66, 42]}


def test_message_limit_follows_from_the_model(files: dict[str, Path], spec: DataSpec, tmp_path: Path) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    node = federation.nodes["anna"]
    experiment = federation.experiment("fedavg")
    size = sum(tensor.nbytes for tensor in experiment.task.model.parameters.values())
    for method, models in {"fedavg": 4, "fedfomo": 7, "apple": 7}.items():
        header = federation.build_request(method=method, run=method).header
        assert node.max_body(header) == models * size + protocol.MARGIN
    assert node.max_body(b"garbage") == protocol.MARGIN
    assert protocol.reply_limit(experiment.task.model.parameters) == 4 * size + protocol.MARGIN


# --- the node's own model


@pytest.mark.parametrize(
    "method", ["fedavg+dbe", "ditto", "fedrep+mr", "perfedavg", "fedfomo", "apple", "fedbabu"]
)
def test_node_has_its_own_model_at_the_end(
    method: str, files: dict[str, Path], spec: DataSpec, pooled: Dataset, tmp_path: Path
) -> None:
    """It has the accuracy of the run's file, and the logits of the same run by the serial engine."""
    run_serial(method, pooled, tmp_path / "serial")
    federation = LocalFederation(files, spec, tmp_path)
    document = federation.run(method)
    assert federation.messages.texts == []
    store = RunStore.open(tmp_path / "run")
    run, best, moment = store.run_id, document["best"], store.meta("moment") or "before"
    assert best
    records = store.records(best["round"], "AND name = 'accuracy' AND moment = ?", moment)
    accuracies = {record.client: record.value for record in records}
    store.close()
    for client, (name, path) in enumerate(sorted(files.items())):
        federation.nodes[name].store.close()
        node = Node(tmp_path / name, str(path), spec)  # another process, another day
        model = node.load_model(run)
        description = model.description
        serial_model = load_client_model(tmp_path / "serial", name, data=pooled)
        assert torch.equal(model.logits, serial_model.logits)
        if method != "fedbabu":  # it is fine-tuned first, which the best round was not
            assert description["accuracy"] == pytest.approx(accuracies[client], abs=1e-12)
        assert description["round"] == best["round"]
        node.store.close()
