"""FedGen, FedFomo and APPLE against their plain loops, and at the edge of their hyper-parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from feddbe import seeds
from feddbe.data.dataset import Dataset
from feddbe.experiment import Experiment, resolve
from feddbe.local import Local
from feddbe.methods import parse
from feddbe.options.config import Config
from feddbe.state import State, prefixed, taken
from feddbe.store import Store
from feddbe.task import Context
from tests.federation import experiment, outcome, same_bits, samples
from tests.methods.test_oracles import EXCHANGING, setting
from tests.oracles import exchanging as oracle
from tests.oracles.methods import Result, Setting

Oracle = Callable[[Setting], Result]
FEDGEN: dict[str, Oracle] = {
    "fedgen": oracle.fedgen,
    "fedgen+prbm": oracle.fedgen,
    "fedgen+mr": oracle.fedgen,
    "fedgen+dbe": oracle.fedgen,
    "fedgen(lite=true)": lambda s: oracle.fedgen(s, lite=True),
    "fedgen(level=z_g)+prbm": lambda s: oracle.fedgen(s, level="z_g"),
}
FEDFOMO: dict[str, Oracle] = {
    "fedfomo": oracle.fedfomo,
    "fedfomo+mr": oracle.fedfomo,
    "fedfomo(m=2)": lambda s: oracle.fedfomo(s, m=2),
    "fedfomo(m=2,epsilon=1,epsilon_decay=0.3)": lambda s: oracle.fedfomo(s, 2, 1.0, 0.3),
}
APPLE: dict[str, Oracle] = {
    "apple": oracle.apple,
    "apple(rounds_l=2,eta2=0.05,mu=1)": lambda s: oracle.apple(s, rounds_l=2, eta2=0.05, mu=1.0),
}
FEW = (13, 9, 6)
"""Samples so few that a batch is short, and that labels are missing."""
MANY = (28, 20, 24, 16, 32, 12)
"""Clients so many that FedFomo has to choose whom it sends."""


def test_no_method_is_left_out() -> None:
    names = (*FEDGEN, *FEDFOMO, *APPLE)
    assert {name.partition("+")[0].partition("(")[0] for name in names} == set(EXCHANGING)


def close(mine: Mapping[str, Tensor], other: Mapping[str, Tensor], atol: float = 1e-5) -> None:
    """The same names, and the same values to `atol`."""
    assert mine.keys() == other.keys()
    torch.testing.assert_close(dict(mine), dict(other), rtol=0, atol=atol)


@pytest.fixture
def double() -> Iterator[None]:
    """All in float64: a kink of ReLU or of a distance is then not met from both sides by rounding alone,
    which Adam would blow up to a whole step."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def uploads(e: Experiment, folder: Path, clients: list[int]) -> dict[int, State]:
    """What the server keeps of these clients."""
    store = Store.open(folder)
    try:
        return {
            c: {n: t for n, t in store.upload(c).items() if n in e.task.model.parameters} for c in clients
        }
    finally:
        store.close()


