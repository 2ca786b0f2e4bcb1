"""Gradients and steps for a method with a scheme of its own, and forward passes: compiled where that can be,
else by torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from feddbe.errors import BadInput
from feddbe.state import State
from feddbe.training.compiled import backend
from feddbe.training.plan import Samples
from feddbe.training.task import Task
from feddbe.training.terms import Gradient, Moved, Steps, by_autograd

PATIENCE = 3.0
"""Seconds after which somebody who waits at a terminal is told why."""


def get_ready(task: Task, tell: Callable[[str], None]) -> None:
    """Compile what will be needed, if anything: once, and before there are processes that all would."""
    if task.training.trainer == "autograd" or backend.refuses_layers(task.model):
        return
    words = "compiling the trainer, once on this machine: some 20 seconds"
    word = threading.Timer(PATIENCE, tell if sys.stderr.isatty() else str, [words])
    word.daemon = True
    word.start()
    reason = backend.refuses_machine(task.model)
    word.cancel()
    word.join()
    if reason:
        tell(f"autograd trains, several times slower than compiled: {reason}")


def gradient(
    task: Task, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor], samples: Samples
) -> Gradient:
    """Of the cross-entropy at `params`, in training mode. What is frozen has a gradient of 0."""
    if _refusal(task, params):
        return by_autograd(task.model, params, statistics, *samples)
    return backend.gradient(task.model, params, statistics, *samples)


def descend(task: Task, params: State, statistics: State, samples: Samples, steps: Steps) -> Moved:
    """These steps from `params` on one batch, in training mode."""
    if not _refusal(task, params):
        return backend.descend(task.model, params, statistics, *samples, steps)
    (times, rate, pull, anchor), total = steps, torch.zeros(())
    for _ in range(times):
        g = by_autograd(task.model, params, statistics, *samples)
        params = {n: p - rate * (g.of[n] + pull * (p - anchor[n])) for n, p in params.items()}
        statistics, total = g.statistics, total + g.loss
    return Moved(params, total / times, statistics)


def trainer(task: Task) -> dict[str, str]:
    """Who computes gradients, and why nobody who is faster."""
    reason, asked = _refusal(task, task.model.parameters), task.training.trainer
    if not reason:
        return {"compiled": ""}
    if asked == "compiled":
        raise BadInput(f"trainer = compiled does not take this: {reason}; take auto")
    return {"autograd": f"not compiled: {reason}" if asked == "auto" else ""}


def predictor(task: Task, params: Mapping[str, Tensor], prbm: Tensor | None) -> backend.Predictor | None:
    """Compiled forward passes at these parameters; None: by torch."""
    return None if _refusal(task, params) else backend.Predictor(task.model, params, prbm)


def _refusal(task: Task, params: Mapping[str, Tensor]) -> str:
    """Why not compiled."""
    names = task.model.parameters
    if task.training.trainer == "autograd":
        return "autograd was asked for"
    if not params.keys() >= names.keys():
        return "these are no parameters of the model"
    return backend.refuses_model(task.model) or backend.refuses_types(params[name] for name in names)
