"""`feddbe methods` tells the defaults that a run would have."""

from __future__ import annotations

import re

import pytest

from feddbe.cli.methods import format_default
from feddbe.config.defaults import PER_MODEL, DefaultLayers
from feddbe.config.parameters import format_value
from feddbe.methods.registry import describe_methods

PARAMETERS = {f"{p['part']} {p['name']}": p for one in describe_methods() for p in one["parameters"]}


@pytest.mark.parametrize("model", PER_MODEL)
def test_defaults_are_those_of_each_model(model: str) -> None:
    layers = DefaultLayers("default", "", model).part_settings()
    for name, parameter in PARAMETERS.items():
        expected = format_value(
            layers.get(parameter["part"], {}).get(parameter["name"], parameter["default"])
        )
        told = format_default(parameter)
        own = re.search(rf"(\S+) for [\w, ]*\b{model}\b", told)
        assert (own[1] if own else told) == expected, name


def test_where_models_differ() -> None:
    assert format_default(PARAMETERS["mr mu"]).endswith("; 0.1 for resnet18")
