"""Builds figures from run documents: pure functions from documents to the values in `figure.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddbe.config.parameters import format_value
from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.points import Analysis, AnalysisColumn, FigureKind, Points
from feddbe.metrics.representations.registry import ANALYSES
from feddbe.reporting.figure import (
    Axis,
    Bars,
    BarSeries,
    Bubbles,
    CellMark,
    Curves,
    DotRow,
    Dots,
    Figure,
    HeatMap,
    Mark,
    Panel,
    Reference,
    Scatter,
    Series,
)
from feddbe.reporting.representations import (
    FoundAnalyses,
    analysis_caption,
    analysis_groups,
    column_title,
    describe_samples,
    is_first_result,
)
from feddbe.results.curves import (
    ACCURACY,
    MeanCurve,
    MetricSeries,
    describe_band,
    mean_and_band,
    mean_curves,
    metric_series,
)
from feddbe.results.document import (
    AnalysisDocument,
    RunDocument,
    accuracy_curve,
    describe_moment,
    distinguishing_settings,
    new_clients_curve,
    run_labels,
    run_title,
    status_note,
)
from feddbe.results.fairness import BASELINES, Fairness
from feddbe.results.seeds import counted_runs, group_experiments, group_names

Colors = Mapping[str, int]
"""Palette indices by the folder of a run; a page uses the same ones in all figures."""
ACCURACY_AXIS = Axis("test accuracy", "%")
ROUND = Axis("round")
MAX_DOTS = 200
"""Clients drawn in a row of dots."""
MAX_BUBBLE_COLUMNS = 1000
"""Clients that can be distinguished in a picture."""


# Curves


def learning_curves(documents: Sequence[RunDocument], colors: Colors | None = None) -> Figure:
    """Return test accuracy over rounds: a curve for each experiment, with its best round marked."""
    moments = list(dict.fromkeys(_moment(document) for document in documents if accuracy_curve(document)))
    panel = metric_panel(documents, ACCURACY, colors, show_moment=len(moments) > 1)
    when = moments[0] if len(moments) == 1 else "at the moment in the legend"
    caption = f"Deployed model {when}, weighted by samples." if moments else ""
    return Figure("curves", run_title(documents), (panel,), caption)


def metric_curves(
    documents: Sequence[RunDocument], metrics: Sequence[MetricSeries] | None = None, **options: Any
) -> Figure:
    """Return a panel for each metric that any of the runs has, see `metric_panel`."""
    chosen = metric_series(documents) if metrics is None else metrics
    panels = tuple(metric_panel(documents, metric, **options) for metric in chosen)
    return Figure("metrics", run_title(documents), panels)


def selected_metric_curves(documents: Sequence[RunDocument]) -> Figure | None:
    """Return the metrics that were selected with `--metrics` beyond the default ones; None without any."""
    selected = [metric for metric in metric_series(documents) if metric.is_selected]
    return metric_curves(documents, selected) if selected else None


def metric_panel(
    documents: Sequence[RunDocument],
    metric: MetricSeries,
    colors: Colors | None = None,
    *,
    max_rounds: int | None = None,
    show_moment: bool = False,
) -> Curves:
    """Return the curves of one metric.

    Args:
        documents: The runs.
        metric: What to show.
        colors: Palette indices; by default in order of appearance.
        max_rounds: Rounds that are drawn at most; None: all.
        show_moment: Whether names say when the accuracy was measured.
    """
    curves = mean_curves(documents, metric.read_curve)
    marks = [_best_mark(curve) if metric.is_primary else None for curve in curves]
    rounds, step = thin({x for curve in curves for x in curve.x}, max_rounds, [m.x for m in marks if m])
    series = []
    for index, (curve, name, mark) in enumerate(zip(curves, _unique_names(curves), marks, strict=True)):
        full_name = f"{name}, {_moment(curve.runs[0])}" if show_moment else name
        note = " or ".join(dict.fromkeys(filter(None, map(status_note, curve.runs))))
        series.append(_series(curve, full_name, _color(curve.runs[0], index, colors), rounds, mark, note))
    if metric.is_primary:
        series += _unevaluated(documents, len(series), colors)
    runs = [run for curve in curves for run in curve.runs]
    floors = (
        sorted({round(100 * run["majority_accuracy"], 2) for run in runs})
        if metric.has_majority_reference
        else []
    )
    note = f"Every {_ordinal(step)} round is drawn, with the best and the last." if step > 1 else ""
    return Curves(
        name=metric.name,
        x_axis=ROUND,
        y_axis=Axis(metric.label, metric.unit),
        series=tuple(series),
        references=tuple(Reference(y, f"majority class of each client: {y:.2f} %") for y in floors),
        band=describe_band([len(curve.runs) for curve in curves]),
        note=note,
    )


def adaptation_curves(documents: Sequence[RunDocument], colors: Colors | None = None) -> Figure:
    """Return the accuracy of new clients over the epochs for which they adapt the model."""
    curves = mean_curves(documents, new_clients_curve)
    firsts = [curve.runs[0] for curve in curves]
    series = []
    for index, (curve, name) in enumerate(zip(curves, _unique_names(curves), strict=True)):
        run = curve.runs[0]
        way = run["new_clients"]["adaptation"] if run["new_clients"] else "full"
        is_named = way == "full" or "adaptation" in distinguishing_settings(run, firsts, seed=False)
        full_name = name if is_named else f"{name}, {way}"
        mark = Mark(curve.x[-1], curve.mean[-1], f"{curve.mean[-1]:.2f} % after {curve.x[-1]} epochs")
        series.append(_series(curve, full_name, _color(run, index, colors), curve.x, mark))
    panel = Curves(
        name="test accuracy of new clients",
        x_axis=Axis("epoch"),
        y_axis=Axis("test accuracy of new clients", "%"),
        series=tuple(series),
        band=describe_band([len(curve.runs) for curve in curves]),
    )
    caption = "Weighted by samples, after each epoch of local adaptation; epoch 0 is the model as received."
    return Figure("new_clients", run_title(documents), (panel,), caption)


def _moment(document: RunDocument) -> str:
    moments = dict.fromkeys(
        describe_moment(entry["moment"]) for entry in document["rounds"] if entry["accuracy"]
    )
    return " / ".join(moments)


def _color(run: RunDocument, index: int, colors: Colors | None) -> int:
    return index if colors is None else colors[run["folder"]]


def _unique_names(curves: Sequence[MeanCurve]) -> list[str]:
    """Return the names of the curves; equal ones are distinguished by the folder of the first run."""
    plain = [curve.name for curve in curves]
    return [
        f"{name} [{curve.runs[0]['folder']}]" if plain.count(name) > 1 else name
        for name, curve in zip(plain, curves, strict=True)
    ]


def _best_mark(curve: MeanCurve) -> Mark:
    x, y = curve.best
    return Mark(x, y, f"best {y:.2f} % in round {x}")


def _series(
    curve: MeanCurve, name: str, color: int, rounds: Sequence[float], mark: Mark | None, note: str = ""
) -> Series:
    """Return the points of the curve at these rounds."""
    drawn = set(rounds)
    kept = [index for index, x in enumerate(curve.x) if x in drawn]

    def select(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[index] for index in kept) if values else ()

    x, mean, low, high = map(select, (curve.x, curve.mean, curve.low, curve.high))
    return Series(name, color, x, mean, low, high, mark, note)


def _unevaluated(documents: Sequence[RunDocument], index: int, colors: Colors | None) -> Iterator[Series]:
    """Yield runs without an evaluated round, which the legend names."""
    runs = [document for document in documents if not accuracy_curve(document)]
    for offset, (run, name) in enumerate(zip(runs, run_labels(runs), strict=True)):
        text = status_note(run) or "no round has been evaluated yet"
        yield Series(name, _color(run, index + offset, colors), ending=text)


def thin(items: Iterable[int], maximum: int | None, keep: Collection[float] = ()) -> tuple[list[int], int]:
    """Return about `maximum` of the items: every n-th, the last, and those to keep; and n."""
    ordered = sorted(items)
    step = max(1, math.ceil(len(ordered) / maximum)) if maximum else 1
    chosen = {*ordered[::step], *ordered[-1:], *(item for item in ordered if item in keep)}
    return sorted(chosen), step


def spread_evenly(items: Sequence[int], maximum: int) -> list[int]:
    """Return at most `maximum` of ordered items, evenly from the first to the last."""
    if len(items) <= maximum:
        return list(items)
    return [items[round(i * (len(items) - 1) / (maximum - 1))] for i in range(maximum)]


def _ordinal(n: int) -> str:
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


# Clients

_SHARES = range(101)
"""Percentages of clients at which curves of ranks have a point."""


def client_ranks(
    documents: Sequence[RunDocument], runs: Sequence[Fairness], colors: Colors | None = None
) -> Figure:
    """Return the accuracy of clients sorted from the lowest to the highest.

    Args:
        documents: The runs.
        runs: The fairness of each of them.
        colors: Palette indices; by default in order of appearance.
    """
    if not runs:
        raise InvalidInputError("nothing to draw: no run was given")
    by_run = {id(document): run for document, run in zip(documents, runs, strict=True)}
    together = [group for experiment in group_experiments(documents) for group in _averaged(experiment)]
    palette = _experiment_colors(documents, colors)
    widest = max(math.ceil(len(run["accuracy"]) / 10) / len(run["accuracy"]) for run in runs)
    series = []
    for index, (group, name) in enumerate(zip(together, group_names(together), strict=True)):
        spreads = [by_run[id(document)]["spread"] for document in group]
        means, low, high = mean_and_band([_at_shares(by_run[id(document)]["accuracy"]) for document in group])
        worst = 100 * float(np.mean([spread["worst_tenth"] for spread in spreads]))
        overall = 100 * float(np.mean([spread["mean"] for spread in spreads]))
        x = 100 * widest * (index + 1) / (len(together) + 1)  # next to each other, also where equal
        mark = Mark(x, worst, f"worst tenth {worst:.2f} %, mean {overall:.2f} %")
        series.append(Series(name, palette[id(group[0])], tuple(_SHARES), means, low, high, mark))
    when = " or ".join(dict.fromkeys(describe_moment(run["moment"]) for run in runs))
    panel = Curves(
        name="test accuracy",
        x_axis=Axis("clients, sorted by accuracy", "%"),
        y_axis=ACCURACY_AXIS,
        series=tuple(series),
        band=describe_band([len(group) for group in together]),
        shaded=(0, 100 * widest),
        is_stepped=True,
    )
    caption = f"Accuracy of each client {when}. Gray: the worst tenth of clients, whose mean is marked."
    return Figure("ranks", run_title(documents), (panel,), caption)


def _experiment_colors(documents: Sequence[RunDocument], colors: Colors | None) -> dict[int, int]:
    """Return a palette index for each document, by its id; runs of one experiment have the same."""
    return {
        id(run): _color(run, index, colors)
        for index, experiment in enumerate(group_experiments(documents))
        for run in experiment
    }


def _averaged(experiment: Sequence[RunDocument]) -> list[list[RunDocument]]:
    """Return the runs that are drawn as their mean, and each of the others alone."""
    together = counted_runs(experiment)
    folders = {run["folder"] for run in together}
    alone = [[run] for run in experiment if run["folder"] not in folders]
    return [together, *alone] if together else alone


def _at_shares(accuracy: Mapping[int, float]) -> list[float]:
    values = np.sort(list(accuracy.values()))
    return [100 * float(values[min(len(values) - 1, share * len(values) // 100)]) for share in _SHARES]


def client_differences(
    documents: Sequence[RunDocument],
    runs: Sequence[Fairness],
    run_names: Sequence[str] | None = None,
    colors: Colors | None = None,
) -> Figure | None:
    """Return each client's accuracy compared with each baseline; None without a baseline among the runs."""
    palette = _experiment_colors(documents, colors)
    panels: list[Panel] = []
    for baseline in BASELINES:
        rows = []
        for index, run in enumerate(runs):
            pair = run["paired"].get(baseline)
            if pair is None:
                continue
            values = [100 * pair["differences"][client] for client in sorted(pair["differences"])]
            drawn = spread_evenly(range(len(values)), MAX_DOTS)
            rows.append(
                DotRow(
                    name=run_names[index] if run_names else run["name"],
                    color=palette[id(documents[index])],
                    values=tuple(values[position] for position in drawn),
                    mean=100 * pair["mean"],
                    note=f"{pair['better']} better, {pair['equal']} equal, {pair['worse']} worse",
                )
            )
        if rows:
            axis = Axis(f"accuracy gain over {baseline}", "percentage points")
            panels.append(Dots(axis.label, axis, tuple(rows)))
    if not panels:
        return None
    caption = (
        "A dot is a client, at the same height in all rows; the bar is the mean. The baseline has the same "
        f"data, and the same seed if there is such a run. At most {MAX_DOTS} clients are drawn."
    )
    return Figure("differences", "", tuple(panels), caption)


