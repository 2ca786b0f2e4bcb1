"""Exact special cases of each method at the limits of its hyperparameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from feddbe.config.options import Config
from feddbe.data.split import RaggedArray
from feddbe.errors import InvalidInputError
from feddbe.methods.fedrep import FedRep
from feddbe.methods.fedrod import _balanced_loss
from feddbe.methods.registry import parse_method, parse_name
from feddbe.methods.scaffold import CONTROL, Scaffold
from feddbe.models.split_model import SplitModel
from feddbe.runs.experiment import Experiment, resolve
from feddbe.state import State, add_prefix, strip_prefix
from feddbe.training.fit_plan import Samples
from feddbe.training.loss_terms import Batch, TermContext, gradient_by_autograd
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer, TrainedModel
from tests.small_runs import are_identical, experiment, make_dataset, run_outcome


@pytest.mark.parametrize("name", ["fedprox(mu=0)", "moon(mu=0)"])
def test_method_without_its_term_equals_fedavg_bit_for_bit(name: str, tmp_path: Path) -> None:
    trainer = (
        "autograd" if name.startswith("moon") else "auto"
    )  # the compiled backend does not support its term
    plain = run_outcome(experiment("fedavg", rounds=3, trainer=trainer), tmp_path / "plain")
    method = run_outcome(experiment(name, rounds=3, trainer=trainer), tmp_path / "method")
    assert are_identical(plain.server, method.server)


def test_scaffold_control_variate_is_the_mean_gradient() -> None:
    """One step: c_i+ = c_i - c + (x - y)/eta = the gradient at x, for any c and c_i."""
    e = experiment("scaffold", batch_size=45)
    task, x = e.task, e.task.model.parameters
    rng = torch.Generator().manual_seed(3)
    c, c_i = ({n: torch.randn(p.shape, generator=rng) * 0.01 for n, p in x.items()} for _ in range(2))
    _, private = Scaffold().train(
        Context(task, 1), ClientTrainer(task, 1, 0), x | add_prefix(CONTROL, c), add_prefix(CONTROL, c_i)
    )
    indices = torch.from_numpy(task.split.train[0])
    leaves = {n: p.clone().requires_grad_() for n, p in x.items()}
    logits = task.model.forward(leaves, task.dataset.inputs(task.dataset.x[indices])).logits
    gradient = torch.autograd.grad(
        nn.functional.cross_entropy(logits, task.dataset.y[indices]), list(leaves.values())
    )
    for name, g in zip(x, gradient, strict=True):
        torch.testing.assert_close(strip_prefix(private, CONTROL)[name], g, rtol=0, atol=2e-6)


def test_scaffold_with_identical_clients_and_full_batches_equals_fedavg(tmp_path: Path) -> None:
    """c and c_i are then equal, so the corrections cancel."""

    def identical_clients(name: str) -> Experiment:
        e = experiment(name, make_dataset([60, 60]), batch_size=45, rounds=3)
        split = dataclasses.replace(e.task.split, train=RaggedArray.from_lists([e.task.split.train[0]] * 2))
        return dataclasses.replace(e, task=dataclasses.replace(e.task, split=split))

    plain, corrected = (
        run_outcome(identical_clients("fedavg"), tmp_path / "a"),
        run_outcome(identical_clients("scaffold"), tmp_path / "b"),
    )
    for name, value in plain.server.items():
        torch.testing.assert_close(corrected.server[name], value, rtol=0, atol=1e-6)


def test_ditto_global_model_equals_fedavg_bit_for_bit(tmp_path: Path) -> None:
    plain = run_outcome(experiment("fedavg", rounds=3), tmp_path / "plain")
    assert are_identical(plain.server, run_outcome(experiment("ditto", rounds=3), tmp_path / "ditto").server)


def test_ditto_with_lam_zero_equals_local_training(tmp_path: Path) -> None:
    local = run_outcome(experiment("local", rounds=3), tmp_path / "local")
    ditto = run_outcome(experiment("ditto(lam=0)", rounds=3), tmp_path / "ditto")
    assert all(are_identical(local.clients[c], ditto.clients[c]) for c in range(3))
    assert [e["accuracy"] for e in local.rounds] == [e["accuracy"] for e in ditto.rounds]


def test_ditto_with_large_lam_stays_at_received_model() -> None:
    """lam = 1/lr: one step from v is v - lr g - (v - w) = w - lr g(v)."""
    e = experiment("ditto", batch_size=45)
    task, theta = e.task, e.task.model.parameters
    w = {n: p + 0.5 for n, p in theta.items()}
    _, private = parse_method("ditto(lam=10)").train(
        Context(task, 1), ClientTrainer(task, 1, 0), w, add_prefix("personal/", theta)
    )
    plain = ClientTrainer(task, 1, 0).fit(theta).params
    for name, v in strip_prefix(private, "personal/").items():
        torch.testing.assert_close(v, w[name] + plain[name] - theta[name], rtol=0, atol=1e-5)


def test_fedper_without_head_equals_fedavg_bit_for_bit(tmp_path: Path) -> None:
    """Cut after the last layer, so that all parameters belong to the body."""

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes), nn.Identity()
        )

    def resolve_without_head(name: str) -> Experiment:
        config = Config(partition="natural", rounds=2, lr=0.1, cut="3")
        return resolve(name, config, dataset=make_dataset(), model=build)

    assert resolve_without_head("fedper").task.model.head == ()
    fedper, fedavg = (
        run_outcome(resolve_without_head("fedper"), tmp_path / "fedper"),
        run_outcome(resolve_without_head("fedavg"), tmp_path / "fedavg"),
    )
    assert are_identical(fedper.server, fedavg.server)
    assert fedper.clients == {}


class RecordingTrainer(ClientTrainer):
    """Trainer that records the result of each fit."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.results: list[State] = []

    def fit(self, *arguments: Any, **options: Any) -> TrainedModel:
        result = super().fit(*arguments, **options)
        self.results.append(result.params)
        return result


