"""A federation by its real commands: processes on 127.0.0.1, each with a time limit."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from feddbe.federation.data_spec import DataSpec
from feddbe.federation.operator_folder import FederationFolder
from feddbe.federation.private_store import PrivateStore
from feddbe.runs.build_document import load_document
from feddbe.runs.store import RunStore
from tests.real_federation.nodes import NAMES, OPTIONS, make_files, make_spec, pool_datasets, run_serial
from tests.waiting import PATIENCE, wait_until

Process = subprocess.Popen[str]


def run_options(**changes: Any) -> list[str]:
    """Return the options of a run as words of a command."""
    pairs = (OPTIONS | changes).items()
    return [word for key, value in pairs for word in (f"--{key.replace('_', '-')}", str(value))]


def free_port() -> int:
    """Return a port of 127.0.0.1 that no process uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_listening(port: int) -> bool:
    """Return True if a process listens on this port of 127.0.0.1."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def count_rounds(folder: Path) -> int:
    """Return the last complete round of a run; -1 before its setup."""
    if not RunStore.is_run(folder):
        return -1
    with closing(RunStore.open(folder)) as store:
        return store.last_round()


class Federation:
    """A federation in a folder, its commands and its processes.

    The output of each process is in a file, so that no process waits for a reader.
    """

    def __init__(self, root: Path, names: Sequence[str] = NAMES) -> None:
        self.root = root
        self.port = free_port()
        self.files = make_files(root / "data")
        self.spec = make_spec(root)
        self.folder = FederationFolder.create(root / "f", "127.0.0.1", self.port, "127.0.0.1", self.spec)
        for name in names:
            self.folder.invite(name, root)
        self.processes: list[Process] = []
        self.nodes: dict[str, Process] = {}
        self._outputs: dict[int, Path] = {}

    def start(self, *words: str | Path, module: str = "feddbe", cwd: str = "") -> Process:
        """Start a command of feddbe, or of another module, in a folder below the root."""
        output = self.root / f"output-{len(self.processes)}"
        command = [sys.executable, "-m", module, *map(str, words)]
        # processes share the cores; an unbuffered output is complete after a kill
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env["PYTHONPATH"] = str(Path(__file__).parents[2])
        with output.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self.root / cwd, env=env, text=True, stdout=file, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        self._outputs[process.pid] = output
        return process

    def output(self, process: Process) -> str:
        """Return what a process has printed."""
        return self._outputs[process.pid].read_text(encoding="utf-8")

    def finish(self, process: Process) -> tuple[int, str]:
        """Return the exit code and the output of a process that ends."""
        return process.wait(PATIENCE), self.output(process)

    def call(self, *words: str | Path, code: int = 0, cwd: str = "") -> str:
        """Return the output of a command that ends with this exit code."""
        status, out = self.finish(self.start(*words, cwd=cwd))
        assert status == code, out
        return out

    def join(self, name: str, *words: str, state: str = "", data: str | Path = "") -> Process:
        """Start a node."""
        return self._join(name, "feddbe", words, state, data)

    def join_with_pause(self, name: str, where: str, round_: int = 2) -> Path:
        """Start a node that pauses in a round; return the file that it then creates.

        Args:
            name: Name of the node.
            where: `before` or `after` it saves its private state; `lock` holds Python's lock for a minute.
            round_: Round in which it pauses, until the file is deleted.
        """
        mark = self.root / f"mark-{len(self.processes)}"
        self._join(name, "tests.real_federation.pausing_node", (), "", "", (where, str(round_), str(mark)))
        return mark

    def _join(
        self,
        name: str,
        module: str,
        words: Sequence[str],
        state: str,
        data: str | Path,
        first: Sequence[str] = (),
    ) -> Process:
        options = ("--data", data or self.files[name], "--state", state or f"state-{name}")
        process = self.start(
            *first, "federation", "join", f"{name}.invitation", *options, *words, module=module
        )
        self.nodes[name] = process
        return process

    def join_all(self, *names: str) -> None:
        """Start these nodes; without names, all."""
        for name in names or NAMES:
            self.join(name)

    def wait_for_nodes(self) -> None:
        """Wait until all nodes have loaded their data."""
        wait_until(
            lambda: all("training and" in self.output(node) for node in self.nodes.values()),
            "the start of the nodes",
        )

    def run(self, method: str, out: str, *words: str, **options: Any) -> Process:
        """Start a run."""
        data = ("--data", "federation:f", *run_options(**options))
        return self.start("run", method, *data, "--out", out, "--quiet", *words)

    def document(self, out: str) -> Any:
        """Return the document of a run, with the hashes of its states."""
        return load_document(self.root / out, hashes=True)

    def serial(self, method: str, absence: tuple[int, Sequence[int]] | None = None, **options: Any) -> Any:
        """Return the document of the same run by the serial engine; see `run_serial`."""
        spec = DataSpec.from_example(str(self.root / "example.npz"))
        folder = self.root / f"serial-{len(list(self.root.glob('serial-*')))}"
        return run_serial(method, pool_datasets(self.files, spec), folder, absence, **options)

    def missing_rounds(self, out: str) -> list[int]:
        """Return the rounds in which a client was missing."""
        with closing(RunStore.open(self.root / out)) as store:
            records = store.aggregate_records()
        return [record.round for record in records if record.name == "missing" and record.value]

    def private_rounds(self, name: str, out: str) -> list[int]:
        """Return the rounds of a run whose states a node has."""
        with closing(RunStore.open(self.root / out)) as store:
            run = store.run_id
        with closing(PrivateStore(self.root / f"state-{name}")) as private:
            return private.rounds(run)

    def delete_private_states(self, name: str) -> None:
        """Delete the private states of a node that is not running."""
        for path in (self.root / f"state-{name}").glob("private.sqlite*"):
            path.unlink()

    def copy_state(self, name: str, copy: str) -> None:
        """Copy the state folder of a node."""
        shutil.copytree(self.root / f"state-{name}", self.root / copy)

    def kill(self, *processes: Process) -> None:
        """Kill processes at the same moment."""
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait(PATIENCE)

    def close(self) -> None:
        """Kill all processes that are left."""
        self.kill(*(process for process in self.processes if process.poll() is None))
