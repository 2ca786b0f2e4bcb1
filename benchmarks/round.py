"""Seconds of one round of FedAvg+DBE: plain loop, serial, pool.

    python benchmarks/round.py [--data fmnist|cifar100|har|digits] [--rows N] [--method fedavg+dbe]
        [--trainer auto] [--threads 2] [--repeats 5] [--without-serial] [--json FILE]

Fashion-MNIST and CIFAR-100 with the published split (20 clients) and the CNN, HAR with its 30 people, digits
with 100 clients (iid). Missing data is replaced by random numbers of its shape.

(a) is a straightforward PyTorch loop in the style of the popular libraries: a DataLoader over a list of
samples, batches of ten, a model object per client, `--threads` of torch; each round trains by FedAvg, tests,
and passes over the training data once more for the loss, all in batches of ten. (b) and (c) are feddbe's
engines, which take the training loss from the training itself. The three take turns and medians are compared:
only ratios within one run are meaningful. `cpu` is processor time including workers. Other programs disturb
it least, if (a) has one thread (two threads wait actively). `% of sgemm`: time of the training's dense
arithmetic (counted from the shapes) at the rate of torch's product of large matrices, measured between the
turns, in percent of the training's processor time. Memory is measured in separate processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from feddbe.callbacks.base import Callback
from feddbe.config.options import Config
from feddbe.data import BUILTIN_DATASETS, load_dataset
from feddbe.data.dataset import Dataset as Data
from feddbe.models.registry import MODELS, default_model, parse_model
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import RunStore
from feddbe.simulation import engines
from feddbe.simulation.client import ClientTask
from feddbe.simulation.engines.base import Broadcasts, ClientStates, peak_memory_mb
from feddbe.simulation.engines.pool import PoolEngine
from feddbe.simulation.loop import RoundLoop, initial_server_state
from feddbe.state import State

Samples = list[tuple[Tensor, Tensor]]
SHAPES = {
    "fmnist": (70_000, (1, 28, 28), 10),
    "cifar100": (60_000, (3, 32, 32), 100),
    "har": (10_299, (9, 1, 128), 6),
    "digits": (1_797, (1, 8, 8), 10),
}
PARTITIONS: dict[str, dict[str, Any]] = {"digits": {"clients": 100, "partition": "iid"}}
LEARNING_RATE = 0.005
Times = dict[str, float]


def load_or_generate(name: str, rows: int | None) -> Data:
    """Return the data, or random numbers of its shape if it is missing."""
    count, shape, classes = SHAPES[name]
    if BUILTIN_DATASETS[name].locate(None):
        dataset = load_dataset(name, None)
    else:
        random = torch.Generator().manual_seed(0)
        x = torch.randint(256, (count, *shape), generator=random, dtype=torch.uint8)
        y = torch.randint(classes, (count,), generator=random)
        clients = np.arange(count) % 30 if name == "har" else None
        dataset = Data(name, x, y, classes, 2 / 255, -1.0, clients, note="random")
    rows = rows or len(dataset)
    clients = None if dataset.client is None else dataset.client[:rows]
    return replace(dataset, x=dataset.x[:rows], y=dataset.y[:rows], client=clients, known_sha256={})


def batches(data: Samples, *, training: bool) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return batches of ten."""
    return DataLoader(cast("Dataset[Any]", data), 10, shuffle=training, drop_last=training)


class PlainClient:
    """One client as in popular libraries."""

    def __init__(self, model: nn.Module, train: Samples, test: Samples) -> None:
        self.model, self.train_data, self.test_data = deepcopy(model), train, test
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def receive(self, model: nn.Module) -> None:
        for own_parameter, received_parameter in zip(
            self.model.parameters(), model.parameters(), strict=True
        ):
            own_parameter.data = received_parameter.data.clone()

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


