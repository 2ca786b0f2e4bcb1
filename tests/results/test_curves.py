"""Curves of metrics: which ones runs have, which point is marked, and the band over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import feddbe
from feddbe.metrics import builtin as registry
from feddbe.metrics.records import Value
from feddbe.results.curves import band_edges, band_meaning, mean_curves, metric_series
from feddbe.results.statistics import mean_interval
from tests.documents import document


def test_marked_point_is_the_best_round() -> None:
    """It is chosen on validation data, if there is some, whatever the test accuracies are; of several seeds
    the mean's."""
    run = document("fedavg", [0.1, 0.8, 0.7, 0.6])
    assert mean_curves([run])[0].best == (1, 80.0)
    entry = run["rounds"][2]
    entry["validation"] = entry["accuracy"]
    run["best"] = entry
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
    assert triple.high[1] - triple.mean[1] == pytest.approx(expected.half)
    assert band_edges([1.0, 1.0, 1.0]) == (1, 1)


def test_meaning_of_the_band_follows_from_the_seeds() -> None:
    assert band_meaning([1, 1]) == ""
    assert "two seeds" in band_meaning([2, 1])
    assert "95 %" in band_meaning([3, 5])
    assert "two" not in band_meaning([3, 5])
    assert all(word in band_meaning([2, 3]) for word in ("95 %", "two seeds"))


def test_metric_series_has_what_any_run_has() -> None:
    run, plain = document("fedavg", [0.1, 0.5]), document("fedprox", [0.1, 0.5])
    assert [series.key for series in metric_series([plain])] == [
        "accuracy", "accuracy/mean", "accuracy/worst_tenth", "seconds",
    ]  # fmt: skip
    readings = {"weighted": 0.25, "mean": 0.0, "worst_tenth": 0.0, "std": 0.0}
    run["rounds"][1]["metrics"] = {"before": {"probe": readings, "x": readings}, "after": {"x": readings}}
    run["rounds"][1]["after"] = run["rounds"][1]["accuracy"]
    series = {series.key: series for series in metric_series([plain, run])}
    assert {"probe", "x", "x@after", "accuracy@after"} <= series.keys()
    assert "x@before" not in series, "the moment that counts is in the series without a moment"
    assert series["x"].points(run) == [(1, 0.25)]
    assert series["x"].points(plain) == []
    assert (series["x"].label, series["x"].unit) == ("x", "")
    assert (series["probe"].label, series["probe"].unit) == ("linear probe accuracy", "%")
    assert series["probe"].points(run) == [(1, 25.0)]
    assert [key for key, one in series.items() if one.is_selected] == ["probe", "x", "x@after"]


def test_metric_of_a_user_is_a_series(tmp_path: Path) -> None:
    @registry.metric(label="mean norm", unit="units")
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
        assert [round_ for round_, _ in series["norm"].points(run.document)] == [0, 1]
        assert series["norm"].is_selected
    finally:
        registry._METRICS.pop("norm")
        registry._DESCRIPTIONS.pop("norm")
