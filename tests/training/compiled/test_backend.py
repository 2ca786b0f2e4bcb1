"""The compiled backend against autograd for many networks, cuts and plans, and what it does not support."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe.data.dataset import Dataset
from feddbe.data.split import Split
from feddbe.errors import DivergenceError, InvalidInputError
from feddbe.models.registry import cnn, cnn_small, har_cnn, mlp
from feddbe.models.split_model import SplitModel
from feddbe.training import autograd, backends
from feddbe.training.backends import select_backend
from feddbe.training.compiled import backend, sgd
from feddbe.training.compiled.network import find_network
from feddbe.training.fit_plan import Batches, FitPlan, FitResult, Samples
from feddbe.training.loss_terms import (
    CROSS_ENTROPY,
    MeanRegularizer,
    ProximalSteps,
    Term,
    TermContext,
    gradient_by_autograd,
    prox,
)
from feddbe.training.task import Optimizer, Task, Training
from feddbe.training.trainer import ClientTrainer, ExtraParameter
from tests.small_runs import experiment

Shape = tuple[int, ...]


def sequence(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Shape]] = {  # built after a seed is set
    "cnn": (lambda: cnn((1, 16, 17), 5), (1, 16, 17)),
    "three channels": (lambda: cnn((3, 16, 16), 5), (3, 16, 16)),
    "small": (lambda: cnn_small((1, 8, 8), 5), (1, 8, 8)),
    "signals": (lambda: har_cnn((9, 1, 30), 5), (9, 1, 30)),
    "perceptron": (lambda: mlp((2, 3), 5), (2, 3)),
    "lenet": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(),
            nn.Linear(20, 5),
        ),
        (1, 16, 16),
    ),
    "unpooled, no bias, 33 channels": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 33, 3, bias=False), nn.Conv2d(33, 5, (2, 3), padding=(1, 0)), nn.ReLU(),
            nn.Flatten(), nn.Linear(5 * 5 * 2, 5, bias=False),
        ),
        (2, 6, 6),
    ),
    "3x3 pool, convolution to the output": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 33, 3), nn.MaxPool2d(3), nn.ReLU(), nn.Conv2d(33, 5, 3), nn.Flatten()
        ),
        (2, 11, 11),
    ),
    "separate pooling and ReLU": (
        lambda: nn.Sequential(
            nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(2, 4, 3, padding="same"), nn.MaxPool2d((1, 2)),
            nn.MaxPool2d((2, 1)), nn.Flatten(), nn.ReLU(), nn.Linear(16, 5),
        ),
        (2, 8, 8),
    ),
    "consecutive linear layers": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(18, 70), nn.Linear(70, 5)), (2, 3, 3),
    ),
}  # fmt: skip


def list_cuts() -> list[tuple[str, str]]:
    return [
        (name, cut)
        for name, (make_module, shape) in NETWORKS.items()
        for cut in SplitModel(make_module(), torch.zeros(1, *shape), onednn=False).cuts
    ]


@pytest.fixture
def float64() -> Iterator[None]:
    """Compute in float64, so that a wrong formula is not mistaken for rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_plan(
    name: str, cut: str | None = None, *, samples: int = 26, batch: int = 13, **parts: Any
) -> FitPlan:
    """Return a plan on random data; `parts` are its other fields.

    Its parameters differ from those of the module, as in every round except the first.
    """
    make_module, shape = NETWORKS[name]
    torch.manual_seed(0)
    x, y = torch.randn(samples, *shape), torch.arange(samples) % 5
    model = SplitModel(make_module().to(x.dtype), x[:1], cut, onednn=False)
    params = {n: p + 0.01 * torch.randn_like(p) for n, p in model.parameters.items()}
    extras = {"prbm": torch.randn(model.feature_shape)} if parts.pop("prbm", False) else {}
    rates = parts.pop("rates", dict.fromkeys(params, 0.02))
    batches = Batches(Dataset("random", x, y, 5), np.arange(samples), batch, parts.pop("epochs", 1), 0, 1, 0)
    terms = tuple(term(model, params) for term in parts.pop("terms", ()))
    correction = {n: torch.randn_like(p) for n, p in params.items()} if parts.pop("corrected", False) else {}
    rates = rates | dict.fromkeys(extras, 0.03)
    optimizer = parts.pop("optimizer", Optimizer())
    return FitPlan(model, params, extras, rates, CROSS_ENTROPY, terms, correction, {}, batches, optimizer)


