"""An experiment states which of its components are Python objects, which other machines cannot load."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from feddbe.config.options import Config
from feddbe.runs.experiment import resolve
from tests.small_runs import make_dataset


def pair(shape: tuple[int, ...], classes: int) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), nn.Linear(4, classes)


@pytest.mark.parametrize(
    ("objects", "kinds"),
    [
        ({"dataset": make_dataset()}, {"data"}),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10))}, {"model"}),
        ({"dataset": make_dataset(), "model": pair}, {"data", "model"}),
        ({"model": "mlp"}, set()),
    ],
)
def test_python_objects_are_in_memory(objects: dict[str, Any], kinds: set[str]) -> None:
    assert resolve("fedavg", Config(), **objects).in_memory == kinds
