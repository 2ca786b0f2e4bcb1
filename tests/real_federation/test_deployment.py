"""A federation by its real commands: processes on 127.0.0.1 with mutual TLS, kills, and refused input."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("grpc", reason="needs feddbe[federation]")
pytest.importorskip("cryptography", reason="needs feddbe[federation]")

from feddbe import cli
from tests.real_federation.nodes import NAMES, hashes
from tests.real_federation.processes import Federation, free_port, is_listening, run_options
from tests.waiting import wait_until


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    opened = Federation(tmp_path)
    yield opened
    opened.close()


def test_two_methods_have_the_bits_of_the_serial_engine(tmp_path: Path) -> None:
    federation = Federation(tmp_path, ())
    try:
        words = ["init", "f", "--host", "127.0.0.1", "--listen", "127.0.0.1", "--port", str(free_port())]
        for path in sorted((tmp_path / "f").rglob("*"), reverse=True):  # the command creates it again
            path.rmdir() if path.is_dir() else path.unlink()
        federation.call("federation", *words, "--like", "example.npz")
        federation.call("federation", "invite", "f", *NAMES)
        federation.join_all()
        for method in ("fedavg+dbe", "scaffold+dbe"):
            status, out = federation.finish(federation.run(method, method))
            assert status == 0, out
            assert hashes(federation.document(method)) == hashes(federation.serial(method))
        text = federation.call("federation", "status", "f")
        assert all(name in text for name in NAMES)
        assert "round 3 of 3" in text
        (tmp_path / "elsewhere").mkdir()
        words = ["export", "--state", f"{tmp_path}/state-anna", "--out", f"{tmp_path}/exported"]
        exported = federation.call("federation", *words, cwd="elsewhere")  # without the server
        assert "exported" in exported
        assert (tmp_path / "exported" / "score.py").exists()
        for name in NAMES:
            assert (tmp_path / f"state-{name}").stat().st_mode & 0o077 == 0
            assert (tmp_path / f"state-{name}" / "private.sqlite").stat().st_mode & 0o077 == 0
            assert (tmp_path / f"{name}.invitation").stat().st_mode & 0o077 == 0
    finally:
        federation.close()


def test_killed_node_and_killed_server_end_in_the_same_bits(federation: Federation) -> None:
    """The node restarts with its private state; the server resumes from the last complete round."""
    federation.join_all()
    server = federation.run("fedavg+dbe", "run", rounds=12)
    store = federation.root / "run" / "run.sqlite"
    wait_until(store.exists, "the first round")
    federation.kill(federation.nodes["bert"])
    federation.join("bert")
    time.sleep(0.3)
    federation.kill(server)
    server = federation.run("fedavg+dbe", "run", "--resume", rounds=12)
    status, out = federation.finish(server)
    assert status == 0, out
    assert hashes(federation.document("run")) == hashes(federation.serial("fedavg+dbe", rounds=12))


def test_second_run_and_used_state_folder_are_refused(federation: Federation) -> None:
    first = federation.run("fedavg", "first")
    wait_until(lambda: is_listening(federation.port), "listening")
    out = federation.call(
        "run", "fedavg", "--data", "federation:f", *run_options(), "--out", "second", code=2
    )
    assert out.startswith("feddbe: another run of ")
    assert out.count("\n") == 1
    assert first.poll() is None
    node = federation.join("anna")
    wait_until(lambda: "training and" in federation.output(node), "the node's start")
    status, out = federation.finish(federation.join("anna"))
    assert (status, out.count("\n")) == (2, 1)
    assert "another process uses the state folder 'state-anna'" in out
    assert node.poll() is None
    os.kill(first.pid, signal.SIGINT)
    assert federation.finish(first)[0] == 130


# --- bad input, in this process


@pytest.fixture(scope="module")
def idle_federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Return a federation without processes, with files of another shape and with another label."""
    federation = Federation(tmp_path_factory.mktemp("idle"))
    arrays = dict(np.load(federation.files["anna"]))
    np.savez(federation.root / "small.npz", x=arrays["x"][..., :4], y=arrays["y"])
    np.savez(federation.root / "label.npz", x=arrays["x"], y=arrays["y"] + 7)
    anna, bert = (
        json.loads((federation.root / f"{name}.invitation").read_text()) for name in ("anna", "bert")
    )
    (federation.root / "key.invitation").write_text(json.dumps(anna | {"key": bert["key"]}))
    return federation


JOIN = ["federation", "join", "anna.invitation", "--state", "s", "--data"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["federation", "status", "nothing"], ["'nothing' is not a federation"]),
        (["run", "fedavg", "--data", "federation:data"], ["data' is not a federation"]),
        (["federation", "invite", "f", "anna"], ["'anna' is invited already", "remove f anna"]),
        (["federation", "invite", "f", "dora", "anna"], ["'anna' is invited already"]),
        (
            ["federation", "init", "g", "--host", "h", "--listen", "h\nport", "--like", "digits"],
            ["--listen h?port"],
        ),
        (["federation", "invite", "f", "An/na"], ["name 'An/na'", "lower-case letters"]),
        (["federation", "remove", "f", "dora"], ["no node 'dora'", "anna, bert, cleo"]),
        (["federation", "init", "f", "--host", "h", "--like", "digits"], ["'f' exists and is not empty"]),
        (["federation", "join", "example.npz", "--data", "digits", "--state", "s"], ["is not an invitation"]),
        (
            ["federation", "join", "key.invitation", "--data", "digits", "--state", "s"],
            ["is not an invitation"],
        ),
        ([*JOIN, "absent.npz"], ["absent.npz"]),
        ([*JOIN, "small.npz"], ["inputs of shape (1, 8, 4)", "the federation has", "shape (1, 8, 8)"]),
        ([*JOIN, "label.npz"], ["the data has the label '10'", "the federation has 0, 1, 2"]),
        ([*JOIN, "digits", "--methods", "fedsum"], ["--methods fedsum", "fedavg"]),
        (["federation", "export", "--state", "data"], ["'data' is not the state folder of a node"]),
        (
            ["run", "fedavg", "--data", "federation:f", "--partition", "iid"],
            ["partition = iid", "divided among its nodes"],
        ),
        (["run", "fedavg", "--data", "federation:f", "--model", "cnm"], ["model 'cnm'", "cnn"]),
        *(
            (["run", "fedavg", "--data", "federation:f", "--metrics", metric], [f"metric {metric} needs"])
            for metric in ("drift", "global_accuracy")
        ),
        (["data", "show", "federation:f"], ["'federation:f' has no rows here"]),
        (["tune", "fedavg", "--data", "federation:f"], ["'federation:f' has no rows here"]),
    ],
    ids=lambda value: " ".join(value[:3]) if value[0] in ("run", "federation", "data", "tune") else "",
)
def test_bad_input_is_one_line(
    idle_federation: Federation,
    words: Sequence[str],
    parts: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(idle_federation.root)
    assert cli.main(words) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("feddbe: ")
    assert error.count("\n") == 1
    assert [part for part in parts if part not in error] == []


def test_port_in_use_is_one_line_and_the_federation_stays_free(
    idle_federation: Federation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(idle_federation.root)
    with socket.socket() as other:
        other.bind(("127.0.0.1", idle_federation.port))
        other.listen()
        assert cli.main(["run", "fedavg", "--data", "federation:f"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"feddbe: cannot listen on 127.0.0.1:{idle_federation.port}: ")
    assert error.count("\n") == 1
    assert not idle_federation.folder.is_in_use()
    status = cli.main(["federation", "status", "f", "--json"])
    assert (status, json.loads(capsys.readouterr().out)["run"]) == (0, None)
