"""Training rate of the probes of an MDL relative to the machine's sgemm; the target is at least half.

    python benchmarks/mdl.py [--repeats 5] [--steps 40] [--k 512] [--classes 10] [--json FILE]

For each size of the default curve (900 training samples), and for a whole `mdl` with all sizes and seeds but
fewer steps, this prints floating-point operations per second: of the probes, counted from the shapes of their
matrix products alone (biases, ReLU, softmax, Adam and the gathering of batches take time but do not count),
and of sgemm (2048 x 2048) on as many threads, before and after each. The better of one product on all threads
and of a product per thread is the machine's rate. Each pair gives a ratio. Medians are shown, because on a
machine with other work only ratios at one time are meaningful. `--profile` adds the shares of operations in
the time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event

import numpy as np
import torch

from feddbe.metrics.representations.mdl import (
    FULL,
    Settings,
    init_probes,
    map_parallel,
    mdl,
    single_threaded,
    train_probes,
    training_sizes,
)
from feddbe.metrics.representations.points import Points, make_points

SGEMM = 2048


def count_operations(widths: tuple[int, ...], seeds: int, batch: int) -> int:
    """Return the operations of one step: forward, weight gradients, and input gradients from layer 2 on."""
    products = [a * b for a, b in pairwise(widths)]
    return 2 * seeds * batch * (3 * sum(products) - products[0])


def measure_seconds(job: Callable[[], object]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def sgemm_rate() -> float:
    """Return operations per second of a large product, the better of two ways to use all threads."""
    threads = torch.get_num_threads()
    a, b = torch.randn(2, SGEMM, SGEMM)
    together = 2 * SGEMM**3 / measure_seconds(lambda: a @ b)
    separate = (
        threads * 2 * SGEMM**3 / measure_seconds(lambda: map_parallel(lambda _, __: a @ b, range(threads)))
    )
    return max(together, separate)


class SizeBenchmark:
    """One size of the curve: as many sets of probes as there are threads, in parallel."""

    def __init__(self, points: Points, classes: int, size: int, settings: Settings) -> None:
        self.settings = settings
        self.batch = min(settings.batch, size)
        self.widths = (points.x.shape[1], settings.hidden, settings.hidden, classes)
        self.x = torch.from_numpy(points.x)
        self.hot = torch.eye(classes)[torch.from_numpy(points.y)]
        rng = np.random.RandomState(0)
        self.orders = torch.from_numpy(
            np.stack([rng.permutation(len(points.y))[:size] for _ in range(settings.seeds)])
        )
        streams = [np.random.RandomState(s) for s in range(settings.seeds)]
        self.programs = [init_probes(self.widths, streams) for _ in range(torch.get_num_threads())]

    def run(self, steps: int) -> None:
        def train(parameters: list[torch.Tensor], stop: Event) -> None:
            train_probes(
                parameters, self.x, self.hot, self.orders,
                steps=steps, batch=self.batch, lr=self.settings.lr, stop=stop,
            )  # fmt: skip

        map_parallel(train, self.programs)

    def rate(self, steps: int) -> float:
        done = steps * len(self.programs) * count_operations(self.widths, self.settings.seeds, self.batch)
        return done / measure_seconds(lambda: self.run(steps))

    def profile(self, steps: int) -> None:
        """Print the shares of operations in the time of one set of probes on one thread."""
        with single_threaded(), torch.profiler.profile() as profiler:
            train_probes(
                self.programs[0], self.x, self.hot, self.orders, steps=steps, batch=self.batch, lr=1e-4
            )
        times = {row.key: row.self_cpu_time_total for row in profiler.key_averages()}
        total = sum(times.values())
        shares = sorted(((t / total, name) for name, t in times.items()), reverse=True)[:7]
        print("    " + ", ".join(f"{name.removeprefix('aten::')} {share:.0%}" for share, name in shares))


def mdl_rate(points: Points, classes: int, settings: Settings) -> float:
    """Return the rate of a complete MDL, whose time includes everything besides training."""
    training = len(points.y) - -(-len(points.y) // 10)
    widths = (points.x.shape[1], settings.hidden, settings.hidden, classes)
    done = sum(
        settings.steps * count_operations(widths, settings.seeds, min(settings.batch, size))
        for size in training_sizes(training, settings.sizes)
    )
    return done / measure_seconds(lambda: mdl(points, classes=classes, settings=settings))


def compare(rate: Callable[[], float], repeats: int) -> dict[str, float]:
    """Return medians of both rates, which take turns, and of their ratio."""
    pairs, before = [], sgemm_rate()
    for _ in range(repeats):
        probe_rate, after = rate(), sgemm_rate()
        pairs.append((probe_rate, (before + after) / 2))
        before = after
    return {
        "probes": statistics.median(probe_rate for probe_rate, _ in pairs),
        "sgemm": statistics.median(machine for _, machine in pairs),
        "ratio": statistics.median(probe_rate / machine for probe_rate, machine in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="steps of a complete MDL")
    parser.add_argument("--k", type=int, default=512, help="features")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument(
        "--profile", action="store_true", help="also print the shares of operations for each size"
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    rng = np.random.RandomState(0)
    points = make_points(rng.randn(1000, arguments.k), rng.randint(0, arguments.classes, 1000))
    print(f"{torch.get_num_threads()} threads, K = {arguments.k}, C = {arguments.classes}, Gflop/s (medians)")
    print(f"{'samples':>10}{'batch':>8}{'probes':>10}{'sgemm':>10}{'ratio':>8}")
    results = {}
    for size in training_sizes(900, FULL.sizes):
        size_benchmark = SizeBenchmark(points, arguments.classes, size, FULL)
        size_benchmark.run(3)  # warms up
        steps = max(3, 1280 // size_benchmark.batch)
        row = results[str(size)] = compare(partial(size_benchmark.rate, steps), arguments.repeats)
        print_row(str(size), str(size_benchmark.batch), row)
        if arguments.profile:
            size_benchmark.profile(steps)
    settings = replace(FULL, steps=arguments.steps)
    results["all"] = compare(
        lambda: mdl_rate(points, arguments.classes, settings), max(3, arguments.repeats // 2)
    )
    print_row("all", "", results["all"])
    print(
        f"target: ratio {results['all']['ratio']:.2f} of 0.5 for the complete MDL ({arguments.steps} steps)"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def print_row(samples: str, batch: str, row: dict[str, float]) -> None:
    rates = f"{row['probes'] / 1e9:10.1f}{row['sgemm'] / 1e9:10.1f}{row['ratio']:8.2f}"
    print(f"{samples:>10}{batch:>8}{rates}", flush=True)


if __name__ == "__main__":
    main()
