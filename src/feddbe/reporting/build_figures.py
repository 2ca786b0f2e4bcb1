"""Figures of run documents: pure functions from documents to the values in `figure.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddbe.config.parameters import format_value
from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.confusion import matrix_from_values
from feddbe.metrics.representations.points import Analysis, AnalysisColumn, FigureKind, Points
from feddbe.metrics.representations.registry import ANALYSES
from feddbe.reporting.analysis_tables import (
    NamedAnalyses,
    analysis_caption,
    describe_samples,
    describe_view,
    group_analyses,
    is_first_result,
)
from feddbe.reporting.build_tables import has_repetitions, majority_accuracies
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
from feddbe.results.repetitions import counted_runs, find_repetition, group_experiments, group_names

Colors = Mapping[str, int]
"""Palette indices by the folder of a run, equal in all figures of a page."""
ACCURACY_AXIS = Axis("test accuracy", "%")
ROUND = Axis("round")
MAX_DOTS = 200
"""Maximum number of clients in a row of dots."""
MAX_BUBBLE_COLUMNS = 1000
"""Maximum number of clients that can be distinguished in a picture."""


# Curves


def learning_curves(documents: Sequence[RunDocument], colors: Colors | None = None) -> Figure:
    """Return test accuracy over rounds: a curve for each experiment, marked with the number of the table.

    It is the best round of each run, or, if experiments have several runs, the round that is compared.
    """
    moments = list(dict.fromkeys(_moment(document) for document in documents if accuracy_curve(document)))
    panel = metric_panel(documents, ACCURACY, colors, show_moment=len(moments) > 1)
    moment = moments[0] if len(moments) == 1 else "at the moment in the legend"
    caption = f"Model {moment}, weighted by samples." if moments else ""
    return Figure("curves", run_title(documents), (panel,), caption)


def metric_curves(
    documents: Sequence[RunDocument], metrics: Sequence[MetricSeries] | None = None, **options: Any
) -> Figure:
    """Return a panel for each metric, by default for all that any of the runs has; see `metric_panel`."""
    if metrics is None:
        metrics = metric_series(documents)
    panels = tuple(metric_panel(documents, metric, **options) for metric in metrics)
    return Figure("metrics", run_title(documents), panels)


def selected_metric_curves(documents: Sequence[RunDocument]) -> Figure | None:
    """Return the metrics that `--metrics` selected beyond the default ones, or None without any."""
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
        metric: The metric.
        colors: Palette indices; by default in order of appearance.
        max_rounds: Rounds that are drawn at most; None: all.
        show_moment: If True, names include the moment of the accuracy.
    """
    curves = mean_curves(documents, metric.read_curve)
    find_mark = _compared_mark if has_repetitions(documents) else _best_mark
    marks = [find_mark(curve) if metric.is_primary else None for curve in curves]
    all_rounds = {x for curve in curves for x in curve.x}
    rounds, step = thin_rounds(all_rounds, max_rounds, [mark.x for mark in marks if mark])
    series = []
    for index, (curve, name, mark) in enumerate(zip(curves, _unique_names(curves), marks, strict=True)):
        full_name = f"{name}, {_moment(curve.runs[0])}" if show_moment else name
        note = " or ".join(dict.fromkeys(filter(None, map(status_note, curve.runs))))
        series.append(_series(curve, full_name, _color(curve.runs[0], index, colors), rounds, mark, note))
    if metric.is_primary:
        series += _unevaluated(documents, len(series), colors)
    runs = [run for curve in curves for run in curve.runs]
    references = [
        Reference(round(100 * accuracy, 2), f"majority class of each client{source}: {100 * accuracy:.2f} %")
        for accuracy, source in sorted(majority_accuracies(runs).items())
        if metric.has_majority_reference and runs
    ]
    note = f"Every {_ordinal(step)} round is drawn, with the best and the last." if step > 1 else ""
    return Curves(
        name=metric.name,
        x_axis=ROUND,
        y_axis=Axis(metric.label, metric.unit),
        series=tuple(series),
        references=tuple(references),
        band=describe_band([curve.runs for curve in curves]),
        note=note,
    )


