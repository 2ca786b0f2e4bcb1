"""Cost of a federation's messages: python -m benchmarks.federation

Four parts, on 127.0.0.1 with mutual TLS: rounds of fedavg+dbe with 3, 20 and 100 nodes next to the pool;
messages alone, without and with a body of 2.3 MB each way; seconds until lost and new connections are
noticed; CPU time while nothing happens, and a node that holds Python's lock for a minute. Three nodes are
three processes; 20 and 100 share two processes, in which one client trains at a time, as in a pool of two.
The tables are in docs/federation.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from feddbe.callbacks.base import Callback
from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.federation.certificates import Invitation
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.grpc_transport import DirectServer, serve_node
from feddbe.federation.node import Node
from feddbe.federation.operator_folder import FederationFolder
from feddbe.federation.private_store import PrivateStore
from feddbe.federation.protocol import Message
from feddbe.federation.server import FederationData, collect_summaries
from feddbe.runs.experiment import resolve
from feddbe.runs.start import run_or_resume
from feddbe.state import Receipt

LARGE = 2_300_000
"""Bytes of the paper's CNN for 28x28 images."""
LOCK_SECONDS = 60
WAITING_SECONDS = 20.0


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> float:
    """Return the seconds until the condition is true."""
    started = time.perf_counter()
    while not condition():
        if time.perf_counter() - started > seconds:
            raise TimeoutError(f"nothing happened in {seconds} s")
        time.sleep(0.002)
    return time.perf_counter() - started


# --- processes of nodes


class EchoNode:
    """A node that returns the body of each message."""

    def reply_to(self, message: Message) -> Message:
        """Return the body; a header `lock` holds Python's lock for a minute first."""
        if message.header == b"lock":
            ctypes.PyDLL(None).sleep(LOCK_SECONDS)
        return Message(b"{}", message.body)

    def max_body(self, header: bytes) -> int:
        """Return the bytes of the largest allowed body."""
        return 2**30


class TimedStore(PrivateStore):
    """A private store that adds up the seconds of saving."""

    saving_seconds = 0.0

    def write(self, *arguments: Any) -> Receipt:
        """Save a state."""
        started = time.perf_counter()
        receipt = super().write(*arguments)
        self.saving_seconds += time.perf_counter() - started
        return receipt


class TimedNode(Node):
    """A node that writes the seconds of each task to a file; nodes of one process take turns."""

    turn = threading.Lock()

    def __init__(self, folder: Path, spec: DataSpec) -> None:
        super().__init__(folder / "state", str(folder / "data.npz"), spec)
        self.log = folder / "seconds"
        self.store.close()
        self.store = self.timed_store = TimedStore(folder / "state")

    def reply_to(self, message: Message) -> Message:
        """Return the reply to a message."""
        with self.turn:
            started, saved = time.perf_counter(), self.timed_store.saving_seconds
            reply = super().reply_to(message)
            seconds, saving = time.perf_counter() - started, self.timed_store.saving_seconds - saved
        task = json.loads(message.header).get("task")
        if task:
            with self.log.open("a") as file:
                file.write(json.dumps([task["round"], os.getpid(), seconds, saving]) + "\n")
        return reply

    def max_body(self, header: bytes) -> int:
        """Return the bytes of the largest allowed body, for which the task is built."""
        with self.turn:
            return super().max_body(header)


