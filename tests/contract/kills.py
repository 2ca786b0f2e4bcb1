"""kill -9 of runs and of their workers at random moments: python -m tests.contract.kills --kills 1000

Every run is killed again and again and continued until it ends, and is then compared with one that was left
alone: states, measured numbers, leftovers. The runs are forked from this process, which imports once.
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
from tests.federation import make_dataset, read_states

METHODS = (
    "fedavg+dbe", "scaffold+dbe", "fedgen(steps=5)+mr", "moon+dbe", "ditto+mr", "fedrep", "fedfomo", "apple",
    "pfedme",
)  # fmt: skip
OPTIONS: dict[str, Any] = {"rounds": 6, "model": "mlp", "lr": 0.05, "metrics": "accuracy,loss"}
ENGINES = ("serial", "pool(workers=2)")


@cache
def data() -> Dataset:
    return make_dataset()


def begin(methods: Sequence[str], engine: str, folder: Path, resume: bool = False) -> int:
    """These runs in a process of its own group; its id."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        code = 0
        try:
            where: dict[str, Any] = {"engine": engine, "out": str(folder), "resume": resume}
            feddbe.compare(methods, data=data(), **OPTIONS, **where)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            code = 1
        os._exit(code)
    return pid


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def result(folder: Path) -> list[Any]:
    """All that the runs in a folder leave, without the times."""
    found = []
    for path in sorted(folder.rglob("run.sqlite")):
        rounds = feddbe.load(path.parent)["rounds"]
        found.append(([{**entry, "seconds": 0.0} for entry in rounds], read_states(path.parent)))
    return found


def strike(
    methods: Sequence[str],
    engine: str,
    folder: Path,
    seconds: float,
    rng: random.Random,
    counts: Counter[str],
) -> bool:
    """One attempt, killed in most cases; whether it came to its end."""
    pid = begin(methods, engine, folder, resume=begun(folder))
    workers = list[int]()
    if rng.random() < 0.9:
        time.sleep(rng.uniform(0.02, 1.0) * seconds)
        workers = children(pid)
        victim = rng.choice([pid, *workers])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            counts["workers" if victim != pid else "runs"] += 1
    _, status = os.waitpid(pid, 0)
    end = time.monotonic() + 10
    while any(Path(f"/proc/{w}/stat").exists() for w in workers) and time.monotonic() < end:
        time.sleep(0.005)
    counts["orphans"] += sum(Path(f"/proc/{w}/stat").exists() for w in workers)
    if os.WIFSIGNALED(status):
        return False
    if os.waitstatus_to_exitcode(status):
        counts["failed"] += 1
        return False
    return True


def begun(folder: Path) -> bool:
    try:
        return any(feddbe.load(path.parent, hashes=False) for path in folder.rglob("run.sqlite"))
    except StoreError:
        return True


def kill(kills: int, seed: int, place: Path, methods: Sequence[str] = METHODS) -> Counter[str]:
    """So many kills over all methods and engines; what was counted."""
    torch.set_num_threads(1)
    data()  # before it is forked
    rng, counts = random.Random(seed), Counter[str]()
    cases: list[tuple[tuple[str, ...], str]] = [((m,), e) for e in ENGINES for m in methods] + [
        (tuple(methods[:3]), e) for e in ENGINES
    ]
    wanted: dict[int, tuple[list[Any], float]] = {}
    while counts["runs"] + counts["workers"] < kills:
        number, folder = counts["cases"] % len(cases), place / "killed"
        names, engine = cases[number]
        if number not in wanted:
            start = time.perf_counter()
            assert os.waitstatus_to_exitcode(os.waitpid(begin(names, engine, place / "whole"), 0)[1]) == 0
            wanted[number] = result(place / "whole"), time.perf_counter() - start
            shutil.rmtree(place / "whole")
        while not strike(names, engine, folder, wanted[number][1], rng, counts):
            pass
        counts["cases"] += 1
        counts["differing"] += result(folder) != wanted[number][0]
        shutil.rmtree(folder)
    return counts


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(kill(given.kills, given.seed, Path(folder))))
