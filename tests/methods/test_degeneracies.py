"""What each method becomes at the edge of its hyper-parameters, exactly."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from feddbe.config import Config
from feddbe.errors import BadInput
from feddbe.experiment import Experiment, resolve
from feddbe.local import Fit, Local
from feddbe.methods import parse
from feddbe.methods.fedrep import FedRep
from feddbe.methods.fedrod import _balanced
from feddbe.methods.scaffold import CONTROL, Scaffold
from feddbe.state import State, prefixed, taken
from feddbe.task import Context
from feddbe.terms import Batch
from tests.federation import experiment, outcome, same_bits, samples


@pytest.mark.parametrize("name", ["fedprox(mu=0)", "moon(mu=0)"])
def test_without_its_term_it_is_fedavg_bit_for_bit(name: str, tmp_path: Path) -> None:
    plain = outcome(experiment("fedavg", rounds=3), tmp_path / "plain")
    assert same_bits(plain.server, outcome(experiment(name, rounds=3), tmp_path / "method").server)


def test_scaffold_control_variate_is_the_mean_raw_gradient() -> None:
    """One step: c_i+ = c_i - c + (x - y)/eta = the gradient at x, whatever c and c_i were."""
    e = experiment("scaffold", batch=45)
    task, x = e.task, e.task.model.parameters
    rng = torch.Generator().manual_seed(3)
    c, own = ({n: torch.randn(p.shape, generator=rng) * 0.01 for n, p in x.items()} for _ in range(2))
    _, private = Scaffold().train(
        Context(task, 1), Local(task, 1, 0), x | prefixed(CONTROL, c), prefixed(CONTROL, own)
    )
    rows = torch.from_numpy(task.split.train[0])
    leaves = {n: p.clone().requires_grad_() for n, p in x.items()}
    logits = task.model.forward(leaves, task.dataset.inputs(task.dataset.x[rows])).logits
    gradient = torch.autograd.grad(
        nn.functional.cross_entropy(logits, task.dataset.y[rows]), list(leaves.values())
    )
    for name, g in zip(x, gradient, strict=True):
        torch.testing.assert_close(taken(private, CONTROL)[name], g, rtol=0, atol=2e-6)


def test_scaffold_with_identical_clients_and_full_batches_is_fedavg(tmp_path: Path) -> None:
    """c and c_i are then equal, so the corrections cancel."""

    def copies(name: str) -> Experiment:
        e = experiment(name, samples([60, 60]), batch=45, rounds=3)
        split = dataclasses.replace(e.task.split, train=(e.task.split.train[0],) * 2)
        return dataclasses.replace(e, task=dataclasses.replace(e.task, split=split))

    plain, corrected = outcome(copies("fedavg"), tmp_path / "a"), outcome(copies("scaffold"), tmp_path / "b")
    for name, value in plain.server.items():
        torch.testing.assert_close(corrected.server[name], value, rtol=0, atol=1e-6)


def test_dittos_shared_track_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    plain = outcome(experiment("fedavg", rounds=3), tmp_path / "plain")
    assert same_bits(plain.server, outcome(experiment("ditto", rounds=3), tmp_path / "ditto").server)


def test_ditto_without_the_pull_is_local_training(tmp_path: Path) -> None:
    alone = outcome(experiment("local", rounds=3), tmp_path / "local")
    ditto = outcome(experiment("ditto(lam=0)", rounds=3), tmp_path / "ditto")
    assert all(same_bits(alone.clients[c], ditto.clients[c]) for c in range(3))
    assert [e["accuracy"] for e in alone.entries] == [e["accuracy"] for e in ditto.entries]


def test_ditto_with_a_strong_pull_stays_at_the_received_model() -> None:
    """lam = 1/lr: one step from v is v - lr g - (v - w) = w - lr g(v)."""
    e = experiment("ditto", batch=45)
    task, theta = e.task, e.task.model.parameters
    w = {n: p + 0.5 for n, p in theta.items()}
    _, private = parse("ditto(lam=10)").train(
        Context(task, 1), Local(task, 1, 0), w, prefixed("personal/", theta)
    )
    plain = Local(task, 1, 0).fit(theta).params
    for name, v in taken(private, "personal/").items():
        torch.testing.assert_close(v, w[name] + plain[name] - theta[name], rtol=0, atol=1e-5)


def test_fedper_without_a_head_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    """Cut after the last layer, so that all parameters belong to the body."""

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes), nn.Identity()
        )

    def whole(name: str) -> Experiment:
        chosen = Config(partition="natural", rounds=2, lr=0.1, cut="3")
        return resolve(name, chosen, dataset=samples(), model=build)

    assert whole("fedper").task.model.head == ()
    shared, plain = (
        outcome(whole("fedper"), tmp_path / "fedper"),
        outcome(whole("fedavg"), tmp_path / "fedavg"),
    )
    assert same_bits(shared.server, plain.server)
    assert shared.clients == {}


class Recording(Local):
    """Remembers what each fit returned."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.results: list[State] = []

    def fit(self, *arguments: Any, **options: Any) -> Fit:
        result = super().fit(*arguments, **options)
        self.results.append(result.params)
        return result


