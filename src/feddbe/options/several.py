"""Several values where one is usual: lists in a TOML file or Python, values with commas on the command line,
and lists in a method's brackets."""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import dataclass
from typing import Any

from feddbe.errors import BadInput
from feddbe.options.config import Config, Given, identity
from feddbe.options.limits import number_or_text

__all__ = ["Several", "expand", "read_seeds", "several"]

_OWN_COMMAS = ("FILE", "DIR", "NAMES")
"""Values of options like these may have commas of their own; several of them are a list."""


@dataclass(frozen=True)
class Several:
    """More than one run: every variant of every method, with every combination of values and every seed."""

    methods: list[list[str]]
    """As they were named, each with its variants: fedavg+dbe(kappa=1,10) has two."""
    options: dict[str, Any]
    """A list has several values."""
    seeds: list[int]
    """None: the default."""

    @property
    def varied(self) -> list[str]:
        """Options with several values."""
        return [k for k, v in self.options.items() if isinstance(v, list) and identity(k) != "no"]

    @property
    def grid(self) -> bool:
        """Whether there is something to choose from."""
        return bool(self.varied) or any(len(variants) > 1 for variants in self.methods)


def several(given: Given) -> Several | None:
    """What was given, if it is more than one run of each method; None: it is not."""
    options = {key: _values(key, value) for key, value in given.values.items()}
    found = Several([expand(name) for name in given.names], options, read_seeds(given))
    return found if found.grid or given.seeds is not None else None


def read_seeds(given: Given) -> list[int]:
    """`seeds`: how many (5 is 0 to 4), or a list; without it the one `seed`, or none if it was not given."""
    seeds: Any = given.seeds
    seed: Any = given.values.get("seed")
    if isinstance(seed, list) or (isinstance(seed, str) and "," in seed):
        raise BadInput(f"seed = {seed}; several seeds are --seeds 0,1,2")
    if seeds is None:
        return [] if seed is None else [seed]
    if seed is not None:
        raise BadInput(f"seed = {seed} and seeds = {seeds}; give one of them")
    if isinstance(seeds, str):
        words = [number_or_text(word.strip()) for word in seeds.split(",") if word.strip()]
        seeds = words[0] if len(words) == 1 and "," not in seeds else words
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        return list(range(seeds))
    whole = isinstance(seeds, list | tuple) and all(type(one) is int and one >= 0 for one in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise BadInput(f"seeds = {given.seeds}; allowed: how many, as in 5, or which, as in 0,1,2")
    return list(seeds)


def expand(name: str) -> list[str]:
    """`fedavg+dbe(kappa=1,10,mu=1)` -> with kappa=1, and with kappa=10; a value without a key belongs to the
    key before it."""
    parts = re.split(r"(\([^()]*\))", name)
    choices = [_brackets(part) if part.startswith("(") else [part] for part in parts]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _brackets(text: str) -> list[str]:
    found: list[list[str]] = []
    for item in text[1:-1].split(","):
        if "=" in item or not found:
            found.append([item])
        else:
            key = found[-1][0].partition("=")[0]
            found[-1].append(f"{key}={item.strip()}")
    return [f"({','.join(chosen)})" for chosen in itertools.product(*found)]


def _values(key: str, value: Any) -> Any:
    """A list if there are several; only what makes another run can have them."""
    field = {field.name: field for field in dataclasses.fields(Config)}[key]
    own = any(word in field.metadata["value"] for word in _OWN_COMMAS)
    if isinstance(value, str) and not own and len(words := _outside_brackets(value)) > 1:
        value = [number_or_text(word.strip()) for word in words] if identity(key) != "no" else value
    if not isinstance(value, list | tuple) or identity(key) == "no":  # then a list is a mistake
        return value
    if len(set(map(str, value))) < len(value) or not value:
        raise BadInput(f"{key} = {list(value)}; several values are all different, and at least one")
    return list(value) if len(value) > 1 else value[0]


def _outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^()]*\))", text)
