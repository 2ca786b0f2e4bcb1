"""A stock Flower deployment on 127.0.0.1: SuperLink, SuperNodes with TLS and node keys, and nginx."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE, wait_until

HOST = "127.0.0.1"
RUN_SECONDS = 900
"""Seconds in which a run must end."""
PAGE = Path(__file__).parents[2] / "docs" / "federation.md"


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def find_nginx() -> str | None:
    """Return the path of nginx, or None."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


def documented_nginx_rule() -> str:
    """Return the rule for nginx in docs/federation.md."""
    (rule,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(rule)


class FlowerDeployment:
    """The processes of a deployment in a folder, and Flower's commands."""

    def __init__(self, root: Path, *, has_proxy: bool = False) -> None:
        """Create a federation in `root/f` and start the SuperLink, with nginx before it if requested."""
        self.root = root
        self.port = free_port()
        self.nodes_port = self.port
        """Port to which SuperNodes connect."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | {
            "FLWR_HOME": str(root / "flwr"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        }  # fmt: skip
        addresses = ("--host", HOST, "--listen", HOST, "--port", str(free_port()))
        self.call("feddbe", "federation", "init", "f", *addresses, "--like", "example.npz")
        self.call("feddbe", "federation", "flower", "f")
        (root / "flwr").mkdir()
        (root / "flwr" / "config.toml").write_text(
            '[superlink]\ndefault = "local"\n'
            f'[superlink.local]\naddress = "{HOST}:{self.port}"\nroot-certificates = "{root}/f/ca.pem"\n'
        )
        try:
            self._start_superlink()
            if has_proxy:
                self._start_nginx()
        except BaseException:
            self.close()
            raise

    def _start_superlink(self) -> None:
        certificates = ("--ssl-ca-certfile", "f/ca.pem", "--ssl-certfile", "f/server.pem")
        self.start(
            "superlink", "flower-superlink", *certificates, "--ssl-keyfile", "f/server.key",
            "--enable-supernode-auth", "--disable-runtime-dependency-installation",
            "--database", "superlink.db", "--host", HOST, "--port", str(self.port),
        )  # fmt: skip
        wait_until(lambda: self.status_of("/health", self.port) == 200, "SuperLink's start")

    def _start_nginx(self) -> None:
        """Start nginx with the documented rule; only its addresses and files are replaced."""
        self.nodes_port = free_port()
        rule = documented_nginx_rule()
        for documented, actual in {
            "listen 8443 ssl": f"listen {HOST}:{self.nodes_port} ssl",
            "127.0.0.1:8000": f"{HOST}:{self.port}",
            "/srv/feddbe/hospital/": f"{self.root}/f/",
        }.items():
            assert documented in rule
            rule = rule.replace(documented, actual)
        folder = self.root / "nginx"
        folder.mkdir()
        temporary = "".join(
            f"{name}_temp_path {folder}/{name};\n"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (folder / "nginx.conf").write_text(
            f"user {getpass.getuser()};\ndaemon off;\npid {folder}/pid;\nevents {{}}\n"
            f"http {{\nlog_format times '$msec $uri';\naccess_log {folder}/access.log times;\n"
            f"{temporary}{rule}}}\n"
        )
        nginx = find_nginx()
        assert nginx is not None
        self.start("nginx", nginx, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log"))
        wait_until(lambda: self.status_of("/", self.nodes_port) == 404, "nginx's start")

    def start(self, name: str, *words: str) -> None:
        """Start a process with its output in NAME.log."""
        with (self.root / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(words, env=self._environment, cwd=self.root, stdout=log, stderr=log)
        self._processes.append(process)

    def call(self, *words: str) -> str:
        """Return the output of a command that must succeed."""
        done = subprocess.run(
            words, env=self._environment, cwd=self.root, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def flwr_json(self, *words: str) -> Any:
        """Return the JSON that a command of flwr prints."""
        return json.loads(self.call("flwr", *words, "local", "--format", "json"))

    def start_nodes(self, files: Mapping[str, Path]) -> None:
        """Register a key for each node, start the SuperNodes, and wait until they are online."""
        for name, path in files.items():
            self.call("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"{name}.key")
            registered = self.call(
                "flwr", "supernode", "register", f"{name}.key.pub", "local", "--name", name,
                "--format", "json",
            )  # fmt: skip
            assert json.loads(registered)["success"]
            self.start(
                name, "flower-supernode", "--superlink", f"{HOST}:{self.nodes_port}",
                "--root-certificates", "f/ca.pem", "--auth-supernode-private-key", f"{name}.key",
                "--host", HOST, "--port", str(free_port()),
                "--node-config", f'data="{path}" state="{self.root}/state-{name}"',
            )  # fmt: skip
        wait_until(lambda: self._count_online() == len(files), "all nodes online", pause=0.5)

    def _count_online(self) -> int:
        return json.dumps(self.flwr_json("supernode", "list")).count('"online"')

    def run(self, command: str, nodes: Sequence[str]) -> str:
        """Run a command of feddbe by `flwr run`; return Flower's status of the run when it has ended."""
        config = f'nodes="{" ".join(nodes)}" command="{command}"'
        started = json.loads(
            self.call("flwr", "run", "f/flower", "local", "--run-config", config, "--format", "json")
        )
        assert started["success"], started
        identifier = str(started["run-id"])

        def status() -> str | None:
            listed = json.loads(self.call("flwr", "ls", "local", "--run-id", identifier, "--format", "json"))
            text = str(listed["runs"][0]["status"])
            return text if text.startswith("finished") else None

        # each `flwr ls` costs seconds of a core
        return str(wait_until(status, f"the end of {command}", RUN_SECONDS, pause=10.0))

    def status_of(self, path: str, port: int, body: bytes | None = None) -> int:
        """Return the status of a request over TLS without credentials; 0 if none arrives."""
        context = ssl.create_default_context(cafile=str(self.root / "f" / "ca.pem"))
        headers = {"Content-Type": "application/protobuf"}
        request = urllib.request.Request(f"https://{HOST}:{port}{path}", data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, context=context, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def log(self) -> str:
        """Return the last lines of every log."""
        parts = []
        for path in sorted(self.root.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-40:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)

    def close(self) -> None:
        """End all processes, also apps that outlive their SuperLink or SuperNode."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
        for pid in self._list_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _list_processes(self) -> list[int]:
        """Return the processes that have the environment of this deployment."""
        mark = f"FLWR_HOME={self._environment['FLWR_HOME']}".encode()
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    pids.append(int(path.parent.name))
        return pids
