"""CPU seconds of a round of every method relative to FedAvg's, in one run.

    python benchmarks/cost.py [METHOD ...] [--repeats 5] [--samples 100] [--json FILE]

The 4-layer CNN on random images of 28x28 (time does not depend on what they show), 20 clients with `samples`
training samples each, engine serial on one thread, where CPU time is wall time less the neighbours' noise.
The methods take turns, forth and back; ratios to FedAvg of the same turn, medians.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from feddbe import methods
from feddbe.data.dataset import Dataset
from feddbe.engines import Serial
from feddbe.options.config import Config
from feddbe.runs import rounds
from feddbe.runs.experiment import resolve
from feddbe.runs.store import Store

CLIENTS, CLASSES = 20, 10
PAPER = {
    "fedavg": 1.59, "fedavg+dbe": 1.60, "perfedavg": 3.56, "pfedme": 10.24, "ditto": 11.78, "fedper": 1.92,
    "fedrep": 4.09, "fedrod": 1.74, "fedbabu": 1.58, "apfl": 2.74, "fedfomo": 2.72, "apple": 2.93,
}  # fmt: skip
"""The paper's minutes per iteration, Tiny-ImageNet with ResNet-18."""


def images(samples: int) -> Dataset:
    """`samples` to train on for each client, and a third of that to test."""
    rng = np.random.RandomState(0)
    n = CLIENTS * samples * 4 // 3
    x = torch.from_numpy(rng.randint(0, 256, (n, 1, 28, 28), dtype=np.uint8))
    y = torch.from_numpy(rng.randint(0, CLASSES, n))
    return Dataset("random", x, y, CLASSES, 2 / 255, -1.0, np.arange(n) % CLIENTS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    described = [one for one in methods.describe() if one["family"] not in ("add-on", "floor")]
    every = [f"{one['name']}{'+dbe' * dbe}" for one in described for dbe in (0, 1)
             if not dbe or "dbe" in one["addons"]]  # fmt: skip
    parser.add_argument("methods", nargs="*", default=every)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = list(dict.fromkeys(["fedavg", *arguments.methods]))
    dataset = images(arguments.samples)
    with tempfile.TemporaryDirectory() as root:
        loops = {}
        for name in names:
            options = Config(partition="natural", model="cnn", rounds=10_000, eval_after=False)
            e = resolve(name, options, dataset=dataset)
            store = Store.create(Path(root) / name, {}, rounds.start(e))
            loops[name] = rounds.Loop(e, store, Serial(e.task, e.method), rounds.Watch())
            for round in (0, 1):  # what is needed once: the preparation, and memory
                loops[name].exchange(round)
        torch.set_num_threads(1)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(arguments.repeats):
            for name in names if repeat % 2 else reversed(names):
                begun = time.process_time()
                loops[name].exchange(2 + repeat)
                seconds[name].append(time.process_time() - begun)
    plain = seconds["fedavg"]
    rows = [
        {
            "method": name,
            "seconds": median(took),
            "ratio": median(a / b for a, b in zip(took, plain, strict=True)),
            "paper": PAPER[name] / PAPER["fedavg"] if name in PAPER else None,
        }
        for name, took in seconds.items()
    ]
    print("| method | CPU s per round | / fedavg | paper / fedavg |\n|---|---|---|---|")
    for row in rows:
        paper = "" if row["paper"] is None else f"{row['paper']:.2f}"
        print(f"| {row['method']} | {row['seconds']:.2f} | {row['ratio']:.2f} | {paper} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
