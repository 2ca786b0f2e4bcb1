"""Every method and combination on digits (20 clients, Dirichlet 0.1, published split), over seeds.

    python benchmarks/digits.py [METHOD ...] [--seeds 3] [--lr LR] [--out runs/benchmark-digits]

Prints the table of docs/results.md: means over seeds with the 95 % interval of Student's t; for a method with
an add-on also that of the paired difference to the plain one. A method that diverges with a seed has
no numbers. Without --lr each method has its default. Runs that are in --out already are not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import feddbe
from feddbe import methods
from feddbe.errors import DivergenceError
from feddbe.results.document import Accuracy, RunDocument
from feddbe.results.statistics import mean_interval


def combinations() -> list[str]:
    """Every method, and it with each add-on; fine-tuning on FedAvg only."""
    found = []
    for one in methods.describe_methods():
        if one["family"] != "add-on":
            found += [one["name"], *(f"{one['name']}+{a}" for a in one["addons"] if a != "ft")]
    return ["majority", "local", "fedavg+ft", *(name for name in found if name not in ("majority", "local"))]


def once(method: str, seed: int, lr: float | None, out: Path) -> RunDocument:
    """The run of this seed, new or from the folder."""
    folder = out / f"{method}-{seed}{f'-{lr:g}' if lr else ''}"
    options: dict[str, Any] = {"data": "digits", "seed": seed, "lr": lr, "out": str(folder)}
    resume = (folder / "run.sqlite").exists()
    return feddbe.run(method, **options, resume=resume, quiet=True).document


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", default=combinations())
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-digits"))
    arguments = parser.parse_args()

    print("| method | best round % | last round % | last - plain's last | after local training % | tuned % |")
    print("|---|---|---|---|---|---|")
    last: dict[str, list[float]] = {}
    for method in arguments.methods:
        try:
            runs = [once(method, seed, arguments.lr, arguments.out) for seed in range(arguments.seeds)]
        except DivergenceError as error:
            print(f"| {method} | diverged in round {error.round} | | | | |", flush=True)
            continue
        ends = [entry for run in runs if (entry := run["last"])]
        last[method] = _percent([entry["accuracy"] for entry in ends])
        plain = last.get(method.split("+")[0], [])
        gains = [a - b for a, b in zip(last[method], plain, strict=True)] if "+" in method and plain else []
        cells = [
            method,
            _shown(_percent([run["best"]["accuracy"] for run in runs if run["best"]])),
            _shown(last[method]),
            _shown(gains, sign=True),
            _shown(_percent([run["rounds"][-2]["after"] for run in runs])),
            _shown(_percent([entry["adapted"] for entry in ends])),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def _percent(found: Sequence[Accuracy | None]) -> list[float]:
    return [100 * accuracy["weighted"] for accuracy in found if accuracy]


def _shown(values: Sequence[float], *, sign: bool = False) -> str:
    return mean_interval(values).format(sign=sign) if values else ""


if __name__ == "__main__":
    main()
