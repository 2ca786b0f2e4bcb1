"""Accuracy of FedAvg+DBE over kappa and mu, before and after local training, as a table and a picture.

    python -m benchmarks.surface [--data fmnist] [--variant official] [--rounds 100] [--seed 0]
                                 [--kappa 0.1 1 5 10 20 50] [--mu 0.1 0.5 1] [--out runs/surface]

Each cell is the accuracy in percent of the last round that was evaluated at both moments. Existing runs in
--out are extended, not repeated. The picture is `surface.png` in --out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import feddbe
from feddbe.errors import DivergenceError
from feddbe.reporting.figure import Axis, Figure, HeatMap
from feddbe.reporting.matplotlib_backend import draw

MOMENTS = ("before", "after")
Cell = tuple[float, float] | None
"""Accuracy before and after local training; None if training diverged."""


def compute_cell(kappa: float, mu: float, arguments: argparse.Namespace) -> Cell:
    """Return the accuracies of one setting; runs it, or extends the run that exists."""
    folder = arguments.out / f"{arguments.data}-{arguments.variant}-kappa{kappa:g}-mu{mu:g}-{arguments.seed}"
    try:
        run = feddbe.run(
            f"fedavg+dbe(kappa={kappa:g},mu={mu:g})",
            data=arguments.data,
            variant=arguments.variant,
            rounds=arguments.rounds,
            seed=arguments.seed,
            metrics="accuracy",
            out=str(folder),
            resume=(folder / "run.sqlite").exists(),
            quiet=True,
        )
    except DivergenceError:
        return None
    # an earlier call may have run more rounds
    rounds = [result for result in run["rounds"] if result["round"] < arguments.rounds]
    evaluated = [result for result in rounds if result["before"] and result["after"]]
    before, after = (evaluated[-1][moment] for moment in MOMENTS)
    return 100 * before["weighted"], 100 * after["weighted"]


def draw_surface(cells: dict[tuple[float, float], Cell], arguments: argparse.Namespace) -> Path:
    """Draw a heat map for each moment and return the path."""
    panels = []
    for index, moment in enumerate(MOMENTS):
        values = []
        empty = []
        for row, mu in enumerate(arguments.mu):
            for column, kappa in enumerate(arguments.kappa):
                if cells[kappa, mu] is None:
                    empty.append((column, row, "diverged"))
            accuracies = (cells[kappa, mu] for kappa in arguments.kappa)
            values.append(tuple(None if cell is None else cell[index] for cell in accuracies))
        known = [value for row_values in values for value in row_values if value is not None]
        panels.append(
            HeatMap(
                name=f"{moment} local training",
                x_axis=Axis("kappa"),
                y_axis=Axis("mu"),
                value_axis=Axis("accuracy", "%"),
                columns=tuple(f"{kappa:g}" for kappa in arguments.kappa),
                rows=tuple(f"{mu:g}" for mu in arguments.mu),
                values=tuple(values),
                limits=(min(known), max(known)),
                empty=tuple(empty),
            )
        )
    title = f"FedAvg+DBE, {arguments.data}, variant {arguments.variant}, round {arguments.rounds - 1}"
    path: Path = arguments.out / "surface.png"
    draw(path, Figure("surface", title, tuple(panels), f"seed {arguments.seed}"))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="fmnist")
    parser.add_argument("--variant", default="official")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kappa", type=float, nargs="+", default=[0.1, 1, 5, 10, 20, 50])
    parser.add_argument("--mu", type=float, nargs="+", default=[0.1, 0.5, 1])
    parser.add_argument("--out", type=Path, default=Path("runs/surface"))
    arguments = parser.parse_args()
    cells = {}
    print("| mu | " + " | ".join(f"kappa {kappa:g}" for kappa in arguments.kappa) + " |")
    print("|---" * (1 + len(arguments.kappa)) + "|")
    for mu in arguments.mu:
        texts = []
        for kappa in arguments.kappa:
            cell = compute_cell(kappa, mu, arguments)
            cells[kappa, mu] = cell
            texts.append("diverged" if cell is None else f"{cell[0]:.2f}, {cell[1]:.2f}")
        print(f"| {mu:g} | {' | '.join(texts)} |", flush=True)
    print(f"picture  {draw_surface(cells, arguments)}")


if __name__ == "__main__":
    main()
