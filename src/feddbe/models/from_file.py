"""A user's model from a Python file: `my_models.py:build`, where build(shape, classes) makes the model, or a
function of fewer or more of (shape, classes, words): `signature.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from feddbe.errors import BadInput
from feddbe.models.cuts import Halves
from feddbe.models.signature import asked
from feddbe.options import from_file
from feddbe.options.from_file import Found

__all__ = ["FromFile", "builder"]


@dataclass(frozen=True)
class FromFile:
    """A function in a user's file, called like any other builder; what goes wrong in it becomes one line."""

    found: Found

    def __reduce__(self) -> tuple[Any, ...]:
        return builder, self.found.again

    def __call__(self, shape: tuple[int, ...], classes: int, words: int = 0) -> nn.Module | Halves:
        path, build = self.found.path, self.found.value
        try:
            places, names = asked(build, shape, classes, words)
        except BadInput as error:
            raise BadInput(f"in '{path}': {error}") from None
        shown = ", ".join([*map(str, places), *(f"{name}={value}" for name, value in names.items())])
        where = f"{self.found.name}({shown}) in '{path}'"
        try:
            made = build(*places, **names)
        except Exception as error:  # a user's code may raise anything
            raise BadInput(f"{where} failed{from_file.failed(error, path)}") from error
        pair = isinstance(made, tuple) and len(made) == 2 and all(isinstance(m, nn.Module) for m in made)
        if not pair and not isinstance(made, nn.Module):
            raise BadInput(
                f"{where} returned {type(made).__name__}; expected an nn.Module or a pair of them "
                "(features, classifier)"
            )
        return made  # type: ignore[no-any-return]


def builder(model: str, sha256: str = "") -> FromFile:
    """The one that `FILE.py:FUNCTION` names."""
    return FromFile(from_file.load("model", "function", model, callable, sha256))
