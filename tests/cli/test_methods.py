"""`feddbe methods`: parameters and the defaults that a run would use."""

from __future__ import annotations

import re

import pytest

from feddbe.cli.methods import format_default
from feddbe.config.defaults import PER_MODEL, ResolvedDefaults
from feddbe.config.parameters import format_value
from feddbe.methods.registry import describe_methods
from tests.cli.shell import Shell

PARAMETERS = {
    f"{parameter['part']} {parameter['name']}": parameter
    for description in describe_methods()
    for parameter in description["parameters"]
}


@pytest.mark.parametrize("model", PER_MODEL)
def test_default_of_each_model_is_printed(model: str) -> None:
    for name, parameter in PARAMETERS.items():
        layers = ResolvedDefaults("default", "", model, parameter["part"]).part_settings()
        part_defaults = layers.get(parameter["part"], {})
        expected = format_value(part_defaults.get(parameter["name"], parameter["default"]))
        text = format_default(parameter)
        match = re.search(rf"(\S+) for [\w, ]*\b{model}\b", text)
        assert (match[1] if match else text) == expected, name


def test_models_with_another_default_are_named() -> None:
    assert format_default(PARAMETERS["mr mu"]).endswith("; 0.1 for resnet18")


@pytest.mark.parametrize("columns", [60, 80])
def test_all_parameters_are_printed(columns: int, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = shell("methods")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= columns
    text = " ".join(out.split())
    descriptions = {description["name"]: description for description in shell.json("methods")["methods"]}
    assert {"fedavg", "prbm", "mr", "dbe"} <= descriptions.keys()
    assert "dbe" in descriptions["fedavg"]["addons"]
    for name, description in descriptions.items():
        assert name in text
        for parameter in description["parameters"]:
            assert f"{parameter['name']} {parameter['meaning']} {parameter['allowed']}; default" in text
    assert "default 1 for cnn, cnn_small, har_cnn, mlp, resnet18, own; 0.1 for fasttext" in text
    assert [parameter["name"] for parameter in descriptions["mr"]["parameters"]][:2] == ["kappa", "mu"]