def client_heat_map(
    name: str,
    clients: Sequence[int],
    rounds: Sequence[int],
    accuracies: Sequence[Mapping[int, float]],
    note: str,
) -> HeatMap:
    """Return the accuracy of each client in each round.

    Args:
        name: The run.
        clients: The clients to show.
        rounds: The rounds to show.
        accuracies: For each of these rounds, the accuracy of clients that were evaluated.
        note: What is left out.
    """
    values = tuple(
        tuple(round(100 * at[client], 1) if client in at else None for at in accuracies) for client in clients
    )
    lowest = min((value for row in values for value in row if value is not None), default=0.0)
    return HeatMap(
        name=name,
        x_axis=ROUND,
        y_axis=Axis("client"),
        value_axis=ACCURACY_AXIS,
        columns=tuple(map(str, rounds)),
        rows=tuple(map(str, clients)),
        values=values,
        limits=(10 * math.floor(lowest / 10), 100),
        note=note,
    )


def client_distribution(
    counts: NDArray[np.int64],
    name: str,
    label_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    *,
    max_clients: int = MAX_BUBBLE_COLUMNS,
    notes: Sequence[str] = (),
) -> Figure:
    """Return the number of samples of each label that each client has.

    Args:
        counts: Samples, clients x labels.
        name: Data set, partition and number of clients.
        label_names: Names of the labels; by default their numbers.
        client_names: Names of the clients; by default their numbers.
        max_clients: Clients that are drawn at most, evenly by number.
        notes: Further notes.
    """
    if counts.ndim != 2 or not counts.size or counts.min() < 0:
        raise InvalidInputError(
            f"bubbles need sample counts of clients x classes, not an array of shape {counts.shape}"
        )
    clients = spread_evenly(range(len(counts)), max_clients)
    is_thinned = len(clients) < len(counts)
    left_out = f"{len(clients)} of {len(counts):,} clients are drawn, evenly by number" if is_thinned else ""
    panel = Bubbles(
        name=name,
        x_axis=Axis("client"),
        y_axis=Axis("label"),
        size_axis=Axis("samples"),
        columns=tuple(client_names[client] if client_names else str(client) for client in clients),
        rows=tuple(label_names[label] if label_names else str(label) for label in range(counts.shape[1])),
        counts=tuple(tuple(int(count) for count in counts[client]) for client in clients),
        note="; ".join(filter(None, [left_out, *notes])),
    )
    caption = "Samples of each label that each client has for training and testing: the area of a bubble."
    return Figure("data", name, (panel,), caption)


