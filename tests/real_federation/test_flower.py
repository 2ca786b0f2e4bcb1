"""Runs on stock Flower, with real processes on 127.0.0.1, have the bits of the serial engine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from feddbe.federation.data_spec import DataSpec
from feddbe.federation.protocol import Message
from tests.real_federation.flower_deployment import FlowerDeployment, find_nginx
from tests.real_federation.nodes import (
    NAMES,
    OPTIONS,
    hashes,
    make_files,
    make_spec,
    pool_datasets,
    run_serial,
)
from tests.waiting import PATIENCE

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="needs feddbe[flower]; make test-all installs it"
)
CLOSED_PATHS = (
    "/v1/control/list-nodes", "/v1/control/list-runs", "/v1/control/register-node", "/v1/control/start-run",
    "/v1/runtime/acquire-task", "/v1/runtime/push-messages", "/v1/fleet/register-node",
    "/v1/fleet/unregister-node", "/v1/fleet/../control/list-nodes", "/v1//control/list-nodes",
    "/v1/fleet/get-run/../../control/list-nodes", "/health", "/docs", "/openapi.json",
)  # fmt: skip
"""Paths of the SuperLink that nodes do not need."""
WITHOUT_FLOWER = """
import sys
sys.modules["flwr"] = None
from feddbe.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@needs_flower
def test_two_methods_have_the_bits_of_the_serial_engine(tmp_path: Path) -> None:
    files, spec = make_files(tmp_path / "data"), make_spec(tmp_path)
    with closing(FlowerDeployment(tmp_path)) as deployment:
        deployment.start_nodes(files)
        assert_bits_equal_serial(deployment, "scaffold+dbe", files, spec, rounds=2)
        assert_bits_equal_serial(deployment, "fedavg+dbe", files, spec, rounds=1)
        assert_bits_equal_serial(deployment, "fedavg+dbe", files, spec, "--resume", rounds=2)
        # without the server
        deployment.call("feddbe", "federation", "export", "--state", "state-anna", "--out", "exported")
        assert (tmp_path / "exported" / "score.py").exists()


@needs_flower
@pytest.mark.skipif(find_nginx() is None, reason="needs nginx")
def test_nodes_train_through_the_documented_nginx_rule_and_strangers_get_404(tmp_path: Path) -> None:
    files, spec = make_files(tmp_path / "data"), make_spec(tmp_path)
    with closing(FlowerDeployment(tmp_path, has_proxy=True)) as deployment:
        deployment.start_nodes(files)
        assert_bits_equal_serial(deployment, "scaffold+dbe", files, spec, rounds=1)
        for path in CLOSED_PATHS:
            assert deployment.status_of(path, deployment.nodes_port, b"") == 404, path
        assert deployment.status_of("/v1/fleet/pull-messages", deployment.nodes_port, b"") == 401
        assert deployment.status_of("/v1/fleet/pull-messages", deployment.nodes_port) == 403
        # the open door that the rule closes
        assert deployment.status_of("/v1/control/list-nodes", deployment.port, b"") == 200


def assert_bits_equal_serial(
    deployment: FlowerDeployment,
    method: str,
    files: Mapping[str, Path],
    spec: DataSpec,
    *more: str,
    rounds: int,
) -> None:
    out = deployment.root / method
    options = OPTIONS | {"rounds": rounds, "out": out}
    words = " ".join([*(f"--{key} {value}" for key, value in options.items()), *more])
    status = deployment.run(f"run {method} {words} --quiet", NAMES)
    assert status == "finished:completed", deployment.log()
    document = json.loads(deployment.call("feddbe", "show", str(out), "--json"))
    pooled = pool_datasets(files, spec)
    serial = run_serial(method, pooled, deployment.root / f"serial-{method}-{rounds}", rounds=rounds)
    assert hashes(document) == hashes(serial)


