"""Adaptation of new clients: prefixes of epochs, adaptation of p_i alone, and closed forms."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe import seeds
from feddbe.config.options import Config
from feddbe.errors import InvalidInputError
from feddbe.methods import new_clients
from feddbe.methods.registry import METHODS
from feddbe.runs.build_document import read_new_clients
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import RunStore
from feddbe.simulation.client import ClientTask, run_client
from feddbe.state import State
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import are_identical, experiment, make_dataset, run_outcome

SIZES = [40, 44, 28, 36]


class RecordingLinear(nn.Linear):
    """Layer that records each training step: a hash of its input and its weights."""

    steps: ClassVar[Counter[str]] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            values = [t.detach().numpy().tobytes() for t in (x, self.weight)]
            self.steps[hashlib.sha256(b"".join(values)).hexdigest()] += 1
        return super().forward(x)


def build_recording_model(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model with dropout, because torch's generator must also be in the same state."""
    return nn.Sequential(
        nn.Flatten(), RecordingLinear(64, 12), nn.Dropout(0.3), nn.ReLU(), nn.Linear(12, classes)
    )


def resolve_with_model(name: str, model: Any, **options: Any) -> Experiment:
    settings = {"partition": "natural", "rounds": 1, "lr": 0.1, **options}
    return resolve(name, Config(**settings), dataset=make_dataset(SIZES), model=model)


def receive_message(e: Experiment, folder: Path) -> State:
    """Return the server's message to the new client, client 3, after the rounds."""
    run_outcome(e, folder)
    store = RunStore.open(folder)
    ctx = Context(e.task, e.task.rounds + 1, store.upload if e.method.keeps_uploads else None)
    server = store.server_state()
    received = e.method.broadcast(ctx, server, 3) | {n: server[n] for n in e.method.constant if n in server}
    store.close()
    return received


def adapt_new_client(
    e: Experiment, received: State, adaptation: str = "full", epochs: int = 3
) -> tuple[ClientTrainer, State]:
    task = e.task.for_adaptation(epochs)
    trainer, ctx = ClientTrainer(task, 9, 3), Context(task, 9)
    private = e.method.init_new_client(ctx, received)
    return trainer, new_clients.adapt(adaptation, e.method, ctx, trainer, received, private)


@pytest.mark.parametrize("name", [*(n for n in METHODS if n != "apple"), "fedavg+dbe", "ditto+mr"])
def test_fewer_epochs_are_a_prefix_of_more_epochs(name: str, tmp_path: Path) -> None:
    """Every step of two epochs (its batch, and the weights that it starts from) is a step of three."""
    name = name.replace("fedgen", "fedgen(steps=2)")
    e = resolve_with_model(name, build_recording_model, new_clients=1)
    received = receive_message(e, tmp_path)
    steps_by_epochs = []
    for epochs in (2, 3):
        RecordingLinear.steps.clear()
        adapt_new_client(e, received, epochs=epochs)
        steps_by_epochs.append(Counter(RecordingLinear.steps))
    assert steps_by_epochs[0] <= steps_by_epochs[1]
    assert steps_by_epochs[0] < steps_by_epochs[1] or name == "majority"


def test_prbm_adaptation_matches_sgd_written_out(tmp_path: Path) -> None:
    """p after one epoch, and after two, equals p after the same epochs of SGD written out."""
    e = resolve_with_model("fedavg+dbe", build_recording_model, new_clients=1)
    received = receive_message(e, tmp_path)
    ends = [adapt_new_client(e, received, "prbm", epochs)[0].extras["prbm"].value for epochs in (1, 2)]
    by_hand = _sgd(e, received, 2)
    torch.testing.assert_close(ends[0], by_hand[0])
    torch.testing.assert_close(ends[1], by_hand[1])


