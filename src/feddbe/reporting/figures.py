"""What all pictures share: colours, a legend that covers nothing, and a file written whole or not at all."""

from __future__ import annotations

import math
import secrets
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from feddbe.config.spec import written
from feddbe.errors import BadInput, unknown
from feddbe.reporting.formatting import folded
from feddbe.results.curves import Line, lines
from feddbe.results.document import RunDocument, adapting, distinguishing_settings, moment, title
from feddbe.results.fairness import BASELINES, Fairness
from feddbe.results.seeds import groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's colours, told apart by colour-blind readers, without the yellow that white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# Four styles against seven colours: 28 lines before a pair comes back.
STYLES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1.2, 1.5)), (0, (1.4, 1.2)))
MARKERS = "os^Dv"
GREY = "#6b6b6b"
_FORMATS = (".pdf", ".png", ".svg")


def write(path: Path, figure: Figure) -> None:
    """Save what is drawn, in the format that the path's suffix says."""
    import matplotlib

    if path.suffix.lower() not in _FORMATS:
        raise unknown("picture format", path.suffix, _FORMATS)
    kind = path.suffix.lower()[1:]
    # No dates and no random ids, so that the same run gives the same file.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with whole(path, "picture") as scratch, matplotlib.rc_context({"svg.hashsalt": "feddbe"}):
        figure.savefig(scratch, format=kind, dpi=150, metadata=metadata)


@contextmanager
def whole(path: Path, what: str) -> Iterator[Path]:
    """Where to write what shall be at `path`: beside it under another name, then it is renamed, so that a
    reader never sees half of it."""
    _clear(path)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield scratch
        scratch.replace(path)
    except OSError as error:
        raise BadInput(f"cannot write the {what} '{path}': {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """What a kill left of this file; one that is being written is younger."""
    for left in path.parent.glob(f".{path.name}.????????.tmp"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - 60:
                left.unlink()


def tidy(axes: Axes) -> None:
    """A pale grid behind what is drawn, and no frame above and on the right."""
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Figure, axes: Axes, width: float = 7.2, height: float = 3.7) -> None:
    """Names below the axes, where they cover no curve; the picture grows by the lines they take."""
    handles, names = axes.get_legend_handles_labels()
    columns = 2 if len(names) > 4 and max(map(len, names)) <= 5.8 * width else 1
    wrapped = [textwrap.fill(name, int(11.7 * width) // columns) for name in names]
    lines = sum(name.count("\n") + 1 for name in wrapped)
    figure.set_size_inches(width, height + 0.19 * math.ceil(lines / columns))
    legend = figure.legend(
        handles, wrapped, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, handlelength=4
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a name is a dollar sign


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
    firsts = [group[0] for group in together]
    for index, (document, line) in enumerate(zip(firsts, lines(documents, adapting), strict=False)):
        way, last = document["newcomers"]["way"] if document["newcomers"] else "full", line.rounds[-1]
        is_named = way == "full" or "adapt" in distinguishing_settings(document, firsts, seed=False)
        name = line.name if is_named else f"{line.name}, {way}"
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


Found = Sequence[tuple[Mapping[str, Any], float | None]]
"""Values that were tried, and the accuracy with them; None: stopped early."""


def surface(
    path: Path, space: Mapping[str, Sequence[Any]], trials: Found, first: Mapping[str, Any], title: str
) -> None:
    """Draw the two options with the most values; over all others, the best is taken. `first`: the values
    without a search, which are marked like the best."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    axes_of = sorted(space, key=lambda key: -len(space[key]))[:2]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    best = max(trials, key=lambda trial: -1.0 if trial[1] is None else trial[1])[0]
    if len(axes_of) == 1:
        _surface_line(axes, axes_of[0], space[axes_of[0]], trials)
    else:
        _map(figure, axes, (axes_of[0], axes_of[1]), space, trials)
    for values, style, name in ((first, "--", "default"), (best, "-", "best")):
        across, up = (space[key].index(values[key]) for key in (axes_of * 2)[:2])
        if len(axes_of) == 2:
            axes.add_patch(
                Rectangle(
                    (across - 0.5, up - 0.5), 1, 1, fill=False, ls=style, lw=2.2, clip_on=False, label=name
                )
            )
        elif (height := _accuracy(trials, {axes_of[0]: values[axes_of[0]]})) is not None:
            marker = "s" if style == "--" else "o"
            axes.plot(across, height, marker, markersize=13, fillstyle="none", color="black", label=name)
    others = [key for key in space if key not in axes_of]
    rest = f"\nbest over {', '.join(others)}" if others else ""
    axes.set_title(f"{title}{rest}", fontsize=10, loc="left", parse_math=False)
    axes.legend(
        loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2, handlelength=3, frameon=False, fontsize=9
    )
    write(path, figure)


def _accuracy(trials: Found, values: Mapping[str, Any]) -> float | None:
    """The best in percent among trials with these values."""
    found = [a for tried, a in trials if a is not None and all(tried[k] == v for k, v in values.items())]
    return 100 * max(found) if found else None


def _surface_line(axes: Axes, key: str, values: Sequence[Any], trials: Found) -> None:
    found = [(index, _accuracy(trials, {key: value})) for index, value in enumerate(values)]
    known = [(index, accuracy) for index, accuracy in found if accuracy is not None]
    axes.plot(*zip(*known, strict=True), ".-", color=COLOURS[0])
    axes.set_xticks(range(len(values)), [written(value) for value in values])
    axes.set(xlabel=key, ylabel="validation accuracy in %")
    tidy(axes)


def _map(
    figure: Figure, axes: Axes, keys: tuple[str, str], space: Mapping[str, Sequence[Any]], trials: Found
) -> None:
    across, up = (space[key] for key in keys)
    grid = [[_accuracy(trials, {keys[0]: a, keys[1]: b}) for a in across] for b in up]
    numbers = np.array([[np.nan if value is None else value for value in row] for row in grid])
    low = float(np.nanpercentile(numbers, 20))  # one that diverged must not take all colours
    image = axes.imshow(
        numbers, origin="lower", aspect="auto", cmap="cividis", vmin=low, vmax=float(np.nanmax(numbers))
    )
    figure.colorbar(image, ax=axes, label="validation accuracy in %", extend="min")
    middle = (low + float(np.nanmax(numbers))) / 2
    for (b, a), value in np.ndenumerate(numbers):
        if not np.isnan(value):
            axes.text(
                a, b, f"{value:.1f}", ha="center", va="center", fontsize=8,
                color="black" if value > middle else "white",
            )  # fmt: skip
    tried = {(values[keys[0]], values[keys[1]]) for values, accuracy in trials if accuracy is None}
    for a, b in tried:
        place = across.index(a), up.index(b)
        if np.isnan(numbers[place[1], place[0]]):
            axes.text(*place, "stopped", ha="center", va="center", fontsize=6, color=GREY)
    axes.set_xticks(range(len(across)), [written(value) for value in across])
    axes.set_yticks(range(len(up)), [written(value) for value in up])
    axes.set(xlabel=keys[0], ylabel=keys[1])
