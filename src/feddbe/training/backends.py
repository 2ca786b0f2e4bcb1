"""Training backends and the choice among them.

A backend is a module with a RANK (the lowest that takes a plan trains it), `refuses(plan)`, which returns the
reason or an empty text, and `train(plan)`. autograd takes every plan and comes last.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from feddbe.errors import BadInput
from feddbe.training.plan import FitPlan, Fitted

MODULES = {"compiled": "feddbe.training.compiled.backend", "autograd": "feddbe.training.autograd"}
"""Every backend: its name and its module."""


class Trainer(Protocol):
    """What the module of a backend has."""

    RANK: int

    def refuses(self, plan: FitPlan) -> str: ...

    def train(self, plan: FitPlan) -> Fitted: ...


@cache
def every() -> dict[str, Trainer]:
    """All trainers by name, the one to be asked first first."""
    found = {name: cast(Trainer, import_module(module)) for name, module in MODULES.items()}
    return dict(sorted(found.items(), key=lambda item: item[1].RANK))


class Chosen(NamedTuple):
    """The trainer that takes a plan, and why faster ones do not."""

    name: str
    trainer: Trainer
    why: str


def trainer_of(plan: FitPlan, asked: str = "auto") -> Chosen:
    """The first that takes this plan; of one that is asked for by name, that one or an error."""
    refused: dict[str, str] = {}
    for name, trainer in every().items():
        if asked in ("auto", name):
            reason = trainer.refuses(plan)
            if not reason:
                why = "; ".join(f"not {other}: {reason}" for other, reason in refused.items())
                return Chosen(name, trainer, why)
            refused[name] = reason
    raise BadInput(f"trainer = {asked} does not take this: {refused[asked]}; take auto")
