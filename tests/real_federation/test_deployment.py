"""A federation by its real commands: processes on 127.0.0.1 with mutual TLS, kills, and refused input."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs feddbe[federation]")
pytest.importorskip("cryptography", reason="needs feddbe[federation]")

from feddbe.federation.data_spec import DataSpec
from tests.real_federation.nodes import (
    NAMES,
    OPTIONS,
    hashes,
    make_files,
    make_spec,
    pool_datasets,
    run_serial,
)

SECONDS = 90
"""Seconds after which a command counts as hanging."""
Process = subprocess.Popen[str]


def run_options(**changes: Any) -> list[str]:
    return [word for key, value in (OPTIONS | changes).items() for word in (f"--{key}", str(value))]


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "feddbe", *map(str, words)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Return the first true value of the condition."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen in {SECONDS} s")


class Federation:
    """A federation in a folder, its commands and its processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.files = make_files(root / "data")
        make_spec(root)  # writes the example
        self.processes: list[Process] = []
        words = ["init", "f", "--host", "127.0.0.1", "--listen", "127.0.0.1", "--port", str(self.port)]
        self.call("federation", *words, "--like", "example.npz")
        self.call("federation", "invite", "f", *NAMES)

    def start(self, *words: str | Path) -> Process:
        process = subprocess.Popen(
            command(*words), cwd=self.root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.processes.append(process)
        return process

    def finish(self, process: Process) -> tuple[int, str]:
        out, _ = process.communicate(timeout=SECONDS)
        return process.returncode, out

    def call(self, *words: str | Path, code: int = 0) -> str:
        status, out = self.finish(self.start(*words))
        assert status == code, out
        return out

    def join(self, name: str, *words: str) -> Process:
        invitation = f"{name}.invitation"
        return self.start(
            "federation", "join", invitation, "--data", self.files[name], "--state", f"state-{name}", *words
        )

    def run(self, method: str, out: str, *words: str, **options: Any) -> Process:
        data = ("--data", "federation:f", *run_options(**options))
        return self.start("run", method, *data, "--out", out, "--quiet", *words)

    def document(self, out: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.call("show", out, "--json"))
        return document

    def serial(self, method: str, **options: Any) -> Any:
        spec = DataSpec.from_example(str(self.root / "example.npz"))
        folder = self.root / f"serial-{method}-{options.get('rounds', '')}"
        return run_serial(method, pool_datasets(self.files, spec), folder, **options)

    def kill(self, process: Process) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    opened = Federation(tmp_path)
    yield opened
    opened.close()


def test_two_methods_have_the_bits_of_the_serial_engine(federation: Federation) -> None:
    for name in NAMES:
        federation.join(name)
    for method in ("fedavg+dbe", "scaffold+dbe"):
        status, out = federation.finish(federation.run(method, method))
        assert status == 0, out
        assert hashes(federation.document(method)) == hashes(federation.serial(method))
    text = federation.call("federation", "status", "f")
    assert all(name in text for name in NAMES)
    assert "round 3 of 3" in text
    exported = federation.call(
        "federation", "export", "--state", "state-anna", "--out", "exported"
    )  # without the server
    assert "exported" in exported
    assert (federation.root / "exported" / "score.py").exists()
    for name in NAMES:
        assert (federation.root / f"state-{name}").stat().st_mode & 0o077 == 0


def test_killed_node_and_killed_server_end_in_the_same_bits(federation: Federation) -> None:
    """The node restarts with its private state; the server resumes from the last complete round."""
    nodes = {name: federation.join(name) for name in NAMES}
    server = federation.run("fedavg+dbe", "run", rounds=12)
    store = federation.root / "run" / "run.sqlite"
    wait_until(store.exists, "the first round")
    federation.kill(nodes["bert"])
    nodes["bert"] = federation.join("bert")
    time.sleep(0.3)
    federation.kill(server)
    server = federation.run("fedavg+dbe", "run", "--resume", rounds=12)
    status, out = federation.finish(server)
    assert status == 0, out
    assert hashes(federation.document("run")) == hashes(federation.serial("fedavg+dbe", rounds=12))


def test_strangers_are_refused(federation: Federation) -> None:
    """Without a certificate, with that of another authority, and as a removed node."""
    other = federation.root / "other"
    other.mkdir()
    words = ["init", "g", "--host", "127.0.0.1", "--listen", "127.0.0.1", "--port", str(federation.port)]
    subprocess.run(
        command("federation", *words, "--like", federation.root / "example.npz"), cwd=other, check=True,
        capture_output=True, timeout=SECONDS,
    )  # fmt: skip
    subprocess.run(
        command("federation", "invite", "g", "cleo"),
        cwd=other,
        check=True,
        capture_output=True,
        timeout=SECONDS,
    )
    federation.join("anna")
    federation.join("bert")
    stranger = subprocess.Popen(
        command("federation", "join", "cleo.invitation", "--data", federation.files["cleo"], "--state", "s"),
        cwd=other, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    federation.processes.append(stranger)
    server = federation.run("fedavg", "run")

    def connected() -> bool:
        return "anna" in json.loads(federation.call("federation", "status", "f", "--json"))["nodes"]

    wait_until(connected, "the first connection")
    with pytest.raises((ssl.SSLError, ConnectionError, TimeoutError)):
        _connect_without_certificate(federation)
    time.sleep(1)
    assert server.poll() is None, "it waits for the real third node"
    federation.join("cleo")
    assert federation.finish(server)[0] == 0


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["federation", "status", "nothing"], "nothing"),
        (["federation", "invite", "f", "anna"], "anna"),
        (["federation", "remove", "f", "dora"], "dora"),
        (["federation", "join", "example.npz", "--data", "digits", "--state", "s"], "invitation"),
        (["federation", "join", "anna.invitation", "--data", "har.npz", "--state", "s"], "har.npz"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(federation: Federation, words: Sequence[str], part: str) -> None:
    out = federation.call(*words, code=2)
    assert part in out
    assert "Traceback" not in out
    assert out.startswith("feddbe: ")
    assert out.count("\n") == 1


def test_second_run_and_used_state_folder_are_refused(federation: Federation) -> None:
    first = federation.run("fedavg", "first")
    wait_until(lambda: _is_listening(federation.port), "listening")
    out = federation.call(
        "run", "fedavg", "--data", "federation:f", *run_options(), "--out", "second", code=2
    )
    assert out.count("\n") == 1
    assert first.poll() is None
    node = federation.join("anna")
    wait_until((federation.root / "state-anna").exists, "the node's state folder")
    time.sleep(2)
    assert node.poll() is None
    status, out = federation.finish(federation.join("anna"))
    assert status == 2, out
    os.kill(first.pid, signal.SIGINT)
    assert federation.finish(first)[0] == 130


def _is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _connect_without_certificate(federation: Federation) -> None:
    """Speak TLS without a client certificate; raises an error if the server ends the connection."""
    context = ssl.create_default_context(cafile=str(federation.root / "f" / "ca.pem"))
    with (
        socket.create_connection(("127.0.0.1", federation.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        if not secure.recv(1):
            raise ConnectionError("closed by the server")