class RecordedGrid:
    """A Grid with one node, whose replies a test prepares."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.pushed = 0

    def get_nodes(self) -> Iterator[Any]:
        yield SimpleNamespace(name="anna", node_id=7, last_activated_at="2026-01-01T00:00:00+00:00")

    def push_messages(self, messages: Sequence[Any]) -> list[str]:
        self.pushed += len(messages)
        return [f"message {self.pushed}"]

    def pull_messages(self, identifiers: Sequence[str]) -> list[Any]:
        pulled, self.replies = self.replies, []
        return pulled

    def add_reply(
        self, identifier: str, message: Message, source: int = 7, error_code: int | None = None
    ) -> None:
        from feddbe.federation.flower import to_records

        metadata = SimpleNamespace(reply_to_message_id=identifier, src_node_id=source)
        reply = SimpleNamespace(metadata=metadata, content=to_records(message))
        reply.error = SimpleNamespace(code=error_code, reason="the private text of an error")
        reply.has_error = lambda: error_code is not None
        self.replies.append(reply)


@pytest.fixture
def grid() -> RecordedGrid:
    return RecordedGrid()


@pytest.fixture
def transport(grid: RecordedGrid, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a transport over the grid; outside of an app, Flower's own message raises an error."""
    from feddbe.federation import flower

    monkeypatch.setattr(flower, "FlowerMessage", lambda content, **fields: content)
    return flower.FlowerTransport(grid)


@needs_flower
def test_reply_counts_once_and_only_from_the_node_of_the_request(grid: RecordedGrid, transport: Any) -> None:
    assert list(transport.nodes()) == ["anna"]
    request, reply = Message.build("describe", {}), Message(b"{}", b"abc")
    assert transport.send("bert", request, 10) is None
    replaced = transport.send("anna", request, 10)
    current = transport.send("anna", request, 10)
    grid.add_reply(replaced, reply)
    grid.add_reply("message of another run", reply)
    grid.add_reply(current, reply, source=8)
    assert transport.receive(0.0) is None
    grid.add_reply(current, reply)
    grid.add_reply(current, reply)
    assert transport.receive(0.0) == (current, reply)
    assert transport.receive(0.0) is None


@needs_flower
@pytest.mark.parametrize(
    ("message", "error_code", "reason"),
    [
        (Message(b"{}", b"0123456789a"), None, "11 bytes; at most 10"),
        (Message(b" " * (2**20 + 1)), None, "does not have the right form"),
        (Message(b"{}"), 5, "its SuperNode is gone"),
        (Message(b"{}"), 99, "error 99 of Flower"),
    ],
    ids=["body", "header", "gone", "unknown"],
)
def test_reply_that_is_not_accepted_is_a_reason(
    grid: RecordedGrid, transport: Any, message: Message, error_code: int | None, reason: str
) -> None:
    transport.nodes()
    identifier = transport.send("anna", Message.build("describe", {}), 10)
    grid.add_reply(identifier, message, error_code=error_code)
    received = transport.receive(0.0)
    assert received[0] == identifier
    assert reason in received[1]


@needs_flower
def test_waiting_ends_when_a_node_disconnects(
    grid: RecordedGrid, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feddbe.federation.flower.NODES_SECONDS", 0.1)
    transport.nodes()
    transport.send("anna", Message.build("describe", {}), 10)
    nodes = iter([list(grid.get_nodes())])
    monkeypatch.setattr(grid, "get_nodes", lambda: next(nodes, []))
    assert transport.receive(3600.0) is None
    assert dict(transport.nodes()) == {}


def test_missing_package_is_one_line(tmp_path: Path) -> None:
    make_spec(tmp_path)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_FLOWER, "federation", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)

    created = call("init", "f", "--host", "127.0.0.1", "--like", "example.npz")
    assert created.returncode == 0, created.stderr
    refused = call("flower", "f")
    assert refused.returncode == 2
    assert refused.stderr == "feddbe: flwr is not installed; install feddbe[flower]\n"
    assert not (tmp_path / "f" / "flower").exists()
