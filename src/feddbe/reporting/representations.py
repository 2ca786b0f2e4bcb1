"""Measures of representations as pictures: MDL by layer, discrepancy by client, and curves over rounds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType

from feddbe.errors import BadInput
from feddbe.metrics.representations.discrepancy import Discrepancy
from feddbe.metrics.representations.points import Points
from feddbe.metrics.representations.registry import as_discrepancy
from feddbe.reporting.figures import COLOURS, GREY, MARKERS, STYLES, legend_below, tidy, write
from feddbe.reporting.formatting import caption, folded, percent, plain_table
from feddbe.results.document import Measurement, RunDocument, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


Found = list[tuple[str, Measurement]]
"""Measurements of one kind, each with the name of its run."""
Layouts = Callable[[RunDocument, Measurement], Points]

MOMENTS = ("before", "adapted", "after")
WORDS = {
    "mdl": "Minimum description length of the labels in nats, given what is at a place (± standard deviation "
    "over seeds): less is better.",
    "probe": "Accuracy in % of a linear classifier of what is at a place.",
    "discrepancy": "Between each client and the others, mean over clients: less is nearer together. Each "
    "client's own model represents its samples, so that the models of the two sides differ.",
    "discrepancy-shared": "Between each client and the others, mean over clients: less is nearer together. "
    "The client's model represents both sides, as in the paper's corollaries.",
}
DISCREPANCIES = ("discrepancy", "discrepancy-shared")
"""Both readings: each client through its own model, or both sides through one client's."""
PER_ROUND = {
    "drift": "distance of a client's mean z_g from the others', in spreads",
    "probe": "accuracy of a linear probe on z_g",
}


def measured_tables(documents: Sequence[RunDocument], what: Container[str] = WORDS) -> list[RenderableType]:
    """One for each kind of measure that has numbers; quick ones apart, and marked."""
    there = [
        (kind, found) for kind, found in kinds(documents, labels(documents)) if found[0][1]["what"] in WORDS
    ]
    return [_table(kind, found) for kind, found in there if found[0][1]["what"] in what]


def draw(folder: Path, documents: Sequence[RunDocument], layouts: Layouts) -> list[Path]:
    """Pictures of all that was measured; `layouts` finds the points that t-SNE has laid out."""
    paths = []
    by_name = dict(zip(labels(documents), documents, strict=True))
    for kind, found in kinds(documents, labels(documents)):
        path, what = folder / f"{kind}.png", found[0][1]["what"]
        title = _title(documents, found)
        if what == "mdl":
            series: dict[str, dict[str, tuple[float, float]]] = {}
            for run, one in found:
                value, std = one["overall"]["value"], one["overall"].get("std")
                series.setdefault(column(run, one), {})[one["place"]] = value or 0.0, std or 0.0
            mdl(path, series, title=title, quick=found[0][1]["quick"])
        elif what in DISCREPANCIES:
            rows = {f"{column(run, one)}, {one['place']}": one for run, one in found if first(one, found)}
            discrepancies(path, {n: discrepancy(one) for n, one in rows.items()}, title=title)
        elif what == "tsne":
            panels: dict[str, Points] = {}
            for run, one in found:
                points = layouts(by_name[run], one)
                if not any(np.array_equal(points.x, other.x) for other in panels.values()):  # z without PRBM
                    panels[f"{column(run, one)}, {one['place']}"] = points
            tsne(path, panels, title)
        else:
            continue
        paths.append(path)
    return paths


def draw_rounds(folder: Path, documents: Sequence[RunDocument]) -> list[Path]:
    """Pooled measures over rounds, where runs have any."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for run, document in zip(labels(documents), documents, strict=True):
        for entry in document["rounds"]:
            for moment in MOMENTS:
                for name, read in entry["measures"].get(moment, {}).items():
                    if name in PER_ROUND:
                        curves = panels.setdefault(PER_ROUND[name], {})
                        point = entry["round"], read["weighted"]
                        curves.setdefault(f"{run}, {moment}", []).append(point)
    if not panels:
        return []
    over_rounds(path := folder / "representations.png", panels)
    return [path]


def kinds(documents: Sequence[RunDocument], names: Sequence[str]) -> Iterator[tuple[str, Found]]:
    """Measurements of the same kind together, in the order in which they were first asked for. Those of an
    older feddbe that lack Fisher's F1 are left out."""
    kinds: dict[str, Found] = {}
    for run, document in zip(names, documents, strict=True):
        for one in document["measured"]:
            if one["what"] in DISCREPANCIES and not one["overall"].keys() >= set(Discrepancy.MEASURES):
                continue
            name = f"{one['what']}{'-clients' * one['per_client']}{'-quick' * one['quick']}"
            kinds.setdefault(name, []).append((run, one))
    yield from kinds.items()


def first(one: Measurement, found: Found) -> bool:
    """Not the same numbers as an earlier one's, as at z without PRBM."""
    earlier = [other for _, other in found]
    return not any(one["clients"] == other["clients"] for other in earlier[: earlier.index(one)])


def column(run: str, one: Measurement) -> str:
    return f"{run}, {one['moment']} @{one['round']}"


def _title(documents: Sequence[RunDocument], found: Found) -> str:
    data = dict.fromkeys(Path(str(document["config"]["data"])).name for document in documents)
    return f"{', '.join(data)}: {samples(found)}"


def samples(found: Found) -> str:
    counts = " or ".join(map(str, sorted({one["samples"] for _, one in found})))
    whose = "of each client alone" if found[0][1]["per_client"] else "of all clients"
    return f"{counts} test samples {whose}"


def discrepancy(one: Measurement) -> Discrepancy:
    def there(read: Mapping[str, float | None]) -> dict[str, float]:
        return {name: float("inf") if value is None else value for name, value in read.items()}

    return as_discrepancy({int(client): there(read) for client, read in one["clients"].items()})


def _table(kind: str, found: Found) -> RenderableType:
    first = found[0][1]
    readings = Discrepancy.MEASURES if first["what"] in DISCREPANCIES else ("value",)
    columns = list(dict.fromkeys((run, one["moment"], one["round"]) for run, one in found))
    cells = {
        (one["place"], reading, (run, one["moment"], one["round"])): _cell(one, reading)
        for run, one in found
        for reading in readings
    }
    table = plain_table(gap=2)
    table.title, table.title_justify, table.title_style = kind, "left", "bold"
    table.add_column("place", overflow="fold")
    for run, moment, round in columns:
        table.add_column(f"{run}\n{moment} @{round}", justify="right", overflow="fold")
    for place in dict.fromkeys(one["place"] for _, one in found):
        for reading in readings:
            name = place if reading == "value" else f"{place} {reading}"
            table.add_row(name, *(cells.get((place, reading, column), "-") for column in columns))
    quick = " QUICK: fewer sizes, seeds and steps than the full measure." if first["quick"] else ""
    words = f"{WORDS[first['what']]} {samples(found).capitalize()}; before and after local training, @ round."
    return Group(table, caption(words + quick))


def _cell(one: Measurement, reading: str) -> str:
    value, std = one["overall"].get(reading), one["overall"].get("std")
    if value is None:
        return "-"
    if one["what"] == "probe":
        return percent(value)
    if one["what"] == "mdl":
        return f"{value:.0f}" if std is None else f"{value:.0f} ± {std:.0f}"
    return f"{value:.3g}"


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