class PlainLoop:
    """(a): the plain loop."""

    def __init__(self, experiment: Experiment, threads: int) -> None:
        self.threads = threads
        dataset, split = experiment.task.dataset, experiment.task.split
        x, y = dataset.inputs(dataset.x), dataset.y
        name, shape = parse_model(str(experiment.options.model)).name, tuple(dataset.x.shape[1:])
        self.model = cast(nn.Module, MODELS[name].build(shape, dataset.classes))
        self.clients = [
            PlainClient(self.model, [(x[i], y[i]) for i in train], [(x[i], y[i]) for i in test])
            for train, test in zip(split.train, split.test, strict=True)
        ]

    def round(self) -> Times:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        for client in self.clients:
            client.receive(self.model)
        evaluation = measure_time(lambda: deque(map(PlainClient.evaluate, self.clients)))
        training = measure_time(lambda: deque(map(PlainClient.train, self.clients)))
        rest = measure_time(self.average)
        torch.set_num_threads(threads)
        total = [sum(times) for times in zip(evaluation, training, rest, strict=True)]
        return {"training": training[0], "training cpu": training[1], "evaluation": evaluation[0],
                "round": total[0], "round cpu": total[1]}  # fmt: skip

    def average(self) -> None:
        total = sum(len(client.train_data) for client in self.clients)
        for i, p in enumerate(self.model.parameters()):
            states = [list(client.model.parameters())[i].data for client in self.clients]
            weights = [len(client.train_data) / total for client in self.clients]
            p.data = sum((s * w for s, w in zip(states, weights, strict=True)), torch.zeros_like(p))


class EngineRounds(ClientStates):
    """(b), (c): an engine with a real store."""

    def __init__(self, experiment: Experiment, name: str, folder: Path) -> None:
        self.experiment, self.engine = (
            experiment,
            engines.create_engine(name, experiment.task, experiment.method),
        )
        self.store = RunStore.create(folder, {}, initial_server_state(experiment))
        self.loop = RoundLoop(experiment, self.store, self.engine, Callback())
        self.loop.run_setup()

    @property
    def server(self) -> State:
        """Server state at the start of a round."""
        return self.loop.server_state

    @server.setter
    def server(self, state: State) -> None:
        self.loop.server_state = state

    def close(self) -> None:
        self.engine.close()
        self.store.close()

    def round(self) -> Times:
        torch.set_num_threads(1)
        clients = range(self.experiment.task.split.clients)
        t = self.store.last_round() + 1
        pids = self.engine.pids if isinstance(self.engine, PoolEngine) else []
        training = measure_time(lambda: self._run([ClientTask(c, t, "train") for c in clients]), pids)
        evaluation = measure_time(
            lambda: self._run([ClientTask(c, t, "none", evaluate=True) for c in clients]), pids
        )
        total = measure_time(lambda: self.loop.run_round(t), pids)
        return {"training": training[0], "training cpu": training[1], "evaluation": evaluation[0],
                "round": total[0], "round cpu": total[1]}  # fmt: skip

    def _run(self, jobs: list[ClientTask]) -> None:
        list(self.engine.run(jobs, Broadcasts(self.loop.server_state), self))

    def read(self, client: int) -> bytes | None:
        return self.store.read(client)

    def write_pending(self, client: int, state: bytes) -> None:
        """Discard states of tasks that are only timed."""

    def version(self, client: int) -> None:
        pass


def measure_time(work: Callable[[], object], pids: Sequence[int] = ()) -> tuple[float, float]:
    """Return wall-clock seconds and CPU seconds, including those of these processes."""
    wall, own_cpu, other_cpu = time.perf_counter(), time.process_time(), cpu_seconds(pids)
    work()
    return time.perf_counter() - wall, time.process_time() - own_cpu + cpu_seconds(pids) - other_cpu


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU seconds of other processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def sgemm_rate() -> float:
    """Return operations per CPU second of a matrix product on one thread."""
    torch.set_num_threads(1)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    torch.mm(a, b)
    started = time.thread_time()
    for _ in range(20):
        torch.mm(a, b)
    return 20 * 2 * 1024**3 / (time.thread_time() - started)


