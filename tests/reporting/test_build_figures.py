"""Figures have the numbers of the runs, and their pictures show them, with nothing cut off."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.discrepancy import Discrepancy, discrepancy
from feddbe.metrics.representations.points import Points, make_points
from feddbe.reporting import matplotlib_backend
from feddbe.reporting.build_figures import (
    analysis_figures,
    client_differences,
    client_ranks,
    scatter_panel,
    selected_metric_curves,
    tuning_surface,
)
from feddbe.reporting.figure import Dots, HeatMap, Scatter
from feddbe.reporting.figure import Figure as FigureValue
from feddbe.reporting.matplotlib_backend import draw, render
from feddbe.results.document import AnalysisDocument, RunDocument
from feddbe.results.fairness import Fairness, compute_fairness
from tests.documents import document

LONG = "fedprox+dbe(kappa=50,mu=1,init_mean=debiased) in a layer with a long name"


def is_everything_inside(figure: Figure) -> bool:
    figure.draw_without_rendering()
    box, paper = figure.get_tightbbox(), figure.get_size_inches()
    corners = np.asarray(box.get_points())
    return bool((corners > -0.01).all() and (corners < paper + 0.01).all())


def find_scatter_collections(figure: Figure, axes: int = 0) -> list[PathCollection]:
    return [group for group in figure.axes[axes].collections if isinstance(group, PathCollection)]


def analysis_document(
    analysis: str, layer: str = "z_g", moment: str = "before", **fields: Any
) -> AnalysisDocument:
    """Return an analysis as in a run's document."""
    plain: Any = {
        "round": 2, "analysis": analysis, "layer": layer, "moment": moment, "on": "own",
        "quick": False, "per_client": False, "samples": 60, "settings": {}, "seconds": 1.0,
        "overall": {}, "clients": {},
    }  # fmt: skip
    return cast(AnalysisDocument, plain | fields)


def analyzed_run(*analyses: AnalysisDocument, method: str = "fedavg") -> RunDocument:
    run = document(method, [0.1, 0.5, 0.6])
    run["analyses"] = list(analyses)
    return run


def render_analysis(*runs: RunDocument, plane: Points | None = None) -> Figure:
    (figure,) = analysis_figures(runs, lambda run, analysis: plane or random_points(4, 3)).values()
    return render(figure)


# Bars


def mdl_document(layer: str, value: float, std: float, **fields: Any) -> AnalysisDocument:
    return analysis_document("mdl", layer, overall={"value": value, "std": std}, **fields)


def test_bars_are_by_layer_and_run_from_zero() -> None:
    before = analyzed_run(
        mdl_document("conv1", 900.0, 30.0, quick=True), mdl_document("fc1", 500.0, 20.0, quick=True)
    )
    after = analyzed_run(mdl_document("fc1", 600.0, 10.0, quick=True), method="fedprox")
    figure = render_analysis(before, after)
    (axes,) = figure.axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [bar.get_height() for bar in bars] == [900, 500, 600]
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in bars] == [0, 1, 1]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["conv1", "fc1"]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylabel() == "minimum description length (nats)"
    assert "QUICK" in figure.legends[0].get_title().get_text()
    assert (
        "QUICK"
        not in render_analysis(analyzed_run(mdl_document("fc1", 1.0, 0.1))).legends[0].get_title().get_text()
    )


def test_bars_of_percentages_are_scaled() -> None:
    figure = render_analysis(analyzed_run(analysis_document("probe", overall={"value": 0.75})))
    assert [patch.get_height() for patch in figure.axes[0].patches if isinstance(patch, Rectangle)] == [75]


@pytest.mark.parametrize("series", [1, 8])
@pytest.mark.parametrize("layers", [1, 8])
def test_bars_are_inside(series: int, layers: int) -> None:
    runs = [
        analyzed_run(*(mdl_document(f"layer{j}", 500.0, 9.0) for j in range(layers)), method=f"{LONG} {i}")
        for i in range(series)
    ]
    assert is_everything_inside(render_analysis(*runs))


# Discrepancy


@cache
def random_discrepancy(clients: int, seed: int = 0) -> Discrepancy:
    random = np.random.RandomState(seed)
    client = np.repeat(np.arange(clients), 20)
    return discrepancy(
        make_points(random.standard_normal((len(client), 3)) + client[:, None], client, client)
    )