def joined(e: Experiment) -> list[int]:
    """Who took part in a round."""
    n, join = e.task.split.clients, e.options.join
    return sorted({c for t in range(1, e.task.rounds + 1) for c in seeds.cohort(0, t, n, join)})


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("sizes", [(60, 44, 28), FEW])
@pytest.mark.parametrize("name", FEDGEN)
def test_fedgen_against_the_plain_loop(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Model, generator, its statistics and Adam's state; and PRBM's vectors."""
    data = samples(sizes)
    data = dataclasses.replace(data, x=data.inputs(data.x).double())
    e = experiment(name, data, rounds=3, join=0.67)
    plain = setting(e, name.partition("+")[2])
    wanted, ran = FEDGEN[name](plain), outcome(e, tmp_path)
    learnt = ["in.weight", "norm.weight", "norm.bias", "out.weight", "out.bias"]
    g = [*learnt, "norm.running_mean", "norm.running_var"]
    g += [f"adam/{moment}/{n}" for moment in ("exp_avg", "exp_avg_sq") for n in learnt]
    names = [*e.task.model.parameters, *(f"generator/{n}" for n in g)]
    server = dict(zip(names, wanted.server[:-1], strict=True))
    server |= {f"generator/adam/step/{n}": wanted.server[-1] for n in learnt}
    labels = [plain.y[torch.from_numpy(rows)].bincount(minlength=10) for rows in plain.train]
    server["labels/counts"] = torch.stack(labels).double()
    server["labels/prior"] = server["labels/counts"].sum(0) / sum(len(rows) for rows in plain.train)
    if plain.z_bar is not None:
        server["mean"] = plain.z_bar
    close(ran.server, server, 1e-9)
    assert ran.clients.keys() == (set(joined(e)) if plain.prbm else set())
    for client, state in ran.clients.items():
        close(state, {"prbm": wanted.private[client][0]}, 1e-9)


@pytest.mark.parametrize("sizes", [(60, 44, 28), FEW, MANY])
@pytest.mark.parametrize("name", FEDFOMO)
def test_fedfomo_against_the_plain_loop(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Affinities, the uploads that the server keeps; old and current of every client."""
    e = experiment(name, samples(sizes), rounds=4, join=0.67)
    n = len(sizes)
    plain = setting(e, name.partition("+")[2])
    wanted, ran = FEDFOMO[name](plain), outcome(e, tmp_path)
    there, parameters = joined(e), list(e.task.model.parameters)
    server = {"fomo/affinity": wanted.server[0], "fomo/uploaded": torch.zeros(n)}
    server["fomo/uploaded"][there] = 1
    assert (wanted.server[0] > 0).any()
    if plain.z_bar is not None:
        server["mean"] = plain.z_bar
    close(ran.server, server)
    both = [prefix + name for prefix in ("old/", "current/") for name in parameters]
    assert ran.clients.keys() == set(there)
    for client, state in ran.clients.items():
        close(state, dict(zip(both, wanted.private[client], strict=True)))
    k = len(parameters)
    for client, state in uploads(e, tmp_path, there).items():
        close(state, dict(zip(parameters, wanted.server[1 + k * client :][:k], strict=True)))


@pytest.mark.parametrize("sizes", [(60, 44, 28), FEW])
@pytest.mark.parametrize("name", APPLE)
def test_apple_against_the_plain_loop(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """The cores that the server keeps, and p of every client."""
    e = experiment(name, samples(sizes), rounds=3)
    wanted, ran = APPLE[name](setting(e)), outcome(e, tmp_path)
    assert ran.server == {}
    parameters = list(e.task.model.parameters)
    k = len(parameters)
    for client, state in uploads(e, tmp_path, [0, 1, 2]).items():
        close(state, dict(zip(parameters, wanted.server[k * client :][:k], strict=True)))
        close(ran.clients[client], {"relations/p": wanted.private[client][0]})


@pytest.mark.parametrize("addon", ["", "+dbe"])
def test_fedgen_without_weights_is_fedavg_bit_for_bit(addon: str, tmp_path: Path) -> None:
    plain = outcome(experiment(f"fedavg{addon}", rounds=3), tmp_path / "fedavg")
    zero = outcome(experiment(f"fedgen(alpha=0,beta=0){addon}", rounds=3), tmp_path / "fedgen")
    assert same_bits(plain.server, {n: zero.server[n] for n in plain.server})
    assert plain.clients.keys() == zero.clients.keys()
    assert all(same_bits(state, zero.clients[c]) for c, state in plain.clients.items())


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
        private = prefixed("old/", scalar(old)) | prefixed("current/", scalar(current))
        received = prefixed("others/1/", scalar(other))
        up, new = parse("fedfomo").train(Context(task, 2), Local(task, 2, 0), received, private)
        assert torch.equal(up["1.weight"], new["current/1.weight"])
        assert up["1.weight"][0, 0] > new["old/1.weight"][0, 0]  # it has trained
        return up["fomo/affinity"].tolist(), new["old/1.weight"][0, 0].item()

    w = [(loss(0.1) - loss(a)) / ((a - 0.1) * math.sqrt(2)) for a in (0.4, 0.9)]
    weights, mixture = trained(0.1, 0.4, 0.9)
    assert weights == pytest.approx(w, rel=1e-4)
    assert mixture == pytest.approx((w[0] * 0.4 + w[1] * 0.9) / sum(w), rel=1e-4)
    for current, other, wanted, a in (
        (0.1, 0.9, [0, w[1]], 0.9),
        (0.4, -0.2, [w[0], 0], 0.4),
        (-0.3, -0.2, [0, 0], -0.3),
    ):
        weights, mixture = trained(0.1, current, other)
        assert weights == pytest.approx(wanted, rel=1e-4)
        assert mixture == pytest.approx(a)


def test_fedfomo_alone_is_local_training_on_the_first_four_fifths(tmp_path: Path) -> None:
    e = experiment("local", rounds=3)
    train = tuple(rows[: len(rows) - int(0.2 * len(rows))] for rows in e.task.split.train)
    split = dataclasses.replace(e.task.split, train=train)
    e = dataclasses.replace(e, task=dataclasses.replace(e.task, split=split))
    alone = outcome(e, tmp_path / "local")
    fomo = outcome(experiment("fedfomo(m=1)", rounds=3), tmp_path / "fedfomo")
    for client, state in alone.clients.items():
        assert same_bits(taken(state, "personal/"), taken(fomo.clients[client], "current/"))


def cores(e: Experiment) -> State:
    """Everyone's first core, as a message."""
    message: State = {}
    for j in range(3):
        core, _ = e.method.prepare(Context(e.task, 0), Local(e.task, 0, j), {}, {})
        message |= prefixed(f"core/{j}/", core)
    return message


def test_apple_with_its_own_core_only_is_local_training() -> None:
    e = experiment("apple(eta1=0.1,eta2=0)")
    message = cores(e)
    for i in range(3):
        own, alone = taken(message, f"core/{i}/"), {"relations/p": torch.eye(3)[i]}
        up, private = e.method.train(Context(e.task, 2), Local(e.task, 2, i), message, alone)
        close(up, Local(e.task, 2, i).fit(own).params)
        assert same_bits(private, alone)
        after = e.method.deployed(Context(e.task, 3), Local(e.task, 3, i), message | up, private)
        close(after, up)


def test_apples_slope_of_p_is_the_numerical_one_plus_the_pull() -> None:
    """One batch, eta2 = 1. In round 3 of 4 the pull is half of mu."""
    e = experiment("apple(eta1=0.1,eta2=1,rounds_l=4,mu=0.6)", batch=45)
    task, message, p = e.task, cores(e), torch.tensor([0.2, 0.5, 0.4])
    up, private = e.method.train(Context(task, 3), Local(task, 3, 0), message, {"relations/p": p})
    rows = torch.from_numpy(task.split.train[0])
    x, y = task.dataset.inputs(task.dataset.x[rows]).double(), task.dataset.y[rows]

    def loss(p: Tensor, own: State) -> Tensor:
        others = [taken(message, f"core/{j}/") for j in range(3)]
        mixed = {
            n: p[0] * c.double() + p[1] * others[1][n].double() + p[2] * others[2][n].double()
            for n, c in own.items()
        }
        return nn.functional.cross_entropy(task.model.forward(mixed, x).logits, y)

    own = taken(message, "core/0/")
    rises = [loss(p.double() + d, own) - loss(p.double() - d, own) for d in 1e-5 * torch.eye(3).double()]
    slope = torch.stack(rises) / 2e-5 + 0.3 * (p - torch.tensor(task.samples) / sum(task.samples))
    torch.testing.assert_close((p - private["relations/p"]).double(), slope, rtol=0, atol=1e-5)
    leaves = {n: c.double().requires_grad_() for n, c in own.items()}
    gradients = torch.autograd.grad(loss(p.double(), leaves), list(leaves.values()))
    close(up, {n: own[n] - 0.1 * g.float() for n, g in zip(own, gradients, strict=True)})


def test_no_client_of_apple_sees_a_core_of_the_same_round(tmp_path: Path) -> None:
    """Each client, asked alone with what the first round left, does what it did in the second one."""
    e = experiment("apple", rounds=1)
    first = outcome(e, tmp_path / "one")
    kept = uploads(e, tmp_path / "one", [0, 1, 2])
    message: State = {}
    for j, core in kept.items():
        message |= prefixed(f"core/{j}/", core)
    second = outcome(experiment("apple", rounds=2), tmp_path / "two")
    after = uploads(e, tmp_path / "two", [0, 1, 2])
    for i in (2, 1, 0):
        up, private = e.method.train(Context(e.task, 2), Local(e.task, 2, i), message, first.clients[i])
        assert same_bits(up, after[i])
        assert same_bits(private, second.clients[i])
        assert not same_bits(up, kept[i])
