"""Training backends, the choice among them, and passes outside of a fit.

A backend is a module in `MODULES` with what `Backend` lists. The first one by RANK that takes a plan trains
it; the first one that takes a model's parameters computes gradients, proximal steps and forward passes for
methods with a scheme of their own. autograd takes everything and comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from feddbe.errors import InvalidInputError
from feddbe.models.split_model import Forward, SplitModel
from feddbe.state import State
from feddbe.training.plan import FitPlan, FitResult, Samples
from feddbe.training.task import Task
from feddbe.training.terms import Gradient, ProximalSteps, StepsResult

MODULES = {"compiled": "feddbe.training.compiled.backend", "autograd": "feddbe.training.autograd"}
"""Every backend: its name and its module."""


class Predictor(Protocol):
    """Forward passes at fixed parameters."""

    params: Mapping[str, Tensor]

    def __call__(self, x: Tensor) -> Forward: ...

    def logits(self, x: Tensor) -> Tensor: ...


class Backend(Protocol):
    """Interface of a backend's module."""

    PRIORITY: int

    def packages(self) -> list[str]:
        """Return the installed packages that its numbers depend on, besides torch."""

    def warm_up_kernels(self, model: SplitModel, tell: Callable[[str], None]) -> None:
        """Compile what this model needs, if anything; `tell` receives what the user should know."""

    def unsupported_reason(self, plan: FitPlan) -> str:
        """Return why it does not train this plan; empty if it does."""

    def train(self, plan: FitPlan) -> FitResult:
        """Train a plan."""

    def unsupported_pass_reason(self, model: SplitModel, params: Mapping[str, Tensor]) -> str:
        """Return why it does not compute passes at these parameters; empty if it does."""

    def gradient(
        self,
        model: SplitModel,
        params: Mapping[str, Tensor],
        statistics: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
    ) -> Gradient:
        """Return the gradient of the cross-entropy in training mode."""

    def proximal_steps(
        self, model: SplitModel, params: State, statistics: State, x: Tensor, y: Tensor, steps: ProximalSteps
    ) -> StepsResult:
        """Return the result of these proximal steps on one batch, in training mode."""

    def predictor(
        self, model: SplitModel, params: Mapping[str, Tensor], prbm: Tensor | None
    ) -> Predictor | None:
        """Return forward passes at these parameters; None: the model's own."""


@cache
def all_backends() -> dict[str, Backend]:
    """Return all backends by name, in the order of their ranks."""
    modules = {name: cast(Backend, import_module(module)) for name, module in MODULES.items()}
    return dict(sorted(modules.items(), key=lambda item: item[1].PRIORITY))


class TrainerSelection(NamedTuple):
    """A selected backend, and why faster ones were rejected."""

    name: str
    trainer: Backend
    why: str


def _select(asked: str, refuses: Callable[[Backend], str]) -> TrainerSelection:
    """Return the first backend that does not refuse; only one that is `asked` for by name, if any.

    Raises:
        BadInput: The backend that is asked for refuses.
    """
    refused: dict[str, str] = {}
    for name, backend in all_backends().items():
        if asked in ("auto", name):
            reason = refuses(backend)
            if not reason:
                why = "; ".join(f"not {other}: {reason}" for other, reason in refused.items())
                return TrainerSelection(name, backend, why)
            refused[name] = reason
    raise InvalidInputError(f"trainer = {asked} does not take this: {refused[asked]}; take auto")


def select_trainer(plan: FitPlan, asked: str = "auto") -> TrainerSelection:
    """Return the backend that trains this plan."""
    return _select(asked, lambda backend: backend.unsupported_reason(plan))


def trainer(task: Task) -> dict[str, str]:
    """Return the backend that computes gradients for this task, and why faster ones were rejected."""
    model = task.model
    chosen = _select(
        task.training.trainer, lambda backend: backend.unsupported_pass_reason(model, model.parameters)
    )
    return {chosen.name: chosen.why}


def _for_passes(task: Task, params: Mapping[str, Tensor]) -> Backend:
    """Return the first backend that takes these parameters, which need not be all of the model's."""
    asked = task.training.trainer
    *faster, last = all_backends().items()
    for name, backend in faster:
        if asked in ("auto", name) and not backend.unsupported_pass_reason(task.model, params):
            return backend
    return last[1]


def gradient(
    task: Task, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor], samples: Samples
) -> Gradient:
    """Return the gradient of the cross-entropy at `params`, in training mode; 0 for what is frozen."""
    return _for_passes(task, params).gradient(task.model, params, statistics, *samples)


def proximal_steps(
    task: Task, params: State, statistics: State, samples: Samples, steps: ProximalSteps
) -> StepsResult:
    """Return the result of these proximal steps from `params` on one batch, in training mode."""
    return _for_passes(task, params).proximal_steps(task.model, params, statistics, *samples, steps)


def predictor(task: Task, params: Mapping[str, Tensor], prbm: Tensor | None) -> Predictor | None:
    """Return forward passes at these parameters; None: the model's own."""
    return _for_passes(task, params).predictor(task.model, params, prbm)


def warm_up_kernels(task: Task, tell: Callable[[str], None]) -> None:
    """Compile what this task needs, if anything: once, and before there are processes that all would."""
    for name, backend in all_backends().items():
        if task.training.trainer in ("auto", name):
            backend.warm_up_kernels(task.model, tell)


def packages() -> list[str]:
    """Return the installed packages that numbers depend on, besides torch."""
    return [name for backend in all_backends().values() for name in backend.packages()]
