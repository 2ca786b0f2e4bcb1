"""Arguments of model builders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from feddbe.errors import InvalidInputError
from feddbe.models.split_model import call_builder

SHAPE = (3, 8)


class Net:
    def __init__(self, shape: Any, classes: Any) -> None:
        self.arguments = shape, classes


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: "nothing", "nothing"),
        (lambda shape, classes: (shape, classes), (SHAPE, 5)),
        (lambda classes, shape: (classes, shape), (5, SHAPE)),
        (lambda inputs, outputs: (inputs, outputs), (SHAPE, 5)),
        (lambda classes: classes, 5),
        (lambda words, classes: (words, classes), (99, 5)),
        (lambda shape, classes, words: (shape, classes, words), (SHAPE, 5, 99)),
        (lambda shape, classes, *, words: (shape, classes, words), (SHAPE, 5, 99)),
        (lambda inputs, outputs, words: (inputs, outputs, words), (SHAPE, 5, 99)),
        (lambda shape, depth=2: (shape, depth), (SHAPE, 2)),
        (lambda classes, *more, depth=2, **others: (classes, more, depth, others), (5, (), 2, {})),
        (lambda shape=None, classes=None: (shape, classes), (SHAPE, 5)),
        (partial(lambda depth, shape, classes: (depth, shape, classes), 7), (7, SHAPE, 5)),
    ],
)
def test_builder_receives_the_parameters_it_names(function: Callable[..., Any], expected: Any) -> None:
    assert call_builder(function, SHAPE, 5, 99) == expected


def test_class_as_builder() -> None:
    assert call_builder(Net, SHAPE, 5, 99).arguments == (SHAPE, 5)


@pytest.mark.parametrize(
    "function", [lambda shape, classes, depth: 0, lambda depth: 0, lambda shape, *, depth: 0]
)
def test_refuses_what_it_does_not_know(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidInputError, match="'depth' needs a default"):
        call_builder(function, SHAPE, 5, 99)
