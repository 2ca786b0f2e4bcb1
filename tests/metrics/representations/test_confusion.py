"""Confusion matrix and recall: against scikit-learn, and of a finished run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, recall_score

import feddbe
from feddbe.cli.main import main
from feddbe.metrics.representations import make_points
from feddbe.metrics.representations.confusion import matrix_from_values
from feddbe.metrics.representations.registry import compute_analysis


@given(st.integers(0, 2**32 - 1), st.integers(1, 50), st.integers(2, 5))
def test_it_is_scikit_learns(seed: int, n: int, classes: int) -> None:
    """Of all samples, and of each client's."""
    rng = np.random.RandomState(seed)
    y, clients = rng.randint(0, classes, n), rng.randint(0, 3, n)
    points = make_points(rng.randn(n, classes), y, clients)
    predicted = points.x.argmax(1)
    result = compute_analysis("confusion", points, classes, {})
    for client, values in {-1: result.overall, **result.clients}.items():
        is_part = (clients == client) | (client == -1)
        part = y[is_part], predicted[is_part]
        expected = confusion_matrix(*part, labels=range(classes))
        np.testing.assert_array_equal(matrix_from_values(values, classes), expected)
        recalls = dict(
            zip(np.unique(part[0]), recall_score(*part, average=None, labels=np.unique(part[0])), strict=True)
        )
        stored = {key: value for key, value in values.items() if key.startswith("recall:")}
        assert stored == pytest.approx({f"recall:{label}": recall for label, recall in recalls.items()})
        assert values[""] == pytest.approx(np.mean(part[0] == part[1]))


def test_of_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All test samples count, at the logits, even if other analyses have fewer and another layer."""
    monkeypatch.chdir(tmp_path)
    run = feddbe.run(
        "fedper", data="digits", clients=4, partition="iid", model="mlp", rounds=2, out="run", quiet=True
    )
    (analyzed,) = feddbe.analyze(
        "run", analyses="confusion,probe", round="last", moment="before", samples=100, quiet=True
    )
    confusion, probe = analyzed["analyses"]
    samples = {str(client["client"]): client["samples"] for client in run.clients()}
    assert (confusion["layer"], confusion["samples"]) == ("logits", sum(samples.values()))
    assert (probe["layer"], probe["samples"]) == ("z_g", 100)
    assert confusion["overall"]["value"] == pytest.approx(run["last"]["accuracy"]["weighted"], abs=0)
    for client in run.clients():
        values = confusion["clients"][str(client["client"])]
        assert values["value"] == client["last"]
        assert matrix_from_values(values, 10).sum() == client["samples"]

    assert main(["analyze", "run", "--analyses", "confusion", "--round", "last", "--moment", "before"]) == 0
    output = capsys.readouterr().out
    recall = 100 * confusion["overall"]["recall:7"]
    assert f"logits recall 7 {recall:.2f}" in " ".join(output.split())
    assert Path("run/confusion.png").stat().st_size > 10_000
    report = feddbe.report([Path("run")], Path("report.html")).read_text(encoding="utf-8")
    assert "recall of each class" in report