def host_nodes(folders: Sequence[Path], kind: str) -> None:
    """Serve one node in each folder, until the process is killed."""
    torch.set_num_threads(1)
    threads = []
    for folder in folders:
        invitation = Invitation.read(next(folder.glob("*.invitation")))
        node: Any = EchoNode() if kind == "echo" else TimedNode(folder, invitation.data_spec)
        threads.append(threading.Thread(target=serve_node, args=(invitation, node)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass
class Site:
    """A federation and the processes of its nodes."""

    folder: FederationFolder
    node_folders: list[Path]
    processes: list[BaseProcess]

    def kill(self) -> None:
        """Kill all nodes."""
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def open_site(root: Path, nodes: int, kind: str, arrays: Sequence[dict[str, Any]]) -> Iterator[Site]:
    """Create a federation and start its nodes; each has some of the arrays as its data."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    root.mkdir()
    np.savez(root / "example.npz", **arrays[0])
    spec = DataSpec.from_example(str(root / "example.npz"))
    folder = FederationFolder.create(root / "f", "127.0.0.1", port, "127.0.0.1", spec)
    node_folders = [root / f"n{number:03}" for number in range(nodes)]
    for number, node_folder in enumerate(node_folders):
        node_folder.mkdir()
        np.savez(node_folder / "data.npz", **arrays[number % len(arrays)])
        folder.invite(node_folder.name, node_folder)
    hosts = nodes if nodes <= 3 else 2
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=host_nodes, args=(node_folders[k::hosts], kind)) for k in range(hosts)
    ]
    for process in processes:
        process.start()
    site = Site(folder, node_folders, list(processes))
    try:
        yield site
    finally:
        site.kill()


def make_arrays(nodes: int, pixels: int, rows: int) -> list[dict[str, Any]]:
    """Return random images for each node."""
    rng = np.random.default_rng(0)
    y = np.arange(rows) % 10
    return [
        {"x": rng.integers(0, 256, (rows, 1, pixels, pixels), dtype=np.uint8), "y": y} for _ in range(nodes)
    ]


# --- rounds


def time_rounds(root: Path, nodes: int, model: str, pixels: int, rounds: int) -> list[float]:
    """Return milliseconds of a round: all, its slowest process, saving, the pool, and above the slowest."""
    arrays = make_arrays(nodes, pixels, 40)
    options: dict[str, Any] = {"model": model, "rounds": rounds, "lr": 0.05, "batch_size": 10}
    with open_site(root, nodes, "timed", arrays) as site, closing(DirectServer(site.folder)) as server:
        names = site.folder.node_names()
        summaries = collect_summaries(server, names, {}, 300, lambda text: None)
        rows = FederationData(server, site.folder.data_spec(), summaries)
        experiment = resolve("fedavg+dbe", Config(data="federation", **options), dataset=rows.dataset())
        document = run_or_resume(experiment, root / "run", Callback())
        work: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        saving: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for folder in site.node_folders:
            for line in (folder / "seconds").read_text().splitlines():
                round_, process, seconds, saving_seconds = json.loads(line)
                work[round_][process].append(seconds)
                saving[round_][process].append(saving_seconds)
    x = torch.from_numpy(np.concatenate([part["x"] for part in arrays]))
    y = torch.from_numpy(np.concatenate([part["y"] for part in arrays]))
    client = np.repeat(np.arange(nodes), 40)
    pooled = Dataset("pooled", x, y, 10, 1 / 255, 0.0, client)
    pool_options = {**options, "partition": "natural", "engine": "pool(workers=2)"}
    pool = run_or_resume(
        resolve("fedavg+dbe", Config(**pool_options), dataset=pooled), root / "pool", Callback()
    )
    timed = range(2, rounds)  # the first rounds compile and warm up
    columns = [
        [document["rounds"][round_]["seconds"] for round_ in timed],
        [max(sum(parts) for parts in work[round_].values()) for round_ in timed],
        [max(sum(parts) for parts in saving[round_].values()) for round_ in timed],
        [pool["rounds"][round_]["seconds"] for round_ in timed],
    ]
    above = median(whole - slowest for whole, slowest in zip(columns[0], columns[1], strict=True))
    return [1000 * value for value in (*map(median, columns), above)]


def print_rounds(root: Path, numbers: Sequence[int], rounds: int) -> None:
    """Print a table of rounds."""
    print("| nodes | model | round | slowest process | of which saving | above it | pool |")
    print("|---|---|---|---|---|---|---|")
    for name, model, pixels in (("19 kB", "mlp", 8), ("2.3 MB", "cnn", 28)):
        for nodes in numbers:
            whole, slowest, saving, pool, above = time_rounds(
                root / f"{model}-{nodes}", nodes, model, pixels, rounds
            )
            cells = [f"{value:.0f} ms" for value in (whole, slowest, saving, above, pool)]
            print(f"| {nodes} | {name} | {' | '.join(cells)} |", flush=True)


# --- messages alone


def exchange(server: DirectServer, names: Sequence[str], message: Message) -> float:
    """Return the seconds in which all nodes receive a message and return its body."""
    started = time.perf_counter()
    waiting = {server.send(name, message, 2**30) for name in names}
    while waiting:
        received = server.receive(5.0)
        if received:
            waiting.discard(received[0])
    return time.perf_counter() - started


def print_messages(root: Path, numbers: Sequence[int]) -> None:
    """Print a table of messages alone."""
    print("\n| nodes | empty message | 2.3 MB each way | CPU of all processes |\n|---|---|---|---|")
    for nodes in numbers:
        arrays = make_arrays(1, 8, 40)
        with (
            open_site(root / f"echo-{nodes}", nodes, "echo", arrays) as site,
            closing(DirectServer(site.folder)) as server,
        ):
            while len(server.nodes()) < nodes:
                time.sleep(0.1)
            names = site.folder.node_names()
            processes = [os.getpid(), *(process.pid for process in site.processes if process.pid)]
            empty, large = Message(b"{}"), Message(b"{}", os.urandom(LARGE))
            calls = max(5, 60 // nodes)
            empty_seconds = median(exchange(server, names, empty) for _ in range(calls))
            before = sum(map(cpu_seconds, processes))
            large_seconds = median(exchange(server, names, large) for _ in range(calls))
            cpu = (sum(map(cpu_seconds, processes)) - before) / calls
            cells = [f"{1000 * value / nodes:.1f} ms" for value in (empty_seconds, large_seconds, cpu)]
            print(f"| {nodes} | {' | '.join(cells)} |", flush=True)


# --- connections


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_connections(root: Path) -> Iterator[tuple[str, str]]:
    """Yield a name and a value for each property of connections."""
    arrays = make_arrays(1, 8, 40)
    with open_site(root / "connections", 1, "echo", arrays) as site:
        (process,) = site.processes
        assert process.pid is not None
        with closing(DirectServer(site.folder)) as server:
            wait_until(server.nodes)
            before = [cpu_seconds(pid) for pid in (os.getpid(), process.pid)]
            end = time.monotonic() + WAITING_SECONDS
            while time.monotonic() < end:
                server.receive(end - time.monotonic())
            after = [cpu_seconds(pid) for pid in (os.getpid(), process.pid)]
            spent = [f"{100 * (b - a) / WAITING_SECONDS:.1f} %" for a, b in zip(before, after, strict=True)]
            yield "CPU while waiting, server and node", ", ".join(spent)

            os.kill(process.pid, signal.SIGSTOP)
            yield "frozen node noticed", f"{wait_until(lambda: not server.nodes()):.1f} s"
            os.kill(process.pid, signal.SIGCONT)
            yield "it connects again", f"{wait_until(server.nodes):.1f} s"

            connected = server.nodes()
            seconds = exchange(server, list(connected), Message(b"lock"))
            stayed = "stays connected" if server.nodes() == connected else "LOST"
            yield f"Python's lock held for {LOCK_SECONDS} s", f"{stayed}, replies after {seconds:.1f} s"
        pauses = []
        for seconds in (1.0, 5.0, 12.0, 20.0):  # the node's pauses grow while no server listens
            time.sleep(seconds)
            with closing(DirectServer(site.folder)) as server:
                pauses.append(wait_until(server.nodes))
        yield "reconnects to a new server", f"{max(pauses):.1f} s at most of {len(pauses)}"
        with closing(DirectServer(site.folder)) as server:
            wait_until(server.nodes)
            process.kill()
            yield "killed node noticed", f"{wait_until(lambda: not server.nodes()):.3f} s"


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 20, 100])
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} before, {os.cpu_count()} cores\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="federation-") as folder:
        root = Path(folder)
        print_rounds(root, options.nodes, options.rounds)
        print_messages(root, options.nodes)
        print("\n| connections | |\n|---|---|")
        for name, value in measure_connections(root):
            print(f"| {name} | {value} |", flush=True)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