def test_fedrep_trains_head_and_body_separately() -> None:
    """The head phase does not change the body, and the body phase does not change the head."""
    task = experiment("fedrep").task
    theta, trainer = task.model.parameters, RecordingTrainer(task, 1, 0)
    FedRep().update(trainer, theta)
    head_phase, body_phase = trainer.results
    for name in task.model.body:
        assert torch.equal(head_phase[name], theta[name])
        assert not torch.equal(body_phase[name], theta[name])
    for name in task.model.head:
        assert not torch.equal(head_phase[name], theta[name])
        assert torch.equal(body_phase[name], head_phase[name])


def test_fedrod_balanced_softmax() -> None:
    """Equal counts add the same to every logit: plain cross-entropy. A class without samples is finite."""
    logits, y = (
        torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 2, 0, 1, 2]),
    )
    batch = Batch(logits, y, logits, logits, logits.requires_grad_())
    equal, _ = _balanced_loss(TermContext(None, {}, {"prior": torch.full((4,), 7.0).log()}, batch, 0), {})  # type: ignore[arg-type]
    torch.testing.assert_close(equal, nn.functional.cross_entropy(logits, y))
    prior = torch.tensor([5.0, 3.0, 2.0, 0.0]).double().clamp(min=1e-8).log().float()
    unequal, _ = _balanced_loss(TermContext(None, {}, {"prior": prior}, batch, 0), {})  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(unequal, logits)
    assert torch.isfinite(unequal)
    assert torch.isfinite(gradient).all()
    assert gradient[:, 3].abs().max() < 1e-6


def test_fedrod_trains_with_missing_labels(tmp_path: Path) -> None:
    outcome = run_outcome(experiment("fedrod", make_dataset([24, 8]), rounds=2), tmp_path)
    assert all(torch.isfinite(t).all() for t in outcome.server.values())


def test_fedbabu_head_stays_at_theta_zero(tmp_path: Path) -> None:
    """The server has no head, and clients predict with that of theta^0."""
    e = experiment("fedbabu", rounds=3)
    outcome = run_outcome(e, tmp_path)
    model = e.task.model
    assert outcome.server.keys() == set(model.body)
    params = e.method.inference_params(Context(e.task, 4), ClientTrainer(e.task, 4, 0), outcome.server, {})
    assert all(torch.equal(params[name], model.parameters[name]) for name in model.head)
    assert not any(torch.equal(params[name], model.parameters[name]) for name in model.body)


