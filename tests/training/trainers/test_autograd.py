"""The end of the step that is written out against autograd's own, and where it is not taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddbe.models.split_model import SplitModel
from feddbe.training import autograd
from feddbe.training.plan import FitPlan
from tests.training.trainers.test_compiled import doubles, mr, near, plan_of

__all__ = ["doubles"]


def agree(plan: FitPlan, monkeypatch: pytest.MonkeyPatch, exact: float = 1e-13) -> None:
    assert autograd._has_explicit_gradient(plan)
    found = autograd.train(plan)
    monkeypatch.setattr(autograd, "_has_explicit_gradient", lambda plan: False)
    wanted = autograd.train(plan)
    pairs = [(found.params, wanted.params), (found.extras, wanted.extras)]
    for one, other in [*pairs, *zip(found.carries, wanted.carries, strict=True)]:
        assert one.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, atol=exact, rtol=exact, msg=name)
    assert float(found.losses.total) == pytest.approx(float(wanted.losses.total), rel=exact)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(
    "parts",
    [
        {"prbm": True},
        {"terms": [mr(1.0, corrected=False)]},
        {"terms": [mr(0.0, corrected=False)]},
        {"terms": [mr(watched=True)]},
        {"terms": [mr()], "prbm": True, "epochs": 3},
        {"terms": [mr()], "prbm": True, "corrected": True},
        {"terms": [mr()], "prbm": True, "rates": {"fc.weight": 0.1}},
        {"terms": [mr()], "prbm": True, "rates": {"conv1.0.weight": 0.1, "fc.bias": 0.2}},
    ],
    ids=["prbm", "mu 1", "mu 0", "watched", "dbe", "scaffold", "head", "some"],
)
def test_is_autograds(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    agree(plan_of("small", **parts), monkeypatch)


class Net(nn.Module):
    """To be traced."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x.flatten(1))))
        return out


def model_of(module: nn.Module, cut: str | None = None) -> SplitModel:
    return SplitModel(module, torch.zeros(2, 2, 3), cut)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("bias", [True, False])
def test_a_traced_model(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model = plan_of("perceptron", terms=[mr()], prbm=True), model_of(Net(bias=bias))
    (term,) = plan.terms
    small = {name: t.flatten()[:6] for name, t in (term.const | {"r": term.carry["r"]}).items()}
    plan = replace(
        plan,
        model=model,
        params=model.parameters,
        extras={"prbm": torch.randn(6)},
        rates=dict.fromkeys([*model.parameters, "prbm"], 0.1),
        terms=(term._replace(const={"mean": small["mean"]}, carry=term.carry | {"r": small["r"]}),),
    )
    assert list(model.linear_head.values()) == ["head.weight", "head.bias"][: 1 + bias]
    agree(plan, monkeypatch)


def hooked() -> nn.Sequential:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Linear(6, 5))
    net[2].register_forward_hook(lambda layer, given, out: 2 * out)
    return net


def tied() -> nn.Sequential:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Linear(6, 6))
    net[2].weight = net[1].weight
    return net


def longer() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))


@pytest.mark.parametrize(
    ("module", "cut"),
    [(hooked(), None), (tied(), None), (Net(), "body"), (longer(), "1")],
    ids=["hooks", "tied", "traced, more than it", "more than it"],
)
def test_no_linear_layer_of_its_own(module: nn.Module, cut: str | None) -> None:
    assert not model_of(module, cut).linear_head


def test_other_plans_are_left_to_autograd() -> None:
    assert not autograd._has_explicit_gradient(plan_of("small"))  # the bits of runs that were made
    assert not autograd._has_explicit_gradient(plan_of("small", terms=[near(0.1), mr()], prbm=True))
    assert not autograd._has_explicit_gradient(plan_of("small", cut="conv2", terms=[mr()], prbm=True))