def mr(mu: float = 0.3, *, corrected: bool = True, without_target: bool = False) -> Any:
    def term(model: SplitModel, params: dict[str, Tensor]) -> Term:
        regularizer = MeanRegularizer(mu, 2.0, corrected)
        const = {} if without_target else {"mean": torch.randn(model.feature_shape)}
        carry = regularizer.init_carry(model.feature_shape)
        return Term(regularizer, const, carry | {"r": torch.randn(model.feature_shape)})

    return term


def proximal(weight: float) -> Any:
    return lambda model, params: prox(weight, {n: p + torch.randn_like(p) for n, p in params.items()})


def assert_equals_autograd(plan: FitPlan, tolerance: float = 1e-10) -> FitResult:
    """Compare all results of a fit; the tolerance of a parameter is relative to its change."""
    assert not backend.unsupported_reason(plan)
    actual, expected = backend.train(plan), autograd.train(plan)
    for name, start in plan.params.items():
        moved = float((expected.params[name] - start).abs().max())
        assert torch.equal(actual.params[name], start) == (name not in plan.rates)
        assert (actual.params[name] - expected.params[name]).abs().max() <= tolerance * max(moved, 1e-3), name
    for name, value in expected.extras.items():
        torch.testing.assert_close(actual.extras[name], value, atol=tolerance, rtol=tolerance)
    assert len(actual.carries) == len(expected.carries)
    for actual_carry, expected_carry in zip(actual.carries, expected.carries, strict=True):
        assert actual_carry.keys() == expected_carry.keys()
        for name, value in expected_carry.items():
            torch.testing.assert_close(actual_carry[name], value, atol=tolerance, rtol=tolerance)
    assert float(actual.losses.total) == pytest.approx(float(expected.losses.total), rel=1e-5)
    assert actual.losses.samples == expected.losses.samples
    return actual


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "cut"), list_cuts())
def test_prbm_and_mr_at_every_cut_of_every_network(name: str, cut: str) -> None:
    assert_equals_autograd(make_plan(name, cut, prbm=True, terms=[mr()]))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("samples", "batch"), [(1, 10), (8, 4), (7, 10)], ids=["1", "4", "7 of 10"])
def test_every_batch_size_equals_autograd(name: str, samples: int, batch: int) -> None:
    assert_equals_autograd(make_plan(name, samples=samples, batch=batch))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "parts",
    [
        {"prbm": True},
        {"terms": [mr(1.0, corrected=False)]},
        {"terms": [mr(0.0, corrected=False)]},
        {"terms": [mr(without_target=True)]},
        {"terms": [mr()], "prbm": True, "epochs": 2},
        {"corrected": True},
        {"terms": [proximal(0.1)]},
        {"terms": [proximal(0.1), mr()], "corrected": True, "prbm": True, "epochs": 2},
        {"optimizer": Optimizer(momentum=0.9), "epochs": 2},
        {
            "optimizer": Optimizer(momentum=0.5, weight_decay=0.01), "terms": [proximal(0.1), mr()],
            "corrected": True, "prbm": True, "epochs": 2,
        },
    ],
    ids=[
        "prbm", "mu 1", "mu 0", "no target", "dbe", "scaffold", "prox", "all", "momentum",
        "all with momentum",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["small", "perceptron"])
def test_terms_corrections_and_optimizers(name: str, parts: dict[str, Any]) -> None:
    assert_equals_autograd(make_plan(name, **parts))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("cut", [None, "conv1", "conv2.0"])