def test_fedrep_moves_one_half_at_a_time() -> None:
    """After the head phase the body is as received, and the body phase leaves the head as it then was."""
    task = experiment("fedrep").task
    theta, local = task.model.parameters, Recording(task, 1, 0)
    FedRep().update(local, theta)
    head_phase, body_phase = local.results
    for name in task.model.body:
        assert torch.equal(head_phase[name], theta[name])
        assert not torch.equal(body_phase[name], theta[name])
    for name in task.model.head:
        assert not torch.equal(head_phase[name], theta[name])
        assert torch.equal(body_phase[name], head_phase[name])


def test_fedrods_balanced_softmax() -> None:
    """Equal counts add the same to every logit: plain cross-entropy. A class without samples is finite."""
    logits, y = (
        torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 2, 0, 1, 2]),
    )
    batch = Batch(logits, y, logits, logits, logits.requires_grad_())
    equal, _ = _balanced(None, {}, {"prior": torch.full((4,), 7.0).log()}, batch, 0, {})  # type: ignore[arg-type]
    torch.testing.assert_close(equal, nn.functional.cross_entropy(logits, y))
    prior = torch.tensor([5.0, 3.0, 2.0, 0.0]).double().clamp(min=1e-8).log().float()
    some, _ = _balanced(None, {}, {"prior": prior}, batch, 0, {})  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(some, logits)
    assert torch.isfinite(some)
    assert torch.isfinite(gradient).all()
    assert gradient[:, 3].abs().max() < 1e-6


def test_fedrod_trains_where_most_labels_are_missing(tmp_path: Path) -> None:
    ran = outcome(experiment("fedrod", samples([24, 8]), rounds=2), tmp_path)
    assert all(torch.isfinite(t).all() for t in ran.server.values())


def test_fedbabus_head_never_moves(tmp_path: Path) -> None:
    """The server has no head, and what is deployed has that of theta^0."""
    e = experiment("fedbabu", rounds=3)
    ran = outcome(e, tmp_path)
    model = e.task.model
    assert ran.server.keys() == set(model.body)
    deployed = e.method.deployed(Context(e.task, 4), Local(e.task, 4, 0), ran.server, {})
    assert all(torch.equal(deployed[name], model.parameters[name]) for name in model.head)
    assert not any(torch.equal(deployed[name], model.parameters[name]) for name in model.body)


def test_majority_is_the_floor(tmp_path: Path) -> None:
    e = experiment("majority", rounds=1)
    ran = outcome(e, tmp_path)
    assert [entry["accuracy"]["weighted"] for entry in ran.entries if entry["accuracy"]] == [e.floor] * 2
    assert ran.entries[1]["bytes_up"] == ran.entries[1]["bytes_down"] == 0


def test_local_training_sends_nothing(tmp_path: Path) -> None:
    ran = outcome(experiment("local"), tmp_path)
    assert ran.server == {}
    assert all(entry["bytes_up"] == entry["bytes_down"] == 0 for entry in ran.entries)
    assert ran.clients.keys() == {0, 1, 2}


def test_what_the_paper_does_not_combine_is_refused_with_its_reason() -> None:
    for method in ("ditto", "fedper", "fedrep", "fedrod", "fedbabu"):
        parse(f"{method}+mr")
        with pytest.raises(BadInput, match=f"{method} does not take \\+prbm: it personalises in its own way"):
            parse(f"{method}+dbe")
        parse(f"{method}+dbe", force=True)
    for method in ("local", "majority"):
        with pytest.raises(BadInput, match="there is no exchange"):
            parse(f"{method}+mr")
