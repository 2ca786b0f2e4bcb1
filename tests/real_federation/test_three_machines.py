"""docs/federation.md is followed literally in three network namespaces, each with its own address."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="needs feddbe[federation]")
pytest.importorskip("cryptography", reason="needs feddbe[federation]")

from feddbe.federation.data_spec import DataSpec
from feddbe.runs.build_document import load_document
from tests.docs.test_pages import DOCS, read_blocks
from tests.real_federation.nodes import hashes, pool_datasets, run_serial
from tests.waiting import PATIENCE, wait_until

ADDRESSES = {"server": "10.77.0.1", "anna": "10.77.0.2", "bert": "10.77.0.3"}
PORT = 8443
pytestmark = [
    pytest.mark.skipif("FEDDBE_CASES" not in os.environ, reason="takes a minute: make test-all"),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2"),
]


def call_ip(*words: str) -> None:
    """Run a command of iproute2."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        pytest.skip(f"cannot create network namespaces: {done.stderr.strip()}")


class Machine:
    """A network namespace with an address, a folder, and the commands of the page."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.folder = name, root / name
        self.namespace = f"feddbe-{os.getpid()}-{name}"
        self.folder.mkdir()
        self.blocks = [
            text for language, text in read_blocks(DOCS / "federation.md") if text.startswith(f"# {name}\n")
        ]
        self.env = {**os.environ, "PATH": f"{root / 'bin'}:{os.environ['PATH']}", "HOME": str(self.folder)}
        self.env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command of a shell in the namespace."""
        words = ["ip", "netns", "exec", self.namespace, "sh", "-e", "-c", f"exec {command}"]
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(
                words, cwd=self.folder, env=self.env, text=True, stdout=output, stderr=output
            )

    def call(self, command: str) -> None:
        """Run a command that succeeds."""
        with self.start(command) as process:
            try:
                code = process.wait(PATIENCE)
            finally:
                process.kill()
        assert code == 0, f"{command}: {self.output()}"

    def output(self) -> str:
        """Return what all commands have printed."""
        return (self.folder / "output").read_text(encoding="utf-8")

    def commands(self, block: int) -> list[str]:
        """Return the command lines of one of the machine's blocks on the page."""
        return [line for line in self.blocks[block].splitlines() if not line.startswith("#")]

    def listening_ports(self) -> set[int]:
        """Return the TCP ports on which processes of the namespace listen."""
        words = ["ip", "netns", "exec", self.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        text = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE).stdout
        return {int(port, 16) for port in re.findall(r"^ *\d+: \w+:(\w+) \w+:\w+ 0A ", text, re.MULTILINE)}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """Return three machines on one network; `server.example` is in their file of hosts."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for tool, words in {"feddbe": " -m feddbe", "python": ""}.items():
        (bin_dir / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n', encoding="utf-8")
        (bin_dir / tool).chmod(0o755)
    machines = {name: Machine(name, tmp_path) for name in ADDRESSES}
    with ExitStack() as cleanup:
        for machine in machines.values():
            call_ip("netns", "add", machine.namespace)
            cleanup.callback(call_ip, "netns", "delete", machine.namespace)
            settings = Path("/etc/netns") / machine.namespace
            settings.mkdir(parents=True)
            cleanup.callback(shutil.rmtree, settings)
            (settings / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESSES['server']} server.example\n")
            call_ip("-n", machine.namespace, "link", "set", "lo", "up")
        server = machines["server"].namespace
        call_ip("-n", server, "link", "add", "switch", "type", "bridge")
        call_ip("-n", server, "addr", "add", f"{ADDRESSES['server']}/24", "dev", "switch")
        call_ip("-n", server, "link", "set", "switch", "up")
        for name in ("anna", "bert"):
            node = machines[name].namespace
            peer = ("type", "veth", "peer", "name", "eth0", "netns", node)
            call_ip("-n", server, "link", "add", f"to-{name}", *peer)
            call_ip("-n", server, "link", "set", f"to-{name}", "master", "switch", "up")
            call_ip("-n", node, "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
            call_ip("-n", node, "link", "set", "eth0", "up")
        yield machines


def test_page_can_be_followed_on_three_machines(machines: dict[str, Machine], tmp_path: Path) -> None:
    server, anna, bert = machines.values()
    assert [len(machine.blocks) for machine in machines.values()] == [2, 2, 1]
    (script,) = (text for kind, text in read_blocks(DOCS / "federation.md") if kind == "python")
    for machine in machines.values():
        (machine.folder / "tables.py").write_text(script)
        machine.call("python tables.py")
    for command in server.commands(0):  # 1. create the federation
        server.call(command)
    with ExitStack() as cleanup:
        for node in (anna, bert):
            invitation = f"{node.name}.invitation"
            shutil.move(server.folder / invitation, node.folder / invitation)  # 2. send the invitations
            (join,) = node.commands(0)  # 3. start the nodes
            process = node.start(join)
            cleanup.callback(process.wait, PATIENCE)
            cleanup.callback(process.kill)
        run, status = server.commands(1)  # 4. run
        process = server.start(run)
        cleanup.callback(process.kill)
        wait_until(lambda: server.listening_ports() == {PORT}, "listening")
        assert anna.listening_ports() == bert.listening_ports() == set()
        assert process.wait(PATIENCE) == 0, server.output()
        assert server.listening_ports() == set()
        server.call(status)
        assert "fedavg+dbe, round 20 of 20" in server.output().splitlines()[-1]
        anna.call(*anna.commands(1))  # 5. take the model
        assert "model   anna-model" in anna.output()

    output_dir = shlex.split(run)[shlex.split(run).index("--out") + 1]
    document = load_document(server.folder / output_dir, hashes=True)
    options = {key: document["config"][key] for key in ("model", "rounds", "lr", "trainer", "batch_size")}
    spec = DataSpec.from_example(str(server.folder / "example.csv"))
    pooled = pool_datasets({node.name: node.folder / f"{node.name}.csv" for node in (anna, bert)}, spec)
    assert hashes(document) == hashes(run_serial("fedavg+dbe", pooled, tmp_path / "serial", **options))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_of_the_page_is_valid(tmp_path: Path) -> None:
    (unit,) = (text for kind, text in read_blocks(DOCS / "federation.md") if kind == "ini")
    assert len(unit.splitlines()) == 10
    path = tmp_path / "feddbe.service"
    path.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", unit.replace("User=feddbe", "User=root")))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert str(path.name) not in done.stderr, done.stderr
