"""Pictures of a run and of its data: PNG, SVG or PDF by the file's suffix, written whole or not at all.

matplotlib takes a second to import, hence inside the functions; its object interface leaves a caller's own
figures, windows and back end alone, which pyplot would not.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from feddbe.errors import BadInput
from feddbe.results.document import RunDocument, adapting, title
from feddbe.results.groups import groups
from feddbe.results.lines import Line, lines
from feddbe.show.canvas import COLOURS, GREY, MARKERS, STYLES, legend_below, tidy, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["adaptation", "bubbles", "curves"]

ACROSS = 1000
"""Clients that can be told apart in a picture."""


def curves(path: Path, documents: Sequence[RunDocument]) -> None:
    """Draw weighted test accuracy over rounds: a line per run, mean and band over seeds."""
    write(path, _curves_figure(documents))


def adaptation(path: Path, documents: Sequence[RunDocument]) -> None:
    """Draw newcomers' accuracy over the epochs that they adapt for, in the same way."""
    write(path, _adaptation_figure(documents))


def bubbles(
    path: Path,
    labels: NDArray[np.int64],
    title: str,
    label_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
) -> None:
    """Draw how the data is spread: `labels` counts samples (clients x classes), each a bubble's area. Of more
    clients than the picture has dots across, every so many are drawn. Names stand where there are any."""
    step = max(1, math.ceil(len(labels) / ACROSS))
    told = f"{title}, one in {step} drawn" if step > 1 else title
    write(path, _bubbles_figure(labels[::step], told, step, label_names, client_names))


# Curves


def _curves_figure(documents: Sequence[RunDocument]) -> Figure:
    found = lines(documents)
    if not any(line.rounds for line in found):
        raise BadInput("nothing to draw: no run has an evaluated round")
    moments = list(dict.fromkeys(line.moment for line in found if line.rounds))
    figure, axes = _axes(documents)
    for index, line in enumerate(found):
        at, best = line.best if line.rounds else (0, 0.0)
        words = [line.name] if len(moments) == 1 else [line.name, line.moment]
        told = [f"best {best:.1f} % in round {at}"] * bool(line.rounds) + [line.ending] * bool(line.ending)
        _line(axes, index, line, f"{', '.join(words)}: {', '.join(told)}", at)
    for floor in sorted({round(100 * d["floor"], 1) for d in documents}):
        name = f"each client's majority class: {floor} %"
        axes.axhline(floor, color=GREY, linestyle="--", linewidth=1.1, label=name)
    when = moments[0] if len(moments) == 1 else "(moment: see below)"
    axes.set_ylabel(f"test accuracy in %\nof the deployed model {when},\nweighted by samples", fontsize=9)
    axes.set_xlabel("round (aggregations so far)")
    _finish(figure, axes)
    return figure


def _adaptation_figure(documents: Sequence[RunDocument]) -> Figure:
    together = groups(documents, adapting)
    if not together:
        raise BadInput("nothing to draw: no run has newcomers that were looked at after each epoch")
    figure, axes = _axes(documents)
    for index, (group, line) in enumerate(zip(together, lines(documents, adapting), strict=False)):
        way, last = group[0]["newcomers"]["way"] if group[0]["newcomers"] else "full", line.rounds[-1]
        name = line.name if way == "full" or "adapt" in line.name else f"{line.name}, {way}"
        _line(axes, index, line, f"{name}: {line.mean[-1]:.1f} % after {last} epochs", last)
    axes.set_ylabel("test accuracy of newcomers in %,\nweighted by samples", fontsize=9)
    axes.set_xlabel("epochs of adapting (0: the model as it was received)")
    _finish(figure, axes)
    return figure


def _axes(documents: Sequence[RunDocument]) -> tuple[Figure, Axes]:
    """With what the runs are about above them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(textwrap.fill(title(documents), 90), fontsize=10, loc="left", parse_math=False)
    return figure, axes


def _finish(figure: Figure, axes: Axes) -> None:
    """What all curves have: whole numbers below, percent that stay percent, a grid, names."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02, y=0.05)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -1), min(high, 101))
    tidy(axes)
    legend_below(figure, axes)


def _line(axes: Axes, index: int, line: Line, name: str, marked: int) -> None:
    """The line with one round marked, a cross where training diverged, and a band from the lowest run to the
    highest. One that ended at once has its cross in the legend only."""
    colour = COLOURS[index % len(COLOURS)]
    cross: dict[str, Any] = {
        "color": colour, "marker": "X", "markersize": 9, "markeredgecolor": "white", "linestyle": "",
    }  # fmt: skip
    if not line.rounds:
        axes.plot([], [], label=name, **cross)
        return
    if line.runs > 1:
        axes.fill_between(line.rounds, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        line.rounds,
        line.mean,
        color=colour,
        linestyle=STYLES[index % len(STYLES)],
        linewidth=1.8,
        label=name,
        marker=MARKERS[index % len(MARKERS)],
        markevery=[line.rounds.index(marked)],
        markersize=7.5,
        markeredgecolor="white",
        clip_on=False,
    )
    if line.ending:
        axes.plot(line.rounds[-1:], line.mean[-1:], clip_on=False, zorder=3, **cross)


