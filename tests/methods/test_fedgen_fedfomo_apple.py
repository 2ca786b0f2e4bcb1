"""FedGen, FedFomo and APPLE compared with their oracles, and exact special cases."""

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
from tests.methods.test_oracles import (
    SETTINGS,
    WITH_LARGER_MESSAGES,
    Comparison,
    assert_close,
    combinations,
    participants,
    run_and_compare,
)
from tests.oracles import fedgen_fedfomo_apple as oracle
from tests.small_runs import are_identical, experiment, run_outcome

USUAL = (60, 44, 28)
FEW = (13, 9, 6)
"""Few samples: batches are short and labels are missing."""
MANY = (28, 20, 24, 16, 32, 12)
"""Many clients: FedFomo has to select models."""
FEDGEN = [
    ("fedgen(steps=10)", "plain", USUAL),
    ("fedgen(steps=5)+dbe", "plain", FEW),
    ("fedgen(steps=5,lite=true)", "plain", FEW),
    *((name.replace("fedgen", "fedgen(steps=5)"), "plain", USUAL) for name in combinations(["fedgen"])[1:]),
    ("fedgen(steps=5,level=z_g)+prbm", "plain", USUAL),
    ("fedgen(level=z_g)+dbe", "local", ()),
    *((name, variant, ()) for name in combinations(["fedgen"]) for variant in SETTINGS[1:]),
]
FEDFOMO = [
    *((name, "plain", sizes) for name in combinations(["fedfomo"]) for sizes in (USUAL, FEW, MANY)),
    ("fedfomo(m=2)", "plain", MANY),
    ("fedfomo(m=3,epsilon=1,epsilon_decay=0.2)", "plain", MANY),
    *((name, variant, ()) for name in combinations(["fedfomo"]) for variant in SETTINGS[1:]),
]
APPLE = [
    ("apple", "plain", USUAL),
    ("apple(rounds_l=2,eta2=0.05,mu=1)", "plain", FEW),
    *(("apple", variant, ()) for variant in SETTINGS[1:]),
]


def test_every_method_is_compared() -> None:
    assert {name for name, _, _ in (*FEDGEN, *FEDFOMO, *APPLE)} >= {*combinations(WITH_LARGER_MESSAGES)}


def read_uploads(e: Experiment, folder: Path, clients: list[int]) -> dict[int, State]:
    """Return the last uploads of these clients in the store."""
    store = RunStore.open(folder)
    try:
        return {
            c: {n: t for n, t in store.upload(c).items() if n in e.task.model.parameters} for c in clients
        }
    finally:
        store.close()


def method_state(comparison: Comparison) -> State:
    """Return the server state without statistics and MR's entries."""
    return drop_keys(comparison.outcome.server, ["mean", "mr/", BUFFER])


