"""How newcomers come in: epochs are prefixes of each other, p_i alone leaves the rest, the closed forms."""

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
from feddbe.runs import summary
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import RunStore
from feddbe.simulation.client import ClientTask, run_client
from feddbe.state import State
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.federation import are_identical, experiment, make_dataset, run_outcome

FOUR = [40, 44, 28, 36]


class Noted(nn.Linear):
    """A layer that notes each training step: a hash of what comes in and of its weights then."""

    steps: ClassVar[Counter[str]] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            seen = [t.detach().numpy().tobytes() for t in (x, self.weight)]
            self.steps[hashlib.sha256(b"".join(seen)).hexdigest()] += 1
        return super().forward(x)


def noted(shape: tuple[int, ...], classes: int) -> nn.Module:
    """With dropout, because torch's own generator must be in the same state, too."""
    return nn.Sequential(nn.Flatten(), Noted(64, 12), nn.Dropout(0.3), nn.ReLU(), nn.Linear(12, classes))


def with_model(name: str, model: Any, **options: Any) -> Experiment:
    chosen = {"partition": "natural", "rounds": 1, "lr": 0.1, **options}
    return resolve(name, Config(**chosen), dataset=make_dataset(FOUR), model=model)


def message(e: Experiment, folder: Path) -> State:
    """What the server has for the newcomer, client 3, after the rounds."""
    run_outcome(e, folder)
    store = RunStore.open(folder)
    ctx = Context(e.task, e.task.rounds + 1, store.upload if e.method.keeps_uploads else None)
    server = store.server_state()
    found = e.method.broadcast(ctx, server, 3) | {n: server[n] for n in e.method.constant if n in server}
    store.close()
    return found


def came_in(
    e: Experiment, received: State, adaptation: str = "full", epochs: int = 3
) -> tuple[ClientTrainer, State]:
    task = e.task.for_adaptation(epochs)
    local, ctx = ClientTrainer(task, 9, 3), Context(task, 9)
    private = e.method.init_new_client(ctx, received)
    return local, new_clients.adapt(adaptation, e.method, ctx, local, received, private)


@pytest.mark.parametrize("name", [*(n for n in METHODS if n != "apple"), "fedavg+dbe", "ditto+mr"])
def test_fewer_epochs_are_the_first_of_more(name: str, tmp_path: Path) -> None:
    """Every step of two epochs (its batch, and the weights that it starts from) is a step of three."""
    name = name.replace("fedgen", "fedgen(steps=2)")
    e = with_model(name, noted, new_clients=1)
    received = message(e, tmp_path)
    taken = []
    for epochs in (2, 3):
        Noted.steps.clear()
        came_in(e, received, epochs=epochs)
        taken.append(Counter(Noted.steps))
    assert taken[0] <= taken[1]
    assert taken[0] < taken[1] or name == "majority"


def test_fewer_epochs_of_p_alone_are_the_first_of_more(tmp_path: Path) -> None:
    """One epoch, and two more from where it ended, are not three: the order is another. But the first of
    three is the one, which shows in p after it: each step is of known length."""
    e = with_model("fedavg+dbe", noted, new_clients=1)
    received = message(e, tmp_path)
    ends = [came_in(e, received, "prbm", epochs)[0].extras["prbm"].value for epochs in (1, 2)]
    by_hand = _sgd(e, received, 2)
    torch.testing.assert_close(ends[0], by_hand[0])
    torch.testing.assert_close(ends[1], by_hand[1])


def _data(e: Experiment, received: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z_g and labels of the newcomer in the order of its rows, and the linear head."""
    rows = torch.from_numpy(e.task.split.train[3])
    x = e.task.dataset.inputs(e.task.dataset.x[rows])
    params = {n: received[n] for n in e.task.model.parameters}
    with torch.no_grad():
        z = e.task.model.forward(params, x).z_g
    weight, bias = (params[name] for name in e.task.model.head)
    return z, e.task.dataset.y[rows], weight, bias


def _sgd(e: Experiment, received: State, epochs: int) -> list[Tensor]:
    """p after each epoch, written out on the features: p <- p - lr mean_b W' (s_b - onehot y_b)."""
    z, y, weight, bias = _data(e, received)
    p, found, rng = torch.zeros(z.shape[1]), [], seeds.make_rng(e.task.seed, "batches", 9, 3)
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(len(z)))
        for some in torch.split(order[: len(z) // 10 * 10], 10):
            s = F.linear(z[some] + p, weight, bias).softmax(1)
            p = p - e.task.training.lr * ((s - F.one_hot(y[some], 10)) @ weight).mean(0)
        found.append(p)
    return found


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, classes)
    )


