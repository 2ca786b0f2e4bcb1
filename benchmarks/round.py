"""Seconds of one FedAvg round on Fashion-MNIST (published split, 20 clients, CNN): plain loop, serial, pool.

    python benchmarks/round.py [--repeats 5] [--without-serial] [--json FILE]

(a) is a straightforward PyTorch loop in the style of the popular libraries: a DataLoader over a list of
samples, batches of ten, a model object per client, two torch threads; each round trains, tests, and passes
over the training data once more for the loss, all in batches of ten. (b) and (c) are feddbe's engines, which
evaluate in batches of 128 and take the training loss from the training itself. The three take turns and
medians are compared: only ratios of one run mean anything. Memory is measured in a process of its own each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from feddbe import engines
from feddbe.engines import Messages
from feddbe.engines.client import Job
from feddbe.measures.memory import used_mb
from feddbe.models.cnn import cnn
from feddbe.options.config import Config
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.rounds import Loop, Watch, start
from feddbe.runs.store import Store

Samples = list[tuple[Tensor, Tensor]]


def batches(data: Samples, *, training: bool) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches of ten."""
    return DataLoader(cast("Dataset[Any]", data), 10, shuffle=training, drop_last=training)


class PlainClient:
    """One client as the popular libraries have it."""

    def __init__(self, model: nn.Module, train: Samples, test: Samples) -> None:
        self.model, self.train_data, self.test_data = deepcopy(model), train, test
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.005)

    def receive(self, model: nn.Module) -> None:
        for mine, new in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.data = new.data.clone()

    def train(self) -> None:
        self.model.train()
        for x, y in batches(self.train_data, training=True):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> tuple[int, float]:
        self.model.eval()
        tested = ((self.model(x), y) for x, y in batches(self.test_data, training=False))
        correct = sum(int((logits.argmax(1) == y).sum()) for logits, y in tested)
        passed = ((self.model(x), y) for x, y in batches(self.train_data, training=True))
        return correct, sum(nn.functional.cross_entropy(logits, y).item() * len(y) for logits, y in passed)


class Plain:
    """(a): the loop."""

    def __init__(self, experiment: Experiment) -> None:
        dataset, split = experiment.task.dataset, experiment.task.split
        x, y = dataset.inputs(dataset.x), dataset.y
        self.model: nn.Module = cnn((1, 28, 28), 10)
        self.clients = [
            PlainClient(self.model, [(x[i], y[i]) for i in train], [(x[i], y[i]) for i in test])
            for train, test in zip(split.train, split.test, strict=True)
        ]

    def round(self) -> dict[str, float]:
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        began = time.perf_counter()
        for client in self.clients:
            client.receive(self.model)
        for client in self.clients:
            client.evaluate()
        evaluated = time.perf_counter()
        for client in self.clients:
            client.train()
        trained = time.perf_counter()
        total = sum(len(client.train_data) for client in self.clients)
        for i, p in enumerate(self.model.parameters()):
            states = [list(client.model.parameters())[i].data for client in self.clients]
            weights = [len(client.train_data) / total for client in self.clients]
            p.data = sum((s * w for s, w in zip(states, weights, strict=True)), torch.zeros_like(p))
        ended = time.perf_counter()
        torch.set_num_threads(threads)
        return {"training": trained - evaluated, "evaluation": evaluated - began, "round": ended - began}


class Ours:
    """(b), (c): an engine, with a real store behind it."""

    def __init__(self, experiment: Experiment, name: str, folder: Path) -> None:
        self.experiment, self.engine = experiment, engines.make(name, experiment.task, experiment.method)
        self.store = Store.create(folder, {}, start(experiment))
        self.loop = Loop(experiment, self.store, self.engine, Watch())
        self.loop.exchange(0)

    def round(self) -> dict[str, float]:
        torch.set_num_threads(1)
        clients = range(self.experiment.task.split.clients)
        t = self.store.last_round() + 1
        training = self._seconds([Job(c, t, "train") for c in clients])
        evaluation = self._seconds([Job(c, t, "none", evaluate=True) for c in clients])
        began = time.perf_counter()
        self.loop.exchange(t)
        return {"training": training, "evaluation": evaluation, "round": time.perf_counter() - began}

    def _seconds(self, jobs: list[Job]) -> float:
        began = time.perf_counter()
        with self.store.transaction(0):
            list(self.engine.run(jobs, Messages(self.loop.server), self.store))
        return time.perf_counter() - began


def federation() -> Experiment:
    return resolve("fedavg", Config(data="fmnist", lr=0.005, engine="pool", eval_after=False))


def peak_of(work: Callable[[], object]) -> float:
    """The most memory in use while it works, in MB: this process and its workers, shared pages once."""
    seen, done = [used_mb()], threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            seen.append(used_mb())

    watcher = threading.Thread(target=look)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(seen)


def memory(which: str) -> float:
    """One round of one variant, in this process."""
    experiment = federation()
    with tempfile.TemporaryDirectory() as folder:
        ours = None if which == "plain" else Ours(experiment, which, Path(folder) / "run")
        variant = Plain(experiment) if ours is None else ours
        peak = peak_of(variant.round)
        if ours is not None:
            ours.engine.close()
    return peak


def compare(repeats: int, ours: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Medians of each phase for each variant, which take turns."""
    experiment = federation()
    with tempfile.TemporaryDirectory() as folder:
        variants: dict[str, Ours | Plain] = {
            name: Ours(experiment, name.split()[-1], Path(folder) / name) for name in ours
        }
        variants = {"(a) plain loop": Plain(experiment), **dict(reversed(variants.items()))}
        times: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        for repeat in range(repeats + 1):
            for name, variant in variants.items():
                taken = variant.round()
                print(
                    f"{repeat} {name:15}",
                    {k: round(v, 2) for k, v in taken.items()},
                    file=sys.stderr,
                    flush=True,
                )
                if repeat:  # the first one warms up
                    times[name].append(taken)
        for variant in variants.values():
            if isinstance(variant, Ours):
                variant.engine.close()
                variant.store.close()
    return {
        name: {phase: statistics.median(t[phase] for t in taken) for phase in taken[0]}
        for name, taken in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-serial", action="store_true", help="(a) and (c) only")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--memory", choices=["plain", "serial", "pool"], help="print one variant's peak only")
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory(arguments.memory))
        return
    ours = ("(c) pool",) if arguments.without_serial else ("(c) pool", "(b) serial")
    peaks = {
        which: float(subprocess.check_output([sys.executable, __file__, "--memory", which]))
        for which in ("plain", *(name.split()[-1] for name in reversed(ours)))
    }
    seconds = compare(arguments.repeats, ours)
    base, pool = seconds["(a) plain loop"], seconds["(c) pool"]
    heads = ("training", "evaluation", "round", "a/x train", "a/x round", "MB")
    print(f"{'seconds (median)':18}" + "".join(f"{head:>12}" for head in heads))
    for (name, row), peak in zip(seconds.items(), peaks.values(), strict=True):
        ratios = (base["training"] / row["training"], base["round"] / row["round"])
        print(f"{name:18}" + "".join(f"{v:12.2f}" for v in (*row.values(), *ratios)) + f"{peak:12.0f}")
    print(
        f"targets: training a/c {base['training'] / pool['training']:.2f} of 1.8, "
        f"round a/c {base['round'] / pool['round']:.2f} of 2.8"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"seconds": seconds, "peak_mb": peaks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