def discrepancy_document(result: Discrepancy, **fields: Any) -> AnalysisDocument:
    columns = [column.name for column in dataclasses.fields(result)[1:-1]]
    clients = {
        str(client): {
            name: value if math.isfinite(value := float(getattr(result, name)[index])) else None
            for name in columns
        }
        for index, client in enumerate(result.client)
    }
    overall = {
        name: value if math.isfinite(value) else None for name, value in result.mean_over_clients().items()
    }
    return analysis_document("discrepancy", overall=overall, clients=clients, **fields)


def test_dots_are_clients_and_the_bar_is_the_mean() -> None:
    upper, lower = random_discrepancy(3), random_discrepancy(4, seed=1)
    run = analyzed_run(discrepancy_document(upper), discrepancy_document(lower, moment="after"))
    figure = render_analysis(run)
    assert [len(axes.get_xlabel()) > 0 for axes in figure.axes] == [True] * 5
    for axes, metric in zip(figure.axes, Discrepancy.METRICS, strict=True):
        groups = [
            dots for dots in axes.collections if isinstance(dots, PathCollection) and dots.get_zorder() == 3
        ]
        for row, (result, group) in enumerate(zip((lower, upper), groups, strict=True)):
            offsets = np.asarray(group.get_offsets())
            assert offsets[:, 0] == pytest.approx(getattr(result, metric))
            assert np.abs(offsets[:, 1] - row).max() < 0.31
            mean = result.mean_over_clients()[metric]
            assert any(np.asarray(line.get_xdata()) == pytest.approx([mean, mean]) for line in axes.lines)
        assert axes.get_xlim()[0] <= 0, "the axis shows where nothing differs"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "fedavg, after @2, z_g", "fedavg, before @2, z_g",
    ]  # fmt: skip


def test_infinite_values_are_counted_and_not_drawn() -> None:
    separated = discrepancy(make_points([[0.0], [0.0], [1.0], [1.0]], [0] * 4, [0, 0, 1, 1]))
    figure = render_analysis(analyzed_run(discrepancy_document(separated)))
    assert [text.get_text() for text in figure.axes[2].texts] == ["2 infinite"]
    assert is_everything_inside(figure)


@pytest.mark.parametrize("rows", [1, 8])
def test_dots_are_inside(rows: int) -> None:
    result = random_discrepancy(20)
    runs = [analyzed_run(discrepancy_document(result), method=f"{LONG} {i}") for i in range(rows)]
    assert is_everything_inside(render_analysis(*runs))


def test_equal_numbers_are_drawn_once() -> None:
    result = random_discrepancy(3)
    run = analyzed_run(discrepancy_document(result), discrepancy_document(result, layer="z"))
    (figure,) = analysis_figures([run], lambda run, analysis: random_points(4, 3)).values()
    assert [len(panel.rows) for panel in figure.panels if isinstance(panel, Dots)] == [1] * 5


# Curves


