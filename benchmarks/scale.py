"""Seconds, memory and disk of runs with very many clients, of whom 50 take part in a round.

    python benchmarks/scale.py [--clients 1000 10000 100000 1000000] [--methods ...] [--rounds 20]
        [--engine pool] [--json FILE]

The data is drawn here: N clients with 12 samples each (2, where there are a million) of 32 numbers in 10
classes, in two files of which each client's label skew and shift are its own; the partition is the client
column. The model is a perceptron 32-64-10. Each run is a process of its own, so that its peak is its own:

- start-up: reading nothing, from options to an experiment (partition, hashes, floor) and the run's file;
- preparation: round 0, for MR with `init_clients=1000`;
- round: the median of rounds 2.. (the first warms up) with evaluation of a sample of 50;
- parent CPU: processor time of the process that runs the rounds, per client and round;
- memory: peak of all processes, shared pages once, less that of the same run with a thousand clients' data
  is what N costs; data: bytes of x, y, the client column and the split;
- file: the run's file; show, resume: seconds of `feddbe show` and of `--resume` of the finished run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddbe import api, engines
from feddbe.data.dataset import Dataset
from feddbe.measures.memory import used_mb
from feddbe.options.config import Config
from feddbe.runs import provenance
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.rounds import Loop, Watch, start
from feddbe.runs.store import FILE, Store

METHODS = ("fedavg+dbe(init_clients=1000)", "ditto", "scaffold")
COHORT, INPUTS, CLASSES = 50, 32, 10


def people(clients: int) -> Dataset:
    """Each client has two favourite classes of ten, and sees all with a shift of its own."""
    rng = np.random.default_rng(0)
    each = 2 if clients >= 1_000_000 else 12
    client = np.repeat(np.arange(clients), each)
    y = rng.integers(0, 2, clients * each) * 3 + rng.integers(0, CLASSES, clients)[client]
    centres = rng.standard_normal((CLASSES, INPUTS), np.float32)
    x = rng.standard_normal((len(client), INPUTS), np.float32)
    x += centres[y % CLASSES] + np.repeat(rng.standard_normal((clients, 1), np.float32), each, axis=0)
    return Dataset("people", torch.from_numpy(x), torch.from_numpy(y % CLASSES), CLASSES, client=client)


def experiment(method: str, dataset: Dataset, clients: int, rounds: int, engine: str) -> Experiment:
    options = Config(
        join=COHORT / clients, rounds=rounds, eval=f"sample:{COHORT}", lr=0.05, model="mlp", engine=engine
    )
    return resolve(method, options, dataset=dataset)


def once(method: str, clients: int, rounds: int, engine: str, folder: Path) -> dict[str, float]:
    """One run in this process."""
    dataset = people(clients)
    before = used_mb()
    began = time.perf_counter()
    made = experiment(method, dataset, clients, rounds, engine)
    resolved = time.perf_counter()
    workers = engines.make(engine, made.task, made.method)
    store = Store.create(folder, provenance.describe(made), start(made))
    loop = Loop(made, store, workers, Watch())
    ready = time.perf_counter()
    torch.set_num_threads(1)
    loop.exchange(0)
    prepared = time.perf_counter()
    seconds, cpu = [], time.process_time()
    for t in range(1, rounds + 1):
        at = time.perf_counter()
        loop.exchange(t)
        seconds.append(time.perf_counter() - at)
    cpu = time.process_time() - cpu
    loop.evaluate_last()
    peak = store.meta("peak_rss_mb")
    workers.close()
    store.close()
    size = (folder / FILE).stat().st_size
    at = time.perf_counter()
    api.load(folder, hashes=False)
    shown = time.perf_counter() - at
    store = Store.open(folder)
    Loop(made, store, workers, Watch()).evaluate_last()
    store.close()
    resumed = time.perf_counter() - at - shown + resolved - began
    return {
        "start-up s": ready - began,
        "preparation s": prepared - ready,
        "round ms": 1000 * statistics.median(seconds[1:]),
        "last rounds ms": 1000 * statistics.median(seconds[-rounds // 4 :]),
        "parent CPU ms": 1000 * cpu / rounds / COHORT,
        "peak MB": peak,
        "data MB": before,
        "file MB": size / 1e6,
        "show s": shown,
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
    found: list[dict[str, Any]] = []
    for method in arguments.methods:
        for clients in arguments.clients:
            if arguments.once:
                with tempfile.TemporaryDirectory() as folder:
                    numbers = once(method, clients, arguments.rounds, arguments.engine, Path(folder))
                print(json.dumps(numbers))
                return
            given = ["--methods", method, "--clients", str(clients), "--rounds", str(arguments.rounds)]
            command = [sys.executable, __file__, "--once", *given, "--engine", arguments.engine]
            numbers = json.loads(subprocess.check_output(command))
            if not found:
                print(f"{'method':32}{'clients':>9}" + "".join(f"{name:>16}" for name in numbers))
            print(f"{method:32}{clients:9}" + "".join(f"{v:16.2f}" for v in numbers.values()), flush=True)
            found.append({"method": method, "clients": clients, **numbers})
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
