"""Optimizers of local training against torch.optim on a plain module, and the decay of the learning rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddbe.errors import InvalidInputError
from feddbe.methods.registry import METHODS
from feddbe.methods.scaffold import CONTROL
from feddbe.runs.experiment import Experiment
from feddbe.state import State, strip_prefix
from feddbe.training.task import Context, LearningRateDecay
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import are_identical, experiment, run_outcome

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
CASES: dict[str, tuple[dict[str, Any], MakeOptimizer]] = {
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "weight decay": ({"weight_decay": 0.02}, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02)),
    "both": (
        {"momentum": 0.5, "weight_decay": 0.02},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.02),
    ),
    "clipped": ({"clip_norm": 0.3}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "adam": (
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.02},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.02),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_fit_equals_torch_optim(name: str) -> None:
    """Two epochs of FedAvg's local training equal a loop over the module."""
    options, make_optimizer = CASES[name]
    e = experiment("fedavg", local_epochs=2, **options)
    trained = ClientTrainer(e.task, 1, 0).fit(e.task.model.parameters).params
    module = copy.deepcopy(e.task.model.module)
    optimizer = make_optimizer(module.parameters())
    for x, y, size in ClientTrainer(e.task, 1, 0)._make_batches().iterate():
        for inputs, labels in zip(torch.split(x, size), torch.split(y, size), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(e.task.dataset.inputs(inputs)), labels)
            torch.autograd.backward(loss)
            if "clip_norm" in options:
                norm = nn.utils.clip_grad_norm_(module.parameters(), options["clip_norm"])
                assert norm > options["clip_norm"]  # otherwise nothing is clipped
            optimizer.step()
    for parameter, p in module.named_parameters():
        torch.testing.assert_close(trained[parameter], p.detach(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(p, e.task.model.parameters[parameter])


def test_prbm_vector_is_trained_without_weight_decay() -> None:
    e = experiment("fedavg+prbm", weight_decay=5.0, lr=0.01)
    trainer = ClientTrainer(e.task, 1, 0)
    private = {"prbm": torch.full(e.task.model.feature_shape, 3.0)}
    _, new = e.method.train(Context(e.task, 1), trainer, e.task.model.parameters, private)
    assert float((new["prbm"] - 3).abs().max()) < 0.1  # four steps of 0.05 x 3 would be 0.6
    assert not torch.equal(new["prbm"], private["prbm"])


@pytest.mark.parametrize("name", ["fedavg+dbe", "scaffold", "fedprox(mu=0.5)"])
def test_compiled_weight_decay_equals_autograd(name: str, tmp_path: Path) -> None:
    servers = []
    for trainer in ("compiled", "autograd"):
        e = experiment(name, weight_decay=0.1, trainer=trainer)
        servers.append(run_outcome(e, tmp_path / trainer).server)
    for key, p in servers[0].items():
        torch.testing.assert_close(p, servers[1][key], rtol=1e-4, atol=1e-6)
    plain = run_outcome(experiment(name), tmp_path / "plain").server
    parameter = next(iter(e.task.model.parameters))
    assert not torch.allclose(plain[parameter], servers[0][parameter], atol=1e-4)


def test_scaffold_control_variate_includes_weight_decay() -> None:
    """After one step from x, c_i+ is the gradient at x plus decay x."""
    controls = []
    for decay in (0.0, 0.25):
        e = experiment("scaffold", batch_size=45, weight_decay=decay)
        ctx, x = Context(e.task, 1), e.task.model.parameters
        _, private = e.method.train(
            ctx, ClientTrainer(e.task, 1, 0), e.method.server_init(ctx), e.method.client_init(ctx)
        )
        controls.append(strip_prefix(private, CONTROL))
    for name, p in x.items():
        torch.testing.assert_close(controls[1][name] - controls[0][name], 0.25 * p, rtol=1e-3, atol=2e-6)


def test_optimizer_state_is_reset_every_round(tmp_path: Path) -> None:
    """Engines agree, because no optimizer state is kept."""
    options: dict[str, Any] = {"momentum": 0.9, "clip_norm": 1.0, "lr_decay": "step:1:0.5", "rounds": 3}
    serial = run_outcome(experiment("ditto+mr", **options), tmp_path / "serial")
    pool = run_outcome(experiment("ditto+mr", **options), tmp_path / "pool", engine="pool(workers=2)")
    assert are_identical(serial.server, pool.server)
    assert all(are_identical(serial.clients[k], pool.clients[k]) for k in serial.clients)


@pytest.mark.parametrize("name", METHODS)
def test_unsupported_optimizer_options_are_errors_with_a_reason(name: str) -> None:
    values: dict[str, Any] = {"optimizer": "adam", "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 1.0}
    for key, value in values.items():
        if reason := METHODS[name].fixed_options.get(key):
            with pytest.raises(InvalidInputError, match=f"{key} = .*not for {name}") as error:
                experiment(name, **{key: value})
            assert reason in str(error.value)
        else:
            experiment(name, **{key: value})


@pytest.mark.parametrize("name", ["pfedme", "apple(eta1=0.1)", "perfedavg(beta=0.1)"])
def test_decay_of_an_unused_learning_rate_is_an_error(name: str) -> None:
    with pytest.raises(InvalidInputError, match="lr_decay = cosine:2; not for"):
        experiment(name, lr_decay="cosine")


def test_momentum_with_adam_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"momentum = 0\.9 is an option of SGD"):
        experiment("fedavg", optimizer="adam", momentum=0.9)


def test_learning_rate_factor_of_a_round() -> None:
    step, cosine = LearningRateDecay.parse("step:3:0.1", 9), LearningRateDecay.parse("cosine", 4)
    assert [step.factor_at(t) for t in (0, 1, 3, 4, 6, 7)] == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01])
    assert [cosine.factor_at(t) for t in (0, 1, 3, 5, 9)] == pytest.approx([1, 1, 0.5, 0, 0])
    assert math.isclose(LearningRateDecay.parse("cosine:8", 4).factor_at(3), (1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize(
    "text", ["step", "step:0:0.5", "step:2:1.5", "step:2:0", "step:2:e", "cosine:0", "half", "step:2:nan"]
)
def test_invalid_decay_is_an_error(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"lr_decay = .*step:EVERY:FACTOR"):
        LearningRateDecay.parse(text, 10)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "apfl", "perfedavg", "apple", "fedavg+dbe"])