@pytest.mark.parametrize(
    "trained",
    [
        [], ["fc.weight"], ["fc.bias"], ["fc1.1.weight", "fc1.1.bias"], ["conv1.0.weight"], ["conv1.0.bias"],
        ["conv2.0.weight", "fc.bias"], ["conv1.0.weight", "conv1.0.bias", "conv2.0.bias"],
    ],
    ids=str,
)  # fmt: skip
def test_frozen_layers_and_separate_learning_rates(trained: list[str], cut: str | None) -> None:
    rates = {name: 0.01 * (i + 1) for i, name in enumerate(trained)}
    extra: dict[str, Any] = {"terms": [proximal(0.1), mr()], "corrected": True, "prbm": True} if cut else {}
    assert_equals_autograd(make_plan("small", cut, rates=rates, **extra))
    if trained:  # torch's optimizers need a parameter
        assert_equals_autograd(
            make_plan("small", cut, rates=rates, optimizer=Optimizer(momentum=0.9), **extra)
        )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "parts", [{}, {"prbm": True, "terms": [mr()]}, {"optimizer": Optimizer(momentum=0.9), "corrected": True}]
)
@pytest.mark.parametrize(
    ("name", "cut"),
    [("small", "fc1"), ("small", "conv2"), ("small", "conv1.0"), ("lenet", "6"), ("perceptron", None)],
)
def test_frozen_body_is_evaluated_once(
    name: str, cut: str, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_plan(name, cut, epochs=3, **parts)
    rates = {n: rate for n, rate in whole.rates.items() if n in whole.model.head or n in whole.extras}
    plan = dataclasses.replace(whole, rates=rates)
    passes = list[Dataset]()
    body_features = backend._body_features

    def record_pass(plan: FitPlan) -> Dataset:
        passes.append(body_features(plan))
        return passes[-1]

    monkeypatch.setattr(backend, "_body_features", record_pass)
    assert_equals_autograd(plan)
    assert len(passes) == 1
    assert len(passes[0]) == len(plan.batches.indices)
    assert_equals_autograd(dataclasses.replace(plan, batches=dataclasses.replace(plan.batches, epochs=1)))
    assert_equals_autograd(whole)
    monkeypatch.setattr(sgd, "MAX_BODY_FEATURES", 0)
    assert_equals_autograd(plan)
    assert len(passes) == 1


def term_of_all_inputs(context: TermContext, carry: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Use everything that a term can read: the batch, parameters before and after the cut, and others."""
    batch, params, names = context.batch, context.params, [*context.model.parameters]
    first, last = params[names[0]], params[names[-1]]
    z = (batch.z_g.flatten(1) * context.const["scale"]).tanh().sum(1) + batch.z.square().flatten(1).sum(1)
    loss = z.mean() + (batch.logits.square().sum() * last.square().sum()) + first.square().sum()
    loss = loss + (params["extra"] * batch.logits.detach()).square().sum() + params["fixed"].sum()
    detached = {name: params[name].detach() for name in names}
    gradients = context.differentiate(context.model, detached, {}, batch.x, batch.y).gradients
    return 0.01 * loss, {"n": carry["n"] + len(batch.y), "slope": gradients[names[0]].sum()}


def margin_loss(context: TermContext, carry: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return F.multi_margin_loss(context.batch.logits, context.batch.y), carry


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "parts",
    [{}, {"prbm": True}, {"terms": [proximal(0.1), mr()], "corrected": True, "prbm": True, "epochs": 2}],
    ids=["plain", "prbm", "all"],
)
@pytest.mark.parametrize(("name", "cut"), [case for case in list_cuts() if case[0] != "cnn"])
def test_terms_that_autograd_differentiates(name: str, cut: str, parts: dict[str, Any]) -> None:
    plan = make_plan(name, cut, **parts)
    scale = torch.randn(math.prod(plan.model.feature_shape))
    carry = {"n": torch.tensor(0), "slope": torch.tensor(0.0)}
    term = Term(term_of_all_inputs, {"scale": scale}, carry, outputs_only=True)
    others = {"extra": torch.randn(5), "fixed": torch.randn(2)}
    plan = dataclasses.replace(
        plan,
        params=plan.params | others,
        rates={**plan.rates, "extra": 0.04},
        loss=Term(margin_loss, outputs_only=True),
        terms=(term, *plan.terms),
    )
    result = assert_equals_autograd(plan)
    assert result.carries[1]["n"] == result.losses.samples


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", NETWORKS)
def test_proximal_steps_on_one_batch(name: str) -> None:
    plan = make_plan(name, samples=7)
    x, y = plan.batches.dataset.x, plan.batches.dataset.y
    anchor = {n: torch.randn_like(p) for n, p in plan.params.items()}
    actual = backend.proximal_steps(plan.model, plan.params, {}, x, y, ProximalSteps(3, 0.05, 2.0, anchor))
    params, losses = plan.params, []
    for _ in range(3):
        gradient = gradient_by_autograd(plan.model, params, {}, x, y)
        params = {n: p - 0.05 * (gradient.gradients[n] + 2.0 * (p - anchor[n])) for n, p in params.items()}
        losses.append(float(gradient.loss))
    assert float(actual.loss) == pytest.approx(sum(losses) / 3, rel=1e-6)
    for parameter, p in params.items():
        torch.testing.assert_close(actual.params[parameter], p, atol=1e-12, rtol=1e-12, msg=parameter)


@pytest.mark.parametrize("name", ["cnn", "small", "perceptron"])
def test_twenty_steps_in_float32(name: str) -> None:
    assert_equals_autograd(make_plan(name, samples=200, batch=10, prbm=True, terms=[mr()]), tolerance=2e-4)


def test_first_of_equal_maxima_receives_the_gradient() -> None:
    """On a constant image all values of a window are equal; in torch the first one receives the gradient."""
    plan = make_plan("small", samples=10, batch=10)
    x = torch.ones_like(plan.batches.dataset.x)
    x[:, :, 5:, 5:] = torch.randn_like(x[:, :, 5:, 5:])
    samples = Samples(x, plan.batches.dataset.y)
    actual = backend.compute_gradient(plan.model, plan.params, {}, *samples).gradients
    expected = gradient_by_autograd(plan.model, plan.params, {}, *samples).gradients
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, atol=1e-6, rtol=1e-5)


def test_frozen_parameters_have_no_gradient() -> None:
    make_module, shape = NETWORKS["small"]
    module = make_module()
    next(module.parameters()).requires_grad_(False)
    model = SplitModel(module, torch.zeros(1, *shape), onednn=False)
    x, y = torch.randn(4, *shape), torch.arange(4)
    gradients = backend.compute_gradient(model, model.parameters, {}, x, y).gradients
    assert not gradients["conv1.0.weight"].any()
    assert gradients["conv1.0.bias"].any()


# --- predictions


@pytest.mark.parametrize(
    ("name", "cut"), [("small", None), ("small", "conv1"), ("lenet", "0"), ("cnn", "fc1.0")]
)
def test_predictions_equal_torch_and_are_independent_of_the_batch(name: str, cut: str | None) -> None:
    """The number of samples is not a multiple of the batch size of predictions."""
    plan = make_plan(name, cut, prbm=True)
    x = torch.randn(backend.PREDICT_BATCH + 7, *plan.model.input_shape)
    predicted = backend.CompiledPredictor(plan.model, plan.params, plan.extras["prbm"])(x)
    expected = plan.model.forward(plan.params, x, plan.extras["prbm"])
    for actual_tensor, expected_tensor in zip(predicted, expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor.detach(), atol=2e-5, rtol=1e-4)
    last_three = backend.CompiledPredictor(plan.model, plan.params, plan.extras["prbm"])(x[-3:])
    assert torch.equal(last_three.logits, predicted.logits[-3:])
    plain = backend.CompiledPredictor(plan.model, plan.params, None)(x)
    torch.testing.assert_close(plain.logits, plan.model.forward(plan.params, x).logits.detach())
    assert torch.equal(plain.z, plain.z_g)
    empty = backend.CompiledPredictor(plan.model, plan.params, None)(x[:0])
    assert empty.logits.shape == (0, 5)


def test_predictions_use_the_current_parameters() -> None:
    """Unchanged parameters are not copied again; parameters that were changed in place are."""
    model = SplitModel(cnn_small((1, 8, 8), 5), torch.zeros(2, 1, 8, 8))
    x, params = torch.randn(4, 1, 8, 8), {name: p.clone() for name, p in model.parameters.items()}

    def predict(params: dict[str, Tensor]) -> Tensor:
        return backend.CompiledPredictor(model, params, None).logits(x)

    first = predict(params)
    assert torch.equal(predict(params), first)
    assert torch.equal(predict({name: p.clone() for name, p in params.items()}), first)
    params["fc.bias"].add_(1)
    assert torch.allclose(predict(params), first + 1)
    network = find_network(
        model, backend._layer_stack(model), 4, torch.float32, with_cut=False, momentum=False
    )
    for _ in range(2):  # training changes the parameters in its memory
        network.write(model.parameters)
        assert all(torch.equal(p, model.parameters[n]) for n, p in network.read(model.parameters).items())
        network.set_updates(dict.fromkeys(network.parts, 0.1), {})
        network.train(x, torch.arange(4), 4, np.ones(1))


def test_client_predicts_with_the_compiled_backend() -> None:
    """Predictions use the client's PRBM vector."""
    task = experiment("fedavg+prbm", model="cnn_small").task
    trainer = ClientTrainer(task, 1, 0)
    trainer.extras["prbm"] = ExtraParameter(torch.randn(task.model.feature_shape))
    predictors = []

    def compute_logits(params: Any, x: Tensor) -> Tensor:
        predictors.append(trainer._predictor)
        return trainer.forward(params, x).logits

    logits, _ = trainer.predict(task.model.parameters, compute_logits)
    assert all(predictors)
    x = task.dataset.inputs(task.dataset.x[trainer.rows["test"]])
    expected = task.model.forward(task.model.parameters, x, trainer.extras["prbm"].value).logits
    torch.testing.assert_close(logits, expected.detach(), atol=1e-5, rtol=1e-5)


# --- unsupported models and plans


def make_model_with_tied_weights() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, second)


def make_model_with_hook() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_hook(lambda layer, inputs, output: output * 2)
    return model


def make_model_with_replaced_forward() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].forward = lambda x: x * 2
    return model


class CustomModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(x.flatten(1))))
        return out


def image_model(*layers: nn.Module) -> Callable[[], nn.Module]:
    return sequence(*layers, nn.Flatten(), nn.LazyLinear(4))


@pytest.mark.parametrize(
    ("make_module", "reason"),
    [
        (make_model_with_tied_weights, "share a parameter"),
        (make_model_with_hook, "hooks"),
        (make_model_with_replaced_forward, "a replaced forward"),
        (CustomModule, "not a sequence of layers"),
        (sequence(nn.Flatten(), nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), "a Dropout"),
        (sequence(nn.Flatten(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)), "a Sigmoid"),
        (sequence(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), "a BatchNorm1d"),
        (
            sequence(nn.Linear(2, 4), nn.Flatten(), nn.Linear(8, 4)),
            r"a Linear on inputs of shape \(1, 2, 2\)",
        ),
        (image_model(nn.Conv2d(1, 2, 1, stride=2)), "stride"),
        (image_model(nn.Conv2d(1, 2, 1, padding=1, padding_mode="reflect")), "padding"),
        (image_model(nn.Conv2d(1, 2, 2, padding=1, dilation=2)), "dilation"),
        (image_model(nn.MaxPool2d(2, stride=1)), "overlap"),
        (image_model(nn.MaxPool2d(2, padding=1)), "padding"),
        (image_model(nn.AvgPool2d(2)), "a AvgPool2d"),
    ],
)
def test_unsupported_models_and_their_reasons(make_module: Callable[[], nn.Module], reason: str) -> None:
    module = make_module()
    x = torch.randn(2, 1, 2, 2)
    module.train()(x)  # initializes lazy layers
    split = SplitModel(module, x[:1], onednn=False)
    assert re.search(reason, backend.unsupported_model(split))
    with pytest.raises(InvalidInputError, match=f"trainer = compiled does not support this: .*{reason}"):
        backends.describe_backend(make_task(split, x, "compiled"))
    assert list(backends.describe_backend(make_task(split, x, "auto"))) == ["autograd"]


