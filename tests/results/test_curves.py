"""Curves of metrics: which ones runs have, which point is marked, and the band over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import feddbe
from feddbe.metrics import builtin
from feddbe.metrics.client_values import Value
from feddbe.results.curves import band_edges, describe_band, mean_curves, metric_series
from feddbe.results.repetitions import group_seeds
from feddbe.results.statistics import Repetition, mean_interval
from tests.documents import document


def test_marked_point_is_the_best_round() -> None:
    """It is selected on validation data, if there is some."""
    run = document("fedavg", [0.1, 0.8, 0.7, 0.6])
    assert mean_curves([run])[0].best == (1, 80.0)
    result = run["rounds"][2]
    result["validation"] = result["accuracy"]
    run["best"] = result
    assert mean_curves([run])[0].best == (2, 70.0)


def test_point_of_several_seeds_is_the_number_of_the_table() -> None:
    """It is the mean of the last rounds, of the rounds selected on validation data, or after adapting."""
    runs = [document("fedavg", [0.1, 0.8, 0.7 + 0.1 * seed], seed=seed) for seed in range(2)]

    def compare_point() -> tuple[list[int], int]:
        (curve,), (group,) = mean_curves(runs), group_seeds(runs)
        assert group.accuracy is not None
        assert curve.compared[1] == pytest.approx(group.accuracy.mean)
        return curve.compared[0], round(curve.compared[1])

    assert compare_point() == ([2, 2], 75)
    for run in runs:
        for result in run["rounds"]:
            result["validation"] = result["accuracy"]
    runs[1]["best"] = runs[1]["rounds"][2]
    assert compare_point() == ([1, 2], 80)
    for run in runs:
        run["rounds"][2]["adapted"] = {"weighted": 0.9, "mean": 0.9, "worst_tenth": 0.9, "std": 0.0}
        run["deployed_moment"] = "adapted"
    assert compare_point() == ([2, 2], 90)


def test_band_is_the_interval_from_three_seeds_on() -> None:
    runs = [document("fedavg", [0.1, value], seed=seed) for seed, value in enumerate((0.4, 0.5, 0.9))]
    (single,) = mean_curves(runs[:1])
    (pair,) = mean_curves(runs[:2])
    (triple,) = mean_curves(runs)
    assert (single.low, single.high) == ((), ())
    assert (pair.low[1], pair.high[1]) == pytest.approx((40, 50))
    expected = mean_interval([40.0, 50.0, 90.0])
    assert triple.mean[1] == pytest.approx(60)
    assert triple.high[1] - triple.mean[1] == pytest.approx(expected.half_width)
    assert band_edges({Repetition(seed, 1): 1.0 for seed in range(3)}) == (1, 1)


def test_meaning_of_the_band_follows_from_the_seeds() -> None:
    runs = [document("fedavg", [0.1], seed=seed) for seed in range(3)]
    partitions = [document("fedavg", [0.1], partition_seed=seed) for seed in range(3)]
    assert describe_band([runs[:1]]) == ""
    assert describe_band([runs[:2], runs[:1]]) == "band: lower to higher of 2 seeds"
    assert describe_band([runs, partitions]) == "band: 95 % interval of the mean over 3 seeds or 3 partitions"
    assert describe_band([runs, runs[:2]]) == (
        "band: 95 % interval of the mean over 3 seeds (2 seeds: lower to higher)"
    )


def test_metric_series_are_those_of_any_run() -> None:
    run, plain = document("fedavg", [0.1, 0.5]), document("fedprox", [0.1, 0.5])
    assert [series.key for series in metric_series([plain])] == [
        "accuracy", "accuracy/mean", "accuracy/worst_tenth", "seconds",
    ]  # fmt: skip
    readings = {"weighted": 0.25, "mean": 0.0, "worst_tenth": 0.0, "std": 0.0}
    run["rounds"][1]["metrics"] = {"before": {"probe": readings, "x": readings}, "after": {"x": readings}}
    run["rounds"][1]["after"] = run["rounds"][1]["accuracy"]
    series = {series.key: series for series in metric_series([plain, run])}
    assert {"probe", "x", "x@after", "accuracy@after"} <= series.keys()
    assert "x@before" not in series, "the run's moment is the series without a moment"
    assert series["x"].read_curve(run) == [(1, 0.25)]
    assert series["x"].read_curve(plain) == []
    assert (series["x"].label, series["x"].unit) == ("x", "")
    assert (series["probe"].label, series["probe"].unit) == ("linear probe accuracy", "%")
    assert series["probe"].read_curve(run) == [(1, 25.0)]
    assert [key for key, item in series.items() if item.is_selected] == ["probe", "x", "x@after"]


def test_metric_without_a_weighted_mean_has_no_point() -> None:
    """If a client's value is nan, so is the mean, but not that of the worst clients."""
    run = document("fedavg", [0.1, 0.5])
    run["rounds"][0]["metrics"] = {"before": {"x": {"worst_tenth": 0.5}}, "after": {"x": {"std": 0.5}}}
    assert not {"x", "x@after"} & {series.key for series in metric_series([run])}


def test_metric_of_a_user_is_a_series(tmp_path: Path) -> None:
    @builtin.metric(label="mean norm", unit="units")
    def norm(z_g: Tensor) -> Value:
        return float(z_g.norm(dim=1).mean()), len(z_g)

    try:
        run = feddbe.run(
            "fedavg",
            out=str(tmp_path / "run"),
            rounds=1,
            clients=3,
            model="mlp",
            metrics="accuracy,norm",
            quiet=True,
        )
        series = {series.key: series for series in metric_series([run.document])}
        assert (series["norm"].label, series["norm"].unit) == ("mean norm", "units")
        assert [round_ for round_, _ in series["norm"].read_curve(run.document)] == [0, 1]
        assert series["norm"].is_selected
    finally:
        builtin._METRICS.pop("norm")