def adaptation_curves(documents: Sequence[RunDocument], colors: Colors | None = None) -> Figure:
    """Return the accuracy of new clients over the epochs of adaptation."""
    curves = mean_curves(documents, new_clients_curve)
    first_runs = [curve.runs[0] for curve in curves]
    series = []
    for index, (curve, name) in enumerate(zip(curves, _unique_names(curves), strict=True)):
        run = curve.runs[0]
        adaptation = run["new_clients"]["adaptation"] if run["new_clients"] else "full"
        is_in_name = "adaptation" in distinguishing_settings(run, first_runs, seed=False)
        full_name = name if is_in_name or adaptation == "full" else f"{name}, {adaptation}"
        mark = Mark(curve.x[-1], curve.mean[-1], f"{curve.mean[-1]:.2f} % after {curve.x[-1]} epochs")
        series.append(_series(curve, full_name, _color(run, index, colors), curve.x, mark))
    panel = Curves(
        name="test accuracy of new clients",
        x_axis=Axis("epoch"),
        y_axis=Axis("test accuracy of new clients", "%"),
        series=tuple(series),
        band=describe_band([curve.runs for curve in curves]),
    )
    caption = "Weighted by samples, after each epoch of local adaptation; epoch 0 is the received model."
    return Figure("new_clients", run_title(documents), (panel,), caption)


def _moment(document: RunDocument) -> str:
    return " / ".join(map(describe_moment, _moments(document)))


def _moments(document: RunDocument) -> list[str]:
    """Return the moments of the learning curve."""
    return list(dict.fromkeys(result["moment"] for result in document["rounds"] if result["accuracy"]))


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


def _compared_mark(curve: MeanCurve) -> Mark:
    """Return the accuracy of the table over seeds; the mark is at the mean of the runs' rounds."""
    rounds, accuracy = curve.compared
    deployed = curve.runs[0]["deployed_moment"]
    moment = "" if deployed in _moments(curve.runs[0]) else f"{deployed} "
    first, last = min(rounds), max(rounds)
    where = f"round {first}" if first == last else f"rounds {first} to {last}"
    return Mark(sum(rounds) / len(rounds), accuracy, f"{moment}{accuracy:.2f} % in {where}")


def _series(
    curve: MeanCurve, name: str, color: int, rounds: Sequence[float], mark: Mark | None, note: str = ""
) -> Series:
    """Return the points of the curve at these rounds."""
    drawn_rounds = set(rounds)
    indices = [index for index, x in enumerate(curve.x) if x in drawn_rounds]

    def select(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[index] for index in indices) if values else ()

    x, mean, low, high = map(select, (curve.x, curve.mean, curve.low, curve.high))
    return Series(name, color, x, mean, low, high, mark, note)


def _unevaluated(documents: Sequence[RunDocument], index: int, colors: Colors | None) -> Iterator[Series]:
    """Yield a series without points for each run without an evaluated round, for the legend."""
    runs = [document for document in documents if not accuracy_curve(document)]
    for offset, (run, name) in enumerate(zip(runs, run_labels(runs), strict=True)):
        text = status_note(run) or "no round has been evaluated yet"
        yield Series(name, _color(run, index + offset, colors), ending=text)


def thin_rounds(
    rounds: Iterable[int], maximum: int | None, keep: Collection[float] = ()
) -> tuple[list[int], int]:
    """Return about `maximum` of the rounds, and the step between them.

    Args:
        rounds: The rounds, in any order.
        maximum: None: return all.
        keep: Rounds that must be included, besides the first and the last.
    """
    ordered = sorted(rounds)
    step = max(1, math.ceil(len(ordered) / maximum)) if maximum else 1
    selected = {*ordered[::step], *ordered[-1:], *(round_ for round_ in ordered if round_ in keep)}
    return sorted(selected), step


def spread_evenly(items: Sequence[int], maximum: int) -> list[int]:
    """Return at most `maximum` of ordered items, evenly from the first to the last."""
    if len(items) <= maximum:
        return list(items)
    return [items[round(i * (len(items) - 1) / (maximum - 1))] for i in range(maximum)]


def _ordinal(n: int) -> str:
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


# Clients

_RANK_PERCENTAGES = range(101)
"""Percentages of clients, the x values of curves over ranks."""