@pytest.mark.parametrize("adaptation", new_clients.ADAPTATIONS)
@pytest.mark.parametrize("name", ["fedavg+dbe", "scaffold+dbe", "moon+dbe", "fedgen(steps=2)+dbe"])
def test_p_alone_leaves_all_else_as_it_was_to_the_bit(name: str, adaptation: str, tmp_path: Path) -> None:
    e = with_model(name, normed, new_clients=1)
    received = message(e, tmp_path)
    before = {n: t.clone() for n, t in received.items()}
    local, state = came_in(e, received, adaptation)
    assert are_identical(received, before)
    model = {n: received[n] for n in e.task.model.parameters}
    assert are_identical({n: state[n] for n in model}, model)
    assert are_identical(local.buffers("shared"), e.task.model.buffers), (
        "BatchNorm's statistics are theta^0's"
    )
    assert local.extras.keys() == {"prbm"}
    assert local.extras["prbm"].value.any()
    again, _ = came_in(e, received, adaptation)
    assert torch.equal(local.extras["prbm"].value, again.extras["prbm"].value)


def objective(e: Experiment, received: State, p: Tensor) -> Tensor:
    z, y, weight, bias = (t.double() if t.is_floating_point() else t for t in _data(e, received))
    return F.cross_entropy(F.linear(z + p, weight, bias), y)


def test_newton_is_the_minimum_of_the_quadratic_and_the_ridge(tmp_path: Path) -> None:
    """g and H by autograd in double precision: 0 = g + H p + p / T, T = 0.1 x 3 epochs of 2 steps."""
    e = with_model("fedavg+dbe", noted, new_clients=1)
    received = message(e, tmp_path)
    zero = torch.zeros(12, dtype=torch.float64)
    loss = lambda p: objective(e, received, p)  # noqa: E731
    gradient = torch.autograd.functional.jacobian(loss, zero)  # type: ignore[no-untyped-call]
    hessian = torch.autograd.functional.hessian(loss, zero)  # type: ignore[no-untyped-call]
    p = came_in(e, received, "newton")[0].extras["prbm"].value.double()
    torch.testing.assert_close(gradient + hessian @ p + p / (0.1 * 3 * 2), zero, rtol=0, atol=1e-6)
    assert float(objective(e, received, p)) < float(objective(e, received, zero))


def test_newton_at_both_ends(tmp_path: Path) -> None:
    """A rate near 0 is one step of gradient descent of that length, and a rate of 0 is none."""
    e = with_model("fedavg+dbe(prbm_lr=1e-6)", noted, new_clients=1)
    received = message(e, tmp_path)
    at = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(objective(e, received, at), at)
    p = came_in(e, received, "newton")[0].extras["prbm"].value.double()
    torch.testing.assert_close(p, -6e-6 * gradient, rtol=1e-4, atol=1e-12)
    still = with_model("fedavg+dbe(prbm_lr=0)", noted, new_clients=1)
    assert not came_in(still, received, "newton")[0].extras["prbm"].value.any()


def test_newton_with_a_head_that_bends_has_the_gauss_newton_matrix(tmp_path: Path) -> None:
    """h = linear, ReLU, linear, small enough to write J_j down: W2 diag(W1 z_j + b1 > 0) W1."""
    e = experiment("fedavg+dbe", make_dataset(FOUR), new_clients=1, cut="fc1.0")
    received = message(e, tmp_path)
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
    p = came_in(e, received, "newton")[0].extras["prbm"].value.double()
    torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adaptation", ["full", *new_clients.ADAPTATIONS])
def test_accuracy_after_each_epoch_is_that_of_so_many(adaptation: str, tmp_path: Path) -> None:
    e = experiment("fedavg+dbe", make_dataset(FOUR), new_clients=1, adapt_epochs=4, adaptation=adaptation)
    server = run_outcome(e, tmp_path).server
    store = RunStore.open(tmp_path)
    found, rows = summary.read_new_clients(store), store.records(2)
    store.close()
    assert found
    assert (found["adaptation"], found["epochs"], len(found["by_epoch"])) == (adaptation, 4, 4)
    assert found["by_epoch"][-1] == found["adapted"]
    assert {f"newcomers adapted {n}" for n in (1, 2, 3)} <= {r.moment for r in rows if r.client == 3}
    for epochs, accuracy in enumerate(found["by_epoch"], 1):
        job = ClientTask(3, 3, evaluate=True, adapt_epochs=epochs, is_new_client=True, adaptation=adaptation)
        reply = run_client(e.task, e.method, job, server, None)
        assert accuracy["weighted"] == float(reply.metrics["adapted"]["accuracy"][0])


def test_ways_are_those_of_the_option() -> None:
    field = next(f for f in dataclasses.fields(Config) if f.name == "adaptation")
    assert field.metadata["choices"] == ("full", *new_clients.ADAPTATIONS)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
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


@pytest.mark.parametrize(("name", "options", "line"), REFUSED)
def test_refusals(name: str, options: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(line)):
        experiment(name, make_dataset(FOUR), **{"new_clients": 1, **options})


def test_another_way_in_is_another_run() -> None:
    hashes = {
        experiment("fedavg+dbe", make_dataset(FOUR), new_clients=1, adaptation=way).config_hash
        for way in ("full", "prbm")
    }
    assert len(hashes) == 2