def make_task(model: SplitModel, x: Tensor, trainer: str) -> Task:
    dataset = Dataset("random", x, torch.arange(len(x)) % 4, 4)
    indices = (np.arange(len(x)),)
    return Task(model, dataset, Split.from_arrays(indices, indices), Training(0.1, trainer=trainer))


def custom_term(context: Any, carry: Any) -> Any:
    return None, carry


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda plan: {"loss": Term(custom_term)}, "its own loss or term"),
        (lambda plan: {"terms": (Term(custom_term),)}, "its own loss or term"),
        (lambda plan: {"terms": (prox(1.0, {}), prox(2.0, {}))}, "its own loss or term"),
        (lambda plan: {"params": {"extra": torch.zeros(3)}}, "other than the model and PRBM"),
        (lambda plan: {"extras": {"other": torch.zeros(3)}}, "other than the model and PRBM"),
        (lambda plan: {"correction": {"other": torch.zeros(3)}}, "other than the model and PRBM"),
        (lambda plan: {"terms": (prox(1.0, {"other": torch.zeros(3)}),)}, "other than the model and PRBM"),
        (lambda plan: {"optimizer": Optimizer("adam")}, "not SGD without momentum"),
        (lambda plan: {"optimizer": Optimizer(clip_norm=1.0)}, "not SGD without momentum"),
        (
            lambda plan: {
                "optimizer": Optimizer(momentum=0.9),
                "terms": (Term(custom_term, outputs_only=True),),
            },
            "not SGD without momentum",
        ),
        (lambda plan: {"params": {n: p.half() for n, p in plan.params.items()}}, "not all float32"),
        (lambda plan: {"correction": {"fc.bias": plan.params["fc.bias"].double()}}, "not all float32"),
    ],
)
def test_unsupported_plans_and_their_reasons(
    change: Callable[[FitPlan], dict[str, Any]], reason: str
) -> None:
    plan = make_plan("perceptron")
    assert select_backend(plan)[::2] == ("compiled", "")
    other = dataclasses.replace(plan, **change(plan))
    assert reason in backend.unsupported_reason(other)
    name, _, note = select_backend(other)
    assert (name, note) == ("autograd", f"not compiled: {backend.unsupported_reason(other)}")
    with pytest.raises(InvalidInputError, match=f"trainer = compiled .*{reason}"):
        select_backend(other, "compiled")
    assert select_backend(plan, "autograd")[::2] == ("autograd", "")