def client_ranks(
    documents: Sequence[RunDocument], runs: Sequence[Fairness], colors: Colors | None = None
) -> Figure:
    """Return the accuracy of clients sorted from the lowest to the highest.

    Args:
        documents: The runs.
        runs: The fairness of each run.
        colors: Palette indices; by default in order of appearance.
    """
    if not runs:
        raise InvalidInputError("nothing to draw: no run was given")
    fairness = {id(document): run for document, run in zip(documents, runs, strict=True)}
    groups = [group for experiment in group_experiments(documents) for group in _split_averaged(experiment)]
    palette = _experiment_colors(documents, colors)
    worst_tenth_share = max(math.ceil(len(run["accuracy"]) / 10) / len(run["accuracy"]) for run in runs)
    series = []
    for index, (group, name) in enumerate(zip(groups, group_names(groups), strict=True)):
        group_fairness = [fairness[id(document)] for document in group]
        means, low, high = mean_and_band(
            {find_repetition(run): _accuracies_by_rank(fairness[id(run)]["accuracy"]) for run in group}
        )
        worst = 100 * float(np.mean([run["spread"]["worst_tenth"] for run in group_fairness]))
        overall = 100 * float(np.mean([run["spread"]["mean"] for run in group_fairness]))
        mark_x = 100 * worst_tenth_share * (index + 1) / (len(groups) + 1)  # equal marks do not overlap
        mark = Mark(mark_x, worst, f"worst tenth {worst:.2f} %, mean {overall:.2f} %")
        series.append(Series(name, palette[id(group[0])], tuple(_RANK_PERCENTAGES), means, low, high, mark))
    panel = Curves(
        name="test accuracy",
        x_axis=Axis("clients, sorted by accuracy", "%"),
        y_axis=ACCURACY_AXIS,
        series=tuple(series),
        band=describe_band(groups),
        shaded=(0, 100 * worst_tenth_share),
        is_stepped=True,
    )
    moments = " or ".join(dict.fromkeys(describe_moment(run["moment"]) for run in runs))
    caption = f"Accuracy of each client {moments}. Gray: the worst tenth of clients; a mark is its mean."
    return Figure("ranks", run_title(documents), (panel,), caption)


def _experiment_colors(documents: Sequence[RunDocument], colors: Colors | None) -> dict[int, int]:
    """Return a palette index for each document, by its id; runs of one experiment share it."""
    return {
        id(run): _color(run, index, colors)
        for index, experiment in enumerate(group_experiments(documents))
        for run in experiment
    }


def _split_averaged(experiment: Sequence[RunDocument]) -> list[list[RunDocument]]:
    """Return the runs that are drawn as their mean as one group, and each of the others as a group."""
    averaged = counted_runs(experiment)
    folders = {run["folder"] for run in averaged}
    others = [[run] for run in experiment if run["folder"] not in folders]
    return [averaged, *others] if averaged else others


