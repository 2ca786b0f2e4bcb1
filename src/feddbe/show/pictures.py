"""Pictures of a run and of its data: PNG, SVG or PDF by the file's suffix, written whole or not at all.

matplotlib takes a second to import, hence inside the functions; its object interface leaves a caller's own
figures, windows and back end alone, which pyplot would not.
"""

from __future__ import annotations

import json
import math
import secrets
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from feddbe.errors import BadInput, unknown
from feddbe.options.config import pick_identity
from feddbe.results.document import RunDocument, labels, moment, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bubbles", "curves"]

# Okabe and Ito's colours, told apart by colour-blind readers, without the yellow that white paper swallows.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# Four styles against seven colours: 28 lines before a pair comes back.
_STYLES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1.2, 1.5)), (0, (1.4, 1.2)))
_MARKERS = "os^Dv"
_GREY = "#6b6b6b"
_FORMATS = (".pdf", ".png", ".svg")
_ACROSS = 1000
"""Clients that can be told apart in a picture."""


def curves(path: Path, documents: Sequence[RunDocument]) -> None:
    """Draw weighted test accuracy over rounds: a line per run, mean and band over seeds."""
    _write(path, _curves_figure(documents))


def bubbles(path: Path, labels: NDArray[np.int64], title: str) -> None:
    """Draw how the data is spread: `labels` counts samples (clients x classes), each a bubble's area. Of more
    clients than the picture has dots across, every so many are drawn."""
    step = max(1, math.ceil(len(labels) / _ACROSS))
    _write(
        path, _bubbles_figure(labels[::step], f"{title}, one in {step} drawn" if step > 1 else title, step)
    )


