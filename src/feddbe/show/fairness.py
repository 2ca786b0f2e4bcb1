"""A picture of clients' accuracies: from the worst to the best, and each against what a baseline gives it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from feddbe.errors import BadInput
from feddbe.results.document import moment
from feddbe.results.fairness import BASELINES, Fairness
from feddbe.show.canvas import COLOURS, GREY, MARKERS, STYLES, legend_below, tidy, write
from feddbe.show.cells import folded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["fairness"]

_ROW, _SORTED, _AROUND = 0.44, 3.0, 0.75
"""Inches: a method's row, the axes above, what a panel needs around it."""


def fairness(path: Path, runs: Sequence[Fairness]) -> None:
    """Draw sorted accuracies, a line per run with its worst tenth marked; below, for each baseline among the
    runs, every client's difference to it."""
    write(path, _figure(runs))


def _figure(runs: Sequence[Fairness]) -> Figure:
    from matplotlib.figure import Figure

    if not runs:
        raise BadInput("nothing to draw: no run was given")
    compared = {b: [i for i, run in enumerate(runs) if b in run["paired"]] for b in BASELINES}
    compared = {baseline: which for baseline, which in compared.items() if which}
    heights = [_SORTED, *(_ROW * len(which) + _AROUND for which in compared.values())]
    figure = Figure(figsize=(7.2, sum(heights)), layout="constrained")
    top, *strips = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _sorted(top, runs)
    for axes, (baseline, which) in zip(strips, compared.items(), strict=True):
        _differences(axes, runs, which, baseline)
    for axes in (top, *strips):
        tidy(axes)
    legend_below(figure, top, height=sum(heights))
    return figure


def _sorted(axes: Axes, runs: Sequence[Fairness]) -> None:
    """Accuracy of the client at each rank, ranks as shares of all clients; a flat line is a fair method."""
    for index, run in enumerate(runs):
        values = 100 * np.sort(list(run["accuracy"].values()))
        tenth, worst = math.ceil(len(values) / 10), 100 * run["spread"]["worst_tenth"]
        edges = 100 * np.arange(len(values) + 1) / len(values)
        colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
        axes.step(
            edges, [*values, values[-1]], where="post", color=colour, linestyle=style, linewidth=1.7,
            label=f"{run['name']}, round {run['round']}: worst tenth {worst:.1f} %, "
            f"mean {100 * run['spread']['mean']:.1f} %",
        )  # fmt: skip
        place = edges[tenth] * (index + 1) / (len(runs) + 1)  # side by side, where means are alike
        axes.plot(
            [place], [worst], marker=MARKERS[index % len(MARKERS)], color=colour, markersize=7.5,
            markeredgecolor="white", clip_on=False, zorder=3,
        )  # fmt: skip
    widest = max(math.ceil(len(run["accuracy"]) / 10) / len(run["accuracy"]) for run in runs)
    axes.axvspan(0, 100 * widest, color=GREY, alpha=0.14, linewidth=0)
    when = " or ".join(dict.fromkeys(moment(run["when"]) for run in runs))
    axes.set(xlim=(0, 100), ylabel=f"test accuracy in %\n{when}")
    words = "clients from the worst to the best, in % of them (grey: the worst tenth, its mean marked)"
    axes.set_xlabel(words, fontsize=9)
    axes.set_ylim(min(0, axes.get_ylim()[0]), 101)


def _differences(axes: Axes, runs: Sequence[Fairness], which: Sequence[int], baseline: str) -> None:
    """A row per run, a dot per client; in all rows a client has the same height."""
    for row, index in enumerate(reversed(which)):
        found = runs[index]["paired"][baseline]
        values = 100 * np.array([found["differences"][client] for client in sorted(found["differences"])])
        colour = COLOURS[index % len(COLOURS)]
        height = row + (np.linspace(-0.3, 0.3, len(values)) if len(values) > 1 else np.zeros(1))
        axes.scatter(
            values, height, s=16, color=colour, marker=MARKERS[index % len(MARKERS)], alpha=0.75, linewidth=0
        )
        mean = 100 * found["mean"]
        axes.plot([mean, mean], [row - 0.4, row + 0.4], color=colour, linewidth=2.2)
        said = f"{found['better']} better, {found['equal']} equal,\n{found['worse']} worse"
        axes.text(1.01, row, said, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.axvline(0, color=GREY, linewidth=1.1)
    names = [folded(runs[index]["name"], 24) for index in reversed(which)]
    axes.set_yticks(range(len(which)), names, fontsize=8, parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.set(ylim=(-0.55, len(which) - 0.45))
    others = {runs[index]["paired"][baseline]["against"] for index in which}
    against = others.pop() if len(others) == 1 else baseline  # each with that of its own seed
    words = f"accuracy less that with {against}, in points (dots: clients, bar: their mean)"
    axes.set_xlabel(textwrap.fill(words, 76), fontsize=9, parse_math=False)
