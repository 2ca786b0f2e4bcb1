"""`feddbe methods` tells the defaults that a run would have."""

from __future__ import annotations

import re

import pytest

from feddbe.cli.methods import default_of
from feddbe.config.defaults import PER_MODEL, Layers
from feddbe.config.parameters import written
from feddbe.methods.registry import describe

PARAMETERS = {f"{p['part']} {p['name']}": p for one in describe() for p in one["parameters"]}


@pytest.mark.parametrize("model", PER_MODEL)
def test_defaults_are_those_of_each_model(model: str) -> None:
    layers = Layers("default", "", model).of_parts()
    for name, parameter in PARAMETERS.items():
        expected = written(layers.get(parameter["part"], {}).get(parameter["name"], parameter["default"]))
        told = default_of(parameter)
        own = re.search(rf"(\S+) for [\w, ]*\b{model}\b", told)
        assert (own[1] if own else told) == expected, name


def test_where_models_differ() -> None:
    assert default_of(PARAMETERS["mr mu"]).endswith("; 0.1 for resnet18")
