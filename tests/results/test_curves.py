"""Curves of metrics: which ones runs have, which point is marked, and the band over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import feddbe
from feddbe.metrics import builtin
from feddbe.metrics.records import Value
from feddbe.results.curves import band_edges, describe_band, mean_curves, metric_series
from feddbe.results.statistics import mean_interval
from tests.documents import document


def test_marked_point_is_the_best_round() -> None:
    """It is selected on validation data, if there is some; for several seeds it is that of the mean."""
    run = document("fedavg", [0.1, 0.8, 0.7, 0.6])
    assert mean_curves([run])[0].best == (1, 80.0)
    result = run["rounds"][2]
    result["validation"] = result["accuracy"]
    run["best"] = result
    assert mean_curves([run])[0].best == (2, 70.0)
    other = document("fedavg", [0.1, 0.8, 0.7, 0.6], seed=1)
    assert mean_curves([run, other])[0].best == (1, 80.0)


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
    assert band_edges([1.0, 1.0, 1.0]) == (1, 1)


def test_meaning_of_the_band_follows_from_the_seeds() -> None:
    assert describe_band([1, 1]) == ""
    assert "two seeds" in describe_band([2, 1])
    assert "95 %" in describe_band([3, 5])
    assert "two" not in describe_band([3, 5])
    assert all(word in describe_band([2, 3]) for word in ("95 %", "two seeds"))


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