def test_decayed_round_equals_training_with_a_lower_rate(name: str, tmp_path: Path) -> None:
    """Round 2 with decay 0.5 equals round 2 at half the rate: every method uses the rate of the round."""
    decayed = experiment(name, lr_decay="step:1:0.5")
    half = experiment(name, lr=0.05)
    assert ClientTrainer(decayed.task, 2, 0).lr == Context(decayed.task, 2).lr == 0.05

    def train_round(e: Experiment, round_: int) -> tuple[State, State]:
        ctx, trainer = Context(e.task, round_), ClientTrainer(e.task, round_, 0)
        return e.method.train(ctx, trainer, _received_state(decayed), e.method.client_init(ctx))

    decayed_upload, decayed_private = train_round(decayed, 2)
    half_upload, half_private = train_round(half, 2)
    assert are_identical(decayed_upload, half_upload)
    assert are_identical(decayed_private, half_private)
    first_upload, _ = train_round(decayed, 1)
    assert not are_identical(first_upload, decayed_upload)


def _received_state(e: Experiment) -> dict[str, Tensor]:
    ctx = Context(e.task, 0)
    if e.method.base_name == "apple":
        cores = [e.method.client_setup(ctx, ClientTrainer(e.task, 0, k), {}, {})[0] for k in range(3)]
        return e.method.broadcast(Context(e.task, 1, cores.__getitem__), {}, 0)
    constants = {"mean": torch.zeros(e.task.model.feature_shape)} if e.method.has_setup else {}
    return e.method.server_init(ctx) | constants


def test_adaptation_uses_the_full_learning_rate() -> None:
    task = experiment("fedavg+ft", lr_decay="cosine").task
    assert ClientTrainer(task, 3, 0).lr == 0
    assert ClientTrainer(task.for_adaptation(2), 3, 0).lr == 0.1


def test_config_hash_ignores_defaults_and_includes_the_decay() -> None:
    """`cosine` is stored with the number of rounds of the run."""
    plain = experiment("fedavg")
    assert plain.config_hash == experiment("fedavg", momentum=0.0, optimizer="sgd").config_hash
    short, long = (experiment("fedavg", lr_decay="cosine", rounds=r) for r in (2, 3))
    assert short.config["lr_decay"] == "cosine:2"
    assert len({plain.config_hash, short.config_hash, long.config_hash}) == 3
    assert long.config_hash == experiment("fedavg", lr_decay="cosine:3", rounds=9).config_hash
