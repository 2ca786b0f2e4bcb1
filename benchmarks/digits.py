"""Every method and combination on digits (20 clients, Dirichlet 0.1, published split), over seeds.

    python benchmarks/digits.py [METHOD ...] [--seeds 3] [--lr LR] [--out runs/benchmark-digits]

Prints the table of docs/results.md: means over seeds with the 95 % interval of Student's t; for a method with
an add-on also that of the paired difference to the method alone. A method that diverges with a seed has no
values. Without --lr each method has its default. Existing runs in --out are not repeated.
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


def list_combinations() -> list[str]:
    """Return every method, alone and with each add-on; fine-tuning with FedAvg only."""
    names = []
    for description in methods.describe_methods():
        name = description["name"]
        if description["family"] != "add-on":
            names += [name, *(f"{name}+{addon}" for addon in description["addons"] if addon != "ft")]
    return ["majority", "local", "fedavg+ft", *(name for name in names if name not in ("majority", "local"))]


def load_or_run(method: str, seed: int, lr: float | None, out: Path) -> RunDocument:
    """Return the run of this seed, from its folder if it is complete."""
    folder = out / f"{method}-{seed}{f'-{lr:g}' if lr else ''}"
    options: dict[str, Any] = {"data": "digits", "seed": seed, "lr": lr, "out": str(folder)}
    resume = (folder / "run.sqlite").exists()
    return feddbe.run(method, **options, resume=resume, quiet=True).document


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", default=list_combinations())
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-digits"))
    arguments = parser.parse_args()

    columns = ("method", "best round %", "last round %", "difference of last to the plain method")
    print("|", " | ".join((*columns, "after local training %", "adapted %")), "|")
    print("|---|---|---|---|---|---|")
    last: dict[str, list[float]] = {}
    for method in arguments.methods:
        try:
            runs = [load_or_run(method, seed, arguments.lr, arguments.out) for seed in range(arguments.seeds)]
        except DivergenceError as error:
            print(f"| {method} | diverged in round {error.round} | | | | |", flush=True)
            continue
        last_results = [result for run in runs if (result := run["last"])]
        last[method] = _percent([result["accuracy"] for result in last_results])
        plain = last.get(method.split("+")[0], [])
        gains = [a - b for a, b in zip(last[method], plain, strict=True)] if "+" in method and plain else []
        cells = [
            method,
            _format(_percent([run["best"]["accuracy"] for run in runs if run["best"]])),
            _format(last[method]),
            _format(gains, sign=True),
            _format(_percent([run["rounds"][-2]["after"] for run in runs])),
            _format(_percent([result["adapted"] for result in last_results])),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def _percent(accuracies: Sequence[Accuracy | None]) -> list[float]:
    return [100 * accuracy["weighted"] for accuracy in accuracies if accuracy]


def _format(values: Sequence[float], *, sign: bool = False) -> str:
    return mean_interval(values).format(sign=sign) if values else ""


if __name__ == "__main__":
    main()