# Tuning

Trials = Sequence[tuple[Mapping[str, Any], float | None]]
"""Values that were tried, and the accuracy with them; None: stopped early."""


def tuning_surface(
    space: Mapping[str, Sequence[Any]], trials: Trials, default: Mapping[str, Any], name: str
) -> Figure:
    """Return the validation accuracy over the two options with the most values.

    Args:
        space: The values of each option.
        trials: The trials; over options that are not shown, the best is taken.
        default: The values without a search, which are framed like the best.
        name: The title.
    """
    shown = sorted(space, key=lambda key: -len(space[key]))[:2]
    across, up = shown[0], shown[1] if len(shown) > 1 else None
    up_values = space[up] if up else [None]
    grid: list[tuple[float | None, ...]] = []
    empty = []
    for row, up_value in enumerate(up_values):
        cells = []
        for position, value in enumerate(space[across]):
            wanted = {across: value, **({up: up_value} if up else {})}
            matching = [found for values, found in trials if all(values[k] == v for k, v in wanted.items())]
            finished = [accuracy for accuracy in matching if accuracy is not None]
            cells.append(100 * max(finished) if finished else None)
            if matching and not finished:
                empty.append((position, row, "stopped"))
        grid.append(tuple(cells))
    best = max(trials, key=lambda trial: -1.0 if trial[1] is None else trial[1])[0]
    marks = [
        CellMark(
            space[across].index(values[across]), space[up].index(values[up]) if up else 0, text, is_dashed
        )
        for values, text, is_dashed in ((default, "default", True), (best, "best", False))
    ]
    known = [value for row in grid for value in row if value is not None]
    others = [key for key in space if key not in shown]
    panel = HeatMap(
        name=name,
        x_axis=Axis(across),
        y_axis=Axis(up or ""),
        value_axis=Axis("validation accuracy", "%"),
        columns=tuple(map(format_value, space[across])),
        rows=tuple(format_value(value) for value in up_values) if up else ("",),
        values=tuple(grid),
        limits=(float(np.percentile(known, 20)), max(known)),  # a diverged trial must not take all colors
        marks=tuple(marks),
        empty=tuple(empty),
    )
    caption = f"Best over {', '.join(others)}." if others else ""
    return Figure("surface", name, (panel,), caption)


