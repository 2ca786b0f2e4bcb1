"""The compiled trainer against autograd: any network, any cut, any plan; and what it refuses."""

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
from feddbe.training.backends import select_trainer
from feddbe.training.compiled import backend, fits
from feddbe.training.compiled.network import find_network
from feddbe.training.plan import Batches, FitPlan, FitResult, Samples
from feddbe.training.task import Optimizer, Task, Training
from feddbe.training.terms import (
    CROSS_ENTROPY,
    MeanRegularizer,
    ProximalSteps,
    Term,
    TermContext,
    gradient_by_autograd,
    prox,
)
from feddbe.training.trainer import ClientTrainer, ExtraParameter
from tests.federation import experiment

Shape = tuple[int, ...]


def row(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Shape]] = {  # made when they are used, after a seed is set
    "cnn": (lambda: cnn((1, 16, 17), 5), (1, 16, 17)),
    "three colours": (lambda: cnn((3, 16, 16), 5), (3, 16, 16)),
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
    "pooling and ReLU alone": (
        lambda: nn.Sequential(
            nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(2, 4, 3, padding="same"), nn.MaxPool2d((1, 2)),
            nn.MaxPool2d((2, 1)), nn.Flatten(), nn.ReLU(), nn.Linear(16, 5),
        ),
        (2, 8, 8),
    ),
    "linear layers in a row": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(18, 70), nn.Linear(70, 5)), (2, 3, 3),
    ),
}  # fmt: skip


def every_cut() -> list[tuple[str, str]]:
    return [
        (name, cut)
        for name, (make, shape) in NETWORKS.items()
        for cut in SplitModel(make(), torch.zeros(1, *shape), onednn=False).cuts
    ]


@pytest.fixture
def doubles() -> Iterator[None]:
    """In float64 a wrong formula cannot hide behind rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def plan_of(name: str, cut: str | None = None, *, rows: int = 26, batch: int = 13, **parts: Any) -> FitPlan:
    """A plan on random data; `parts` are other fields of it. The network starts at other numbers than its
    module's, as it does in every round but the first."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    x, y = torch.randn(rows, *shape), torch.arange(rows) % 5
    model = SplitModel(make().to(x.dtype), x[:1], cut, onednn=False)
    params = {n: p + 0.01 * torch.randn_like(p) for n, p in model.parameters.items()}
    extras = {"prbm": torch.randn(model.feature_shape)} if parts.pop("prbm", False) else {}
    rates = parts.pop("rates", dict.fromkeys(params, 0.02))
    batches = Batches(Dataset("random", x, y, 5), np.arange(rows), batch, parts.pop("epochs", 1), 0, 1, 0)
    terms = tuple(term(model, params) for term in parts.pop("terms", ()))
    correction = {n: torch.randn_like(p) for n, p in params.items()} if parts.pop("corrected", False) else {}
    rates = rates | dict.fromkeys(extras, 0.03)
    optimizer = parts.pop("optimizer", Optimizer())
    return FitPlan(model, params, extras, rates, CROSS_ENTROPY, terms, correction, {}, batches, optimizer)


def mr(mu: float = 0.3, *, corrected: bool = True, watched: bool = False) -> Any:
    def term(model: SplitModel, params: dict[str, Tensor]) -> Term:
        pull = MeanRegularizer(mu, 2.0, corrected)
        goal = {} if watched else {"mean": torch.randn(model.feature_shape)}
        carry = pull.start(model.feature_shape)
        return Term(pull, goal, carry | {"r": torch.randn(model.feature_shape)})

    return term


def near(weight: float) -> Any:
    return lambda model, params: prox(weight, {n: p + torch.randn_like(p) for n, p in params.items()})


