"""FedAvg+DBE against FedAvg on digits (20 clients, Dirichlet 0.1, published split), over seeds.

    python benchmarks/digits.py [--seeds 3] [--out runs/benchmark-digits]

Prints the table of docs/results.md: mean over seeds with the 95 % interval of Student's t, and that of the
paired difference to FedAvg. Runs that are in --out already are not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from scipy.stats import t as student

import feddbe
from feddbe import api, config
from feddbe.document import RunDocument

METHODS = ("fedavg", "fedavg+prbm", "fedavg+mr", "fedavg+dbe")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval."""
    n = len(values)
    return mean(values), float(student.ppf(0.975, n - 1)) * stdev(values) / n**0.5


def once(method: str, seed: int, out: Path) -> RunDocument:
    """The run of this seed, new or from the folder."""
    folder = out / f"{method}-{seed}"
    options = {"data": "digits", "seed": seed, "out": str(folder), "resume": (folder / "run.sqlite").exists()}
    names, chosen = config.read([method], options)
    return api.carry_out(names, chosen, single=True)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-digits"))
    arguments = parser.parse_args()
    runs = {m: [once(m, seed, arguments.out) for seed in range(arguments.seeds)] for m in METHODS}
    feddbe.draw(arguments.out, [run for several in runs.values() for run in several])

    print("| method | best round % | last round % | last - fedavg's last | s per round |")
    print("|---|---|---|---|---|")
    last = {m: [100 * accuracy(run, "last") for run in several] for m, several in runs.items()}
    for method, several in runs.items():
        best = interval([100 * accuracy(run, "best") for run in several])
        end = interval(last[method])
        gain = interval([a - b for a, b in zip(last[method], last["fedavg"], strict=True)])
        gained = "" if method == "fedavg" else _plus_minus(gain, "+")
        seconds = mean(run["cost"]["seconds"] for run in several)
        cells = (method, _plus_minus(best), _plus_minus(end), gained, f"{seconds:.2f}")
        print(f"| {' | '.join(cells)} |")
    print(f"| majority class (floor) | {100 * runs['fedavg'][0]['floor']:.2f} | | | |")


def _plus_minus(value: tuple[float, float], sign: str = "") -> str:
    return f"{value[0]:{sign}.2f} ± {value[1]:.2f}"


def accuracy(run: RunDocument, which: str) -> float:
    entry = run["best"] if which == "best" else run["last"]
    assert entry is not None
    assert entry["accuracy"] is not None
    return entry["accuracy"]["weighted"]


if __name__ == "__main__":
    main()
