"""Overhead per client on Ray compared with the pool: python -m benchmarks.ray_overhead

There are three cases: clients only reply to a message; all receive a model of 2 MB and return it; each also
keeps a state of 2 MB. Calls of pool and Ray take turns, so that other work on the machine affects both.
Values are milliseconds per client: the median of wall-clock time, and the mean CPU time of all processes,
including Ray's daemons, which depends less on other work. At the end it prints the start-up time of each
engine, that of its first call, in which Ray's workers import, and the machine's load. The table is in
docs/cluster.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import ClassVar, Literal

import numpy as np
import torch

from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.methods.base import Names
from feddbe.methods.fedavg import FedAvg
from feddbe.runs.experiment import resolve
from feddbe.simulation import engines
from feddbe.simulation.client import ClientTask
from feddbe.simulation.engines.base import Broadcasts, ClientStates, Engine
from feddbe.state import State, encode
from feddbe.training.task import Context, Task
from feddbe.training.trainer import ClientTrainer

LARGE = {"large": torch.zeros(2 * 2**20 // 4)}
NOTHING, MODEL = "empty task", "a model of 2 MB, uploaded by each"
STATE = "the same, and 2 MB kept by each"


@dataclass(frozen=True)
class Echo(FedAvg):
    """Method that returns the received message and keeps its state."""

    keeps: ClassVar[Names] = ("large",)
    sends: ClassVar[Names] = ("large",)
    receives: ClassVar[Names] = ("large",)

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return received, dict(private)


class FixedState(ClientStates):
    """Equal, constant states of all clients."""

    def __init__(self, state: State) -> None:
        self.state = encode(state)

    def read(self, client: int) -> bytes | None:
        return self.state

    def write_pending(self, client: int, state: bytes) -> None:
        pass

    def version(self, client: int) -> int:
        return 0  # it never changes


def build_task(clients: int) -> Task:
    """Return a task in which each client has four samples."""
    x = torch.zeros(4 * clients, 1, 8, 8, dtype=torch.uint8)
    y = torch.arange(4 * clients) % 2
    data = Dataset("nothing", x, y, 2, 1 / 255, 0.0, np.arange(4 * clients) % clients)
    return resolve("fedavg", Config(partition="natural", model="mlp"), dataset=data).task


def cpu_seconds() -> float:
    """Return CPU seconds so far of this process and its live descendants."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            seconds[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_descendant(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return sum(spent for pid, spent in seconds.items() if is_descendant(pid))


def time_call(engine: Engine, clients: int, case: str) -> tuple[float, float]:
    """Return wall-clock and CPU seconds of one call of all clients."""
    work: Literal["train", "none"] = "none" if case == NOTHING else "train"
    tasks = [ClientTask(client, 1, work) for client in range(clients)]
    message, kept = Broadcasts({} if case == NOTHING else LARGE), FixedState(LARGE if case == STATE else {})
    before, start = cpu_seconds(), time.perf_counter()
    assert len(list(engine.run(tasks, message, kept))) == clients
    return time.perf_counter() - start, cpu_seconds() - before


def milliseconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def main(numbers: list[int], calls: int) -> None:
    load, workers = os.getloadavg()[0], engines.find_engine("pool").processes()
    specs = {"pool": f"pool(workers={workers})", "ray": f"ray(cpus={workers})"}
    startup: dict[str, tuple[float, float]] = {}
    rows: dict[str, list[str]] = {NOTHING: [], MODEL: [], STATE: []}
    for clients in numbers:
        task, engines_by_name = build_task(clients), dict[str, Engine]()
        engines.create_engine("serial", task, Echo())  # compiles kernels
        for name, spec in specs.items():
            start = time.perf_counter()
            engines_by_name[name] = engines.create_engine(spec, task, Echo())
            ready = time.perf_counter() - start
            startup.setdefault(name, (ready, time_call(engines_by_name[name], clients, NOTHING)[0]))
        for case in rows:
            turns = [
                {name: time_call(engine, clients, case) for name, engine in engines_by_name.items()}
                for _ in range(calls)
            ]
            cells = [median(turn[name][0] for turn in turns) for name in specs]
            cells += [fmean(turn[name][1] for turn in turns) for name in specs]
            text = " | ".join(milliseconds(1000 * cell / clients) for cell in cells)
            rows[case].append(f"| {case} | {clients} | {text} |")
        for engine in engines_by_name.values():
            engine.close()
    print(f"| {calls} calls, {workers} workers | clients | pool | Ray | pool, CPU | Ray, CPU |")
    print("|---|---|---|---|---|---|", *(row for case in rows.values() for row in case), sep="\n")
    print()
    for name, (ready, first) in startup.items():
        print(f"{name}: ready after {ready:.1f} s, first call {first:.1f} s")
    print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} at the end, of which ours is about {workers}")
    sys.modules["ray"].shutdown()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--clients", type=int, nargs="+", default=[20, 100])
    arguments.add_argument("--calls", type=int, default=9)
    options = arguments.parse_args()
    main(options.clients, options.calls)