# Analyses of representations

LoadPoints = Callable[[RunDocument, AnalysisDocument], Points]
"""Reads the points that an analysis with a scatter plot stored."""


def analysis_figures(
    documents: Sequence[RunDocument],
    load_points: LoadPoints,
    run_names: Sequence[str] | None = None,
    *,
    max_points: int | None = None,
) -> dict[str, Figure]:
    """Return a figure for each kind of analysis that the runs have, by the name of the kind.

    Args:
        documents: The runs.
        load_points: Reads stored points.
        run_names: A name for each run.
        max_points: Points of all scatter plots together at most; None: all.
    """
    run_names = run_names or run_labels(documents)
    by_name = dict(zip(run_names, documents, strict=True))
    data = ", ".join(dict.fromkeys(Path(str(document["config"]["data"])).name for document in documents))
    figures = {}
    for kind, found in analysis_groups(documents, run_names):
        analysis = ANALYSES[found[0][1]["analysis"]]
        panels: tuple[Panel, ...]
        if analysis.figure is FigureKind.BARS:
            panels = tuple(_layer_bars(column, found) for column in analysis.columns)
        elif analysis.figure is FigureKind.DOTS:
            panels = tuple(_client_dots(column, found) for column in analysis.columns)
        else:
            panels = tuple(_scatters(found, by_name, load_points, max_points))
        figures[kind] = Figure(kind, f"{data}: {describe_samples(found)}", panels, _caption(analysis, found))
    return figures


