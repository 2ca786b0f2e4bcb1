"""What clients measure: small pure functions, registered by name and chosen by `--measure`.

A new one is one file in this folder with a function under `@measure`; all files here are looked through. It
is given what its parameters name, and by that its moment is chosen:

- a pass over one client's rows: `logits`, labels `y`, representations `z_g` = f(x) and `z` = z_g + p_i (these
  two are computed only if somebody asks);
- its local training: `loss_sum` over the `samples` trained on, `seconds`, `bytes_up`, `bytes_down`.

It returns (value, weight), the weight being what the client counts for in the mean over clients, or None
where it is not defined. It is never asked about no rows at all.

A *pooled* measure asks for `points` alone: z_g of test samples of all clients that were evaluated, at most
`POOLED_ROWS` of each, the same ones in every round. It returns the numbers of clients, or of `ALL` together.
For it clients send representations to the server, which no method does: it is for simulations.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from feddbe.errors import BadInput, unknown
from feddbe.metrics.records import Numbers, Value
from feddbe.metrics.representations.points import Points

Function = Callable[..., Any]
"""Gives a `Value` or None; a pooled one, a `Value` for each client, or for `ALL`."""
PASS = {"logits", "y", "z", "z_g"}
TRAINING = {"loss_sum", "samples", "seconds", "bytes_up", "bytes_down"}
POOLED = {"points"}
POOLED_ROWS = 100
"""Test samples of a client whose representations it sends for pooled measures."""
_MEASURES: dict[str, tuple[Function, frozenset[str]]] = {}


def measure(function: Function) -> Function:
    """Register a measure under the function's name."""
    asks = frozenset(inspect.signature(function).parameters)
    if not any(asks <= given for given in (PASS, TRAINING, POOLED)):
        raise TypeError(
            f"measure {function.__name__} asks for {sorted(asks)}; there are {PASS}, {TRAINING} or {POOLED}"
        )
    _MEASURES[function.__name__] = function, asks
    return function


def known() -> Mapping[str, tuple[Function, frozenset[str]]]:
    """All measures by name, each with what it asks for."""
    _discover()
    return _MEASURES


@cache
def _discover() -> None:
    """Import the built-in metrics, which registers them."""
    importlib.import_module("feddbe.metrics.builtin")


def parse(spec: str, always: Iterable[str] = ("accuracy",)) -> tuple[str, ...]:
    """The names in `auc,loss`, after those that are measured `always`: accuracy chooses the best round."""
    names = [name.strip() for name in spec.split(",") if name.strip()]
    for name in names:
        if name not in known():
            raise unknown("measure", name, known())
    return tuple(dict.fromkeys([*always, *names]))


def asked(names: Iterable[str]) -> set[str]:
    """What these measures ask for."""
    return {parameter for name in names for parameter in known()[name][1]}


def take(names: Iterable[str], given: Mapping[str, Any]) -> Numbers:
    """Those of the measures that ask for nothing but what is given; what is not defined is left out."""
    found: Numbers = {}
    for name in names:
        function, asks = known()[name]
        if asks <= given.keys() and (value := function(**{key: given[key] for key in asks})) is not None:
            found[name] = value
    return found


def pool(names: Iterable[str], points: Points) -> dict[int, Numbers]:
    """The pooled ones of the measures, by client, `ALL` among them; what cannot be said of these points (too
    few, of one label) is left out."""
    found: dict[int, Numbers] = {}
    for name in names:
        function, asks = known()[name]
        values: Mapping[int, Value] = {}
        with suppress(BadInput):
            values = function(points) if asks == POOLED else {}
        for client, value in values.items():
            found.setdefault(client, {})[name] = value
    return found
