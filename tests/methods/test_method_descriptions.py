"""What `feddbe methods` tells of a method's cost, against what a run measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from feddbe.methods.registry import METHODS, describe_methods
from feddbe.runs.store import RunStore
from feddbe.state import nbytes
from tests.federation import client_values, experiment, make_dataset, run_outcome


@pytest.mark.parametrize("name", METHODS)
def test_messages_and_private_state_are_as_told(name: str, tmp_path: Path) -> None:
    """Eight clients, so that FedFomo's five models are there; the third round, when all is in flow."""
    e = experiment(name, make_dataset([16] * 8), rounds=3)
    ran = run_outcome(e, tmp_path)
    model, facts = e.task.model, METHODS[name].description
    one = nbytes(model.parameters)
    units = {
        "f": nbytes({n: model.parameters[n] for n in model.body}),
        "h": nbytes({n: model.parameters[n] for n in model.head}),
        "generator": nbytes({n: t for n, t in ran.server.items() if re.match("generator/(?!adam)", n)}),
        "m": getattr(e.method, "m", 0) * one,
        "N": 8 * one,
    }

    def told(text: str) -> int:
        """`1 + N numbers` in bytes."""
        total = 0
        for sign, part in re.findall(r"([+-]?)\s*([\w ]+)", text):
            part = part.strip()
            if part.endswith(("number", "numbers")):
                size = 4 * (8 if part[0] == "N" else int(part.split()[0]))
            else:
                size = units[part] if part in units else int(part) * one
            total += -size if sign == "-" else size
        return total

    store = RunStore.open(tmp_path)
    down, up = (client_values(store, 3, name, "training") for name in ("bytes_down", "bytes_up"))
    store.close()
    assert set(down.values()) == {told(facts.down)}
    assert set(up.values()) == {told(facts.up)}
    kept = {nbytes(state) for state in ran.clients.values()} or {0}
    assert kept == {told(facts.keeps)}


def test_every_hyper_parameter_of_a_method_has_values_to_try() -> None:
    """Choices and switches name theirs already."""
    for one in describe_methods():
        for parameter in one["parameters"] if one["family"] != "add-on" else []:
            listed = "," in parameter["allowed"]
            assert parameter["search"] or parameter["search_rule"] or listed, (
                f"{one['name']} {parameter['name']}"
            )