def count_operations(experiment: Experiment) -> float:
    """Return operations of one round's training: forward, weight gradients, input gradients after layer 1."""
    task, per_sample, first = experiment.task, 0, True
    x = task.dataset.inputs(task.dataset.x[:1])
    for layer, _ in [layer for half in task.model.layers for layer in half]:
        x = layer(x)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            per_sample += (2 if first else 3) * 2 * layer.weight[0].numel() * x.numel()
            first = False
    return float(per_sample) * sum(n // 10 * 10 or n for n in task.samples) * task.training.local_epochs


def build_experiment(arguments: argparse.Namespace) -> Experiment:
    dataset = load_or_generate(arguments.data, arguments.rows)
    options = Config(
        data=arguments.data, lr=LEARNING_RATE, engine="pool", eval_after=False, trainer=arguments.trainer,
        model=default_model(tuple(dataset.x.shape[1:])), **PARTITIONS.get(arguments.data, {}),
    )  # fmt: skip
    return resolve(arguments.method, options, dataset=dataset)


def measure_peak(work: Callable[[], object]) -> float:
    """Return the peak memory during the work in MB: this process and its workers, shared pages once."""
    peaks, done = [peak_memory_mb()], threading.Event()

    def sample_memory() -> None:
        while not done.wait(0.05):
            peaks.append(peak_memory_mb())

    watcher = threading.Thread(target=sample_memory)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(peaks)


def memory(arguments: argparse.Namespace) -> float:
    """Return the peak memory of one round of one variant, in this process."""
    experiment, which = build_experiment(arguments), arguments.memory
    with tempfile.TemporaryDirectory() as folder:
        ours = None if which == "plain" else EngineRounds(experiment, which, Path(folder) / "run")
        variant = PlainLoop(experiment, arguments.threads) if ours is None else ours
        peak = measure_peak(variant.round)
        if ours is not None:
            ours.engine.close()
    return peak


def compare(
    experiment: Experiment, repeats: int, threads: int, ours: tuple[str, ...]
) -> tuple[dict[str, Times], float]:
    """Return medians of each phase for each variant, which take turns, and the rate of sgemm between them."""
    with tempfile.TemporaryDirectory() as folder:
        variants: dict[str, EngineRounds | PlainLoop] = {
            name: EngineRounds(experiment, name.split()[-1], Path(folder) / name) for name in ours
        }
        variants = {"(a) plain loop": PlainLoop(experiment, threads), **dict(reversed(variants.items()))}
        times: dict[str, list[Times]] = {name: [] for name in variants}
        rates = []
        for repeat in range(repeats + 1):
            for name, variant in variants.items():
                round_times = variant.round()
                rates.append(sgemm_rate())
                rounded = {k: round(v, 2) for k, v in round_times.items()}
                print(f"{repeat} {name:15}", rounded, file=sys.stderr, flush=True)
                if repeat:  # the first round warms up
                    times[name].append(round_times)
        for variant in variants.values():
            if isinstance(variant, EngineRounds):
                variant.close()
    medians = {
        name: {phase: statistics.median(t[phase] for t in rounds) for phase in rounds[0]}
        for name, rounds in times.items()
    }
    return medians, statistics.median(rates)


def print_table(seconds: dict[str, Times], limit: float, peaks: dict[str, float]) -> None:
    base = seconds["(a) plain loop"]
    heads = (*base, "a/x train", "a/x round", "a/x cpu", "% of sgemm", "MB")
    print(f"{'seconds (median)':18}" + "".join(f"{head:>14}" for head in heads))
    for (name, row), peak in zip(seconds.items(), peaks.values(), strict=True):
        ratios = [base[phase] / row[phase] for phase in ("training", "round", "round cpu")]
        values = [*row.values(), *ratios, 100 * limit / row["training cpu"], peak]
        print(f"{name:18}" + "".join(f"{v:14.2f}" for v in values))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=SHAPES, default="fmnist")
    parser.add_argument("--rows", type=int, help="number of rows of the data to use")
    parser.add_argument("--method", default="fedavg+dbe")
    parser.add_argument("--trainer", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="torch's, in (a)")
    parser.add_argument("--without-serial", action="store_true", help="(a) and (c) only")
    parser.add_argument("--without-memory", action="store_true", help="no peaks of memory")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--memory", choices=["plain", "serial", "pool"], help="print one variant's peak only")
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory(arguments))
        return
    ours = ("(c) pool",) if arguments.without_serial else ("(c) pool", "(b) serial")
    which = ["plain", *(name.split()[-1] for name in reversed(ours))]
    peaks = dict.fromkeys(which, 0.0)
    if not arguments.without_memory:
        command = [sys.executable, *sys.argv, "--memory"]
        peaks = {name: float(subprocess.check_output([*command, name])) for name in which}
    experiment = build_experiment(arguments)
    seconds, rate = compare(experiment, arguments.repeats, arguments.threads, ours)
    limit = count_operations(experiment) / rate
    print_table(seconds, limit, peaks)
    base, pool = seconds["(a) plain loop"], seconds["(c) pool"]
    print(f"sgemm {rate / 1e9:.0f} GFLOP/s and core; the training's dense arithmetic {limit:.2f} s")
    of_limit = 100 * limit / pool["training cpu"]
    print(f"round a/c {base['round'] / pool['round']:.2f}, training alone at {of_limit:.0f} % of sgemm")
    if arguments.json:
        numbers = {"seconds": seconds, "peak_mb": peaks, "sgemm": rate, "limit": limit}
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
