"""Faults of real processes: each run ends in the bits of the serial engine, with the same absences."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc", reason="needs feddbe[federation]")
pytest.importorskip("cryptography", reason="needs feddbe[federation]")

from tests.real_federation.nodes import NAMES, hashes
from tests.real_federation.pausing_node import LOCK_SECONDS
from tests.real_federation.processes import Federation, Process, count_rounds
from tests.waiting import wait_until

METHOD = "scaffold+dbe"
BERT = 1
"""Number of the client 'bert'."""
pytestmark = pytest.mark.skipif("FEDDBE_CASES" not in os.environ, reason="takes minutes: make test-all")


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    opened = Federation(tmp_path)
    yield opened
    opened.close()


def start_paused(federation: Federation, name: str, where: str, **options: Any) -> tuple[Process, Path]:
    """Start a run; return its process and the mark of the node, which pauses in round 2."""
    federation.join_all(*(other for other in NAMES if other != name))
    mark = federation.join_with_pause(name, where)
    federation.wait_for_nodes()  # a run waits for nodes only as long as for their replies
    server = federation.run(METHOD, "run", **options)
    wait_until(mark.exists, "the pause")
    return server, mark


def check_bits(federation: Federation, server: Process, expected: Any) -> None:
    """Check that the run ends with the hashes of another run."""
    status, out = federation.finish(server)
    assert status == 0, out
    assert hashes(federation.document("run")) == hashes(expected)


@pytest.mark.parametrize("where", ["before", "after"])
def test_node_is_killed_before_or_after_it_saves(federation: Federation, where: str) -> None:
    server, _ = start_paused(federation, "bert", where)
    assert (2 in federation.private_rounds("bert", "run")) == (where == "after")
    federation.kill(federation.nodes["bert"])
    federation.join("bert")
    check_bits(federation, server, federation.serial(METHOD))
    assert "node 'bert': connection lost" in federation.output(server)


def test_server_is_killed_in_a_round(federation: Federation) -> None:
    """Two nodes have the states of round 2, which the server never accepted."""
    server, mark = start_paused(federation, "cleo", "before")
    others = ("anna", "bert")
    wait_until(
        lambda: all(2 in federation.private_rounds(name, "run") for name in others), "two states of round 2"
    )
    federation.kill(server)
    assert count_rounds(federation.root / "run") == 1
    mark.unlink()
    server = federation.run(METHOD, "run", "--resume")
    check_bits(federation, server, federation.serial(METHOD))


def test_everything_is_killed(federation: Federation) -> None:
    server, _ = start_paused(federation, "cleo", "after")
    federation.kill(server, *federation.nodes.values())
    assert count_rounds(federation.root / "run") == 1
    federation.join_all()
    server = federation.run(METHOD, "run", "--resume")
    check_bits(federation, server, federation.serial(METHOD))


def test_late_node_does_not_start_from_the_round_that_it_missed(federation: Federation) -> None:
    """It has a state of round 2, and its late reply must not count for round 3."""
    options = {"rounds": 5, "min_replies": 2, "worker_timeout": 20.0}
    server, mark = start_paused(federation, "bert", "after", **options)
    wait_until(lambda: count_rounds(federation.root / "run") >= 2, "round 2 without the node")
    mark.unlink()
    status, out = federation.finish(server)
    assert status == 0, out
    missing = federation.missing_rounds("run")
    assert missing[0] == 2
    assert 5 not in missing
    serial = federation.serial(METHOD, absence=(BERT, missing), **options)
    assert hashes(federation.document("run")) == hashes(serial)


def test_frozen_node_is_noticed_and_continues(federation: Federation) -> None:
    """Its process stands still, as if its machine hung; it connects again when it continues."""
    server, mark = start_paused(federation, "bert", "before")
    os.kill(federation.nodes["bert"].pid, signal.SIGSTOP)
    wait_until(lambda: "node 'bert': connection lost" in federation.output(server), "the notice", 50)
    mark.unlink()
    os.kill(federation.nodes["bert"].pid, signal.SIGCONT)
    check_bits(federation, server, federation.serial(METHOD))


def test_resumed_run_does_not_wait_for_a_node_that_is_gone(federation: Federation) -> None:
    options = {"min_replies": 2, "worker_timeout": 20.0}
    server, _ = start_paused(federation, "bert", "after", **options)
    federation.kill(federation.nodes["bert"])
    wait_until(lambda: count_rounds(federation.root / "run") >= 2, "round 2 without the node")
    federation.kill(server)
    server = federation.run(METHOD, "run", "--resume", **options)
    serial = federation.serial(METHOD, absence=(BERT, [2, 3, 4]), **options)
    check_bits(federation, server, serial)
    assert "without the model of round" in federation.output(server)


def test_deleted_private_states_are_refused(federation: Federation) -> None:
    server, _ = start_paused(federation, "cleo", "before")
    federation.kill(federation.nodes["cleo"])
    federation.delete_private_states("cleo")
    federation.join("cleo")
    status, out = federation.finish(server)
    assert status == 2
    assert out.splitlines()[-1].startswith("feddbe: client 'cleo' did not reply in round 2 (node 'cleo': ")
    assert "its private state of this run is missing or was changed" in out.splitlines()[-1]
    assert count_rounds(federation.root / "run") == 1


def test_second_run_is_refused_and_the_first_continues(federation: Federation) -> None:
    server, mark = start_paused(federation, "bert", "before")
    status, out = federation.finish(federation.run("fedavg", "second"))
    assert status == 2
    assert out.startswith("feddbe: another run of ")
    assert out.count("\n") == 1
    mark.unlink()
    check_bits(federation, server, federation.serial(METHOD))


def test_second_process_with_an_invitation_replaces_the_first(federation: Federation) -> None:
    """A node moves to another machine with a copy of its folder; the old process ends after its task."""
    server, mark = start_paused(federation, "cleo", "before")
    older = federation.nodes["cleo"]
    federation.copy_state("cleo", "copy")
    federation.join("cleo", state="copy")
    wait_until(lambda: "node 'cleo': connection lost" in federation.output(server), "the second connection")
    mark.unlink()
    status, out = federation.finish(older)
    assert status == 2
    assert "another process connected with the same invitation" in out.splitlines()[-1]
    check_bits(federation, server, federation.serial(METHOD))


def test_changed_data_is_named_when_a_run_is_resumed(federation: Federation) -> None:
    server, _ = start_paused(federation, "bert", "before")
    federation.kill(server, federation.nodes["bert"])
    arrays = dict(np.load(federation.files["bert"]))
    arrays["x"][0] += 1
    np.savez(federation.files["bert"], **arrays)
    federation.join("bert")
    status, out = federation.finish(federation.run(METHOD, "run", "--resume"))
    assert status == 2
    assert "(node 'bert': its data has changed since the run began)" in out.splitlines()[-1]


def test_node_that_holds_the_lock_of_python_stays_connected(federation: Federation) -> None:
    """Other threads of Python cannot run for a minute; those of gRPC answer pings."""
    started = time.monotonic()
    server, _ = start_paused(federation, "bert", "lock")
    check_bits(federation, server, federation.serial(METHOD))
    assert time.monotonic() - started > LOCK_SECONDS
    assert "connection lost" not in federation.output(server)