def _caption(analysis: Analysis, found: FoundAnalyses) -> str:
    text = analysis_caption(found)
    if analysis.figure is FigureKind.DOTS:
        text += " A dot is a client, the bar the mean."
        if any(column.spread for column in analysis.columns):
            text += " Thin lines: standard deviation."
        if any(column.expected for column in analysis.columns):
            text += " Gray ticks: expected from chance alone."
    return text


def _layer_bars(shown: AnalysisColumn, found: FoundAnalyses) -> Bars:
    """Return a group of bars for each layer, and a color for each run and moment."""
    layers = list(dict.fromkeys(one["layer"] for _, one in found))
    by_series: dict[str, dict[str, AnalysisDocument]] = {}
    for run, one in found:
        by_series.setdefault(column_title(run, one), {})[one["layer"]] = one
    series = [
        BarSeries(
            name,
            tuple(_reading(by_layer.get(layer), shown.key, shown) for layer in layers),
            tuple(_reading(by_layer.get(layer), shown.spread, shown) for layer in layers),
        )
        for name, by_layer in by_series.items()
    ]
    return Bars(shown.label, Axis(shown.label, shown.unit), tuple(layers), tuple(series))


def _reading(one: AnalysisDocument | None, key: str, shown: AnalysisColumn) -> float | None:
    value = one["overall"].get(key) if one else None
    if value is None:
        return None
    return 100 * value if shown.unit == "%" else value


