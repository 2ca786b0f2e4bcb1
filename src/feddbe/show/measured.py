"""Measures of representations as pictures: MDL by layer, discrepancy by client, and curves over rounds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from feddbe.errors import BadInput
from feddbe.representations.discrepancy import Discrepancy
from feddbe.show.canvas import COLOURS, GREY, MARKERS, STYLES, legend_below, tidy, write
from feddbe.show.cells import folded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SAID", "discrepancies", "mdl", "over_rounds"]

_HATCHES = ("", "///", "...", "\\\\\\", "xxx")


def mdl(
    path: Path,
    series: Mapping[str, Mapping[str, tuple[float, float]]],
    *,
    unit: str = "nats",
    title: str = "",
    quick: bool = False,
) -> None:
    """Draw MDL by place: name (as in `fedavg, before`) -> place (as in `conv1`) -> (mean, standard
    deviation over seeds), a group of bars for each place. `quick` is said in the title."""
    write(path, _mdl_figure(series, unit, title, quick))


def discrepancies(path: Path, found: Mapping[str, Discrepancy], *, title: str = "") -> None:
    """Draw all measures, a row for each name (as in `fedavg+dbe, z, after`): a dot per client, a bar at
    their mean."""
    write(path, _discrepancies_figure(found, title))


def over_rounds(
    path: Path, measures: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], *, title: str = ""
) -> None:
    """Draw measures over rounds, a panel each: what it is -> name of the run -> (round, value)."""
    write(path, _rounds_figure(measures, title))


def _titled(figure: Figure, words: str, width: float = 7.2) -> None:
    if words:
        figure.suptitle(textwrap.fill(words, int(12.5 * width)), fontsize=10, parse_math=False)


# MDL


def _mdl_figure(
    series: Mapping[str, Mapping[str, tuple[float, float]]], unit: str, title: str, quick: bool
) -> Figure:
    from matplotlib.figure import Figure

    places = list(dict.fromkeys(place for one in series.values() for place in one))
    if not places:
        raise BadInput("nothing to draw: no MDL was given")
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    width = min(0.8 / len(series), 0.3)
    for index, (name, values) in enumerate(series.items()):
        at = [places.index(place) + (index - (len(series) - 1) / 2) * width for place in values]
        means, spreads = np.array(list(values.values())).T
        axes.bar(
            at, means, width, yerr=spreads, label=name, edgecolor="white", linewidth=0.5,
            color=COLOURS[index % len(COLOURS)], hatch=_HATCHES[index % len(_HATCHES)],
            error_kw={"elinewidth": 1, "capsize": 2},
        )  # fmt: skip
    axes.set_xticks(range(len(places)), places, parse_math=False)
    axes.tick_params(axis="x", length=0)
    axes.set(
        ylim=(0, None), ylabel=f"minimum description length in {unit}\n(lines: standard deviation over seeds)"
    )
    tidy(axes)
    axes.grid(visible=False, axis="x")
    quickly = "quick: fewer sizes, seeds and steps than the full measure" if quick else ""
    _titled(figure, "; ".join(filter(None, [title, quickly])))
    legend_below(figure, axes, height=3.9)
    return figure


# Discrepancy

SAID = {
    "a_distance": "proxy A-distance\n(2: told apart)",
    "mmd2": "MMD$^2$\n(unbiased)",
    "mean_distance": "distance of means\n(in pooled spreads)",
    "fisher_f1": "Fisher's F1\n(largest of a dimension)",
    "fisher_between_means": "Fisher ratio\n(line of means)",
}


def _discrepancies_figure(found: Mapping[str, Discrepancy], title: str) -> Figure:
    from matplotlib.figure import Figure

    if not found:
        raise BadInput("nothing to draw: no discrepancy was given")
    figure = Figure(figsize=(10.0, 1.4 + 0.5 * len(found) + (0.3 if title else 0)), layout="constrained")
    panels = figure.subplots(1, len(SAID), sharey=True)
    for axes, (measure, words) in zip(panels, SAID.items(), strict=True):
        for row, one in enumerate(reversed(list(found.values()))):
            _row(axes, row, measure, one)
        axes.set_xlabel(words, fontsize=9)
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, 0), max(high, 2.05) if measure == "a_distance" else high)
        axes.axvline(0, color=GREY, linewidth=1.1)
        tidy(axes)
        axes.tick_params(axis="y", length=0)
    names = [_name(name) for name in reversed(list(found))]
    panels[0].set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    panels[0].set_ylim(-0.55, len(names) - 0.45)
    words = (
        "A dot is a client against all others (in a row clients from below in their order), "
        "the bar their mean. Thin lines: standard deviation over folds. "
        "Small grey bars: what it would be without any difference, because means of samples differ."
    )
    figure.supxlabel(textwrap.fill(words, 130), fontsize=8)
    _titled(figure, title, 10.0)
    return figure


def _row(axes: Axes, row: int, measure: str, found: Discrepancy) -> None:
    values = getattr(found, measure)
    there = np.isfinite(values)
    height = row + (np.linspace(-0.3, 0.3, len(values)) if len(values) > 1 else np.zeros(1))
    if measure == "a_distance":
        axes.errorbar(
            values,
            height,
            xerr=found.a_distance_std,
            fmt="none",
            ecolor=COLOURS[0],
            elinewidth=0.5,
            alpha=0.5,
        )
    chance = getattr(found, f"{measure}_chance", None)
    if chance is not None:
        axes.scatter(chance, height, marker="|", s=14, color=GREY, linewidth=1)
    axes.scatter(values[there], height[there], s=14, color=COLOURS[0], alpha=0.8, linewidth=0, zorder=3)
    if there.any():
        mean = values[there].mean()
        axes.plot([mean, mean], [row - 0.4, row + 0.4], color=COLOURS[1], linewidth=2.2, zorder=2)
    if not there.all():
        axes.text(
            0.98,
            row,
            f"{np.sum(~there)} infinite",
            transform=axes.get_yaxis_transform(),
            ha="right",
            fontsize=8,
        )


# Curves


def _rounds_figure(measures: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(name for runs in measures.values() for name in runs))
    if not any(curve for runs in measures.values() for curve in runs.values()):
        raise BadInput("nothing to draw: no round has been measured")
    figure = Figure(layout="constrained")
    panels = figure.subplots(len(measures), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (measure, runs) in zip(panels, measures.items(), strict=True):
        for name in names:
            index, curve = names.index(name), runs.get(name, ())
            axes.plot(
                [t for t, _ in curve], [value for _, value in curve], label=name, linewidth=1.7,
                color=COLOURS[index % len(COLOURS)], linestyle=STYLES[index % len(STYLES)],
                marker=MARKERS[index % len(MARKERS)] if len(curve) < 12 else "", markersize=5,
            )  # fmt: skip
        axes.set_ylabel(textwrap.fill(measure, 30), fontsize=9, parse_math=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.02)
        tidy(axes)
    panels[-1].set_xlabel("round (aggregations so far)")
    _titled(figure, title)
    legend_below(figure, panels[0], height=0.8 + 2.3 * len(measures))
    return figure


def _name(text: str) -> str:
    """A row's, in lines: what was measured where (after the last comma) stays whole."""
    run, comma, place = text.rpartition(", ")
    return f"{folded(run, 26)},\n{place}" if comma and len(text) > 26 else folded(text, 26)
