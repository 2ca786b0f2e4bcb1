"""A search over hyper-parameters as a picture: accuracy over two of them, or over one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from feddbe.options.grammar import written
from feddbe.show.canvas import COLOURS, GREY, tidy, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["surface"]

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
        _line(axes, axes_of[0], space[axes_of[0]], trials)
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


def _line(axes: Axes, key: str, values: Sequence[Any], trials: Found) -> None:
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
