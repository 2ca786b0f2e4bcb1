"""A user's model from a Python file: `my_models.py:build`, where build(shape, classes) makes the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from feddbe.errors import BadInput
from feddbe.models.cuts import Halves
from feddbe.options import from_file
from feddbe.options.from_file import Found

__all__ = ["FromFile", "builder"]


@dataclass(frozen=True)
class FromFile:
    """A function in a user's file, called like any other builder; what goes wrong in it becomes one line."""

    found: Found

    def __reduce__(self) -> tuple[Any, ...]:
        return builder, self.found.again

    def __call__(self, shape: tuple[int, ...], classes: int) -> nn.Module | Halves:
        path = self.found.path
        where = f"{self.found.name}({shape}, {classes}) in '{path}'"
        try:
            made = self.found.value(shape, classes)
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