def test_perfedavg_with_alpha_zero_is_fedavg_on_every_second_batch() -> None:
    """alpha = 0: w <- w - beta g(w; D2). 45 samples: two pairs of batches."""
    task = experiment("perfedavg").task
    theta, trainer = task.model.parameters, ClientTrainer(task, 1, 0)
    upload, _ = parse_method("perfedavg(alpha=0)").train(Context(task, 1), trainer, theta, {})
    indices = torch.from_numpy(task.split.train[0][trainer.rng("batches").permutation(45)])
    expected = theta
    for second in (indices[10:20], indices[30:40]):
        samples = Samples(task.dataset.inputs(task.dataset.x[second]), task.dataset.y[second])
        gradients = gradient_by_autograd(task.model, expected, {}, *samples).gradients
        expected = {name: p - 0.1 * gradients[name] for name, p in expected.items()}
    for name, value in upload.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_perfedavg_hessian_free_is_the_meta_gradient() -> None:
    """With D1 = D2 = D3 in the limit: w - beta (I - alpha H) g(w'), H from autograd, on one small client."""
    task = experiment(
        "perfedavg", make_dataset([2]), batch_size=1
    ).task  # one training sample: each part is the whole batch
    theta = task.model.parameters
    upload, _ = parse_method("perfedavg(hessian=free,alpha=0.05,beta=1)").train(
        Context(task, 1), ClientTrainer(task, 1, 0), theta, {}
    )
    x, y = task.dataset.inputs(task.dataset.x[task.split.train[0]]), task.dataset.y[task.split.train[0]]

    def loss(*weights: torch.Tensor) -> torch.Tensor:
        logits = task.model.forward(dict(zip(theta, weights, strict=True)), x).logits
        return nn.functional.cross_entropy(logits, y)

    start = tuple(p.clone() for p in theta.values())
    g = _gradient(loss, start)
    adapted = tuple(p - 0.05 * d for p, d in zip(start, g, strict=True))
    u = _gradient(loss, adapted)
    _, hessian_product = torch.autograd.functional.hvp(loss, start, u)  # type: ignore[no-untyped-call]
    for name, a, b in zip(theta, u, hessian_product, strict=True):
        torch.testing.assert_close(theta[name] - upload[name], a - 0.05 * b, rtol=0.02, atol=2e-3)


def _gradient(loss: Callable[..., torch.Tensor], point: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in point]
    return torch.autograd.grad(loss(*leaves), leaves)


@pytest.mark.parametrize("trainer", ["compiled", "autograd"])
def test_pfedme_converges_to_the_proximal_point(trainer: str) -> None:
    """There grad f(theta) + lam (theta - w) = 0, lam being 15. Without ReLU, which has kinks."""
    task = experiment("pfedme", batch_size=45, trainer=trainer).task
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10))
    indices = task.split.train[0]
    x, y = task.dataset.inputs(task.dataset.x[indices]), task.dataset.y[indices]
    task = dataclasses.replace(task, model=SplitModel(module, x[:1], "1"))
    w, method = task.model.parameters, parse_method("pfedme(k=800,eta=0.0000001)")
    _, private = method.train(Context(task, 1), ClientTrainer(task, 1, 0), w, {})
    theta = strip_prefix(private, "personal/")
    gradients = gradient_by_autograd(task.model, theta, {}, x, y).gradients
    for name, g in gradients.items():
        torch.testing.assert_close(g + 15 * (theta[name] - w[name]), torch.zeros_like(g), rtol=0, atol=2e-5)
    assert max(float(g.abs().max()) for g in gradients.values()) > 0.01


