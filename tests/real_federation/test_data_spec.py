"""The form of a federation's data: nodes apply the operator's, and a crafted one is refused."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from feddbe.data.registry import load_dataset
from feddbe.errors import FeddbeError
from feddbe.federation.data_spec import DataSpec

CRAFTED: list[Any] = [
    None, True, 0, -1, 1e308, float("nan"), float("inf"), 2**70, "", "x", "\x1b[2J", [], {}, [1], ["a", "a"],
    [[]],
]  # fmt: skip
RANDOM_CHANGES = 300


def write_table(path: Path, mean: int) -> str:
    lines = ["age,city,label", *(f"{mean + k % 5 - 2},{'ab'[k % 2]},{'xy'[k % 3 == 0]}" for k in range(40))]
    path.write_text("\n".join(lines))
    return str(path)


def write_texts(path: Path) -> str:
    lines = [
        "text,label",
        *(f"sentence {k % 5} has some {'more ' * (k % 3)}words,{'xy'[k % 2]}" for k in range(40)),
    ]
    path.write_text("\n".join(lines))
    return str(path)


def test_tables_of_other_means_keep_their_difference(tmp_path: Path) -> None:
    """By their own rows, both would be standardized to the same inputs."""
    young, old = (write_table(tmp_path / f"{mean}.csv", mean) for mean in (20, 70))
    spec = DataSpec.from_example(young)
    inputs = [spec.conform(load_dataset(path)).x for path in (young, old)]
    assert inputs[0][:, 0].mean().abs() < 1e-6
    deviation = spec.preprocessing.columns[0].deviation
    torch.testing.assert_close(inputs[1][:, 0], inputs[0][:, 0] + 50 / deviation)
    assert torch.equal(inputs[1][:, 1:], inputs[0][:, 1:])


def find_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from find_paths(value[key], (*path, key))


@pytest.mark.parametrize("kind", ["table", "texts", "digits"])
def test_crafted_form_is_refused_or_applies(kind: str, tmp_path: Path) -> None:
    """Any change of data.json is refused, or gives inputs that a model can use."""
    data = {"table": write_table(tmp_path / "t.csv", 20), "texts": write_texts(tmp_path / "w.csv")}.get(
        kind, kind
    )
    dataset, valid = load_dataset(data), json.loads(json.dumps(DataSpec.from_example(data).to_json()))
    assert DataSpec.from_json(valid).to_json() == DataSpec.from_example(data).to_json()
    rng, refused = random.Random(0), 0
    for _ in range(RANDOM_CHANGES):
        crafted = copy.deepcopy(valid)
        *path, last = rng.choice(list(find_paths(crafted)))
        target = crafted
        for key in path:
            target = target[key]
        target[last] = copy.deepcopy(rng.choice(CRAFTED))
        try:
            spec = DataSpec.from_json(crafted)
            assert spec.conform(dataset).x.float().isfinite().all()
        except (ValueError, FeddbeError):
            refused += 1
    assert refused > RANDOM_CHANGES / 2