def _data(e: Experiment, received: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return z_g and labels of the new client in the order of its samples, and the linear head."""
    indices = torch.from_numpy(e.task.split.train[3])
    x = e.task.dataset.inputs(e.task.dataset.x[indices])
    params = {n: received[n] for n in e.task.model.parameters}
    with torch.no_grad():
        z = e.task.model.forward(params, x).z_g
    weight, bias = (params[name] for name in e.task.model.head)
    return z, e.task.dataset.y[indices], weight, bias


def _sgd(e: Experiment, received: State, epochs: int) -> list[Tensor]:
    """Return p after each epoch, from the features: p <- p - lr mean_b W' (s_b - onehot y_b)."""
    z, y, weight, bias = _data(e, received)
    p, results, rng = torch.zeros(z.shape[1]), [], seeds.make_rng(e.task.seed, "batches", 9, 3)
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(len(z)))
        for batch in torch.split(order[: len(z) // 10 * 10], 10):
            s = F.linear(z[batch] + p, weight, bias).softmax(1)
            p = p - e.task.training.lr * ((s - F.one_hot(y[batch], 10)) @ weight).mean(0)
        results.append(p)
    return results


def build_batch_norm_model(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, classes)
    )


@pytest.mark.parametrize("adaptation", new_clients.ADAPTATIONS)
@pytest.mark.parametrize("name", ["fedavg+dbe", "scaffold+dbe", "moon+dbe", "fedgen(steps=2)+dbe"])
def test_prbm_adaptation_changes_only_prbm(name: str, adaptation: str, tmp_path: Path) -> None:
    e = resolve_with_model(name, build_batch_norm_model, new_clients=1)
    received = receive_message(e, tmp_path)
    before = {n: t.clone() for n, t in received.items()}
    trainer, state = adapt_new_client(e, received, adaptation)
    assert are_identical(received, before)
    model = {n: received[n] for n in e.task.model.parameters}
    assert are_identical({n: state[n] for n in model}, model)
    assert are_identical(trainer.buffers("shared"), e.task.model.buffers), (
        "BatchNorm's statistics are theta^0's"
    )
    assert trainer.extras.keys() == {"prbm"}
    assert trainer.extras["prbm"].value.any()
    repeated, _ = adapt_new_client(e, received, adaptation)
    assert torch.equal(trainer.extras["prbm"].value, repeated.extras["prbm"].value)


def objective(e: Experiment, received: State, p: Tensor) -> Tensor:
    z, y, weight, bias = (t.double() if t.is_floating_point() else t for t in _data(e, received))
    return F.cross_entropy(F.linear(z + p, weight, bias), y)


def test_newton_minimizes_the_regularized_quadratic(tmp_path: Path) -> None:
    """g and H by autograd in double precision: 0 = g + H p + p / T, T = 0.1 x 3 epochs of 2 steps."""
    e = resolve_with_model("fedavg+dbe", build_recording_model, new_clients=1)
    received = receive_message(e, tmp_path)
    zero = torch.zeros(12, dtype=torch.float64)
    loss = lambda p: objective(e, received, p)  # noqa: E731
    gradient = torch.autograd.functional.jacobian(loss, zero)  # type: ignore[no-untyped-call]
    hessian = torch.autograd.functional.hessian(loss, zero)  # type: ignore[no-untyped-call]
    p = adapt_new_client(e, received, "newton")[0].extras["prbm"].value.double()
    torch.testing.assert_close(gradient + hessian @ p + p / (0.1 * 3 * 2), zero, rtol=0, atol=1e-6)
    assert float(objective(e, received, p)) < float(objective(e, received, zero))


def test_newton_with_small_and_zero_rate(tmp_path: Path) -> None:
    """A rate near 0 is one step of gradient descent of that length, and a rate of 0 is none."""
    e = resolve_with_model("fedavg+dbe(prbm_lr=1e-6)", build_recording_model, new_clients=1)
    received = receive_message(e, tmp_path)
    zero = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(objective(e, received, zero), zero)
    p = adapt_new_client(e, received, "newton")[0].extras["prbm"].value.double()
    torch.testing.assert_close(p, -6e-6 * gradient, rtol=1e-4, atol=1e-12)
    zero_rate = resolve_with_model("fedavg+dbe(prbm_lr=0)", build_recording_model, new_clients=1)
    assert not adapt_new_client(zero_rate, received, "newton")[0].extras["prbm"].value.any()


def test_newton_with_nonlinear_head_uses_the_gauss_newton_matrix(tmp_path: Path) -> None:
    """h = linear, ReLU, linear, small enough to write J_j down: W2 diag(W1 z_j + b1 > 0) W1."""
    e = experiment("fedavg+dbe", make_dataset(SIZES), new_clients=1, cut="fc1.0")
    received = receive_message(e, tmp_path)
    x = e.task.dataset.inputs(e.task.dataset.x[torch.from_numpy(e.task.split.train[3])]).flatten(1).double()
    y = e.task.dataset.y[torch.from_numpy(e.task.split.train[3])]
    w1, b1, w2, b2 = (received[n].double() for n in e.task.model.head)
    assert (len(e.task.model.head), e.task.model.feature_shape) == (4, (64,))
    hidden = F.linear(x, w1, b1)
    s = F.linear(hidden.relu(), w2, b2).softmax(1)
    jacobian = torch.einsum("ch,jh,hk->jck", w2, (hidden > 0).double(), w1)
    g = torch.einsum("jck,jc->k", jacobian, s - F.one_hot(y, 10)) / len(x)
    middle = torch.diag_embed(s) - s[:, :, None] * s[:, None, :]
    h = torch.einsum("jck,jcd,jdl->kl", jacobian, middle, jacobian) / len(x)
    expected = -torch.linalg.solve(h + torch.eye(64) / (0.1 * 3 * 2), g)
    p = adapt_new_client(e, received, "newton")[0].extras["prbm"].value.double()
    torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adaptation", ["full", *new_clients.ADAPTATIONS])
def test_accuracy_after_each_epoch_equals_adaptation_for_as_many_epochs(
    adaptation: str, tmp_path: Path
) -> None:
    e = experiment("fedavg+dbe", make_dataset(SIZES), new_clients=1, adapt_epochs=4, adaptation=adaptation)
    server = run_outcome(e, tmp_path).server
    store = RunStore.open(tmp_path)
    result, records = read_new_clients(store), store.records(2)
    store.close()
    assert result
    assert (result["adaptation"], result["epochs"], len(result["by_epoch"])) == (adaptation, 4, 4)
    assert result["by_epoch"][-1] == result["adapted"]
    assert {f"newcomers adapted {n}" for n in (1, 2, 3)} <= {r.moment for r in records if r.client == 3}
    for epochs, accuracy in enumerate(result["by_epoch"], 1):
        task = ClientTask(3, 3, evaluate=True, adapt_epochs=epochs, is_new_client=True, adaptation=adaptation)
        client_result = run_client(e.task, e.method, task, server, None)
        assert accuracy["weighted"] == float(client_result.metrics["adapted"]["accuracy"][0])


def test_adaptations_are_the_choices_of_the_option() -> None:
    field = next(f for f in dataclasses.fields(Config) if f.name == "adaptation")
    assert field.metadata["choices"] == ("full", *new_clients.ADAPTATIONS)


INVALID_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    (
        "fedavg",
        {"adaptation": "prbm"},
        "adaptation = prbm; not for fedavg: it has no p_i, as +prbm and +dbe have",
    ),
    ("fedavg+mr", {"adaptation": "prbm"}, "adaptation = prbm; not for fedavg+mr: it has no p_i"),
    (
        "fedavg+dbe",
        {"adaptation": "newton", "new_clients": 0},
        "adaptation = newton; there are no new clients to adapt",
    ),
    ("fedavg+dbe", {"adaptation": "newtn"}, "unknown adaptation 'newtn'; did you mean 'newton'"),
]


@pytest.mark.parametrize(("name", "options", "line"), INVALID_OPTIONS)
def test_invalid_adaptation_raises_error(name: str, options: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(line)):
        experiment(name, make_dataset(SIZES), **{"new_clients": 1, **options})


def test_adaptation_identifies_a_run() -> None:
    hashes = {
        experiment("fedavg+dbe", make_dataset(SIZES), new_clients=1, adaptation=adaptation).config_hash
        for adaptation in ("full", "prbm")
    }
    assert len(hashes) == 2