def _write(path: Path, figure: Figure) -> None:
    """Save beside `path` under another name, then rename: a reader never sees half a picture."""
    import matplotlib

    if path.suffix.lower() not in _FORMATS:
        raise unknown("picture format", path.suffix, _FORMATS)
    kind = path.suffix.lower()[1:]
    # No dates and no random ids, so that the same run gives the same file.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    _clear(path)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with matplotlib.rc_context({"svg.hashsalt": "feddbe"}):
            figure.savefig(scratch, format=kind, dpi=150, metadata=metadata)
        scratch.replace(path)
    except OSError as error:
        raise BadInput(f"cannot write the picture '{path}': {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """What a kill left of this picture; one that is being drawn is younger."""
    for left in path.parent.glob(f".{path.name}.????????.tmp"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - 60:
                left.unlink()


# Curves


def _groups(documents: Sequence[RunDocument]) -> list[list[RunDocument]]:
    """Runs of one experiment that were evaluated in the same rounds, in order of appearance.

    A run that stopped early stays alone: a mean over ever fewer runs would jump where one ends.
    """
    found: dict[str, list[RunDocument]] = {}
    for document in documents:
        if rounds := [t for t, _ in points(document)]:
            rest = pick_identity(document["config"], seed=False)
            key = json.dumps([document["method"], rest, rounds], sort_keys=True, default=str)
            found.setdefault(key, []).append(document)
    return list(found.values())


def _names(groups: Sequence[Sequence[RunDocument]]) -> list[str]:
    """A legend entry for each group; seeds are counted, or named where that alone tells lines apart."""
    plain = labels([group[0] for group in groups], seed=False)
    return [
        f"{name} ({len(group)} seeds)"
        if len(group) > 1
        else f"{name}, seed {group[0]['config'].get('seed', '?')}"
        if plain.count(name) > 1
        else name
        for group, name in zip(groups, plain, strict=True)
    ]


def _moments(documents: Sequence[RunDocument]) -> list[str]:
    return list(dict.fromkeys(moment(e["when"]) for d in documents for e in d["rounds"] if e["accuracy"]))


def _curves_figure(documents: Sequence[RunDocument]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    groups = _groups(documents)
    if not groups:
        raise BadInput("nothing to draw: no run has an evaluated round")
    moments = _moments(documents)
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for index, (group, name) in enumerate(zip(groups, _names(groups), strict=True)):
        _line(axes, index, group, name if len(moments) == 1 else f"{name}, {' / '.join(_moments(group))}")
    for floor in sorted({round(100 * d["floor"], 1) for group in groups for d in group}):
        name = f"each client's majority class: {floor} %"
        axes.axhline(floor, color=_GREY, linestyle="--", linewidth=1.1, label=name)
    when = moments[0] if len(moments) == 1 else "(moment: see below)"
    axes.set_ylabel(f"test accuracy in %\nof the deployed model {when},\nweighted by samples", fontsize=9)
    axes.set_xlabel("round (aggregations so far)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02, y=0.05)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -1), min(high, 101))
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, axes)
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    """Names below the axes, where they cover no curve; the picture grows by the lines they take."""
    handles, names = axes.get_legend_handles_labels()
    columns = 2 if len(names) > 4 and max(map(len, names)) <= 42 else 1
    wrapped = [textwrap.fill(name, 84 // columns) for name in names]
    lines = sum(name.count("\n") + 1 for name in wrapped)
    figure.set_size_inches(7.2, 3.7 + 0.19 * math.ceil(lines / columns))
    legend = figure.legend(
        handles, wrapped, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, handlelength=4
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a name is a dollar sign


def _line(axes: Axes, index: int, group: Sequence[RunDocument], name: str) -> None:
    """The mean of the group's runs, its best round marked, and a band from the lowest run to the highest."""
    rounds = [t for t, _ in points(group[0])]
    runs = np.array([[percent for _, percent in points(document)] for document in group])
    mean = runs.mean(axis=0)
    best = int(mean.argmax())
    colour = _COLOURS[index % len(_COLOURS)]
    if len(runs) > 1:
        axes.fill_between(rounds, runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        rounds,
        mean,
        color=colour,
        linestyle=_STYLES[index % len(_STYLES)],
        linewidth=1.8,
        label=f"{name}: best {mean[best]:.1f} % in round {rounds[best]}",
        marker=_MARKERS[index % len(_MARKERS)],
        markevery=[best],
        markersize=7.5,
        markeredgecolor="white",
        clip_on=False,
    )


# Bubbles: laid out by hand in inches, because a bubble's area must follow from the size of a cell.


def _bubbles_figure(labels: NDArray[np.int64], title: str, step: int = 1) -> Figure:
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
    left, bottom = 0.6, 0.55
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
        client, label, s=area, c=_COLOURS[0], alpha=0.85, linewidths=edge.tolist(), edgecolors="white",
        clip_on=False, zorder=2,
    )  # fmt: skip
    across, up = (max(0.5, 0.55 * largest / (72 * side)) for side in (wide, high))  # no bubble on the frame
    axes.set(xlim=(-across, clients - 1 + across), ylim=(-up, classes - 1 + up))
    axes.set(xlabel="client", ylabel="label")
    ticks = range(0, clients, _step(wide))
    axes.set_xticks(ticks, [str(step * tick) for tick in ticks])
    axes.set_yticks(range(0, classes, _step(high)))
    axes.tick_params(length=0, labelsize=8)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_color("#c8c8c8")
    figure.text(left / width, 1 - 0.1 / height, "\n".join(lines), va="top", fontsize=10, parse_math=False)
    _size_key(figure, left + grid_width + 0.3, bottom + max(grid_height, 1.5), largest, most)
    return figure


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
        axes.scatter([largest / 2], [y], s=[diameter**2], color=_COLOURS[0], alpha=0.85, linewidth=0)
        axes.text(largest + 5, y, f"{count}", va="center", fontsize=8)
        y -= max(diameter, 9) / 2 + 4


def _round_counts(most: int) -> list[int]:
    """Up to three round counts (1, 2 or 5 and zeros), the largest first, each about a fifth of the last."""
    steps = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return [step for step in steps if step <= most][::-2][:3]
