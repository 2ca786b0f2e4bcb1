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
from feddbe.federation import protocol
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.engine import MAX_FAILURES
from feddbe.federation.node import Node, make_recipe
from feddbe.federation.protocol import Message, error_message
from feddbe.runs.store import RunStore
from feddbe.simulation.client import ClientTask
from feddbe.simulation.loop import build_broadcast
from feddbe.state import decode, encode
from feddbe.training.task import Context
from tests.real_federation.nodes import (
    LocalFederation,
    hashes,
    make_files,
    make_spec,
    pool_datasets,
    run_serial,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_files(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return make_spec(tmp_path_factory.mktemp("spec"))


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


def test_missing_private_state_is_named(files: dict[str, Path], spec: DataSpec, tmp_path: Path) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    federation.run("ditto", rounds=2)
    federation.nodes["cleo"].store._db.execute("DELETE FROM states")
    with pytest.raises(FeddbeError, match=r"client 2 .*node 'cleo': its private state .* --resume continues"):
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
    reply = request(LocalFederation(files, spec, tmp_path), recipe={"initial_model": "0" * 64})
    with pytest.raises(protocol.NodeError, match="its initial model differs from the server's"):
        reply.read("result")


@pytest.mark.parametrize("metrics", ["drift", "global_accuracy"])
def test_metrics_of_all_clients_samples_are_refused(
    metrics: str, files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=f"metrics = {metrics}; metric {metrics} needs"):
        LocalFederation(files, spec, tmp_path).run("fedavg", metrics=metrics)


# --- a malicious server


def request(
    federation: LocalFederation,
    task: ClientTask | None = None,
    method: str = "fedavg",
    base: Any = None,
    recipe: dict[str, Any] | None = None,
    **options: Any,
) -> Message:
    """Return anna's reply to a task of a server that changed the recipe or its options."""
    task = task or ClientTask(0, 1, "train", evaluate=True)
    experiment = federation.experiment(method)
    changed = make_recipe(experiment, federation.spec, task.client) | (recipe or {})
    changed["options"] = changed["options"] | options
    server = experiment.method.server_init(Context(experiment.task, 0))
    broadcast = build_broadcast(experiment.method, Context(experiment.task, task.round), server)
    fields = {"run": "r", "recipe": changed, "base": base, "keep": []}
    message = protocol.task_message(task, fields, encode(broadcast.message_for(task.client)))
    return federation.nodes["anna"].reply_to(message)


def kind_and_type(reply: Message) -> tuple[str, str | None]:
    header = json.loads(reply.header)
    return header["kind"], header.get("type")


@pytest.mark.parametrize("fields", [{"layers": ("z_g",)}, {"sample_indices": (0,)}, {"metrics": ("drift",)}])
def test_node_never_sends_representations(
    fields: dict[str, Any], files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    assert kind_and_type(request(federation)) == ("result", None)
    reply = request(federation, ClientTask(0, 1, "none", evaluate=True, **fields))
    assert kind_and_type(reply) == ("error", "NotAllowedError")
    assert not reply.body


@pytest.mark.parametrize("kind", ["model", "method"])
def test_server_cannot_name_a_python_file(
    kind: str, files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    script, mark = tmp_path / "script.py", tmp_path / "mark"
    script.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    federation = LocalFederation(files, spec, tmp_path)
    reference = f"{script}:thing"
    if kind == "model":
        reply = request(federation, model=reference)
    else:
        reply = request(federation, recipe={"method": reference})
    assert kind_and_type(reply) == ("error", "NotAllowedError")
    assert not mark.exists()


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


@pytest.mark.parametrize(
    "change",
    [{"method": "local"}, {"recipe": {"data_spec": "0" * 64}}, {"seed": 3}, {"task": ClientTask(1, 2)}],
)
def test_run_keeps_its_method_model_seed_and_client(
    change: dict[str, Any], files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    receipt = json.loads(request(federation, method="ditto").header)["receipt"]
    task = ClientTask(0, 2, "train")
    assert kind_and_type(request(federation, task, "ditto", base=receipt)) == ("result", None)
    reply = request(federation, **{"task": task, "method": "ditto", "base": receipt, **change})
    assert kind_and_type(reply)[0] == "error"


def test_owner_chooses_methods(files: dict[str, Path], spec: DataSpec, tmp_path: Path) -> None:
    federation = LocalFederation(files, spec, tmp_path)
    federation.nodes["anna"].methods = frozenset({"fedrep"})
    assert kind_and_type(request(federation)) == ("error", "NotAllowedError")
    federation.nodes["anna"].methods = frozenset({"fedavg"})
    assert kind_and_type(request(federation)) == ("result", None)


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
    recipe = make_recipe(experiment, spec, 0)
    fields: dict[str, Any] = {"run": "r", "recipe": recipe, "base": None, "keep": []}
    header = protocol.task_message(ClientTask(0, 1, "train"), fields, b"").header
    size = sum(tensor.nbytes for tensor in experiment.task.model.parameters.values())
    assert node.max_body(header) == 7 * size + protocol.MARGIN
    assert node.max_body(b"garbage") == protocol.MARGIN
    assert protocol.reply_limit(experiment.task.model.parameters) == 4 * size + protocol.MARGIN


# --- the node's own model


@pytest.mark.parametrize(
    "method", ["fedavg+dbe", "ditto", "fedrep+mr", "perfedavg", "fedfomo", "apple", "fedbabu"]
)
def test_node_has_its_own_model_at_the_end(
    method: str, files: dict[str, Path], spec: DataSpec, tmp_path: Path
) -> None:
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
        description = node.load_model(run).description
        if method != "fedbabu":  # it is fine-tuned first, which the best round was not
            assert description["accuracy"] == pytest.approx(accuracies[client], abs=1e-12)
        assert description["round"] == best["round"]
        node.store.close()