# Bubbles: laid out by hand in inches, because a bubble's area must follow from the size of a cell.


def _bubbles_figure(
    labels: NDArray[np.int64],
    title: str,
    step: int = 1,
    label_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
) -> Figure:
    from matplotlib.figure import Figure

    if labels.ndim != 2 or not labels.size or labels.min() < 0:
        raise BadInput(
            f"bubbles need sample counts of clients x classes, not an array of shape {labels.shape}"
        )
    (clients, classes), most = labels.shape, max(1, int(labels.max()))
    # With more than a hundred labels the picture grows to twice its height: two hundred can be told apart.
    wide, high = _cell(clients, 7.4), _cell(classes, min(12.8, max(6.4, 0.064 * classes)))
    # In a fine grid of sparse data bubbles may overlap their neighbours, else all would be specks; the
    # fuller the grid, the smaller they are, so that an even split does not run into one blot.
    cell, fullness = 72 * min(wide, high), float(labels.sum()) / most / labels.size
    largest = min(36.0, 0.67 * cell / math.sqrt(max(fullness, 1e-9)), max(0.95 * cell, min(11.0, 2.2 * cell)))
    grid_width, grid_height = clients * wide, classes * high
    ticks, heights = range(0, clients, _step(wide)), range(0, classes, _step(high))
    below = [_cut(client_names[step * k], 16) if client_names else str(step * k) for k in ticks]
    beside = [_cut(label_names[k], 20) if label_names else str(k) for k in heights]
    longest, upright = max(map(len, below)), 0.075 * max(map(len, below)) > _step(wide) * wide
    left = max(0.6, 0.4 + 0.07 * max(map(len, beside)))
    bottom = 0.45 + 0.07 * longest if upright else 0.55
    width = max(3.4, left + grid_width + 0.35 + largest / 72 + 0.75)
    lines = textwrap.wrap(title, width=int(12.5 * (width - left))) or [""]
    height = bottom + max(grid_height, 1.5) + 0.2 + 0.2 * len(lines)

    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((left / width, bottom / height, grid_width / width, grid_height / height))
    client, label = np.nonzero(labels)
    order = np.argsort(-labels[client, label], kind="stable")  # a small one is seen on top of a large one
    client, label = client[order], label[order]
    area = largest**2 * labels[client, label] / most
    edge = np.where(area > 9, 0.4, 0.0)  # tells neighbours that overlap apart; a speck would vanish in it
    axes.scatter(
        client, label, s=area, c=COLOURS[0], alpha=0.85, linewidths=edge.tolist(), edgecolors="white",
        clip_on=False, zorder=2,
    )  # fmt: skip
    across, up = (max(0.5, 0.55 * largest / (72 * side)) for side in (wide, high))  # no bubble on the frame
    axes.set(xlim=(-across, clients - 1 + across), ylim=(-up, classes - 1 + up))
    axes.set(xlabel="client", ylabel="label")
    axes.set_xticks(ticks, below, rotation=90 if upright else 0)
    axes.set_yticks(heights, beside)
    for tick in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        tick.set_parse_math(False)
    axes.tick_params(length=0, labelsize=8)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_color("#c8c8c8")
    figure.text(left / width, 1 - 0.1 / height, "\n".join(lines), va="top", fontsize=10, parse_math=False)
    _size_key(figure, left + grid_width + 0.3, bottom + max(grid_height, 1.5), largest, most)
    return figure


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _cell(count: int, room: float) -> float:
    """The side of a cell in inches: as large as `room` allows, but few cells do not grow into a poster."""
    return min(room / count, max(0.36, 1.4 / count))


def _step(cell: float) -> int:
    """Every how many cells a tick label fits: 1, 2 or 5, and zeros."""
    steps = (digit * zeros for zeros in (1, 10, 100, 1000, 10_000) for digit in (1, 2, 5))
    return next((step for step in steps if step * cell >= 0.2), 100_000)


def _size_key(figure: Figure, left: float, top: float, largest: float, most: int) -> None:
    """Bubbles of round counts with their numbers, downwards from (left, top) in inches."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((left / width, 0, 1 - left / width, top / height))
    axes.set_axis_off()
    axes.set(xlim=(0, 72 * (width - left)), ylim=(-72 * top, 0))  # points, so that areas match the grid's
    axes.text(0, -2, "samples", va="top", fontsize=8)
    y = -16.0
    for count in _round_counts(most):
        diameter = largest * math.sqrt(count / most)
        y -= max(diameter, 9) / 2
        axes.scatter([largest / 2], [y], s=[diameter**2], color=COLOURS[0], alpha=0.85, linewidth=0)
        axes.text(largest + 5, y, f"{count}", va="center", fontsize=8)
        y -= max(diameter, 9) / 2 + 4


def _round_counts(most: int) -> list[int]:
    """Up to three round counts (1, 2 or 5 and zeros), the largest first, each about a fifth of the last."""
    steps = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return [step for step in steps if step <= most][::-2][:3]
