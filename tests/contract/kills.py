"""kill -9 of runs and of their workers at random moments: python -m tests.contract.kills --kills 1000

Every run is killed and resumed until it is complete, and is then compared with an uninterrupted run: states,
metrics, remaining processes. The runs are forked from this process, which imports once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import feddbe
from feddbe.data.dataset import Dataset
from feddbe.errors import StoreError
from tests.small_runs import make_dataset, read_states
from tests.waiting import wait_until

METHODS = (
    "fedavg+dbe", "scaffold+dbe", "fedgen(steps=5)+mr", "moon+dbe", "ditto+mr", "fedrep", "fedfomo", "apple",
    "pfedme",
)  # fmt: skip
OPTIONS: dict[str, Any] = {"rounds": 6, "model": "mlp", "lr": 0.05, "metrics": "accuracy,loss"}
ENGINES = ("serial", "pool(workers=2)")


@cache
def load_data() -> Dataset:
    return make_dataset()


def start_runs(methods: Sequence[str], engine: str, folder: Path, resume: bool = False) -> int:
    """Start the runs in a process with a new group, and return its id."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        code = 0
        try:
            options = OPTIONS | {"engine": engine, "out": str(folder), "resume": resume}
            feddbe.compare(methods, data=load_data(), **options)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            code = 1
        os._exit(code)
    return pid


def list_children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def read_results(folder: Path) -> list[Any]:
    """Return round results and states of all runs in a folder, without times."""
    results = []
    for path in sorted(folder.rglob("run.sqlite")):
        rounds = feddbe.load_run(path.parent)["rounds"]
        without_times = [{**round_result, "seconds": 0.0} for round_result in rounds]
        results.append((without_times, read_states(path.parent)))
    return results


def has_started(folder: Path) -> bool:
    """Return True if the folder has a run, complete or damaged."""
    try:
        return any(feddbe.load(path.parent, hashes=False) for path in folder.rglob("run.sqlite"))
    except StoreError:
        return True


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


def attempt_runs(
    methods: Sequence[str],
    engine: str,
    folder: Path,
    seconds: float,
    rng: random.Random,
    counts: Counter[str],
) -> bool:
    """Start or resume the runs, kill them in most cases, and return True if they are complete."""
    pid = start_runs(methods, engine, folder, resume=has_started(folder))
    workers = list[int]()
    if rng.random() < 0.9:
        time.sleep(rng.uniform(0.02, 1.0) * seconds)
        workers = list_children(pid)
        victim = rng.choice([pid, *workers])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            counts["workers" if victim != pid else "runs"] += 1
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not any(map(exists, workers)), "the end of all workers", seconds=60, pause=0.005)
    counts["orphans"] += sum(exists(worker) for worker in workers)
    if os.WIFSIGNALED(status):
        return False
    if os.waitstatus_to_exitcode(status):
        counts["failed"] += 1
        return False
    return True


def run_uninterrupted(methods: Sequence[str], engine: str, folder: Path) -> tuple[list[Any], float]:
    """Return the results of runs that are not killed, and their duration in seconds."""
    started = time.perf_counter()
    _, status = os.waitpid(start_runs(methods, engine, folder), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    results, seconds = read_results(folder), time.perf_counter() - started
    shutil.rmtree(folder)
    return results, seconds


def kill_runs(kills: int, seed: int, output_dir: Path, methods: Sequence[str] = METHODS) -> Counter[str]:
    """Kill runs of all methods and engines until there were `kills` kills, and return all counts."""
    torch.set_num_threads(1)
    load_data()  # before the first fork
    rng, counts = random.Random(seed), Counter[str]()
    cases: list[tuple[tuple[str, ...], str]] = [
        ((method,), engine) for engine in ENGINES for method in methods
    ]
    cases += [(tuple(methods[:3]), engine) for engine in ENGINES]
    expected: dict[int, tuple[list[Any], float]] = {}
    while counts["runs"] + counts["workers"] < kills:
        number, folder = counts["cases"] % len(cases), output_dir / "killed"
        names, engine = cases[number]
        if number not in expected:
            expected[number] = run_uninterrupted(names, engine, output_dir / "uninterrupted")
        results, seconds = expected[number]
        while not attempt_runs(names, engine, folder, seconds, rng, counts):
            pass
        counts["cases"] += 1
        counts["differing"] += read_results(folder) != results
        shutil.rmtree(folder)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(kill_runs(arguments.kills, arguments.seed, Path(folder))))