def _accuracies_by_rank(accuracy: Mapping[int, float]) -> list[float]:
    """Return the sorted accuracies in percent at each of `_RANK_PERCENTAGES`."""
    values = np.sort(list(accuracy.values()))
    positions = [min(len(values) - 1, rank * len(values) // 100) for rank in _RANK_PERCENTAGES]
    return [100 * float(values[position]) for position in positions]


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
            indices = spread_evenly(range(len(values)), MAX_DOTS)
            rows.append(
                DotRow(
                    name=run_names[index] if run_names else run["name"],
                    color=palette[id(documents[index])],
                    values=tuple(values[index] for index in indices),
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
        f"data, and the same seed if such a run exists. At most {MAX_DOTS} clients are drawn."
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
        accuracies: For each of these rounds, the accuracy of the evaluated clients.
        note: Clients and rounds that are left out.
    """

    def percent(accuracy: float | None) -> float | None:
        return None if accuracy is None else round(100 * accuracy, 1)

    values = tuple(
        tuple(percent(round_accuracies.get(client)) for round_accuracies in accuracies) for client in clients
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
            f"sample counts have the wrong shape or a negative value: got shape {counts.shape}; "
            "expected clients x classes"
        )
    clients = spread_evenly(range(len(counts)), max_clients)
    all_notes = [*notes]
    if len(clients) < len(counts):
        all_notes.insert(0, f"{len(clients)} of {len(counts):,} clients are drawn, evenly by number")
    panel = Bubbles(
        name=name,
        x_axis=Axis("client"),
        y_axis=Axis("label"),
        size_axis=Axis("samples"),
        columns=tuple(client_names[client] if client_names else str(client) for client in clients),
        rows=tuple(label_names[label] if label_names else str(label) for label in range(counts.shape[1])),
        counts=tuple(tuple(int(count) for count in counts[client]) for client in clients),
        note="; ".join(all_notes),
    )
    caption = "The area of a bubble is a client's number of samples of a label, for training and testing."
    return Figure("data", name, (panel,), caption)


# Tuning

Trials = Sequence[tuple[Mapping[str, Any], float | None]]
"""Values and accuracy of each trial; the accuracy is None if the trial was stopped early."""


def tuning_surface(
    space: Mapping[str, Sequence[Any]], trials: Trials, default: Mapping[str, Any], name: str
) -> Figure:
    """Return the validation accuracy over the two options with the most values.

    Args:
        space: The values of each option.
        trials: The trials; each cell shows the best over the other options.
        default: The values without a search, framed like the best ones.
        name: The title.
    """
    axes = sorted(space, key=lambda key: -len(space[key]))[:2]
    x_key = axes[0]
    y_key = axes[1] if len(axes) > 1 else None
    y_values = space[y_key] if y_key else [None]
    grid: list[tuple[float | None, ...]] = []
    empty = []
    for row, y_value in enumerate(y_values):
        cells = []
        for column, x_value in enumerate(space[x_key]):
            accuracies = [
                accuracy
                for values, accuracy in trials
                if values[x_key] == x_value and (y_key is None or values[y_key] == y_value)
            ]
            finished = [accuracy for accuracy in accuracies if accuracy is not None]
            cells.append(100 * max(finished) if finished else None)
            if accuracies and not finished:
                empty.append((column, row, "stopped"))
        grid.append(tuple(cells))

    def mark(values: Mapping[str, Any], text: str, *, is_dashed: bool) -> CellMark:
        row = space[y_key].index(values[y_key]) if y_key else 0
        return CellMark(space[x_key].index(values[x_key]), row, text, is_dashed)

    best, _ = max(trials, key=lambda trial: -1.0 if trial[1] is None else trial[1])
    known = [value for row in grid for value in row if value is not None]
    panel = HeatMap(
        name=name,
        x_axis=Axis(x_key),
        y_axis=Axis(y_key or ""),
        value_axis=Axis("validation accuracy", "%"),
        columns=tuple(map(format_value, space[x_key])),
        rows=tuple(map(format_value, y_values)) if y_key else ("",),
        values=tuple(grid),
        limits=(float(np.percentile(known, 20)), max(known)),  # a diverged trial must not use most colors
        marks=(mark(default, "default", is_dashed=True), mark(best, "best", is_dashed=False)),
        empty=tuple(empty),
    )
    others = [key for key in space if key not in axes]
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
        max_points: Maximum number of points of all scatter plots together; None: all.
    """
    run_names = run_names or run_labels(documents)
    by_name = dict(zip(run_names, documents, strict=True))
    data = ", ".join(dict.fromkeys(Path(str(document["config"]["data"])).name for document in documents))
    figures = {}
    for kind, named_analyses in group_analyses(documents, run_names):
        analysis = ANALYSES[named_analyses[0][1]["analysis"]]
        panels: tuple[Panel, ...]
        if analysis.figure is FigureKind.BARS:
            panels = tuple(_layer_bars(column, named_analyses) for column in analysis.columns)
        elif analysis.figure is FigureKind.DOTS:
            panels = tuple(_client_dots(column, named_analyses) for column in analysis.columns)
        elif analysis.figure is FigureKind.CONFUSION:
            panels = tuple(_confusion_panels(named_analyses, by_name))
        else:
            panels = tuple(_scatter_panels(named_analyses, by_name, load_points, max_points))
        title = f"{data}: {describe_samples(named_analyses)}"
        figures[kind] = Figure(kind, title, panels, _analysis_caption(analysis, named_analyses))
    return figures


def _analysis_caption(analysis: Analysis, named_analyses: NamedAnalyses) -> str:
    text = analysis_caption(named_analyses)
    if analysis.figure is FigureKind.DOTS:
        text += " A dot is a client, the bar the mean."
        if any(column.spread for column in analysis.columns):
            text += " Thin lines: standard deviation."
        if any(column.expected for column in analysis.columns):
            text += " Gray ticks: expected by chance."
    return text


def _layer_bars(column: AnalysisColumn, named_analyses: NamedAnalyses) -> Bars:
    """Return a group of bars for each layer, and a color for each run and moment."""
    layers = list(dict.fromkeys(analysis["layer"] for _, analysis in named_analyses))
    by_series: dict[str, dict[str, AnalysisDocument]] = {}
    for run, analysis in named_analyses:
        by_series.setdefault(describe_view(run, analysis), {})[analysis["layer"]] = analysis
    series = [
        BarSeries(
            name,
            tuple(_read_value(by_layer.get(layer), column.key, column) for layer in layers),
            tuple(_read_value(by_layer.get(layer), column.spread, column) for layer in layers),
        )
        for name, by_layer in by_series.items()
    ]
    return Bars(column.label, Axis(column.label, column.unit), tuple(layers), tuple(series))


def _read_value(analysis: AnalysisDocument | None, key: str, column: AnalysisColumn) -> float | None:
    value = analysis["overall"].get(key) if analysis else None
    if value is None:
        return None
    return 100 * value if column.unit == "%" else value


def _client_dots(column: AnalysisColumn, named_analyses: NamedAnalyses) -> Dots:
    """Return a row for each run, moment and layer."""
    rows = []
    for run, analysis in named_analyses:
        if not is_first_result(analysis, named_analyses):
            continue
        values = _read_client_values(analysis, column.key)
        finite = [value for value in values if value is not None and math.isfinite(value)]
        infinite_count = len(values) - len(finite)
        rows.append(
            DotRow(
                name=f"{describe_view(run, analysis)}, {analysis['layer']}",
                color=0,
                values=values,
                mean=float(np.mean(finite)) if finite else None,
                spreads=_read_client_values(analysis, column.spread),
                expected=_read_client_values(analysis, column.expected),
                note=f"{infinite_count} infinite" if infinite_count else "",
            )
        )
    axis = Axis(column.label, column.unit)
    return Dots(axis.label, axis, tuple(rows))


def _read_client_values(analysis: AnalysisDocument, key: str) -> tuple[float | None, ...]:
    """Return a value of each client; nothing without a key."""
    if not key:
        return ()
    return tuple(values.get(key) for values in analysis["clients"].values())


def _scatter_panels(
    named_analyses: NamedAnalyses,
    by_name: Mapping[str, RunDocument],
    load_points: LoadPoints,
    maximum: int | None,
) -> Iterator[Scatter]:
    """Yield the stored points of each run, moment and layer; equal ones, as z without PRBM, once."""
    distinct: dict[str, Points] = {}
    for run, analysis in named_analyses:
        points = load_points(by_name[run], analysis)
        if not any(np.array_equal(points.x, other.x) for other in distinct.values()):
            distinct[f"{describe_view(run, analysis)}, {analysis['layer']}"] = points
    panel_maximum = max(100, maximum // len(distinct)) if maximum else None
    for name, points in distinct.items():
        yield scatter_panel(name, points, panel_maximum)


def _confusion_panels(named_analyses: NamedAnalyses, by_name: Mapping[str, RunDocument]) -> Iterator[HeatMap]:
    """Yield the matrix of each run and moment, in percent of the samples of each label."""
    for run, analysis in named_analyses:
        names = by_name[run]["label_names"]
        labels = [int(text) for key in analysis["overall"] for text in key.split(":")[1:]]
        classes = max([len(names), 1, *(label + 1 for label in labels)])  # one: a run without counts
        matrix = matrix_from_values(analysis["overall"], classes)
        sizes = matrix.sum(1)
        rows = [(100 * row / size).tolist() if size else [None] * classes
                for row, size in zip(matrix, sizes, strict=True)]  # fmt: skip
        titles = tuple(names) if len(names) == classes else tuple(map(str, range(classes)))
        yield HeatMap(
            name=describe_view(run, analysis),
            x_axis=Axis("prediction"),
            y_axis=Axis("label"),
            value_axis=Axis("share of the label's samples", "%"),
            columns=titles,
            rows=titles,
            values=tuple(map(tuple, rows)),
            limits=(0.0, 100.0),
        )


def scatter_panel(name: str, points: Points, maximum: int | None = None) -> Scatter:
    """Return points with two dimensions as a panel.

    Args:
        name: The name of the panel.
        points: The points.
        maximum: Points that are drawn at most; None: all.

    Raises:
        InvalidInputError: The points do not have two dimensions.
    """
    if points.x.shape[1] != 2:
        raise InvalidInputError(
            f"panel '{name}' has points of {points.x.shape[1]} dimensions; expected 2. Embed them first."
        )
    total = len(points.y)
    indices = spread_evenly(range(total), maximum or total)
    x, y = np.asarray(points.x, dtype=float)[indices].T.tolist()
    return Scatter(
        name=name,
        x=tuple(x),
        y=tuple(y),
        labels=tuple(points.y[indices].tolist()),
        clients=tuple(points.client[indices].tolist()),
        note=f"{len(indices)} of {total:,} points are drawn" if len(indices) < total else "",
    )
