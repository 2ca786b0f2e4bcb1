"""FedGen, FedFomo and APPLE against their plain loops, and at the edge of their hyper-parameters."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.data.split import RaggedArray
from feddbe.methods.registry import parse_method
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import RunStore
from feddbe.simulation.client import BUFFER
from feddbe.state import State, add_prefix, drop_keys, strip_prefix
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.federation import are_identical, experiment, run_outcome
from tests.methods.test_oracles import EXCHANGING, SETTINGS, Compared, close, combinations, compared, joined
from tests.oracles import fedgen_fedfomo_apple as oracle

USUAL = (60, 44, 28)
FEW = (13, 9, 6)
"""Samples so few that a batch is short, and that labels are missing."""
MANY = (28, 20, 24, 16, 32, 12)
"""Clients so many that FedFomo has to choose whom it sends."""
FEDGEN = [
    ("fedgen(steps=10)", "plain", USUAL),
    ("fedgen(steps=5)+dbe", "plain", FEW),
    ("fedgen(steps=5,lite=true)", "plain", FEW),
    *((name.replace("fedgen", "fedgen(steps=5)"), "plain", USUAL) for name in combinations(["fedgen"])[1:]),
    ("fedgen(steps=5,level=z_g)+prbm", "plain", USUAL),
    ("fedgen(level=z_g)+dbe", "local", ()),
    *((name, how, ()) for name in combinations(["fedgen"]) for how in SETTINGS[1:]),
]
FEDFOMO = [
    *((name, "plain", sizes) for name in combinations(["fedfomo"]) for sizes in (USUAL, FEW, MANY)),
    ("fedfomo(m=2)", "plain", MANY),
    ("fedfomo(m=3,epsilon=1,epsilon_decay=0.2)", "plain", MANY),
    *((name, how, ()) for name in combinations(["fedfomo"]) for how in SETTINGS[1:]),
]
APPLE = [
    ("apple", "plain", USUAL),
    ("apple(rounds_l=2,eta2=0.05,mu=1)", "plain", FEW),
    *(("apple", how, ()) for how in SETTINGS[1:]),
]


def test_no_method_is_left_out() -> None:
    assert {name for name, _, _ in (*FEDGEN, *FEDFOMO, *APPLE)} >= {*combinations(EXCHANGING)}


def uploads(e: Experiment, folder: Path, clients: list[int]) -> dict[int, State]:
    """What the server keeps of these clients."""
    store = RunStore.open(folder)
    try:
        return {
            c: {n: t for n, t in store.upload(c).items() if n in e.task.model.parameters} for c in clients
        }
    finally:
        store.close()


def server(found: Compared) -> State:
    """What the server has apart from statistics and MR's."""
    return drop_keys(found.ran.server, ["mean", "mr/", BUFFER])


