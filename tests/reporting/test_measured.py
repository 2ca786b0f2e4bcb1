"""Pictures of measures: they show what they were given, from zero where bars are, with nothing cut off."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from feddbe.errors import BadInput
from feddbe.metrics.representations.discrepancy import Discrepancy, discrepancy
from feddbe.metrics.representations.points import Points, points
from feddbe.reporting import figures, representations
from feddbe.results.fairness import Fairness, fairness
from tests.documents import document

LONG = "fedprox+dbe(kappa=50,mu=1,init_mean=debiased) at a place of a long name"


def everything_is_inside(figure: Figure) -> bool:
    figure.draw_without_rendering()
    box, paper = figure.get_tightbbox(), figure.get_size_inches()
    corners = np.asarray(box.get_points())
    return bool((corners > -0.01).all() and (corners < paper + 0.01).all())


def scattered(figure: Figure, axes: int = 0) -> list[PathCollection]:
    return [one for one in figure.axes[axes].collections if isinstance(one, PathCollection)]


# MDL


def test_mdl_has_a_bar_for_each_place_and_name_from_zero() -> None:
    given = {"before": {"conv1": (900.0, 30.0), "fc1": (500.0, 20.0)}, "after": {"fc1": (600.0, 10.0)}}
    figure = representations._mdl_figure(given, "bits", "fmnist", quick=True)
    (axes,) = figure.axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [bar.get_height() for bar in bars] == [900, 500, 600]
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in bars] == [0, 1, 1]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["conv1", "fc1"]
    assert axes.get_ylim()[0] == 0
    assert "bits" in axes.get_ylabel()
    assert figure.get_suptitle() == "fmnist; quick: fewer sizes, seeds and steps than the full measure"
    assert "quick" not in representations._mdl_figure(given, "bits", "fmnist", quick=False).get_suptitle()


@pytest.mark.parametrize("series", [1, 8])
@pytest.mark.parametrize("places", [1, 8])
def test_mdl_is_inside(series: int, places: int) -> None:
    given = {f"{LONG} {i}": {f"layer{j}": (500.0, 9.0) for j in range(places)} for i in range(series)}
    assert everything_is_inside(representations._mdl_figure(given, "nats", LONG, quick=True))


# Discrepancy


@cache
def some_discrepancy(clients: int, seed: int = 0) -> Discrepancy:
    random = np.random.RandomState(seed)
    client = np.repeat(np.arange(clients), 20)
    return discrepancy(points(random.standard_normal((len(client), 3)) + client[:, None], client, client))


def test_discrepancies_have_a_dot_per_client_and_a_bar_at_the_mean() -> None:
    found = {"upper": some_discrepancy(3), "lower": some_discrepancy(4, seed=1)}
    figure = representations._discrepancies_figure(found, "title")
    assert [len(axes.get_xlabel()) > 0 for axes in figure.axes] == [True] * 5
    for axes, measure in zip(figure.axes, Discrepancy.MEASURES, strict=True):
        dots = [one for one in axes.collections if isinstance(one, PathCollection) and one.get_zorder() == 3]
        for row, (name, one) in enumerate(zip(("lower", "upper"), dots, strict=True)):
            offsets = np.asarray(one.get_offsets())
            assert offsets[:, 0] == pytest.approx(getattr(found[name], measure))
            assert np.abs(offsets[:, 1] - row).max() < 0.31
            mean = found[name].overall()[measure]
            assert any(np.asarray(line.get_xdata()) == pytest.approx([mean, mean]) for line in axes.lines)
        assert axes.get_xlim()[0] <= 0, "the axis shows where nothing differs"
    assert figure.axes[0].get_xlim()[1] >= 2
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["lower", "upper"]


def test_an_infinite_discrepancy_is_said_and_not_drawn() -> None:
    apart = discrepancy(points([[0.0], [0.0], [1.0], [1.0]], [0] * 4, [0, 0, 1, 1]))
    figure = representations._discrepancies_figure({"x": apart}, "")
    assert [text.get_text() for text in figure.axes[2].texts] == ["2 infinite"]
    assert everything_is_inside(figure)


@pytest.mark.parametrize("rows", [1, 8])
def test_discrepancies_are_inside(rows: int) -> None:
    one = some_discrepancy(20)
    assert everything_is_inside(
        representations._discrepancies_figure({f"{LONG} {i}": one for i in range(rows)}, LONG)
    )


# Curves


def test_curves_over_rounds_have_a_panel_per_measure_and_a_colour_per_run() -> None:
    given = {"drift": {"a": [(0, 0.5), (2, 0.25)], "b": [(0, 1.0)]}, "probe": {"b": [(0, 80.0), (1, 81.0)]}}
    figure = representations._rounds_figure(given, "title")
    drift, probe = figure.axes
    assert [np.asarray(line.get_xydata()).tolist() for line in drift.lines] == [
        [[0, 0.5], [2, 0.25]],
        [[0, 1]],
    ]
    assert np.asarray(probe.lines[1].get_xydata()).tolist() == [[0, 80], [1, 81]]
    assert drift.lines[1].get_color() == probe.lines[1].get_color() != drift.lines[0].get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert drift.get_ylabel() == "drift"
    assert everything_is_inside(figure)


# t-SNE


def plane(clients: int, labels: int, n: int = 200) -> Points:
    random = np.random.RandomState(0)
    return points(random.standard_normal((n, 2)), np.arange(n) % labels, np.arange(n) // labels % clients)


@pytest.mark.parametrize(("clients", "labels"), [(1, 1), (1, 3), (20, 10), (20, 100), (60, 10)])
@pytest.mark.parametrize("panels", [1, 4, 6])
def test_panels_are_inside_whatever_there_is(clients: int, labels: int, panels: int) -> None:
    figure = representations._figure({f"{LONG} {i}": plane(clients, labels) for i in range(panels)}, LONG)
    assert everything_is_inside(figure)


def test_colour_is_the_label_and_marker_the_client() -> None:
    """The same ones in all panels, also where a label or a client is missing; hollow ones from client 12."""
    whole = plane(20, 10)
    figure = representations._figure({"all": whole, "some": whole.of((whole.y > 3) & (whole.client > 5))}, "")
    for index, found in enumerate((whole, whole.of((whole.y > 3) & (whole.client > 5)))):
        groups = scattered(figure, index)
        assert len(groups) == 20
        for client, group in enumerate(groups):
            mine = found.of(found.client == client)
            assert np.asarray(group.get_offsets()).tolist() == mine.x.tolist()
            edges = np.asarray(group.get_edgecolor())
            assert [to_hex(colour).upper() for colour in edges] == [
                representations.LABELS[y].upper() for y in mine.y
            ]
            assert (len(np.asarray(group.get_facecolor())) == 0) == (client >= 12 or not len(mine.y))
    labels, clients = ([text.get_text() for text in legend.get_texts()] for legend in figure.legends)
    assert labels == [str(label) for label in range(10)]
    assert clients == [str(client) for client in range(20)]
    shapes = {representations._marker(np.arange(24), index) for index in range(24)}
    assert len(shapes) == 24


def test_many_labels_are_on_a_colour_bar_and_many_clients_are_numbers() -> None:
    figure = representations._figure({"many": plane(60, 100, 6000)}, "")
    _, bar = figure.axes
    assert bar.get_ylabel() == "label"
    assert [tick.get_text() for tick in bar.get_yticklabels()][::10] == ["0", "99"]
    assert figure.legends == []
    assert "number of its client" in figure.get_supxlabel()
    assert representations._marker(np.arange(60), 31) == ("$31$", True)


# Fairness


def some_runs(methods: list[str], clients: int = 20) -> list[Fairness]:
    random = np.random.RandomState(0)
    accuracies = [dict(enumerate(random.rand(clients).tolist())) for _ in methods]
    return fairness([document(method, [0.1, 0.9]) for method in methods], accuracies)


def test_fairness_sorts_clients_and_shows_differences() -> None:
    runs = some_runs(["local", "fedavg", "ditto"])
    figure = figures._figure(runs)
    top, local, fedavg = figure.axes
    lines = [line for line in top.lines if len(np.asarray(line.get_xdata())) == 21]
    for line, run in zip(lines, runs, strict=True):
        heights = np.asarray(line.get_ydata())
        assert heights[:-1] == pytest.approx(100 * np.sort(list(run["accuracy"].values())))
        assert np.asarray(line.get_xdata())[-1] == 100
    marks = [line for line in top.lines if line not in lines]
    worst = [100 * run["spread"]["worst_tenth"] for run in runs]
    assert [float(np.asarray(mark.get_ydata())[0]) for mark in marks] == pytest.approx(worst)
    assert [label.get_text() for label in local.get_yticklabels()] == ["ditto", "fedavg"]
    dots = [one for one in local.collections if isinstance(one, PathCollection)]
    expected = [100 * d for d in runs[2]["paired"]["local"]["differences"].values()]
    assert np.asarray(dots[0].get_offsets())[:, 0] == pytest.approx(expected)
    pair = runs[2]["paired"]["fedavg"]
    assert f"{pair['better']} better, {pair['equal']} equal,\n{pair['worse']} worse" in [
        text.get_text() for text in fedavg.texts
    ]
    assert top.get_ylim()[0] <= 0


@pytest.mark.parametrize(
    "methods", [["ditto"], ["local", "fedavg"], ["local", "fedavg", LONG, "a", "b", "c"]]
)
@pytest.mark.parametrize("clients", [1, 100])
def test_fairness_is_inside(methods: list[str], clients: int) -> None:
    assert everything_is_inside(figures._figure(some_runs(methods, clients)))


# Files and mistakes


def test_all_are_written_whole(tmp_path: Path) -> None:
    representations.mdl(tmp_path / "m.png", {r"a $\frac$": {r"b $\frac$": (1.0, 0.1)}}, title=r"c $\frac$")
    representations.discrepancies(tmp_path / "d.svg", {r"a $\frac$": some_discrepancy(2)}, title=r"c $\frac$")
    representations.over_rounds(
        tmp_path / "r.pdf", {r"b $\frac$": {r"a $\frac$": [(0, 1.0)]}}, title=r"c $\frac$"
    )
    representations.tsne(tmp_path / "t.png", {r"a $\frac$": plane(30, 3)}, title=r"c $\frac$")
    figures.fairness(tmp_path / "f.png", some_runs([r"a $\frac$", "local"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.svg", "f.png", "m.png", "r.pdf", "t.png"]


def test_nothing_to_draw_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    with pytest.raises(BadInput, match="no MDL"):
        representations.mdl(path, {"a": {}})
    with pytest.raises(BadInput, match="no discrepancy"):
        representations.discrepancies(path, {})
    with pytest.raises(BadInput, match="no round has been measured"):
        representations.over_rounds(path, {"drift": {"a": []}})
    with pytest.raises(BadInput, match="no panel"):
        representations.tsne(path, {})
    with pytest.raises(BadInput, match="panel 'a' has points of 3 dimensions"):
        representations.tsne(path, {"a": points(np.ones((5, 3)), [0] * 5)})
    with pytest.raises(BadInput, match="no run"):
        figures.fairness(path, [])
    assert not list(tmp_path.iterdir())


def test_a_discrepancy_without_f1_is_left_out_of_tables_and_pictures() -> None:
    """Older runs have another ratio in its place; they are measured again when it is asked for."""
    old = {
        "what": "discrepancy",
        "per_client": False,
        "quick": False,
        "overall": {"fisher": 1.0},
        "clients": {},
    }
    new = {**old, "overall": dict.fromkeys(Discrepancy.MEASURES, 1.0)}
    measured_twice: Any = {"measured": [old, new]}
    assert [found for _, found in representations.kinds([measured_twice], ["fedavg"])] == [[("fedavg", new)]]