@pytest.mark.parametrize(("name", "variant", "sizes"), FEDGEN)
def test_fedgen_matches_oracle(name: str, variant: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Equal are model, generator, its statistics and Adam's state, and PRBM's vectors."""
    comparison = run_and_compare(name, variant, oracle.fedgen, tmp_path, sizes)
    setting, oracle_result = comparison.setting, comparison.expected
    trainable = ["in.weight", "norm.weight", "norm.bias", "out.weight", "out.bias"]
    g = [*trainable, "norm.running_mean", "norm.running_var"]
    g += [f"adam/{moment}/{n}" for moment in ("exp_avg", "exp_avg_sq") for n in trainable]
    names = [*comparison.e.task.model.parameters, *(f"generator/{n}" for n in g)]
    expected = dict(zip(names, oracle_result.server[:-1], strict=True))
    expected |= {f"generator/adam/step/{n}": oracle_result.server[-1] for n in trainable}
    labels = [setting.y[torch.from_numpy(indices)].bincount(minlength=10) for indices in setting.train]
    expected["labels/counts"] = torch.stack(labels).double()
    expected["labels/prior"] = expected["labels/counts"].sum(0) / sum(
        len(indices) for indices in setting.train
    )
    assert_close(method_state(comparison), expected, comparison.atol)
    for client, state in comparison.clients.items():
        assert_close(
            state, {"prbm": oracle_result.private[client][0]} if setting.prbm else {}, comparison.atol
        )


@pytest.mark.parametrize(("name", "variant", "sizes"), FEDFOMO)
def test_fedfomo_matches_oracle(name: str, variant: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Equal are affinities, stored uploads, and old and current of every client."""
    comparison = run_and_compare(name, variant, oracle.fedfomo, tmp_path, sizes, rounds=4)
    e, oracle_result, atol = comparison.e, comparison.expected, comparison.atol
    clients, parameters = participants(e), list(e.task.model.parameters)
    expected = {"fomo/affinity": oracle_result.server[0], "fomo/uploaded": torch.zeros(e.task.split.clients)}
    expected["fomo/uploaded"][clients] = 1
    assert (oracle_result.server[0] > 0).any()
    assert (oracle_result.server[0] < 0).any()
    assert_close(
        method_state(comparison), {n: t.to(oracle_result.server[0]) for n, t in expected.items()}, atol
    )
    both = [prefix + name for prefix in ("old/", "current/") for name in parameters]
    for client, state in comparison.clients.items():
        assert_close(state, dict(zip(both, oracle_result.private[client], strict=True)), atol)
    k = len(parameters)
    for client, state in read_uploads(e, tmp_path, clients).items():
        assert_close(
            state, dict(zip(parameters, oracle_result.server[1 + k * client :][:k], strict=True)), atol
        )


@pytest.mark.parametrize(("name", "variant", "sizes"), APPLE)
def test_apple_matches_oracle(name: str, variant: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Equal are the stored cores and p of every client."""
    comparison = run_and_compare(name, variant, oracle.apple, tmp_path, sizes)
    assert method_state(comparison) == {}
    parameters, oracle_result, atol = (
        list(comparison.e.task.model.parameters),
        comparison.expected,
        comparison.atol,
    )
    k = len(parameters)
    for client, state in read_uploads(comparison.e, tmp_path, participants(comparison.e)).items():
        assert_close(state, dict(zip(parameters, oracle_result.server[k * client :][:k], strict=True)), atol)
        assert_close(comparison.clients[client], {"relations/p": oracle_result.private[client][0]}, atol)


@pytest.mark.parametrize("addon", ["", "+dbe"])
def test_fedgen_with_zero_weights_equals_fedavg(addon: str, tmp_path: Path) -> None:
    """Bit for bit without DBE; with DBE, FedAvg's linear head has its own gradient code."""
    by_torch: dict[str, Any] = {"rounds": 3, "trainer": "autograd"}
    plain = run_outcome(experiment(f"fedavg{addon}", **by_torch), tmp_path / "fedavg")
    zero = run_outcome(experiment(f"fedgen(alpha=0,beta=0){addon}", **by_torch), tmp_path / "fedgen")
    model = {n: zero.server[n] for n in plain.server}
    torch.testing.assert_close(plain.server, model, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain.clients, zero.clients, rtol=1e-5, atol=1e-6)
    assert addon or are_identical(plain.server, model)


def scalar_model(a: float) -> State:
    """Parameters with the logits (a x, -a x)."""
    return {"1.weight": torch.tensor([[a], [-a]])}


def test_fedfomo_weights_match_closed_form() -> None:
    """On x = 1, y = 0 the loss at a is log(1 + e^(-2a)), and its distance to old is |a - old| sqrt(2)."""
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

    def train_client_0(old: float, current: float, other: float) -> tuple[list[float], float]:
        """Return the weights and the mixture's a of client 0."""
        private = add_prefix("old/", scalar_model(old)) | add_prefix("current/", scalar_model(current))
        received = add_prefix("others/1/", scalar_model(other))
        upload, new = parse_method("fedfomo").train(
            Context(task, 2), ClientTrainer(task, 2, 0), received, private
        )
        assert torch.equal(upload["1.weight"], new["current/1.weight"])
        assert upload["1.weight"][0, 0] > new["old/1.weight"][0, 0]  # it has trained
        return upload["fomo/affinity"].tolist(), new["old/1.weight"][0, 0].item()

    def expected_weight(a: float) -> float:
        return (loss(0.1) - loss(a)) / (abs(a - 0.1) * math.sqrt(2))

    w = [expected_weight(a) for a in (0.4, 0.9)]
    weights, mixture = train_client_0(0.1, 0.4, 0.9)
    assert weights == pytest.approx(w, rel=1e-4)
    assert mixture == pytest.approx((w[0] * 0.4 + w[1] * 0.9) / sum(w), rel=1e-4)
    for current, other, expected, a in (
        (0.1, 0.9, [0, expected_weight(0.9)], 0.9),
        (0.4, -0.2, [expected_weight(0.4), expected_weight(-0.2)], 0.4),
        (-0.3, -0.2, [expected_weight(-0.3), expected_weight(-0.2)], -0.3),
    ):
        weights, mixture = train_client_0(0.1, current, other)
        assert weights == pytest.approx(expected, rel=1e-4)
        assert mixture == pytest.approx(a)


def test_fedfomo_with_one_model_is_local_training_on_four_fifths_of_the_data(tmp_path: Path) -> None:
    e = experiment("local", rounds=3)
    train = RaggedArray.from_lists(
        indices[: len(indices) - int(0.2 * len(indices))] for indices in e.task.split.train
    )
    split = dataclasses.replace(e.task.split, train=train)
    e = dataclasses.replace(e, task=dataclasses.replace(e.task, split=split))
    local = run_outcome(e, tmp_path / "local")
    fomo = run_outcome(experiment("fedfomo(m=1)", rounds=3), tmp_path / "fedfomo")
    for client, state in local.clients.items():
        assert are_identical(strip_prefix(state, "personal/"), strip_prefix(fomo.clients[client], "current/"))


def initial_cores(e: Experiment) -> State:
    """Return all initial cores as a message."""
    message: State = {}
    for j in range(3):
        core, _ = e.method.client_setup(Context(e.task, 0), ClientTrainer(e.task, 0, j), {}, {})
        message |= add_prefix(f"core/{j}/", core)
    return message


def test_apple_with_own_core_only_equals_local_training() -> None:
    e = experiment("apple(eta1=0.1,eta2=0)")
    message = initial_cores(e)
    for i in range(3):
        core, relations = strip_prefix(message, f"core/{i}/"), {"relations/p": torch.eye(3)[i]}
        upload, private = e.method.train(Context(e.task, 2), ClientTrainer(e.task, 2, i), message, relations)
        assert_close(upload, ClientTrainer(e.task, 2, i).fit(core).params, 1e-5)
        assert are_identical(private, relations)
        after = e.method.inference_params(
            Context(e.task, 3), ClientTrainer(e.task, 3, i), message | upload, private
        )
        assert_close(after, upload, 1e-5)


def test_apple_gradient_of_p_matches_numerical_gradient() -> None:
    """One batch, eta2 = 1. In round 3 of 4 the penalty is half of mu."""
    e = experiment("apple(eta1=0.1,eta2=1,rounds_l=4,mu=0.6)", batch_size=45)
    task, message, p = e.task, initial_cores(e), torch.tensor([0.2, 0.5, 0.4])
    upload, private = e.method.train(Context(task, 3), ClientTrainer(task, 3, 0), message, {"relations/p": p})
    rows = torch.from_numpy(task.split.train[0])
    x, y = task.dataset.inputs(task.dataset.x[rows]).double(), task.dataset.y[rows]

    def loss(p: Tensor, own_core: State) -> Tensor:
        others = [strip_prefix(message, f"core/{j}/") for j in range(3)]
        mixed = {
            n: p[0] * c.double() + p[1] * others[1][n].double() + p[2] * others[2][n].double()
            for n, c in own_core.items()
        }
        return nn.functional.cross_entropy(task.model.forward(mixed, x).logits, y)

    own_core = strip_prefix(message, "core/0/")
    differences = [
        loss(p.double() + d, own_core) - loss(p.double() - d, own_core) for d in 1e-5 * torch.eye(3).double()
    ]
    gradient = torch.stack(differences) / 2e-5 + 0.3 * (p - torch.tensor(task.samples) / sum(task.samples))
    torch.testing.assert_close((p - private["relations/p"]).double(), gradient, rtol=0, atol=1e-5)
    leaves = {n: c.double().requires_grad_() for n, c in own_core.items()}
    gradients = torch.autograd.grad(loss(p.double(), leaves), list(leaves.values()))
    assert_close(
        upload, {n: own_core[n] - 0.1 * g.float() for n, g in zip(own_core, gradients, strict=True)}, 1e-5
    )


def test_apple_clients_use_the_cores_of_the_previous_round(tmp_path: Path) -> None:
    """Each client alone, with the state after round 1, gives the result of round 2."""
    e = experiment("apple", rounds=1)
    first = run_outcome(e, tmp_path / "one")
    first_uploads = read_uploads(e, tmp_path / "one", [0, 1, 2])
    message: State = {}
    for j, core in first_uploads.items():
        message |= add_prefix(f"core/{j}/", core)
    second = run_outcome(experiment("apple", rounds=2), tmp_path / "two")
    second_uploads = read_uploads(e, tmp_path / "two", [0, 1, 2])
    for i in (2, 1, 0):
        upload, private = e.method.train(
            Context(e.task, 2), ClientTrainer(e.task, 2, i), message, first.clients[i]
        )
        assert are_identical(upload, second_uploads[i])
        assert are_identical(private, second.clients[i])
        assert not are_identical(upload, first_uploads[i])