@pytest.mark.parametrize(("name", "how", "sizes"), FEDGEN)
def test_fedgen_against_the_plain_loop(name: str, how: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Model, generator, its statistics and Adam's state; and PRBM's vectors."""
    found = compared(name, how, oracle.fedgen, tmp_path, sizes)
    plain, wanted = found.plain, found.wanted
    learnt = ["in.weight", "norm.weight", "norm.bias", "out.weight", "out.bias"]
    g = [*learnt, "norm.running_mean", "norm.running_var"]
    g += [f"adam/{moment}/{n}" for moment in ("exp_avg", "exp_avg_sq") for n in learnt]
    names = [*found.e.task.model.parameters, *(f"generator/{n}" for n in g)]
    expected = dict(zip(names, wanted.server[:-1], strict=True))
    expected |= {f"generator/adam/step/{n}": wanted.server[-1] for n in learnt}
    labels = [plain.y[torch.from_numpy(rows)].bincount(minlength=10) for rows in plain.train]
    expected["labels/counts"] = torch.stack(labels).double()
    expected["labels/prior"] = expected["labels/counts"].sum(0) / sum(len(rows) for rows in plain.train)
    close(server(found), expected, found.atol)
    for client, state in found.clients.items():
        close(state, {"prbm": wanted.private[client][0]} if plain.prbm else {}, found.atol)


@pytest.mark.parametrize(("name", "how", "sizes"), FEDFOMO)
def test_fedfomo_against_the_plain_loop(name: str, how: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Affinities, the uploads that the server keeps; old and current of every client."""
    found = compared(name, how, oracle.fedfomo, tmp_path, sizes, rounds=4)
    e, wanted, atol = found.e, found.wanted, found.atol
    there, parameters = joined(e), list(e.task.model.parameters)
    expected = {"fomo/affinity": wanted.server[0], "fomo/uploaded": torch.zeros(e.task.split.clients)}
    expected["fomo/uploaded"][there] = 1
    assert (wanted.server[0] > 0).any()
    assert (wanted.server[0] < 0).any()
    close(server(found), {n: t.to(wanted.server[0]) for n, t in expected.items()}, atol)
    both = [prefix + name for prefix in ("old/", "current/") for name in parameters]
    for client, state in found.clients.items():
        close(state, dict(zip(both, wanted.private[client], strict=True)), atol)
    k = len(parameters)
    for client, state in uploads(e, tmp_path, there).items():
        close(state, dict(zip(parameters, wanted.server[1 + k * client :][:k], strict=True)), atol)


@pytest.mark.parametrize(("name", "how", "sizes"), APPLE)
def test_apple_against_the_plain_loop(name: str, how: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """The cores that the server keeps, and p of every client."""
    found = compared(name, how, oracle.apple, tmp_path, sizes)
    assert server(found) == {}
    parameters, wanted, atol = list(found.e.task.model.parameters), found.wanted, found.atol
    k = len(parameters)
    for client, state in uploads(found.e, tmp_path, joined(found.e)).items():
        close(state, dict(zip(parameters, wanted.server[k * client :][:k], strict=True)), atol)
        close(found.clients[client], {"relations/p": wanted.private[client][0]}, atol)


@pytest.mark.parametrize("addon", ["", "+dbe"])
def test_fedgen_without_weights_is_fedavg(addon: str, tmp_path: Path) -> None:
    """Bit for bit, but with DBE, where FedAvg's classifier is written out."""
    by_torch: dict[str, Any] = {"rounds": 3, "trainer": "autograd"}
    plain = run_outcome(experiment(f"fedavg{addon}", **by_torch), tmp_path / "fedavg")
    zero = run_outcome(experiment(f"fedgen(alpha=0,beta=0){addon}", **by_torch), tmp_path / "fedgen")
    model = {n: zero.server[n] for n in plain.server}
    torch.testing.assert_close(plain.server, model, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain.clients, zero.clients, rtol=1e-5, atol=1e-6)
    assert addon or are_identical(plain.server, model)


def scalar(a: float) -> State:
    """Parameters with the logits (a x, -a x)."""
    return {"1.weight": torch.tensor([[a], [-a]])}


def test_fedfomo_weights_by_hand() -> None:
    """On x = 1, y = 0 the loss at a is log(1 + e^(-2a)), and a lies |a - old| sqrt(2) from old."""
    data = Dataset(
        "ones", torch.ones(16, 1), torch.zeros(16, dtype=torch.int64), 2, client=np.repeat([0, 1], 8)
    )
    task = resolve(
        "fedfomo",
        Config(partition="natural", lr=0.1),
        dataset=data,
        model=lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(1, classes, bias=False)),
    ).task

    def loss(a: float) -> float:
        return math.log1p(math.exp(-2 * a))

    def trained(old: float, current: float, other: float) -> tuple[list[float], float]:
        """The weights, and a of the mixture, of client 0."""
        private = add_prefix("old/", scalar(old)) | add_prefix("current/", scalar(current))
        received = add_prefix("others/1/", scalar(other))
        up, new = parse_method("fedfomo").train(
            Context(task, 2), ClientTrainer(task, 2, 0), received, private
        )
        assert torch.equal(up["1.weight"], new["current/1.weight"])
        assert up["1.weight"][0, 0] > new["old/1.weight"][0, 0]  # it has trained
        return up["fomo/affinity"].tolist(), new["old/1.weight"][0, 0].item()

    def weight(a: float) -> float:
        return (loss(0.1) - loss(a)) / (abs(a - 0.1) * math.sqrt(2))

    w = [weight(a) for a in (0.4, 0.9)]
    weights, mixture = trained(0.1, 0.4, 0.9)
    assert weights == pytest.approx(w, rel=1e-4)
    assert mixture == pytest.approx((w[0] * 0.4 + w[1] * 0.9) / sum(w), rel=1e-4)
    for current, other, wanted, a in (
        (0.1, 0.9, [0, weight(0.9)], 0.9),
        (0.4, -0.2, [weight(0.4), weight(-0.2)], 0.4),
        (-0.3, -0.2, [weight(-0.3), weight(-0.2)], -0.3),
    ):
        weights, mixture = trained(0.1, current, other)
        assert weights == pytest.approx(wanted, rel=1e-4)
        assert mixture == pytest.approx(a)


def test_fedfomo_alone_is_local_training_on_the_first_four_fifths(tmp_path: Path) -> None:
    e = experiment("local", rounds=3)
    train = RaggedArray.from_lists(rows[: len(rows) - int(0.2 * len(rows))] for rows in e.task.split.train)
    split = dataclasses.replace(e.task.split, train=train)
    e = dataclasses.replace(e, task=dataclasses.replace(e.task, split=split))
    alone = run_outcome(e, tmp_path / "local")
    fomo = run_outcome(experiment("fedfomo(m=1)", rounds=3), tmp_path / "fedfomo")
    for client, state in alone.clients.items():
        assert are_identical(strip_prefix(state, "personal/"), strip_prefix(fomo.clients[client], "current/"))


def cores(e: Experiment) -> State:
    """Everyone's first core, as a message."""
    message: State = {}
    for j in range(3):
        core, _ = e.method.client_setup(Context(e.task, 0), ClientTrainer(e.task, 0, j), {}, {})
        message |= add_prefix(f"core/{j}/", core)
    return message


def test_apple_with_its_own_core_only_is_local_training() -> None:
    e = experiment("apple(eta1=0.1,eta2=0)")
    message = cores(e)
    for i in range(3):
        own, alone = strip_prefix(message, f"core/{i}/"), {"relations/p": torch.eye(3)[i]}
        up, private = e.method.train(Context(e.task, 2), ClientTrainer(e.task, 2, i), message, alone)
        close(up, ClientTrainer(e.task, 2, i).fit(own).params, 1e-5)
        assert are_identical(private, alone)
        after = e.method.inference_params(
            Context(e.task, 3), ClientTrainer(e.task, 3, i), message | up, private
        )
        close(after, up, 1e-5)


def test_apples_slope_of_p_is_the_numerical_one_plus_the_pull() -> None:
    """One batch, eta2 = 1. In round 3 of 4 the pull is half of mu."""
    e = experiment("apple(eta1=0.1,eta2=1,rounds_l=4,mu=0.6)", batch_size=45)
    task, message, p = e.task, cores(e), torch.tensor([0.2, 0.5, 0.4])
    up, private = e.method.train(Context(task, 3), ClientTrainer(task, 3, 0), message, {"relations/p": p})
    rows = torch.from_numpy(task.split.train[0])
    x, y = task.dataset.inputs(task.dataset.x[rows]).double(), task.dataset.y[rows]

    def loss(p: Tensor, own: State) -> Tensor:
        others = [strip_prefix(message, f"core/{j}/") for j in range(3)]
        mixed = {
            n: p[0] * c.double() + p[1] * others[1][n].double() + p[2] * others[2][n].double()
            for n, c in own.items()
        }
        return nn.functional.cross_entropy(task.model.forward(mixed, x).logits, y)

    own = strip_prefix(message, "core/0/")
    rises = [loss(p.double() + d, own) - loss(p.double() - d, own) for d in 1e-5 * torch.eye(3).double()]
    slope = torch.stack(rises) / 2e-5 + 0.3 * (p - torch.tensor(task.samples) / sum(task.samples))
    torch.testing.assert_close((p - private["relations/p"]).double(), slope, rtol=0, atol=1e-5)
    leaves = {n: c.double().requires_grad_() for n, c in own.items()}
    gradients = torch.autograd.grad(loss(p.double(), leaves), list(leaves.values()))
    close(up, {n: own[n] - 0.1 * g.float() for n, g in zip(own, gradients, strict=True)}, 1e-5)


def test_no_client_of_apple_sees_a_core_of_the_same_round(tmp_path: Path) -> None:
    """Each client, asked alone with what the first round left, does what it did in the second one."""
    e = experiment("apple", rounds=1)
    first = run_outcome(e, tmp_path / "one")
    kept = uploads(e, tmp_path / "one", [0, 1, 2])
    message: State = {}
    for j, core in kept.items():
        message |= add_prefix(f"core/{j}/", core)
    second = run_outcome(experiment("apple", rounds=2), tmp_path / "two")
    after = uploads(e, tmp_path / "two", [0, 1, 2])
    for i in (2, 1, 0):
        up, private = e.method.train(
            Context(e.task, 2), ClientTrainer(e.task, 2, i), message, first.clients[i]
        )
        assert are_identical(up, after[i])
        assert are_identical(private, second.clients[i])
        assert not are_identical(up, kept[i])
