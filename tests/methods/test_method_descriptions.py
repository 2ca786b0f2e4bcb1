"""Costs in method descriptions, compared with the costs of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from feddbe.methods.registry import METHODS, describe_methods
from feddbe.runs.store import RunStore
from feddbe.state import nbytes
from tests.federation import client_values, experiment, make_dataset, run_outcome


@pytest.mark.parametrize("name", METHODS)
def test_message_and_state_sizes_match_description(name: str, tmp_path: Path) -> None:
    """Eight clients, so that FedFomo has five models; the third round, after which sizes are constant."""
    e = experiment(name, make_dataset([16] * 8), rounds=3)
    outcome = run_outcome(e, tmp_path)
    model, description = e.task.model, METHODS[name].description
    model_bytes = nbytes(model.parameters)
    units = {
        "f": nbytes({n: model.parameters[n] for n in model.body}),
        "h": nbytes({n: model.parameters[n] for n in model.head}),
        "generator": nbytes({n: t for n, t in outcome.server.items() if re.match("generator/(?!adam)", n)}),
        "m": getattr(e.method, "m", 0) * model_bytes,
        "N": 8 * model_bytes,
    }

    def parse_size(text: str) -> int:
        """Return the bytes of a text like `1 + N numbers`."""
        total = 0
        for sign, part in re.findall(r"([+-]?)\s*([\w ]+)", text):
            part = part.strip()
            if part.endswith(("number", "numbers")):
                size = 4 * (8 if part[0] == "N" else int(part.split()[0]))
            else:
                size = units[part] if part in units else int(part) * model_bytes
            total += -size if sign == "-" else size
        return total

    store = RunStore.open(tmp_path)
    down, up = (client_values(store, 3, name, "training") for name in ("bytes_down", "bytes_up"))
    store.close()
    assert set(down.values()) == {parse_size(description.down)}
    assert set(up.values()) == {parse_size(description.up)}
    kept = {nbytes(state) for state in outcome.clients.values()} or {0}
    assert kept == {parse_size(description.keeps)}


def test_every_hyperparameter_has_search_values() -> None:
    """Choices and switches list their values already."""
    for info in describe_methods():
        for parameter in info["parameters"] if info["family"] != "add-on" else []:
            listed = "," in parameter["allowed"]
            assert parameter["search"] or parameter["search_rule"] or listed, (
                f"{info['name']} {parameter['name']}"
            )