def _client_dots(shown: AnalysisColumn, found: FoundAnalyses) -> Dots:
    """Return a row for each run, moment and layer."""
    rows = []
    for run, one in found:
        if not is_first_result(one, found):
            continue

        def read(key: str, readings: AnalysisDocument = one) -> tuple[float | None, ...]:
            if not key:
                return ()
            return tuple(numbers.get(key) for numbers in readings["clients"].values())

        values = read(shown.key)
        finite = [value for value in values if value is not None and math.isfinite(value)]
        infinite = len(values) - len(finite)
        rows.append(
            DotRow(
                name=f"{column_title(run, one)}, {one['layer']}",
                color=0,
                values=values,
                mean=float(np.mean(finite)) if finite else None,
                spreads=read(shown.spread),
                expected=read(shown.expected),
                note=f"{infinite} infinite" if infinite else "",
            )
        )
    axis = Axis(shown.label, shown.unit)
    return Dots(axis.label, axis, tuple(rows))


def _scatters(
    found: FoundAnalyses, by_name: Mapping[str, RunDocument], load_points: LoadPoints, maximum: int | None
) -> Iterator[Scatter]:
    """Yield the stored points of each run, moment and layer; equal ones, as z without PRBM, once."""
    distinct: dict[str, Points] = {}
    for run, one in found:
        loaded = load_points(by_name[run], one)
        if not any(np.array_equal(loaded.x, other.x) for other in distinct.values()):
            distinct[f"{column_title(run, one)}, {one['layer']}"] = loaded
    for name, loaded in distinct.items():
        yield scatter_panel(name, loaded, maximum and max(100, maximum // len(distinct)))


def scatter_panel(name: str, plane: Points, maximum: int | None = None) -> Scatter:
    """Return points of the plane, at most `maximum` of them."""
    if plane.x.shape[1] != 2:
        raise InvalidInputError(
            f"panel '{name}' has points of {plane.x.shape[1]} dimensions; lay them out first"
        )
    kept = spread_evenly(range(len(plane.y)), maximum or len(plane.y))
    note = f"{len(kept)} of {len(plane.y):,} points are drawn" if len(kept) < len(plane.y) else ""
    x, y = np.asarray(plane.x, dtype=float)[kept].T.tolist()
    return Scatter(
        name, tuple(x), tuple(y), tuple(plane.y[kept].tolist()), tuple(plane.client[kept].tolist()), note
    )
