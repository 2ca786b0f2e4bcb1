"""How fast the probes of an MDL train, next to the machine's own sgemm: is it at least half of it?

    python benchmarks/mdl.py [--repeats 5] [--steps 40] [--k 512] [--classes 10] [--json FILE]

For each size of the default curve (900 training samples), and for a whole `mdl` with all sizes and seeds but
fewer steps, this prints floating-point operations per second: of the probes, counted from the shapes of their
matrix products alone (biases, ReLU, softmax, Adam and the gathering of batches cost time and count nothing),
and of sgemm (2048 x 2048) on as many threads, before and after each. The better of one product on all threads
and of a product per thread is taken for the machine's rate. Each pair is a ratio; medians are shown, since
only ratios of one moment mean anything on a machine with other work. `--profile` adds where the time of a
step goes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
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


def work(widths: tuple[int, ...], seeds: int, batch: int) -> int:
    """Floating-point operations in the products of one step of one program: forward, the weights' gradient,
    and from the second layer on that of its input."""
    products = [a * b for a, b in pairwise(widths)]
    return 2 * seeds * batch * (3 * sum(products) - products[0])


def timed(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def sgemm() -> float:
    """Operations per second of a large product, the better of two ways to use all threads."""
    threads = torch.get_num_threads()
    a, b = torch.randn(2, SGEMM, SGEMM)
    together = 2 * SGEMM**3 / timed(lambda: a @ b)
    apart = threads * 2 * SGEMM**3 / timed(lambda: map_parallel(lambda _, __: a @ b, range(threads)))
    return max(together, apart)


class Size:
    """One size of the curve: as many of its programs as there are threads, next to each other."""

    def __init__(self, given: Points, classes: int, size: int, settings: Settings) -> None:
        self.settings = settings
        self.batch = min(settings.batch, size)
        self.widths = (given.x.shape[1], settings.hidden, settings.hidden, classes)
        self.x = torch.from_numpy(given.x)
        self.hot = torch.eye(classes)[torch.from_numpy(given.y)]
        rng = np.random.RandomState(0)
        self.orders = torch.from_numpy(
            np.stack([rng.permutation(len(given.y))[:size] for _ in range(settings.seeds)])
        )
        streams = [np.random.RandomState(s) for s in range(settings.seeds)]
        self.programs = [init_probes(self.widths, streams) for _ in range(torch.get_num_threads())]

    def run(self, steps: int) -> None:
        def one(parameters: list[torch.Tensor], stop: Event) -> None:
            train_probes(
                parameters, self.x, self.hot, self.orders,
                steps=steps, batch=self.batch, lr=self.settings.lr, stop=stop,
            )  # fmt: skip

        map_parallel(one, self.programs)

    def rate(self, steps: int) -> float:
        done = steps * len(self.programs) * work(self.widths, self.settings.seeds, self.batch)
        return done / timed(lambda: self.run(steps))

    def profile(self, steps: int) -> None:
        """Shares of one program's time on one thread."""
        with single_threaded(), torch.profiler.profile() as seen:
            train_probes(
                self.programs[0], self.x, self.hot, self.orders, steps=steps, batch=self.batch, lr=1e-4
            )
        found = {row.key: row.self_cpu_time_total for row in seen.key_averages()}
        total = sum(found.values())
        shares = sorted(((t / total, name) for name, t in found.items()), reverse=True)[:7]
        print("    " + ", ".join(f"{name.removeprefix('aten::')} {share:.0%}" for share, name in shares))


def whole(given: Points, classes: int, settings: Settings) -> float:
    """The rate of a whole MDL, with all that is not training in its time."""
    training = len(given.y) - -(-len(given.y) // 10)
    widths = (given.x.shape[1], settings.hidden, settings.hidden, classes)
    done = sum(
        settings.steps * work(widths, settings.seeds, min(settings.batch, size))
        for size in training_sizes(training, settings.sizes)
    )
    return done / timed(lambda: mdl(given, classes=classes, settings=settings))


def compare(rate: Callable[[], float], repeats: int) -> dict[str, float]:
    """Medians of both rates and of their ratio, which take turns."""
    pairs, before = [], sgemm()
    for _ in range(repeats):
        mine, after = rate(), sgemm()
        pairs.append((mine, (before + after) / 2))
        before = after
    return {
        "probes": statistics.median(mine for mine, _ in pairs),
        "sgemm": statistics.median(machine for _, machine in pairs),
        "ratio": statistics.median(mine / machine for mine, machine in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=40, help="of a whole MDL; a size alone has some of a second"
    )
    parser.add_argument("--k", type=int, default=512, help="features")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="also where the time of each size goes")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    rng = np.random.RandomState(0)
    given = make_points(rng.randn(1000, arguments.k), rng.randint(0, arguments.classes, 1000))
    print(f"{torch.get_num_threads()} threads, K = {arguments.k}, C = {arguments.classes}, Gflop/s (medians)")
    print(f"{'samples':>10}{'batch':>8}{'probes':>10}{'sgemm':>10}{'ratio':>8}")
    found = {}
    for size in training_sizes(900, FULL.sizes):
        one = Size(given, arguments.classes, size, FULL)
        one.run(3)  # warms up
        steps = max(3, 1280 // one.batch)
        row = found[str(size)] = compare(lambda one=one, steps=steps: one.rate(steps), arguments.repeats)  # type: ignore[misc]
        show(str(size), str(one.batch), row)
        if arguments.profile:
            one.profile(steps)
    settings = replace(FULL, steps=arguments.steps)
    found["all"] = compare(lambda: whole(given, arguments.classes, settings), max(3, arguments.repeats // 2))
    show("all", "", found["all"])
    print(f"target: ratio {found['all']['ratio']:.2f} of 0.5 for the whole MDL ({arguments.steps} steps)")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def show(samples: str, batch: str, row: dict[str, float]) -> None:
    rates = f"{row['probes'] / 1e9:10.1f}{row['sgemm'] / 1e9:10.1f}{row['ratio']:8.2f}"
    print(f"{samples:>10}{batch:>8}{rates}", flush=True)


if __name__ == "__main__":
    main()
