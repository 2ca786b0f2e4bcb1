"""The accuracy of each client's model on the test data of all clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import feddbe
from feddbe.metrics.client_values import ALL
from feddbe.runs.reopen import Checkpoint, load_experiment
from feddbe.runs.store import RunStore

SMALL: dict[str, Any] = {
    "data": "digits", "clients": 4, "partition": "dirichlet:0.5", "rounds": 2, "engine": "serial",
    "quiet": True,
}  # fmt: skip


@pytest.mark.parametrize("method", ["fedavg", "fedavg+dbe", "fedper", "ditto", "fedrod"])
def test_it_is_the_accuracy_of_each_clients_model(method: str, tmp_path: Path) -> None:
    """The models of the last round predict all test samples, one client after the other."""
    run = feddbe.run(method, model="mlp", metrics="global_accuracy", out=str(tmp_path / "run"), **SMALL)
    store = RunStore.open(tmp_path / "run")
    experiment = load_experiment(store)
    checkpoint = Checkpoint(store, experiment, "last")
    expected = {}
    for client in range(4):
        trainer, state = checkpoint.inference_model(client)
        trainer.rows["test"] = experiment.task.split.test.flat

        def predict(params: Any, x: Tensor, trainer: Any = trainer) -> Tensor:
            return experiment.method.logits(trainer, params, x)

        logits, y = trainer.predict(state, predict, track=experiment.method.inference_track)
        expected[client] = float((logits.argmax(1) == y).double().mean())
    records = [r for r in store.records(2) if (r.moment, r.name) == ("before", "global_accuracy")]
    store.close()
    assert {r.client: r.value for r in records if r.client != ALL and "/" not in r.name} == expected
    statistics = run["last"]["metrics"]["before"]["global_accuracy"]
    if method == "fedavg":  # one model: its accuracy on all test data is the weighted accuracy
        assert statistics["weighted"] == run["last"]["before"]["weighted"]
        assert len(set(expected.values())) == 1
    else:  # a personal model is worse on the data of the others
        assert statistics["weighted"] < run["last"]["before"]["weighted"]
        assert len(set(expected.values())) > 1


class CountSamples(nn.Module):
    """A layer that returns its input and counts the samples of predictions."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            CountSamples.count += len(x)
        return x


@pytest.mark.parametrize(("method", "passes"), [("fedavg", 1), ("fedper", 4)])
def test_clients_with_the_same_model_share_one_pass(method: str, passes: int, tmp_path: Path) -> None:
    """Two evaluations predict every test sample once, and once for each pass over all of them.

    All clients have the same initial model, so the first evaluation needs one pass.
    """
    layers = [CountSamples(), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)]
    options = SMALL | {"rounds": 1, "eval_after": False, "out": str(tmp_path / "run")}
    CountSamples.count = 0
    run = feddbe.run(method, model=nn.Sequential(*layers), metrics="global_accuracy", **options)
    samples = sum(client["samples"] for client in run.clients())
    assert CountSamples.count == samples * (2 + 1 + passes)


def test_new_clients_and_validation_data_are_not_part_of_it(tmp_path: Path) -> None:
    run = feddbe.run(
        "fedavg", model="mlp", metrics="global_accuracy", validation=0.2, new_clients=1,
        adapt_epochs=1, out=str(tmp_path / "run"), **SMALL,
    )  # fmt: skip
    metrics = run["last"]["metrics"]
    assert "global_accuracy" not in metrics.get("validation", {})
    assert metrics["before"]["global_accuracy"]["weighted"] == run["last"]["before"]["weighted"]