def test_nan_loss_is_an_error() -> None:
    """Pooling and ReLU must keep NaN."""
    plan = make_plan("small")
    bad = {n: torch.full_like(p, math.nan) if n == "conv1.0.weight" else p for n, p in plan.params.items()}
    with pytest.raises(DivergenceError, match="loss"):
        backend.train(dataclasses.replace(plan, params=bad))


def test_broken_compiler_is_reported_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that differs from autograd's, or any error, selects autograd with a message."""
    correct_gradient = backend.compute_gradient
    broken_gradients = [
        lambda *args: correct_gradient(*args)._replace(
            gradients={n: 1.01 * g for n, g in correct_gradient(*args).gradients.items()}
        ),
        lambda *args: 1 / 0,
    ]
    reasons = ("differs from autograd's", "division by zero")
    for broken_gradient, reason in zip(broken_gradients, reasons, strict=True):
        monkeypatch.setattr(backend, "compute_gradient", broken_gradient)
        plan, messages = make_plan("perceptron"), list[str]()
        backends.warm_up_kernels(make_task(plan.model, plan.batches.dataset.x, "auto"), messages.append)
        assert reason in backend.unsupported_reason(plan)
        assert len(messages) == 1
        assert "autograd trains" in messages[0]
        assert reason in messages[0]


def test_compilation_is_reported_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_slowly(model: SplitModel) -> str:
        time.sleep(0.3)
        return ""

    monkeypatch.setattr(backend, "MESSAGE_DELAY", 0.01)
    monkeypatch.setattr(backend, "unsupported_machine", check_slowly)
    plan, messages = make_plan("perceptron"), list[str]()
    backends.warm_up_kernels(make_task(plan.model, plan.batches.dataset.x, "auto"), messages.append)
    assert messages == [], "stderr is not a terminal"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    backends.warm_up_kernels(make_task(plan.model, plan.batches.dataset.x, "auto"), messages.append)
    backends.warm_up_kernels(make_task(plan.model, plan.batches.dataset.x, "autograd"), messages.append)
    assert messages == ["compiling the trainer, once on this machine: about 20 seconds"]


MAIN_WITHOUT_NUMBA = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "numba" else find(name, *more)
sys.modules["numba"] = None
from feddbe.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_run_without_numba_uses_autograd_with_one_message(tmp_path: Path) -> None:
    line = f"run fedavg --clients 3 --rounds 1 --model mlp --engine serial --json --out {tmp_path / 'run'}"
    process = subprocess.run(
        [sys.executable, "-c", MAIN_WITHOUT_NUMBA, *line.split()], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    document = json.loads(process.stdout)
    assert document["trainers"] == ["autograd"]
    assert document["remarks"] == ["autograd trains, not compiled: numba is not installed"]
    assert process.stderr.count("autograd trains, several times slower than compiled: numba is not") == 1
