"""What a client costs on Ray beside its own work, against the pool: python -m benchmarks.ray_overhead

Clients that do nothing get a message and answer at once; or they all get a model of 2 MB and each sends it
back; or each also gets 2 MB that it keeps, and gives them back. Calls of pool and Ray take turns, so that
what else the machine does hits both. Milliseconds per client: the median by the clock, and the mean of what
all our processes computed, Ray's daemons among them, which depends less on the machine's other work. At the
end the seconds until each engine could begin, and of its first call, in which Ray's workers import; and the
machine's load, before and at the end. The table is the one of docs/cluster.md.
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
NOTHING, MODEL = "nothing to do", "a model of 2 MB, which each sends back"
STATE = "the same, and 2 MB that each keeps"


@dataclass(frozen=True)
class Echo(FedAvg):
    """Sends back what it got, and keeps what it has."""

    keeps: ClassVar[Names] = ("large",)
    sends: ClassVar[Names] = ("large",)
    receives: ClassVar[Names] = ("large",)

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return received, dict(private)


class Kept(ClientStates):
    """What each client has."""

    def __init__(self, state: State) -> None:
        self.state = encode(state)

    def read(self, client: int) -> bytes | None:
        return self.state

    def write_pending(self, client: int, state: bytes) -> None:
        pass

    def version(self, client: int) -> int:
        return 0  # it stays as it is


def federation(clients: int) -> Task:
    """Each has four samples."""
    x = torch.zeros(4 * clients, 1, 8, 8, dtype=torch.uint8)
    y = torch.arange(4 * clients) % 2
    data = Dataset("nothing", x, y, 2, 1 / 255, 0.0, np.arange(4 * clients) % clients)
    return resolve("fedavg", Config(partition="natural", model="mlp"), dataset=data).task


def computed() -> float:
    """Seconds of processor time so far, of this process and its descendants that are alive."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            seconds[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return sum(spent for pid, spent in seconds.items() if ours(pid))


def call(engine: Engine, clients: int, case: str) -> tuple[float, float]:
    """Seconds of one call of all clients: by the clock, and computed."""
    work: Literal["train", "none"] = "none" if case == NOTHING else "train"
    jobs = [ClientTask(client, 1, work) for client in range(clients)]
    message, kept = Broadcasts({} if case == NOTHING else LARGE), Kept(LARGE if case == STATE else {})
    before, start = computed(), time.perf_counter()
    assert len(list(engine.run(jobs, message, kept))) == clients
    return time.perf_counter() - start, computed() - before


def milliseconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def main(numbers: list[int], calls: int) -> None:
    load, workers = os.getloadavg()[0], engines.find_engine("pool").processes()
    specs = {"pool": f"pool(workers={workers})", "ray": f"ray(cpus={workers})"}
    begun: dict[str, tuple[float, float]] = {}
    rows: dict[str, list[str]] = {NOTHING: [], MODEL: [], STATE: []}
    for clients in numbers:
        task, both = federation(clients), dict[str, Engine]()
        engines.create_engine("serial", task, Echo())  # what is compiled is compiled
        for name, spec in specs.items():
            start = time.perf_counter()
            both[name] = engines.create_engine(spec, task, Echo())
            ready = time.perf_counter() - start
            begun.setdefault(name, (ready, call(both[name], clients, NOTHING)[0]))
        for case in rows:
            turns = [
                {name: call(engine, clients, case) for name, engine in both.items()} for _ in range(calls)
            ]
            cells = [median(turn[name][0] for turn in turns) for name in specs]
            cells += [fmean(turn[name][1] for turn in turns) for name in specs]
            shown = " | ".join(milliseconds(1000 * cell / clients) for cell in cells)
            rows[case].append(f"| {case} | {clients} | {shown} |")
        for engine in both.values():
            engine.close()
    print(f"| {calls} calls, {workers} workers | clients | pool | Ray | pool, computed | Ray, computed |")
    print("|---|---|---|---|---|---|", *(row for case in rows.values() for row in case), sep="\n")
    print()
    for name, (ready, first) in begun.items():
        print(f"{name}: ready after {ready:.1f} s, first call {first:.1f} s")
    print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} at the end, of which ours is about {workers}")
    sys.modules["ray"].shutdown()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--clients", type=int, nargs="+", default=[20, 100])
    arguments.add_argument("--calls", type=int, default=9)
    given = arguments.parse_args()
    main(given.clients, given.calls)
