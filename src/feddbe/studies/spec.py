"""What a study consists of: cells, one configuration each, and grids of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from feddbe.config.options import Asked, read
from feddbe.config.spec import written
from feddbe.errors import BadInput


@dataclass(frozen=True)
class Cell:
    """One run to be: a method, and options of `Config` by name; what is not given has its default."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """The trial that it is."""
        return int(self.options.get("seed", 0))

    def asked(self, **more: Any) -> Asked:
        """As it would be asked for; `more` wins over its own options."""
        return read([self.method], {**self.options, **more})

    def __str__(self) -> str:
        """The method and the options that were given, as in `fedavg, lr 0.1, seed 2`."""
        told = {**self.options, "seed": self.seed}
        return ", ".join([self.method, *(f"{key} {written(value)}" for key, value in told.items())])

    def __hash__(self) -> int:
        return hash((self.method, repr(sorted(self.options.items()))))


def grid(
    methods: Sequence[str], options: Mapping[str, Any] | None = None, seeds: Sequence[int] = (0,)
) -> list[Cell]:
    """Every method with every combination of values, each with every seed; the last option varies first, and
    seeds before that.

    An option whose value is a list has these values, one after the other; all others are the same for all.
    """
    for what, values in {"method": methods, "seed": seeds, **(options or {})}.items():
        if isinstance(values, list | tuple) and not values:
            raise BadInput(f"{what} = []; a list of values needs at least one")
    lists = {
        key: list(value) if isinstance(value, list | tuple) else [value]
        for key, value in (options or {}).items()
    }
    return [
        Cell(method, dict(zip(lists, values, strict=True)) | {"seed": seed})
        for method in methods
        for values in itertools.product(*lists.values())
        for seed in seeds
    ]
