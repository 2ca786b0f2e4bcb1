"""A user's function that makes a model is called with what its signature asks for.

`build()`, `build(shape, classes)`, `build(classes)`, `build(shape, *, words)`: parameters are known by their
names; two others without names of ours are taken for (shape, classes), in that order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from feddbe.errors import BadInput

__all__ = ["asked", "call"]

Shape = tuple[int, ...]
KNOWN = ("shape", "classes", "words")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def asked(
    function: Callable[..., Any], shape: Shape, classes: int, words: int
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, by place and by name, that it is called with."""
    given: dict[str, Any] = {"shape": shape, "classes": classes, "words": words}
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # some builtins have none
        return [shape, classes], {}
    required = [
        p for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip
    strange = [p for p in required if p.name not in KNOWN]
    if strange and all(p.kind in _POSITIONAL for p in strange) and required[:2] == parameters[:2]:
        # named as the user likes: (shape, classes) by place
        places, rest = parameters[:2], [p for p in required[2:] if p.name not in KNOWN]
        if len(required) >= 2 and not rest and not any(p.name == "words" for p in places):
            more = {p.name: given[p.name] for p in parameters[2:] if p.name in KNOWN}
            return [shape, classes], more
    if strange:
        name = getattr(function, "__name__", "build")
        raise BadInput(
            f"{name}{inspect.signature(function)}: it is called with shape, classes and words, those that it "
            f"asks for by name; '{strange[0].name}' is none of them: give it a default"
        )
    first = list(takewhile(lambda p: p.name in KNOWN and p.kind in _POSITIONAL, parameters))
    rest = [p for p in parameters[len(first) :] if p.name in KNOWN]
    return [given[p.name] for p in first], {p.name: given[p.name] for p in rest}


def call(function: Callable[..., Any], shape: Shape, classes: int, words: int) -> Any:
    """What it makes for inputs of this shape."""
    places, names = asked(function, shape, classes, words)
    return function(*places, **names)
