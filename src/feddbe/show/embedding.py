"""Representations laid out in the plane, in panels: colour is the label, the marker the client."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from feddbe.errors import BadInput
from feddbe.representations import Points
from feddbe.show.canvas import write
from feddbe.show.cells import folded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LABELS", "tsne"]

# Paul Tol's muted colours, told apart by colour-blind readers, and black.
LABELS = (
    "#332288", "#88CCEE", "#117733", "#DDCC77", "#CC6677",
    "#AA4499", "#44AA99", "#882255", "#999933", "#000000",
)  # fmt: skip
_SHAPES = "os^Dv<>pPX*h"
"""Filled for the first clients, hollow for as many more; from then on a marker is the client's number."""


def tsne(path: Path, panels: Mapping[str, Points], title: str = "") -> None:
    """Draw points that have places in the plane for `x`, a panel for each name.

    Up to ten labels have a colour each; more lie on a colour bar. Up to 24 clients have a marker each; of
    more the marker is the number.
    """
    write(path, _figure(panels, title))


def _figure(panels: Mapping[str, Points], title: str) -> Figure:
    from matplotlib.figure import Figure

    for name, found in panels.items():
        if found.x.shape[1] != 2:
            raise BadInput(f"panel '{name}' has points of {found.x.shape[1]} dimensions; lay them out first")
    if not panels:
        raise BadInput("nothing to draw: no panel was given")
    labels, clients = (
        np.unique(np.concatenate([getattr(found, what) for found in panels.values()]))
        for what in ("y", "client")
    )
    columns = 1 if len(panels) == 1 else 2 if len(panels) in (2, 4) else 3
    rows = math.ceil(len(panels) / columns)
    side = 5.2 if columns == 1 else 4.0 if columns == 2 else 3.2
    below = 0.45 + 0.2 * math.ceil(len(clients) / (6 * columns)) if len(clients) <= 2 * len(_SHAPES) else 0.5
    figure = Figure(figsize=(side * columns + 0.9, (side + 0.3) * rows + below), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    colours = _colours(labels)
    for axes, (name, found) in zip(grid, panels.items(), strict=False):
        _panel(axes, folded(name, int(11 * side)), found, clients, colours)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _label_key(figure, grid, labels, colours)
    _client_key(figure, clients, columns)
    if title:
        figure.suptitle(textwrap.fill(title, int(11 * side * columns)), fontsize=10, parse_math=False)
    return figure


def _colours(labels: np.ndarray[Any, Any]) -> dict[int, Any]:
    import matplotlib

    if len(labels) <= len(LABELS):
        return {int(label): LABELS[index] for index, label in enumerate(labels)}
    scale = matplotlib.colormaps["viridis"]  # without its last yellow, which white paper swallows
    return {int(label): scale(0.93 * index / (len(labels) - 1)) for index, label in enumerate(labels)}


def _marker(clients: np.ndarray[Any, Any], index: int) -> tuple[str, bool]:
    """The marker of a client, and whether it is filled."""
    if len(clients) > 2 * len(_SHAPES):
        return f"${clients[index]}$", True
    return _SHAPES[index % len(_SHAPES)], index < len(_SHAPES)


def _panel(
    axes: Axes, name: str, found: Points, clients: np.ndarray[Any, Any], colours: Mapping[int, Any]
) -> None:
    size = float(np.clip(9000 / len(found.x), 9, 36))
    for index, client in enumerate(clients):
        mine = found.of(found.client == client)
        marker, filled = _marker(clients, index)
        shown = [colours[int(label)] for label in mine.y]
        faces = shown if filled else "none"
        big = 2 * size if marker.startswith("$") else size
        axes.scatter(
            mine.x[:, 0], mine.x[:, 1], s=big, marker=marker, facecolors=faces, edgecolors=shown,
            linewidths=0.5, alpha=0.85,
        )  # fmt: skip
    axes.set_title(name, fontsize=9, parse_math=False)
    axes.set_xticks([])  # only nearness means something in t-SNE: its axes have no unit
    axes.set_yticks([])
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.04)
    axes.spines[:].set_color("#c8c8c8")


def _label_key(
    figure: Figure, grid: list[Axes], labels: np.ndarray[Any, Any], colours: Mapping[int, Any]
) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.lines import Line2D

    if len(labels) <= len(LABELS):
        dots = [
            Line2D([], [], linestyle="", marker="o", color=colours[int(label)], label=f"{label}")
            for label in labels
        ]
        figure.legend(handles=dots, title="label", loc="outside right upper", frameon=False, fontsize=9)
        return
    steps = BoundaryNorm(np.arange(len(labels) + 1) - 0.5, len(labels))
    listed = ListedColormap([colours[int(label)] for label in labels])
    bar = figure.colorbar(ScalarMappable(steps, listed), ax=grid, fraction=0.04, pad=0.01, label="label")
    ticks = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), 11)).round().astype(int))
    bar.set_ticks(ticks.tolist(), labels=[f"{labels[tick]}" for tick in ticks])
    bar.minorticks_off()


def _client_key(figure: Figure, clients: np.ndarray[Any, Any], columns: int) -> None:
    from matplotlib.lines import Line2D

    if len(clients) > 2 * len(_SHAPES):
        figure.supxlabel("a marker is the number of its client", fontsize=9)
        return
    marks = []
    for index, client in enumerate(clients):
        marker, filled = _marker(clients, index)
        face = "#404040" if filled else "none"
        marks.append(
            Line2D(
                [], [], linestyle="", marker=marker, color="#404040", markerfacecolor=face, label=f"{client}"
            )
        )
    figure.legend(
        handles=marks, title="client", loc="outside lower center", ncols=min(len(marks), 5 * columns),
        frameon=False, fontsize=9, columnspacing=1.2, handletextpad=0.2,
    )  # fmt: skip