def test_metrics_have_a_panel_each_and_a_color_per_run() -> None:
    first, second = document("a", [0.1, 0.5, 0.6]), document("b", [0.1, 0.5])
    readings = {"mean": 0.0, "worst_tenth": 0.0, "std": 0.0}
    for entry, value in zip(first["rounds"], (0.5, 0.4, 0.25), strict=True):
        entry["metrics"] = {"before": {"drift": {"weighted": value, **readings}}}
    for entry, value in zip(second["rounds"], (0.8, 0.81), strict=True):
        measured = {"drift": {"weighted": 1.0, **readings}, "probe": {"weighted": value, **readings}}
        entry["metrics"] = {"before": measured}
    chosen = selected_metric_curves([first, second])
    assert chosen is not None
    figure = render(chosen)
    drift, probe = figure.axes
    assert [np.asarray(line.get_xydata()).tolist() for line in drift.lines] == [
        [[0, 0.5], [1, 0.4], [2, 0.25]],
        [[0, 1], [1, 1]],
    ]
    assert np.asarray(probe.lines[0].get_xydata()).tolist() == [[0, 80], [1, 81]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert drift.get_ylabel() == "client drift\n(standard deviations)"
    assert drift.get_title(loc="left") == "client drift, test data"
    assert is_everything_inside(figure)
    assert selected_metric_curves([document("a", [0.1])]) is None


# t-SNE


def random_points(clients: int, labels: int, n: int = 200) -> Points:
    random = np.random.RandomState(0)
    return make_points(
        random.standard_normal((n, 2)), np.arange(n) % labels, np.arange(n) // labels % clients
    )


def render_planes(planes: Mapping[str, Points]) -> Figure:
    return render(
        FigureValue("tsne", LONG, tuple(scatter_panel(name, points) for name, points in planes.items()))
    )


@pytest.mark.parametrize(("clients", "labels"), [(1, 1), (1, 3), (20, 10), (20, 100), (60, 10)])
@pytest.mark.parametrize("panels", [1, 4, 6])
def test_scatter_panels_are_inside_for_any_numbers_of_clients_and_labels(
    clients: int, labels: int, panels: int
) -> None:
    figure = render_planes({f"{LONG} {i}": random_points(clients, labels) for i in range(panels)})
    assert is_everything_inside(figure)


def test_color_is_the_label_and_marker_the_client() -> None:
    """The same ones in all panels, also where a label or a client is missing; hollow ones from client 12."""
    whole = random_points(20, 10)
    part = whole.select((whole.y > 3) & (whole.client > 5))
    figure = render_planes({"all": whole, "some": part})
    for index, points in enumerate((whole, part)):
        groups = find_scatter_collections(figure, index)
        assert len(groups) == 20
        for client, group in enumerate(groups):
            client_points = points.select(points.client == client)
            assert np.asarray(group.get_offsets()) == pytest.approx(client_points.x)
            edges = np.asarray(group.get_edgecolor())
            assert [to_hex(color).upper() for color in edges] == [
                matplotlib_backend.LABEL_COLORS[y].upper() for y in client_points.y
            ]
            assert (len(np.asarray(group.get_facecolor())) == 0) == (client >= 12 or not len(client_points.y))
    labels, clients = ([text.get_text() for text in legend.get_texts()] for legend in figure.legends)
    assert labels == [str(label) for label in range(10)]
    assert clients == [str(client) for client in range(20)]
    shapes = {matplotlib_backend._client_marker(range(24), index) for index in range(24)}
    assert len(shapes) == 24


def test_many_labels_are_on_a_color_bar_and_many_clients_are_numbers() -> None:
    figure = render_planes({"many": random_points(60, 100, 6000)})
    _, bar = figure.axes
    assert bar.get_ylabel() == "label"
    assert [tick.get_text() for tick in bar.get_yticklabels()][::10] == ["0", "99"]
    assert figure.legends == []
    assert "number of the client" in figure.get_supxlabel()
    assert matplotlib_backend._client_marker(range(60), 31) == ("$31$", True)


def test_scatter_plots_are_limited_and_distinct() -> None:
    run = analyzed_run(analysis_document("tsne"), analysis_document("tsne", "z"))
    plane = random_points(4, 3, 500)
    (figure,) = analysis_figures([run], lambda run, analysis: plane, max_points=120).values()
    (panel,) = figure.panels
    assert isinstance(panel, Scatter)
    assert len(panel.x) == 120
    assert panel.note == "120 of 500 points are drawn"


# Fairness


def random_runs(methods: list[str], clients: int = 20) -> tuple[list[RunDocument], list[Fairness]]:
    random = np.random.RandomState(0)
    accuracies = [dict(enumerate(random.rand(clients).tolist())) for _ in methods]
    documents = [document(method, [0.1, 0.9]) for method in methods]
    return documents, compute_fairness(documents, accuracies)


def render_fairness(documents: list[RunDocument], runs: list[Fairness]) -> Figure:
    return render(client_ranks(documents, runs), *filter(None, [client_differences(documents, runs)]))


def test_fairness_sorts_clients_and_shows_differences() -> None:
    documents, runs = random_runs(["local", "fedavg", "ditto"])
    figure = render_fairness(documents, runs)
    top, local, fedavg = figure.axes
    lines = [line for line in top.lines if len(np.asarray(line.get_xdata())) == 101]
    for line, run in zip(lines, runs, strict=True):
        heights = np.asarray(line.get_ydata())
        assert heights[:-1:5] == pytest.approx(100 * np.sort(list(run["accuracy"].values())))
        assert np.asarray(line.get_xdata())[-1] == 100
    marks = [line for line in top.lines if line not in lines]
    worst = [100 * run["spread"]["worst_tenth"] for run in runs]
    assert [float(np.asarray(mark.get_ydata())[0]) for mark in marks] == pytest.approx(worst)
    assert [label.get_text() for label in local.get_yticklabels()] == ["ditto", "fedavg"]
    dots = [group for group in local.collections if isinstance(group, PathCollection)]
    expected = [100 * d for d in runs[2]["paired"]["local"]["differences"].values()]
    assert np.asarray(dots[0].get_offsets())[:, 0] == pytest.approx(expected)
    pair = runs[2]["paired"]["fedavg"]
    assert f"{pair['better']} better, {pair['equal']} equal, {pair['worse']} worse" in [
        " ".join(text.get_text().split()) for text in fedavg.texts
    ]
    color: Any = np.asarray(dots[0].get_facecolor())[0]
    assert to_hex(color[:3]) == to_hex(str(lines[2].get_color())), "a run has one color"


@pytest.mark.parametrize(
    "methods", [["ditto"], ["local", "fedavg"], ["local", "fedavg", LONG, "a", "b", "c"]]
)
@pytest.mark.parametrize("clients", [1, 100])
def test_fairness_is_inside(methods: list[str], clients: int) -> None:
    assert is_everything_inside(render_fairness(*random_runs(methods, clients)))


# Tuning


SPACE: dict[str, list[Any]] = {"lr": [0.01, 0.1, 1.0], "kappa": [1, 10], "mu": [0.5]}
TRIALS: list[tuple[dict[str, Any], float | None]] = [
    ({"lr": 0.01, "kappa": 1, "mu": 0.5}, 0.8),
    ({"lr": 0.1, "kappa": 1, "mu": 0.5}, 0.9),
    ({"lr": 0.1, "kappa": 10, "mu": 0.5}, None),
]


def test_surface_has_the_best_accuracy_of_each_cell() -> None:
    figure = tuning_surface(SPACE, TRIALS, TRIALS[0][0], "title")
    (panel,) = figure.panels
    assert isinstance(panel, HeatMap)
    assert panel.values == ((80.0, 90.0, None), (None, None, None))
    assert panel.empty == ((1, 1, "stopped"),)
    assert [(mark.column, mark.row, mark.text) for mark in panel.marks] == [(0, 0, "default"), (1, 0, "best")]
    assert figure.caption == "Best over mu."
    assert is_everything_inside(render(figure))


def test_surface_of_one_option_is_a_row() -> None:
    trials = [({"lr": lr}, 0.5 + lr / 10) for lr in SPACE["lr"]]
    figure = tuning_surface({"lr": SPACE["lr"]}, trials, {"lr": 0.01}, "title")
    (panel,) = figure.panels
    assert isinstance(panel, HeatMap)
    assert list(panel.values[0]) == pytest.approx([50.1, 51.0, 60.0])
    assert is_everything_inside(render(figure))


# Files and mistakes


def test_dollar_signs_are_not_parsed_as_math(tmp_path: Path) -> None:
    name = r"a $\frac$"
    draw(
        tmp_path / "m.png",
        *analysis_figures(
            [analyzed_run(mdl_document(name, 1.0, 0.1), method=name)], fail_to_load_points
        ).values(),
    )
    run = analyzed_run(discrepancy_document(random_discrepancy(2)), method=name)
    draw(tmp_path / "d.svg", *analysis_figures([run], fail_to_load_points).values())
    draw(tmp_path / "t.png", FigureValue("tsne", name, (scatter_panel(name, random_points(30, 3)),)))
    draw(tmp_path / "f.png", *filter(None, [client_differences(*random_runs([name, "local"]))]))
    draw(tmp_path / "s.pdf", tuning_surface({name: [1, 2]}, [({name: 1}, 0.5)], {name: 1}, name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.svg", "f.png", "m.png", "s.pdf", "t.png"]


def fail_to_load_points(run: RunDocument, analysis: AnalysisDocument) -> Points:
    raise AssertionError("this analysis has no points")


def test_nothing_to_draw_raises_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nothing to draw"):
        draw(tmp_path / "x.png", FigureValue("tsne", "", ()))
    with pytest.raises(InvalidInputError, match="panel 'a' has points of 3 dimensions"):
        scatter_panel("a", make_points(np.ones((5, 3)), [0] * 5))
    with pytest.raises(InvalidInputError, match="no run"):
        client_ranks([], [])
    assert not list(tmp_path.iterdir())
