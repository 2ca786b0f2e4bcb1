"""Seconds of one FedAvg round of fastText at AG News' full size: dense plain loop, serial, pool.

    python -m benchmarks.agnews [--repeats 3] [--threads 2] [--json FILE]

127,600 rows of 200 word numbers out of 98,635, 20 clients by dirichlet:1. The words are random: Zipf
frequencies, lengths of the real texts, and labels that determine a fifth of the words. (a) is the
straightforward loop: `nn.Embedding` with its dense gradient, `torch.optim.SGD`, the same batches of ten,
evaluation in batches of 128 as in feddbe; `--threads` are torch's. (b) and (c) are feddbe's engines with
a real store. A round evaluates all clients, trains them and averages. The three take turns after
one warm-up round, and medians are compared: only ratios within one run are meaningful. All of them start
each round from the same model, and their results must agree to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.round import EngineRounds
from feddbe import seeds
from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.runs.experiment import Experiment, resolve
from feddbe.state import State

ROWS, WORDS, LENGTH, CLASSES = 127_600, 98_635, 200, 4
PHASES = ("training", "evaluation", "round")


def make_dataset(rows: int = ROWS) -> Dataset:
    """Return random texts of the size of AG News, equally many of each class."""
    rng = np.random.default_rng(0)
    y = np.arange(rows) % CLASSES
    lengths = rng.normal(43.5, 13, rows).clip(8, LENGTH).astype(int)
    frequency = 1 / np.arange(1, WORDS)
    words = rng.choice(WORDS - 1, lengths.sum(), p=frequency / frequency.sum()) + 1
    is_informative = rng.random(len(words)) < 0.2
    label = np.repeat(y, lengths)
    words[is_informative] = np.clip(
        words[is_informative] // CLASSES * CLASSES + label[is_informative], 1, WORDS - 1
    )
    x = np.zeros((rows, LENGTH), np.int32)
    x[np.arange(LENGTH) < lengths[:, None]] = words
    return Dataset("news", torch.from_numpy(x), torch.from_numpy(y), CLASSES, num_words=WORDS)


class PlainModel(nn.Module):
    """fastText in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32, padding_idx=0)
        self.fc1, self.fc = nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.fc1(self.embedding(x).mean(1)))
        return logits


class PlainLoop:
    """(a): the plain loop."""

    def __init__(self, experiment: Experiment, threads: int) -> None:
        self.task, self.threads, self.model = experiment.task, threads, PlainModel()
        self.server: State = {}
        self.t = 0

    def round(self) -> dict[str, float]:
        torch.set_num_threads(self.threads)
        self.t, server = self.t + 1, self.server
        clients = range(self.task.split.clients)
        started = time.perf_counter()
        for client in clients:
            self.model.load_state_dict(server)
            self._evaluate(client)
        evaluated = time.perf_counter()
        total = sum(self.task.samples)
        mean = {name: torch.zeros_like(p) for name, p in server.items()}
        for client in clients:
            self.model.load_state_dict(server)
            self._train(client, self.t)
            for name, p in self.model.state_dict().items():
                mean[name] += p * (self.task.samples[client] / total)
        ended = time.perf_counter()
        self.server = mean
        return {"training": ended - evaluated, "evaluation": evaluated - started, "round": ended - started}

    def _train(self, client: int, t: int) -> None:
        x, y, rows = self.task.dataset.x, self.task.dataset.y, self.task.split.train[client]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.task.training.lr)
        order = rows[seeds.make_rng(self.task.seed, "batches", t, client).permutation(len(rows))]
        for start in range(0, len(rows) // 10 * 10, 10):
            batch = order[start : start + 10]
            optimizer.zero_grad()
            F.cross_entropy(self.model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    @torch.no_grad()
    def _evaluate(self, client: int) -> int:
        x, y, rows = self.task.dataset.x, self.task.dataset.y, self.task.split.test[client]
        chunks = [rows[start : start + 128] for start in range(0, len(rows), 128)]
        return sum(int((self.model(x[chunk]).argmax(1) == y[chunk]).sum()) for chunk in chunks)


def compare(repeats: int, threads: int) -> tuple[dict[str, dict[str, float]], float]:
    """Return medians of each phase for each variant, and the largest difference of models after a round."""
    experiment = resolve(
        "fedavg",
        Config(partition="dirichlet:1", clients=20, lr=0.1, engine="pool", eval_after=False),
        dataset=make_dataset(),
    )
    with tempfile.TemporaryDirectory() as folder:
        pool = EngineRounds(
            experiment, "pool", Path(folder) / "pool"
        )  # first: forked while this process is small
        serial = EngineRounds(experiment, "serial", Path(folder) / "serial")
        variants: dict[str, PlainLoop | EngineRounds] = {
            "(a) plain loop": PlainLoop(experiment, threads),
            "(b) serial": serial,
            "(c) pool": pool,
        }
        times: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        server, difference = pool.server, 0.0
        for t in range(1, repeats + 2):
            for name, variant in variants.items():
                variant.server = server
                round_times = variant.round()
                if t > 1:  # the first round warms up
                    times[name].append(round_times)
                rounded = {phase: round(seconds, 2) for phase, seconds in round_times.items()}
                print(f"{t} {name:15}", rounded, file=sys.stderr, flush=True)
            models = [variant.server for variant in variants.values()]
            differences = [
                float((other[n] - p).abs().max()) for other in models[1:] for n, p in models[0].items()
            ]
            difference = max(difference, *differences)
            server = pool.server
        for engine in (pool, serial):
            engine.close()
    medians = {
        name: {phase: statistics.median(t[phase] for t in rounds) for phase in PHASES}
        for name, rounds in times.items()
    }
    return medians, difference


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's, in (a)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    seconds, difference = compare(arguments.repeats, arguments.threads)
    base = seconds["(a) plain loop"]
    heads = (*PHASES, "a/x train", "a/x round")
    print(f"{'seconds (median)':18}" + "".join(f"{head:>12}" for head in heads))
    for name, row in seconds.items():
        ratios = (base["training"] / row["training"], base["round"] / row["round"])
        print(f"{name:18}" + "".join(f"{v:12.2f}" for v in (*row.values(), *ratios)))
    ratio = base["round"] / seconds["(c) pool"]["round"]
    print(f"targets: round a/c {ratio:.1f} of 30, models differ by {difference:.1e} of 1e-05")
    if arguments.json:
        numbers = {"seconds": seconds, "difference": difference, "threads": arguments.threads}
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")
    if difference > 1e-5:
        sys.exit("the loops do not agree")


if __name__ == "__main__":
    main()