def agree(plan: FitPlan, exact: float = 1e-10) -> FitResult:
    """Parameters, by how far they moved; all other numbers of the fit."""
    assert not backend.unsupported_reason(plan)
    found, wanted = backend.train(plan), autograd.train(plan)
    for name, start in plan.params.items():
        moved = float((wanted.params[name] - start).abs().max())
        assert torch.equal(found.params[name], start) == (name not in plan.rates)
        assert (found.params[name] - wanted.params[name]).abs().max() <= exact * max(moved, 1e-3), name
    for name, value in wanted.extras.items():
        torch.testing.assert_close(found.extras[name], value, atol=exact, rtol=exact)
    assert len(found.carries) == len(wanted.carries)
    for one, other in zip(found.carries, wanted.carries, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, atol=exact, rtol=exact)
    assert float(found.losses.total) == pytest.approx(float(wanted.losses.total), rel=1e-5)
    assert found.losses.samples == wanted.losses.samples
    return found


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(("name", "cut"), every_cut())
def test_with_prbm_and_mr_at_every_cut_of_every_network(name: str, cut: str) -> None:
    agree(plan_of(name, cut, prbm=True, terms=[mr()]))


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("rows", "batch"), [(1, 10), (8, 4), (7, 10)], ids=["1", "4", "7 of 10"])
def test_batches_of_any_size(name: str, rows: int, batch: int) -> None:
    agree(plan_of(name, rows=rows, batch=batch))


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(
    "parts",
    [
        {"prbm": True},
        {"terms": [mr(1.0, corrected=False)]},
        {"terms": [mr(0.0, corrected=False)]},
        {"terms": [mr(watched=True)]},
        {"terms": [mr()], "prbm": True, "epochs": 2},
        {"corrected": True},
        {"terms": [near(0.1)]},
        {"terms": [near(0.1), mr()], "corrected": True, "prbm": True, "epochs": 2},
        {"optimizer": Optimizer(momentum=0.9), "epochs": 2},
        {
            "optimizer": Optimizer(momentum=0.5, weight_decay=0.01), "terms": [near(0.1), mr()],
            "corrected": True, "prbm": True, "epochs": 2,
        },
    ],
    ids=["prbm", "mu 1", "mu 0", "watched", "dbe", "scaffold", "prox", "all", "momentum", "all of them"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["small", "perceptron"])
def test_every_kind_of_plan(name: str, parts: dict[str, Any]) -> None:
    agree(plan_of(name, **parts))


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("cut", [None, "conv1", "conv2.0"])
@pytest.mark.parametrize(
    "trained",
    [
        [], ["fc.weight"], ["fc.bias"], ["fc1.1.weight", "fc1.1.bias"], ["conv1.0.weight"], ["conv1.0.bias"],
        ["conv2.0.weight", "fc.bias"], ["conv1.0.weight", "conv1.0.bias", "conv2.0.bias"],
    ],
    ids=str,
)  # fmt: skip
def test_frozen_layers_and_separate_rates(trained: list[str], cut: str | None) -> None:
    rates = {name: 0.01 * (i + 1) for i, name in enumerate(trained)}
    extra: dict[str, Any] = {"terms": [near(0.1), mr()], "corrected": True, "prbm": True} if cut else {}
    agree(plan_of("small", cut, rates=rates, **extra))
    if trained:  # torch's optimisers do not begin with nothing
        agree(plan_of("small", cut, rates=rates, optimizer=Optimizer(momentum=0.9), **extra))


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(
    "parts", [{}, {"prbm": True, "terms": [mr()]}, {"optimizer": Optimizer(momentum=0.9), "corrected": True}]
)
@pytest.mark.parametrize(
    ("name", "cut"),
    [("small", "fc1"), ("small", "conv2"), ("small", "conv1.0"), ("lenet", "6"), ("perceptron", None)],
)
def test_a_body_that_stays_passes_once(
    name: str, cut: str, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan_of(name, cut, epochs=3, **parts)
    rates = {n: rate for n, rate in whole.rates.items() if n in whole.model.head or n in whole.extras}
    plan, passes = dataclasses.replace(whole, rates=rates), list[Dataset]()
    features = backend._body_features

    def counted(plan: FitPlan) -> Dataset:
        passes.append(features(plan))
        return passes[-1]

    monkeypatch.setattr(backend, "_body_features", counted)
    agree(plan)
    assert len(passes) == 1
    assert len(passes[0]) == len(plan.batches.indices)
    agree(dataclasses.replace(plan, batches=dataclasses.replace(plan.batches, epochs=1)))
    agree(whole)
    monkeypatch.setattr(fits, "MAX_BODY_FEATURES", 0)
    agree(plan)
    assert len(passes) == 1


def inside(context: TermContext, carry: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Of all that a term can look at: the batch, parameters before and after the cut, and others."""
    first, last = (
        context.params[next(iter(context.model.parameters))],
        context.params[[*context.model.parameters][-1]],
    )
    z = (context.batch.z_g.flatten(1) * context.const["by"]).tanh().sum(1) + context.batch.z.square().flatten(
        1
    ).sum(1)
    loss = z.mean() + (context.batch.logits.square().sum() * last.square().sum()) + first.square().sum()
    loss = (
        loss
        + (context.params["more"] * context.batch.logits.detach()).square().sum()
        + context.params["fixed"].sum()
    )
    here = {n: context.params[n].detach() for n in context.model.parameters}
    slope = (
        context.differentiate(context.model, here, {}, context.batch.x, context.batch.y)
        .gradients[next(iter(here))]
        .sum()
    )
    return 0.01 * loss, {"n": carry["n"] + len(context.batch.y), "slope": slope}


def own_loss(context: TermContext, carry: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return F.multi_margin_loss(context.batch.logits, context.batch.y), carry


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(
    "parts",
    [{}, {"prbm": True}, {"terms": [near(0.1), mr()], "corrected": True, "prbm": True, "epochs": 2}],
    ids=["alone", "prbm", "with all"],
)
@pytest.mark.parametrize(("name", "cut"), [case for case in every_cut() if case[0] != "cnn"])
def test_terms_at_the_end_of_a_step(name: str, cut: str, parts: dict[str, Any]) -> None:
    plan = plan_of(name, cut, **parts)
    by = torch.randn(math.prod(plan.model.feature_shape))
    term = Term(inside, {"by": by}, {"n": torch.tensor(0), "slope": torch.tensor(0.0)}, outputs_only=True)
    others = {"more": torch.randn(5), "fixed": torch.randn(2)}
    plan = dataclasses.replace(
        plan,
        params=plan.params | others,
        rates={**plan.rates, "more": 0.04},
        loss=Term(own_loss, outputs_only=True),
        terms=(term, *plan.terms),
    )
    fitted = agree(plan)
    assert fitted.carries[1]["n"] == fitted.losses.samples


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_on_one_batch(name: str) -> None:
    plan = plan_of(name, rows=7)
    x, y = plan.batches.dataset.x, plan.batches.dataset.y
    anchor = {n: torch.randn_like(p) for n, p in plan.params.items()}
    found = backend.proximal_steps(plan.model, plan.params, {}, x, y, ProximalSteps(3, 0.05, 2.0, anchor))
    params, losses = plan.params, []
    for _ in range(3):
        g = gradient_by_autograd(plan.model, params, {}, x, y)
        params = {n: p - 0.05 * (g.gradients[n] + 2.0 * (p - anchor[n])) for n, p in params.items()}
        losses.append(float(g.loss))
    assert float(found.loss) == pytest.approx(sum(losses) / 3, rel=1e-6)
    for parameter, p in params.items():
        torch.testing.assert_close(found.params[parameter], p, atol=1e-12, rtol=1e-12, msg=parameter)


@pytest.mark.parametrize("name", ["cnn", "small", "perceptron"])
def test_twenty_steps_in_float32(name: str) -> None:
    agree(plan_of(name, rows=200, batch=10, prbm=True, terms=[mr()]), exact=2e-4)


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    """On a constant image all positions of a window are equal: torch gives the first one everything."""
    plan = plan_of("small", rows=10, batch=10)
    x = torch.ones_like(plan.batches.dataset.x)
    x[:, :, 5:, 5:] = torch.randn_like(x[:, :, 5:, 5:])
    samples = Samples(x, plan.batches.dataset.y)
    found = backend.gradient(plan.model, plan.params, {}, *samples).gradients
    wanted = gradient_by_autograd(plan.model, plan.params, {}, *samples).gradients
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=1e-5)


def test_frozen_parameters_have_no_gradient() -> None:
    make, shape = NETWORKS["small"]
    module = make()
    next(module.parameters()).requires_grad_(False)
    model = SplitModel(module, torch.zeros(1, *shape), onednn=False)
    found = backend.gradient(model, model.parameters, {}, torch.randn(4, *shape), torch.arange(4)).gradients
    assert not found["conv1.0.weight"].any()
    assert found["conv1.0.bias"].any()


# --- predictions


@pytest.mark.parametrize(
    ("name", "cut"), [("small", None), ("small", "conv1"), ("lenet", "0"), ("cnn", "fc1.0")]
)
def test_predictions(name: str, cut: str | None) -> None:
    """More samples than are predicted at once, and no whole number of them."""
    plan = plan_of(name, cut, prbm=True)
    x = torch.randn(backend.PREDICT_BATCH + 7, *plan.model.input_shape)
    found = backend.Predictor(plan.model, plan.params, plan.extras["prbm"])(x)
    wanted = plan.model.forward(plan.params, x, plan.extras["prbm"])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.detach(), atol=2e-5, rtol=1e-4)
    alone = backend.Predictor(plan.model, plan.params, plan.extras["prbm"])(x[-3:])
    assert torch.equal(alone.logits, found.logits[-3:]), "whoever is predicted beside"
    plain = backend.Predictor(plan.model, plan.params, None)(x)
    torch.testing.assert_close(plain.logits, plan.model.forward(plan.params, x).logits.detach())
    assert torch.equal(plain.z, plain.z_g)
    nobody = backend.Predictor(plan.model, plan.params, None)(x[:0])
    assert nobody.logits.shape == (0, 5)


def test_predictions_follow_the_parameters() -> None:
    """A model that is there already is not written again; one that was changed in its place is."""
    model = SplitModel(cnn_small((1, 8, 8), 5), torch.zeros(2, 1, 8, 8))
    x, params = torch.randn(4, 1, 8, 8), {name: p.clone() for name, p in model.parameters.items()}

    def found(params: dict[str, Tensor]) -> Tensor:
        return backend.Predictor(model, params, None).logits(x)

    first = found(params)
    assert torch.equal(found(params), first)
    assert torch.equal(found({name: p.clone() for name, p in params.items()}), first)
    params["fc.bias"].add_(1)
    assert torch.allclose(found(params), first + 1)
    network = find_network(
        model, backend._layer_stack(model), 4, torch.float32, with_cut=False, momentum=False
    )
    for _ in range(2):  # training leaves other parameters there
        network.write(model.parameters)
        assert all(torch.equal(p, model.parameters[n]) for n, p in network.read(model.parameters).items())
        network.set_updates(dict.fromkeys(network.parts, 0.1), {})
        network.train(x, torch.arange(4), 4, np.ones(1))


def test_a_client_predicts_with_them() -> None:
    """With its vector, and with the bits that others see."""
    task = experiment("fedavg+prbm", model="cnn_small").task
    local = ClientTrainer(task, 1, 0)
    local.extras["prbm"] = ExtraParameter(torch.randn(task.model.feature_shape))
    seen = []

    def logits(params: Any, x: Tensor) -> Tensor:
        seen.append(local._predictor)
        return local.forward(params, x).logits

    found, _ = local.predict(task.model.parameters, logits)
    assert all(seen)
    x = task.dataset.inputs(task.dataset.x[local.rows["test"]])
    wanted = task.model.forward(task.model.parameters, x, local.extras["prbm"].value).logits
    torch.testing.assert_close(found, wanted.detach(), atol=1e-5, rtol=1e-5)


# --- what is refused


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, second)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_hook(lambda layer, given, out: out * 2)
    return model


def replaced_forward() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].forward = lambda x: x * 2
    return model


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(x.flatten(1))))
        return out


def image(*layers: nn.Module) -> Callable[[], nn.Module]:
    return row(*layers, nn.Flatten(), nn.LazyLinear(4))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (tied, "share a parameter"),
        (hooked, "hooks"),
        (replaced_forward, "a replaced forward"),
        (Own, "not a sequence of layers"),
        (row(nn.Flatten(), nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), "a Dropout"),
        (row(nn.Flatten(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)), "a Sigmoid"),
        (row(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), "a BatchNorm1d"),
        (row(nn.Linear(2, 4), nn.Flatten(), nn.Linear(8, 4)), r"a Linear on inputs of shape \(1, 2, 2\)"),
        (image(nn.Conv2d(1, 2, 1, stride=2)), "stride"),
        (image(nn.Conv2d(1, 2, 1, padding=1, padding_mode="reflect")), "padding"),
        (image(nn.Conv2d(1, 2, 2, padding=1, dilation=2)), "dilation"),
        (image(nn.MaxPool2d(2, stride=1)), "overlap"),
        (image(nn.MaxPool2d(2, padding=1)), "padding"),
        (image(nn.AvgPool2d(2)), "a AvgPool2d"),
    ],
)
def test_models_that_it_does_not_take_with_the_reason(model: Callable[[], nn.Module], reason: str) -> None:
    module = model()
    x = torch.randn(2, 1, 2, 2)
    module.train()(x)  # gives lazy layers their shape
    split = SplitModel(module, x[:1], onednn=False)
    assert re.search(reason, backend.unsupported_model(split))
    with pytest.raises(InvalidInputError, match=f"trainer = compiled does not support this: .*{reason}"):
        backends.describe_trainer(task(split, x, "compiled"))
    assert list(backends.describe_trainer(task(split, x, "auto"))) == ["autograd"]


def task(model: SplitModel, x: Tensor, trainer: str) -> Task:
    dataset = Dataset("some", x, torch.arange(len(x)) % 4, 4)
    rows = (np.arange(len(x)),)
    return Task(model, dataset, Split.from_arrays(rows, rows), Training(0.1, trainer=trainer))


def own_term(at: Any, carry: Any) -> Any:
    return None, carry


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda plan: {"loss": Term(own_term)}, "its own loss or term"),
        (lambda plan: {"terms": (Term(own_term),)}, "its own loss or term"),
        (lambda plan: {"terms": (prox(1.0, {}), prox(2.0, {}))}, "its own loss or term"),
        (lambda plan: {"params": {"more": torch.zeros(3)}}, "other than the model and PRBM"),
        (lambda plan: {"extras": {"other": torch.zeros(3)}}, "other than the model and PRBM"),
        (lambda plan: {"correction": {"other": torch.zeros(3)}}, "other than the model and PRBM"),
        (lambda plan: {"terms": (prox(1.0, {"other": torch.zeros(3)}),)}, "other than the model and PRBM"),
        (lambda plan: {"optimizer": Optimizer("adam")}, "not plain SGD"),
        (lambda plan: {"optimizer": Optimizer(clip_norm=1.0)}, "not plain SGD"),
        (
            lambda plan: {
                "optimizer": Optimizer(momentum=0.9),
                "terms": (Term(own_term, outputs_only=True),),
            },
            "not plain SGD",
        ),
        (lambda plan: {"params": {n: p.half() for n, p in plan.params.items()}}, "not all float32"),
        (lambda plan: {"correction": {"fc.bias": plan.params["fc.bias"].double()}}, "not all float32"),
    ],
)
def test_plans_that_it_does_not_take_with_the_reason(
    change: Callable[[FitPlan], dict[str, Any]], reason: str
) -> None:
    plan = plan_of("perceptron")
    assert select_trainer(plan)[::2] == ("compiled", "")
    other = dataclasses.replace(plan, **change(plan))
    assert reason in backend.unsupported_reason(other)
    name, _, why = select_trainer(other)
    assert (name, why) == ("autograd", f"not compiled: {backend.unsupported_reason(other)}")
    with pytest.raises(InvalidInputError, match=f"trainer = compiled .*{reason}"):
        select_trainer(other, "compiled")
    assert select_trainer(plan, "autograd")[::2] == ("autograd", "")


def test_a_loss_that_is_no_number_is_told() -> None:
    """Also through pooling and ReLU, which must not swallow it."""
    plan = plan_of("small")
    bad = {n: torch.full_like(p, math.nan) if n == "conv1.0.weight" else p for n, p in plan.params.items()}
    with pytest.raises(DivergenceError, match="loss"):
        backend.train(dataclasses.replace(plan, params=bad))


def test_a_broken_tool_chain_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers than autograd's, or any error, and it is left alone; and somebody is told."""
    right = backend.gradient
    wrong = [
        lambda *some: right(*some)._replace(
            gradients={n: 1.01 * g for n, g in right(*some).gradients.items()}
        ),
        lambda *some: 1 / 0,
    ]
    for broken, reason in zip(wrong, ("differs from autograd's", "division by zero"), strict=True):
        monkeypatch.setattr(backend, "gradient", broken)
        plan, told = plan_of("perceptron"), list[str]()
        backends.warm_up_kernels(task(plan.model, plan.batches.dataset.x, "auto"), told.append)
        assert reason in backend.unsupported_reason(plan)
        assert len(told) == 1
        assert "autograd trains" in told[0]
        assert reason in told[0]


def test_somebody_who_waits_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(model: SplitModel) -> str:
        time.sleep(0.3)
        return ""

    monkeypatch.setattr(backend, "MESSAGE_DELAY", 0.01)
    monkeypatch.setattr(backend, "unsupported_machine", slow)
    plan, told = plan_of("perceptron"), list[str]()
    backends.warm_up_kernels(task(plan.model, plan.batches.dataset.x, "auto"), told.append)
    assert told == [], "nobody is at a terminal"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    backends.warm_up_kernels(task(plan.model, plan.batches.dataset.x, "auto"), told.append)
    backends.warm_up_kernels(task(plan.model, plan.batches.dataset.x, "autograd"), told.append)
    assert told == ["compiling the trainer, once on this machine: about 20 seconds"]


WITHOUT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "numba" else find(name, *more)
sys.modules["numba"] = None
from feddbe.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_numba_everything_works_and_one_line_says_so(tmp_path: Path) -> None:
    line = f"run fedavg --clients 3 --rounds 1 --model mlp --engine serial --json --out {tmp_path / 'run'}"
    done = subprocess.run([sys.executable, "-c", WITHOUT, *line.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["trainers"] == ["autograd"]
    assert document["remarks"] == ["autograd trains, not compiled: numba is not installed"]
    assert done.stderr.count("autograd trains, several times slower than compiled: numba is not") == 1
