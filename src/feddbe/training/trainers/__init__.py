"""Trainers: every module here that does not begin with an underscore is one.

It has a RANK (the lowest that takes a plan trains it), `refuses(plan)`, which says why not or nothing, and
`train(plan)`. autograd takes every plan and comes last; the others are faster at what they know.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

from feddbe.training.plan import FitPlan, Fitted

__all__ = ["Trainer", "every", "trainer_of"]


class Trainer(Protocol):
    """What a module here is."""

    RANK: int

    def refuses(self, plan: FitPlan) -> str: ...

    def train(self, plan: FitPlan) -> Fitted: ...


@cache
def every() -> dict[str, Trainer]:
    """All trainers by name, the one to be asked first first."""
    names = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    found = {name: cast(Trainer, import_module(f"{__name__}.{name}")) for name in names}
    return dict(sorted(found.items(), key=lambda item: item[1].RANK))


def trainer_of(plan: FitPlan) -> tuple[str, Trainer]:
    """The one that takes this plan, with its name."""
    return next((name, trainer) for name, trainer in every().items() if not trainer.refuses(plan))
