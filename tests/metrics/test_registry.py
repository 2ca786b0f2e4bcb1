"""Measures by name: a new one is one function, and nothing else knows of it."""

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
from feddbe.metrics.records import ALL, Value
from feddbe.models.split_model import SplitModel
from feddbe.runs.store import RunStore
from feddbe.simulation.client import ClientTask, run_client
from tests.federation import experiment, make_dataset


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two measures that were not there before: of a pass, and of the training."""
    monkeypatch.setattr(builtin, "_MEASURES", dict(metrics.registered_metrics()))

    @metrics.metric
    def norm(z_g: Tensor) -> Value:
        return float(z_g.norm(dim=1).mean()), len(z_g)

    @metrics.metric
    def per_sample(loss_sum: float, samples: int) -> Value | None:
        return (loss_sum / samples, samples) if samples else None


def test_the_files_of_the_folder_are_found() -> None:
    assert metrics.registered_metrics().keys() == {"accuracy", "auc", "loss", "drift", "probe"}
    assert metrics.required_inputs(["accuracy", "auc", "loss"]) == {"logits", "y"}


def test_names() -> None:
    assert metrics.parse_metrics("loss, auc") == ("accuracy", "loss", "auc")
    assert metrics.parse_metrics("") == metrics.parse_metrics("accuracy") == ("accuracy",)
    with pytest.raises(
        InvalidInputError,
        match=r"^unknown measure 'los'; did you mean 'loss'\? allowed: accuracy, auc, drift, ",
    ):
        metrics.parse_metrics("accuracy,los")


def test_an_unknown_name_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="unknown measure 'norm'"):
        feddbe.run("fedavg", metrics="norm", out=str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_given_is_refused() -> None:
    def both(y: Tensor, seconds: float) -> Value:
        return seconds, len(y)

    with pytest.raises(TypeError, match="both asks for"):
        metrics.metric(both)
    assert "both" not in metrics.registered_metrics()


@pytest.mark.usefixtures("new")
@pytest.mark.parametrize("engine", ["serial", "pool(workers=2)"])
def test_a_new_measure_is_in_the_run_and_in_show(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"data": make_dataset(), "model": "mlp", "partition": "natural", "lr": 0.1}
    folder = str(tmp_path / "run")
    feddbe.run("fedavg+dbe", **options, rounds=1, metrics="norm,per_sample", engine=engine, out=folder)
    e = experiment("fedavg+dbe", rounds=1)
    wanted = {}
    for client, rows in enumerate(e.task.split.test):
        x = e.task.dataset.inputs(e.task.dataset.x[torch.from_numpy(rows)])
        out = e.task.model.forward(e.task.model.parameters, x)
        wanted[client] = float(out.z_g.norm(dim=1).mean())

    store = RunStore.open(tmp_path / "run")
    found = {r.client: r.value for r in store.records(0) if (r.moment, r.name) == ("before", "norm")}
    trained = [r for r in store.records(1) if (r.client, r.moment) == (ALL, "training")]
    store.close()
    overall = found.pop(ALL)
    assert found == pytest.approx(wanted)
    assert overall == pytest.approx((15 * wanted[0] + 11 * wanted[1] + 7 * wanted[2]) / 33)

    assert main(["show", folder, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["rounds"]
    assert first["metrics"]["before"]["norm"]["weighted"] == overall
    assert first["metrics"]["before"]["norm"]["mean"] == pytest.approx(sum(wanted.values()) / 3)
    assert first["auc"] is None  # it was not chosen
    assert first["accuracy"]  # it always is
    per_sample = next(row.value for row in trained if row.name == "per_sample")
    assert second["metrics"]["training"]["per_sample"]["weighted"] == per_sample
    assert per_sample == pytest.approx(second["train_loss"])


@pytest.mark.usefixtures("new")
def test_representations_are_computed_only_if_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    e, calls = experiment("fedavg", trainer="autograd"), []

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls.append(1)
            return function(*arguments)

        return call

    for name in ("forward", "at"):
        monkeypatch.setattr(SplitModel, name, counted(getattr(SplitModel, name)))
    for names, passes in ((("accuracy", "auc", "loss"), 1), (("accuracy", "norm"), 2)):
        calls.clear()
        job = ClientTask(0, 1, evaluate=True, metrics=names)
        run_client(e.task, e.method, job, e.task.model.parameters, None)
        assert len(calls) == passes
