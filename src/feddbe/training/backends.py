"""Training backends, their selection, and passes outside of a fit.

A backend is a module in `MODULES` with the members of `Backend`. The first one by PRIORITY that supports a
plan trains it. The first one that supports a model's parameters computes gradients, proximal steps and
forward passes for methods with their own local steps. autograd supports everything and is the last.
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
from feddbe.training.fit_plan import FitPlan, FitResult, Samples
from feddbe.training.loss_terms import Gradient, ProximalSteps, StepsResult
from feddbe.training.task import Task

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

    def list_packages(self) -> list[str]:
        """Return the installed packages, except torch, that its numbers depend on."""

    def warm_up_kernels(self, model: SplitModel, notify: Callable[[str], None]) -> None:
        """Compile the kernels of this model, if there are any; `notify` receives messages to the user."""

    def unsupported_reason(self, plan: FitPlan) -> str:
        """Return why it does not train this plan; empty if it does."""

    def train(self, plan: FitPlan) -> FitResult:
        """Train a plan."""

    def unsupported_pass_reason(self, model: SplitModel, params: Mapping[str, Tensor]) -> str:
        """Return why it does not compute passes at these parameters; empty if it does."""

    def compute_gradient(
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

    def make_predictor(
        self, model: SplitModel, params: Mapping[str, Tensor], prbm: Tensor | None
    ) -> Predictor | None:
        """Return forward passes at these parameters; None: the model's own."""


@cache
def all_backends() -> dict[str, Backend]:
    """Return all backends by name, in the order of their priorities."""
    modules = {name: cast(Backend, import_module(module)) for name, module in MODULES.items()}
    return dict(sorted(modules.items(), key=lambda item: item[1].PRIORITY))


class BackendSelection(NamedTuple):
    """A selected backend, and why faster ones were rejected."""

    name: str
    backend: Backend
    reason: str


def _select(requested: str, unsupported_reason: Callable[[Backend], str]) -> BackendSelection:
    """Return the first backend without a reason against it, or the requested one.

    Raises:
        InvalidInputError: The requested backend is not supported.
    """
    rejected: dict[str, str] = {}
    for name, backend in all_backends().items():
        if requested not in ("auto", name):
            continue
        reason = unsupported_reason(backend)
        if not reason:
            reasons = "; ".join(f"not {other}: {why}" for other, why in rejected.items())
            return BackendSelection(name, backend, reasons)
        rejected[name] = reason
    raise InvalidInputError(f"trainer = {requested} does not support this: {rejected[requested]}; use auto")


def select_backend(plan: FitPlan, requested: str = "auto") -> BackendSelection:
    """Return the backend that trains this plan, and why faster ones were rejected."""
    return _select(requested, lambda backend: backend.unsupported_reason(plan))


def describe_backend(task: Task) -> dict[str, str]:
    """Return the backend that computes gradients for this task, and why faster ones were rejected."""
    model = task.model
    selection = _select(
        task.training.trainer, lambda backend: backend.unsupported_pass_reason(model, model.parameters)
    )
    return {selection.name: selection.reason}


def _select_for_passes(task: Task, params: Mapping[str, Tensor]) -> Backend:
    """Return the first backend that supports these parameters, which may be a part of the model's."""
    requested = task.training.trainer
    *faster, last = all_backends().items()
    for name, backend in faster:
        if requested in ("auto", name) and not backend.unsupported_pass_reason(task.model, params):
            return backend
    return last[1]


def compute_gradient(
    task: Task, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor], samples: Samples
) -> Gradient:
    """Return the gradient of the cross-entropy at `params`, in training mode; 0 for what is frozen."""
    return _select_for_passes(task, params).compute_gradient(task.model, params, statistics, *samples)


def proximal_steps(
    task: Task, params: State, statistics: State, samples: Samples, steps: ProximalSteps
) -> StepsResult:
    """Return the result of these proximal steps from `params` on one batch, in training mode."""
    return _select_for_passes(task, params).proximal_steps(task.model, params, statistics, *samples, steps)


def make_predictor(task: Task, params: Mapping[str, Tensor], prbm: Tensor | None) -> Predictor | None:
    """Return forward passes at these parameters; None: the model's own."""
    return _select_for_passes(task, params).make_predictor(task.model, params, prbm)


def warm_up_kernels(task: Task, notify: Callable[[str], None]) -> None:
    """Compile the kernels of this task, if there are any, before processes are started that all would."""
    for name, backend in all_backends().items():
        if task.training.trainer in ("auto", name):
            backend.warm_up_kernels(task.model, notify)


def list_packages() -> list[str]:
    """Return the installed packages, except torch, that numbers depend on."""
    return [name for backend in all_backends().values() for name in backend.list_packages()]
