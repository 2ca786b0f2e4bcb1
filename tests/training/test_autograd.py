"""The explicit gradient of the last layer against autograd, and plans for which it is not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddbe.models.split_model import SplitModel
from feddbe.training import autograd
from feddbe.training.fit_plan import FitPlan
from tests.training.compiled.test_backend import float64, make_plan, mr, proximal

__all__ = ["float64"]


def assert_equals_autograd(plan: FitPlan, monkeypatch: pytest.MonkeyPatch, tolerance: float = 1e-13) -> None:
    assert autograd._has_explicit_gradient(plan)
    actual = autograd.train(plan)
    monkeypatch.setattr(autograd, "_has_explicit_gradient", lambda plan: False)
    expected = autograd.train(plan)
    pairs = [(actual.params, expected.params), (actual.extras, expected.extras)]
    pairs += zip(actual.carries, expected.carries, strict=True)
    for actual_state, expected_state in pairs:
        assert actual_state.keys() == expected_state.keys()
        for name, value in expected_state.items():
            torch.testing.assert_close(actual_state[name], value, atol=tolerance, rtol=tolerance, msg=name)
    assert float(actual.losses.total) == pytest.approx(float(expected.losses.total), rel=tolerance)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "parts",
    [
        {"prbm": True},
        {"terms": [mr(1.0, corrected=False)]},
        {"terms": [mr(0.0, corrected=False)]},
        {"terms": [mr(without_target=True)]},
        {"terms": [mr()], "prbm": True, "epochs": 3},
        {"terms": [mr()], "prbm": True, "corrected": True},
        {"terms": [mr()], "prbm": True, "rates": {"fc.weight": 0.1}},
        {"terms": [mr()], "prbm": True, "rates": {"conv1.0.weight": 0.1, "fc.bias": 0.2}},
    ],
    ids=["prbm", "mu 1", "mu 0", "no target", "dbe", "scaffold", "head only", "two parameters"],
)
def test_explicit_gradient_equals_autograd(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equals_autograd(make_plan("small", **parts), monkeypatch)


class TracedModel(nn.Module):
    """Model that is traced by torch.fx."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x.flatten(1))))
        return out


def make_split_model(module: nn.Module, cut: str | None = None) -> SplitModel:
    return SplitModel(module, torch.zeros(2, 2, 3), cut)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("bias", [True, False])
def test_explicit_gradient_of_a_traced_model(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("perceptron", terms=[mr()], prbm=True)
    model = make_split_model(TracedModel(bias=bias))
    (term,) = plan.terms
    global_mean, running_mean = term.const["mean"].flatten()[:6], term.carry["r"].flatten()[:6]
    plan = replace(
        plan,
        model=model,
        params=model.parameters,
        extras={"prbm": torch.randn(6)},
        rates=dict.fromkeys([*model.parameters, "prbm"], 0.1),
        terms=(term._replace(const={"mean": global_mean}, carry=term.carry | {"r": running_mean}),),
    )
    assert list(model.linear_head.values()) == ["head.weight", "head.bias"][: 1 + bias]
    assert_equals_autograd(plan, monkeypatch)


def make_model_with_hook() -> nn.Sequential:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Linear(6, 5))
    net[2].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return net


def make_model_with_tied_weights() -> nn.Sequential:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Linear(6, 6))
    net[2].weight = net[1].weight
    return net


def make_model_with_tanh() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))


@pytest.mark.parametrize(
    ("module", "cut"),
    [
        (make_model_with_hook(), None),
        (make_model_with_tied_weights(), None),
        (TracedModel(), "body"),
        (make_model_with_tanh(), "1"),
    ],
    ids=["hook", "tied weights", "traced, two layers", "two layers"],
)
def test_head_is_not_one_linear_layer(module: nn.Module, cut: str | None) -> None:
    assert not make_split_model(module, cut).linear_head


def test_plans_without_explicit_gradient() -> None:
    assert not autograd._has_explicit_gradient(make_plan("small"))  # keeps the bits of existing runs
    assert not autograd._has_explicit_gradient(make_plan("small", terms=[proximal(0.1), mr()], prbm=True))
    assert not autograd._has_explicit_gradient(make_plan("small", cut="conv2", terms=[mr()], prbm=True))
