"""Seconds per round over stock Flower and over the direct carrier: python -m benchmarks.flower

Three nodes with a small model run the same method over both carriers, as real processes on 127.0.0.1. The
script then prints where the time of an exchange over Flower goes: it reads the requests of the SuperNodes in
nginx's log, and the start of the app's processes in /proc. It needs nginx, and an environment with
feddbe[flower]: build/flower/venv, which `make test-flower` creates. The table is in docs/federation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.real_federation.flower_deployment import FlowerDeployment
from tests.real_federation.nodes import NAMES, OPTIONS, make_files, make_spec

METHOD = "scaffold+dbe"
_PROCESS = b"flwr-clientapp"


@dataclass(frozen=True)
class Exchange:
    """Moments of the last node in an exchange with all nodes, in seconds."""

    started: float
    """The process of the app started."""
    replied: float
    """The SuperNode pushed its reply."""
    next_started: float
    """The process of the next exchange started."""


class ProcessWatch(threading.Thread):
    """A thread that records when processes of the app start, and their CPU time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.starts: dict[int, float] = {}
        """Time of the start by process."""
        self.cpu_seconds: dict[int, float] = {}
        self._is_stopped = threading.Event()

    def run(self) -> None:
        ticks = os.sysconf("SC_CLK_TCK")
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        while not self._is_stopped.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    if _PROCESS not in path.read_bytes():
                        continue
                    fields = (path.parent / "stat").read_text().rpartition(")")[2].split()
                    pid = int(path.parent.name)
                    self.cpu_seconds[pid] = (int(fields[11]) + int(fields[12])) / ticks
                    self.starts[pid] = boot + int(fields[19]) / ticks

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped.set()
        self.join()


def read_exchanges(log: str, starts: Sequence[float], rounds: int) -> list[Exchange]:
    """Return the exchanges of the rounds.

    Args:
        log: Requests of the SuperNodes, in nginx's format.
        starts: Times at which processes of the app started.
        rounds: Number of rounds.
    """
    requests = [line.split() for line in log.splitlines()]
    pushes = [float(moment) for moment, path in requests if path == "/v1/fleet/push-messages"]

    def last_of_each_exchange(times: Sequence[float]) -> list[float]:
        # both descriptions of the data and the setup precede round 1
        return sorted(times)[3 * len(NAMES) :][len(NAMES) - 1 :: len(NAMES)]

    started, replied = last_of_each_exchange(starts), last_of_each_exchange(pushes)
    return [Exchange(started[n], replied[n], started[n + 1]) for n in range(rounds)]


def time_imports(statement: str) -> float:
    """Return the median seconds in which a process for each node, all at once, imports these modules."""
    seconds = []
    for _ in range(3):
        begin = time.monotonic()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([sys.executable, "-c", statement], env=environment) for _ in NAMES]
        for process in processes:
            process.wait()
        seconds.append(time.monotonic() - begin)
    return median(seconds)


def read_seconds(deployment: FlowerDeployment, out: Path) -> list[float]:
    """Return the seconds of each round of a run."""
    document = json.loads(deployment.call("feddbe", "show", str(out), "--json"))
    return [result["seconds"] for result in document["rounds"] if result["round"] > 0]


def run_direct(deployment: FlowerDeployment, files: dict[str, Path], options: Sequence[str]) -> list[float]:
    """Return the seconds per round over the direct carrier."""
    deployment.call("feddbe", "federation", "invite", "f", *NAMES)
    for name, path in files.items():
        words = ("--data", str(path), "--state", f"direct-{name}")
        deployment.start(f"direct-{name}", "feddbe", "federation", "join", f"{name}.invitation", *words)
    out = deployment.root / "direct"
    deployment.call("feddbe", "run", METHOD, "--data", "federation:f", *options, "--out", str(out), "--quiet")
    return read_seconds(deployment, out)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    options = [
        word for key, value in (OPTIONS | {"rounds": rounds}).items() for word in (f"--{key}", str(value))
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = make_files(root / "data")
        make_spec(root)
        with closing(FlowerDeployment(root, has_proxy=True)) as deployment:
            direct = run_direct(deployment, files, options)
            deployment.start_nodes(files)
            watch = ProcessWatch()
            watch.start()
            begin = time.monotonic()
            status = deployment.run(f"run {METHOD} {' '.join(options)} --out {root}/flower --quiet", NAMES)
            total = time.monotonic() - begin
            watch.stop()
            if status != "finished:completed":
                sys.exit(f"{status}\n{deployment.log()}")
            flower = read_seconds(deployment, root / "flower")
            exchanges = read_exchanges(
                (root / "nginx" / "access.log").read_text(), [*watch.starts.values()], rounds
            )
    print(f"{METHOD}, {len(NAMES)} nodes, {rounds} rounds")
    print(f"load {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")
    print(f"direct: {median(direct):.2f} s per round")
    print(f"Flower: {median(flower):.1f} s per round, {total:.0f} s from `flwr run` to the end")
    print(f"of a round over Flower, median of {len(exchanges)}:")
    process_seconds = median(exchange.replied - exchange.started for exchange in exchanges)
    other_seconds = median(exchange.next_started - exchange.replied for exchange in exchanges)
    print(f"  {process_seconds:5.1f} s  processes of the app: start, imports, data, training, reply")
    print(f"  {other_seconds:5.1f} s  reply to the ServerApp, next message to the SuperNodes")
    print(f"CPU of a process of the app: {median(watch.cpu_seconds.values()):.1f} s")
    print("imports, one process for each node at once:")
    for label, statement in {
        "Flower's": "import flwr.app, flwr.clientapp",
        "Flower's and feddbe's": "import flwr.clientapp, feddbe.federation.flower, feddbe.federation.node",
    }.items():
        print(f"  {time_imports(statement):5.1f} s  {label}")


if __name__ == "__main__":
    main()
