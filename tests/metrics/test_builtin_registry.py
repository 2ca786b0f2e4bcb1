"""Registered metrics: a new one is a single function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import feddbe
from feddbe import metrics
from feddbe.cli.main import main
from feddbe.errors import InvalidInputError
from feddbe.metrics import builtin
from feddbe.metrics.client_values import ALL, Value
from feddbe.models.split_model import SplitModel
from feddbe.runs.store import RunStore
from feddbe.simulation.client import ClientTask, run_client
from tests.small_runs import experiment, make_dataset


@pytest.fixture
def new_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register two new metrics: of evaluation, and of training."""
    monkeypatch.setattr(builtin, "_METRICS", dict(builtin._METRICS))

    @metrics.metric
    def norm(z_g: Tensor) -> Value:
        return float(z_g.norm(dim=1).mean()), len(z_g)

    @metrics.metric
    def per_sample(loss_sum: float, samples: int) -> Value | None:
        return (loss_sum / samples, samples) if samples else None


def test_builtin_metrics_are_registered() -> None:
    assert builtin._METRICS.keys() == {
        "accuracy", "auc", "macro_f1", "balanced_accuracy", "ece", "global_accuracy",
        "loss", "drift", "probe",
    }  # fmt: skip
    assert metrics.required_inputs(["accuracy", "auc", "loss"]) == {"logits", "y"}


def test_parsed_metrics_always_include_accuracy() -> None:
    assert metrics.parse_metrics("loss, auc") == ("accuracy", "loss", "auc")
    assert metrics.parse_metrics("") == metrics.parse_metrics("accuracy") == ("accuracy",)
    with pytest.raises(
        InvalidInputError,
        match=r"^unknown metric 'los'; did you mean 'loss'\? allowed: accuracy, auc, balanced_accuracy, ",
    ):
        metrics.parse_metrics("accuracy,los")


def test_unknown_metric_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="unknown metric 'norm'"):
        feddbe.run("fedavg", metrics="norm", out=str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_unsupported_parameters_are_rejected() -> None:
    def both(y: Tensor, seconds: float) -> Value:
        return seconds, len(y)

    with pytest.raises(TypeError, match="metric both has unsupported parameters"):
        metrics.metric(both)
    assert "both" not in builtin._METRICS


@pytest.mark.usefixtures("new_metrics")
@pytest.mark.parametrize("engine", ["serial", "pool(workers=2)"])
def test_new_metric_is_in_the_run_and_in_show(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"data": make_dataset(), "model": "mlp", "partition": "natural", "lr": 0.1}
    folder = str(tmp_path / "run")
    feddbe.run("fedavg+dbe", **options, rounds=1, metrics="norm,per_sample", engine=engine, out=folder)
    experiment_ = experiment("fedavg+dbe", rounds=1)
    expected = {}
    for client, rows in enumerate(experiment_.task.split.test):
        x = experiment_.task.dataset.inputs(experiment_.task.dataset.x[torch.from_numpy(rows)])
        out = experiment_.task.model.forward(experiment_.task.model.parameters, x)
        expected[client] = float(out.z_g.norm(dim=1).mean())

    store = RunStore.open(tmp_path / "run")
    values = {
        record.client: record.value
        for record in store.records(0)
        if (record.moment, record.name) == ("before", "norm")
    }
    trained = [record for record in store.records(1) if (record.client, record.moment) == (ALL, "training")]
    store.close()
    overall = values.pop(ALL)
    assert values == pytest.approx(expected)
    assert overall == pytest.approx((15 * expected[0] + 11 * expected[1] + 7 * expected[2]) / 33)

    assert main(["show", folder, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["rounds"]
    assert first["metrics"]["before"]["norm"]["weighted"] == overall
    assert first["metrics"]["before"]["norm"]["mean"] == pytest.approx(sum(expected.values()) / 3)
    assert first["auc"] is None  # not selected
    assert first["accuracy"]  # always computed
    per_sample = next(record.value for record in trained if record.name == "per_sample")
    assert second["metrics"]["training"]["per_sample"]["weighted"] == per_sample
    assert per_sample == pytest.approx(second["train_loss"])


@pytest.mark.usefixtures("new_metrics")
def test_representations_are_computed_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment_, calls = experiment("fedavg", trainer="autograd"), []

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls.append(1)
            return function(*arguments)

        return call

    for name in ("forward", "activations"):
        monkeypatch.setattr(SplitModel, name, counted(getattr(SplitModel, name)))
    for names, passes in ((("accuracy", "auc", "loss"), 1), (("accuracy", "norm"), 2)):
        calls.clear()
        client_task = ClientTask(0, 1, evaluate=True, metrics=names)
        run_client(experiment_.task, experiment_.method, client_task, experiment_.task.model.parameters, None)
        assert len(calls) == passes