def test_apfl_with_fixed_alpha_equals_fedavg_or_local_training(tmp_path: Path) -> None:
    """alpha = 0 predicts with FedAvg's model, alpha = 1 with the local one; the global model is FedAvg's."""
    options: dict[str, Any] = {"rounds": 3, "trainer": "autograd"}
    fedavg = run_outcome(experiment("fedavg", **options), tmp_path / "fedavg")
    local = run_outcome(experiment("local", **options), tmp_path / "local")
    for alpha, other in ((0, fedavg), (1, local)):
        outcome = run_outcome(
            experiment(f"apfl(alpha={alpha},adaptive=false)", **options), tmp_path / f"apfl{alpha}"
        )
        assert are_identical(outcome.server, fedavg.server)
        assert [e["accuracy"] for e in outcome.rounds] == [e["accuracy"] for e in other.rounds]
    for client, state in local.clients.items():
        for name, value in state.items():
            torch.testing.assert_close(outcome.clients[client][name], value, rtol=0, atol=1e-6)


def test_apfl_alpha_gradient_matches_numerical_gradient() -> None:
    """d f(alpha v + (1 - alpha) w) / d alpha, from the change of alpha in one step."""
    task = experiment("apfl", batch_size=45).task
    w, rng = task.model.parameters, torch.Generator().manual_seed(1)
    v = {n: p + 0.05 * torch.randn(p.shape, generator=rng) for n, p in w.items()}
    private = add_prefix("personal/", v) | {"alpha": torch.tensor(0.5)}
    _, after = parse_method("apfl").train(Context(task, 1), ClientTrainer(task, 1, 0), w, private)
    indices = torch.from_numpy(task.split.train[0])
    inputs, y = task.dataset.inputs(task.dataset.x[indices]), task.dataset.y[indices]

    def loss(alpha: float) -> float:
        mixture = {n: (alpha * v[n] + (1 - alpha) * w[n]).double() for n in w}
        return nn.functional.cross_entropy(task.model.forward(mixture, inputs.double()).logits, y).item()

    gradient = (loss(0.5 + 1e-4) - loss(0.5 - 1e-4)) / 2e-4
    assert (0.5 - after["alpha"].item()) / 0.1 == pytest.approx(gradient, rel=1e-3)


def test_majority_has_the_majority_accuracy(tmp_path: Path) -> None:
    e = experiment("majority", rounds=1)
    outcome = run_outcome(e, tmp_path)
    assert [result["accuracy"]["weighted"] for result in outcome.rounds if result["accuracy"]] == [
        e.majority_accuracy
    ] * 2
    assert outcome.rounds[1]["bytes_up"] == outcome.rounds[1]["bytes_down"] == 0


def test_local_training_sends_nothing(tmp_path: Path) -> None:
    outcome = run_outcome(experiment("local"), tmp_path)
    assert outcome.server == {}
    assert all(result["bytes_up"] == result["bytes_down"] == 0 for result in outcome.rounds)
    assert outcome.clients.keys() == {0, 1, 2}


def test_rejected_addons_have_a_reason() -> None:
    for method in ("fedper", "fedrep", "fedrod", "fedbabu", "fedfomo"):
        parse_method(f"{method}+mr")
        with pytest.raises(
            InvalidInputError, match=f"{method} does not support \\+prbm: it has its own personalization"
        ):
            parse_method(f"{method}+dbe")
        parse_name(f"{method}+dbe").build(force=True)
    for method in ("ditto", "apfl"):
        parse_method(f"{method}+mr")
        with pytest.raises(InvalidInputError, match="it trains two models, and PRBM is defined for one"):
            parse_name(f"{method}+dbe").build(force=True)
    for method in ("fedbabu", "perfedavg"):
        with pytest.raises(InvalidInputError, match="it adapts its model to each client already"):
            parse_name(f"{method}+ft").build(force=True)
    with pytest.raises(
        InvalidInputError, match="fedrod does not support \\+ft: plain SGD would train one of its two heads"
    ):
        parse_name("fedrod+ft").build(force=True)
    with pytest.raises(
        InvalidInputError,
        match="fedfomo does not support this \\+mr: init_keep_model=true would have no effect",
    ):
        parse_method("fedfomo+mr(init_keep_model=true)")
    for method in ("perfedavg", "pfedme"):
        with pytest.raises(InvalidInputError, match="its local scheme is not plain SGD"):
            parse_method(f"{method}+mr")
    for method in ("local", "majority"):
        with pytest.raises(InvalidInputError, match="without an exchange it has no effect"):
            parse_method(f"{method}+mr")
