"""Seconds, memory and disk space of runs with very many clients, 50 of which take part in a round.

    python benchmarks/scale.py [--clients 1000 10000 100000 1000000] [--methods ...] [--rounds 20]
        [--engine pool] [--json RUN_FILE]

The data is random: N clients with 12 samples each (2, where there are a million) of 32 numbers in 10
classes, each client with its own two labels and shift; the partition is the client
column. The model is a perceptron 32-64-10. Each run is a separate process, so that peaks are separate:

- start-up: from options to an experiment (partition, hashes, majority accuracy) and the run's file;
- preparation: the setup (round 0), for MR with `init_clients=1000`;
- round: the median of rounds 2.. (the first warms up) with evaluation of a sample of 50; CPU: processor time
  of all processes in a round, which other programs disturb less; parent: that of the process that runs the
  rounds, per client that takes part;
- start MB: memory after creating the data; peak MB: peak during rounds, all processes with shared pages once;
  grown MB: growth between round 2 and the last;
- file MB: the run's file; show, resume: seconds of `feddbe show` and of `--resume` of the finished run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddbe import api
from feddbe.callbacks.base import Callback
from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.runs import start
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import RUN_FILE, RunStore
from feddbe.simulation import engines
from feddbe.simulation.engines.base import peak_memory_mb
from feddbe.simulation.loop import RoundLoop, initial_server_state

METHODS = ("fedavg+dbe(init_clients=1000)", "ditto", "scaffold")
COHORT, INPUTS, CLASSES = 50, 32, 10


def make_dataset(clients: int) -> Dataset:
    """Return data in which each client has two frequent classes of ten, and its own shift."""
    rng = np.random.default_rng(0)
    samples_per_client = 2 if clients >= 1_000_000 else 12
    client = np.repeat(np.arange(clients), samples_per_client)
    y = rng.integers(0, 2, clients * samples_per_client) * 3 + rng.integers(0, CLASSES, clients)[client]
    centres = rng.standard_normal((CLASSES, INPUTS), np.float32)
    x = rng.standard_normal((len(client), INPUTS), np.float32)
    x += centres[y % CLASSES] + np.repeat(
        rng.standard_normal((clients, 1), np.float32), samples_per_client, axis=0
    )
    return Dataset("people", torch.from_numpy(x), torch.from_numpy(y % CLASSES), CLASSES, client=client)


def build_experiment(method: str, dataset: Dataset, clients: int, rounds: int, engine: str) -> Experiment:
    options = Config(
        participation=COHORT / clients,
        rounds=rounds,
        eval=f"sample:{COHORT}",
        lr=0.05,
        model="mlp",
        engine=engine,
    )
    return resolve(method, options, dataset=dataset)


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds of these processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def run_once(method: str, clients: int, rounds: int, engine: str, folder: Path) -> dict[str, float]:
    """Run once in this process, and return its measurements."""
    dataset = make_dataset(clients)
    before = peak_memory_mb()
    started = time.perf_counter()
    experiment_ = build_experiment(method, dataset, clients, rounds, engine)
    resolved = time.perf_counter()
    workers = engines.create_engine(engine, experiment_.task, experiment_.method)
    server = initial_server_state(experiment_)
    store = RunStore.create(folder, start.initial_metadata(experiment_, server), server)
    loop = RoundLoop(experiment_, store, workers, Callback())
    ready = time.perf_counter()
    torch.set_num_threads(1)
    loop.run_setup()
    prepared = time.perf_counter()
    seconds, memory, pids = [], [], getattr(workers, "pids", [])
    for t in range(1, rounds + 1):
        if t == 2:
            cpu, others = time.process_time(), cpu_seconds(pids)
        round_started = time.perf_counter()
        loop.run_round(t)
        seconds.append(time.perf_counter() - round_started)
        memory.append(peak_memory_mb())
    cpu, others = time.process_time() - cpu, cpu_seconds(pids) - others
    loop.evaluate_final()
    workers.close()
    store.close()
    size = (folder / RUN_FILE).stat().st_size
    shown = time.perf_counter()
    api.load(folder, hashes=False)
    show_seconds = time.perf_counter() - shown
    store = RunStore.open(folder)
    RoundLoop(experiment_, store, workers, Callback()).evaluate_final()
    store.close()
    resumed = time.perf_counter() - shown - show_seconds + resolved - started
    return {
        "start-up s": ready - started,
        "preparation s": prepared - ready,
        "round ms": 1000 * statistics.median(seconds[1:]),
        "CPU ms": 1000 * (cpu + others) / (rounds - 1),
        "parent ms": 1000 * cpu / (rounds - 1) / COHORT,
        "start MB": before,
        "peak MB": max(memory),
        "grown MB": memory[-1] - memory[1],
        "file MB": size / 1e6,
        "show s": show_seconds,
        "resume s": resumed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--engine", default="pool")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for method in arguments.methods:
        for clients in arguments.clients:
            if arguments.once:
                with tempfile.TemporaryDirectory() as folder:
                    numbers = run_once(method, clients, arguments.rounds, arguments.engine, Path(folder))
                print(json.dumps(numbers))
                return
            options = ["--methods", method, "--clients", str(clients), "--rounds", str(arguments.rounds)]
            command = [sys.executable, __file__, "--once", *options, "--engine", arguments.engine]
            numbers = json.loads(subprocess.check_output(command))
            if not results:
                print(f"{'method':32}{'clients':>9}" + "".join(f"{name:>14}" for name in numbers))
            print(f"{method:32}{clients:9}" + "".join(f"{v:14.2f}" for v in numbers.values()), flush=True)
            results.append({"method": method, "clients": clients, **numbers})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
