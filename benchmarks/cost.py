"""CPU seconds of a round of every method relative to FedAvg's, in one run.

    python benchmarks/cost.py [METHOD ...] [--repeats 5] [--samples 100] [--json FILE] [--steps]

The 4-layer CNN on random images of 28x28 (time does not depend on what they show), 20 clients with `samples`
training samples each, engine serial on one thread, where CPU time is wall time without noise of other
programs. The methods take turns in alternating order; medians of the ratios to FedAvg of the same turn.

`--steps`: instead one client's training alone, per batch of ten, by the compiled trainer and by autograd, of
FedAvg, FedAvg+DBE, SCAFFOLD, FedProx, Ditto and FedRep unless others are named. It shows the speedup of the
compiled trainer, and the cost of DBE.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from feddbe import methods
from feddbe.callbacks import base
from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.runs.experiment import resolve
from feddbe.runs.store import RunStore
from feddbe.simulation import engines
from feddbe.simulation.client import ClientTask, run_client
from feddbe.simulation.loop import RoundLoop, build_broadcast, initial_server_state
from feddbe.state import decode
from feddbe.training.task import Context

CLIENTS, CLASSES = 20, 10
TRAINERS = ("compiled", "autograd")
STEPS = ("fedavg+dbe", "scaffold", "fedprox", "ditto", "fedrep")
PAPER = {
    "fedavg": 1.59, "fedavg+dbe": 1.60, "perfedavg": 3.56, "pfedme": 10.24, "ditto": 11.78, "fedper": 1.92,
    "fedrep": 4.09, "fedrod": 1.74, "fedbabu": 1.58, "apfl": 2.74, "fedfomo": 2.72, "apple": 2.93,
}  # fmt: skip
"""The paper's minutes per iteration, Tiny-ImageNet with ResNet-18."""


def make_dataset(samples: int) -> Dataset:
    """Return random images: `samples` training samples per client, and a third of that for test."""
    rng = np.random.RandomState(0)
    n = CLIENTS * samples * 4 // 3
    x = torch.from_numpy(rng.randint(0, 256, (n, 1, 28, 28), dtype=np.uint8))
    y = torch.from_numpy(rng.randint(0, CLASSES, n))
    return Dataset("random", x, y, CLASSES, 2 / 255, -1.0, np.arange(n) % CLIENTS)


def create_loop(name: str, dataset: Dataset, folder: Path, trainer: str = "auto") -> RoundLoop:
    """Return the loop of a run after its setup."""
    options = Config(partition="natural", model="cnn", rounds=10_000, eval_after=False, trainer=trainer)
    experiment = resolve(name, options, dataset=dataset)
    store = RunStore.create(folder, {}, initial_server_state(experiment))
    loop = RoundLoop(
        experiment,
        store,
        engines.create_engine("serial", experiment.task, experiment.method),
        base.Callback(),
    )
    loop.run_setup()
    return loop


def time_training(loop: RoundLoop) -> float:
    """Return CPU milliseconds per batch of one client's training in a round."""
    task, kept = loop.task, loop.store.read(0)
    message = build_broadcast(loop.method, Context(task, 1), loop.server_state).message_for(0)
    started = time.process_time()
    run_client(task, loop.method, ClientTask(0, 1, "train"), message, None if kept is None else decode(kept))
    return (time.process_time() - started) * 1000 / (task.samples[0] // task.training.batch_size)


def compare_steps(names: list[str], dataset: Dataset, repeats: int, root: Path) -> list[dict[str, Any]]:
    """Return medians of each method with both trainers, and of the ratios within a turn."""
    which = [(name, trainer) for name in names for trainer in TRAINERS]
    loops = {case: create_loop(case[0], dataset, root / " ".join(case), case[1]) for case in which}
    times: dict[tuple[str, str], list[float]] = {case: [] for case in which}
    for repeat in range(repeats + 1):
        for case in which if repeat % 2 else reversed(which):
            times[case].append(time_training(loops[case]))

    def ratio(case: tuple[str, str], other: tuple[str, str]) -> float:
        turns = list(zip(times[case], times[other], strict=True))
        return median(a / b for a, b in turns[1:])  # the first turn warms up

    rows = []
    for name in names:
        row: dict[str, Any] = {"method": name}
        row |= {f"{trainer} ms": median(times[name, trainer][1:]) for trainer in TRAINERS}
        row["autograd / compiled"] = ratio((name, "autograd"), (name, "compiled"))
        row |= {f"{t} / {names[0]}": ratio((name, t), (names[0], t)) for t in TRAINERS}
        rows.append(row)
    print(f"| {' | '.join(rows[0])} |\n{'|---' * len(rows[0])}|")
    for name, *numbers in (row.values() for row in rows):
        print(f"| {name} | {' | '.join(f'{number:.3f}' for number in numbers)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    all_methods = []
    for description in methods.describe_methods():
        if description["family"] not in ("add-on", "baseline"):
            all_methods.append(description["name"])
            if "dbe" in description["addons"]:
                all_methods.append(f"{description['name']}+dbe")
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--steps", action="store_true", help="training alone, compiled and by autograd")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = list(
        dict.fromkeys(["fedavg", *(arguments.methods or (STEPS if arguments.steps else all_methods))])
    )
    dataset = make_dataset(arguments.samples)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        if arguments.steps:
            table = compare_steps(names, dataset, arguments.repeats, Path(root))
            if arguments.json:
                arguments.json.write_text(json.dumps(table, indent=1), encoding="utf-8")
            return
        loops = {name: create_loop(name, dataset, Path(root) / name) for name in names}
        for loop in loops.values():
            loop.run_round(1)  # warms up
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(arguments.repeats):
            for name in names if repeat % 2 else reversed(names):
                started = time.process_time()
                loops[name].run_round(2 + repeat)
                seconds[name].append(time.process_time() - started)
    plain = seconds["fedavg"]
    rows = [
        {
            "method": name,
            "seconds": median(times),
            "ratio": median(a / b for a, b in zip(times, plain, strict=True)),
            "paper": PAPER[name] / PAPER["fedavg"] if name in PAPER else None,
        }
        for name, times in seconds.items()
    ]
    print("| method | CPU s per round | / fedavg | paper / fedavg |\n|---|---|---|---|")
    for row in rows:
        paper = "" if row["paper"] is None else f"{row['paper']:.2f}"
        print(f"| {row['method']} | {row['seconds']:.2f} | {row['ratio']:.2f} | {paper} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
