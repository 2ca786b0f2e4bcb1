"""A recipe builds the same task elsewhere, or says that it cannot."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from feddbe.config.options import Config
from feddbe.errors import InvalidInputError
from feddbe.models.registry import ModelSource
from feddbe.runs.experiment import Experiment, Recipe, resolve
from tests.federation import are_identical, make_samples

MODEL = """
from torch import nn

def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 8), nn.Linear(8, classes))
"""


def pair(shape: tuple[int, ...], classes: int) -> ModelSource:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), nn.Linear(4, classes)


def write(path: Path, y: Any) -> str:
    np.savez(path, x=np.random.default_rng(0).normal(size=(60, 1, 4, 4)).astype(np.float32), y=y)
    return str(path)


def again(experiment: Experiment) -> Experiment:
    """What another process makes of it."""
    recipe = Recipe.of(experiment)
    assert recipe is not None
    sent = pickle.dumps(recipe)
    assert len(sent) < 2000
    task, method = pickle.loads(sent).build()
    return dataclasses.replace(experiment, task=task, method=method)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg+dbe", {}),
        ("scaffold+mr(mu=0.5)", {"variant": "official", "rounds": 3}),
        (
            "fedper+dbe",
            {"force": True, "partition": "iid", "clients": 4, "validation": 0.2, "new_clients": 1},
        ),
    ],
)
def test_the_same_task_and_method(name: str, options: dict[str, Any]) -> None:
    here = resolve(name, Config(**options))
    there = again(here)
    assert there.method == here.method
    assert are_identical(there.task.model.parameters, here.task.model.parameters)
    assert there.task.dataset.sha256() == here.task.dataset.sha256()
    assert there.task.split.index_sha256() == here.task.split.index_sha256()
    fields = ("training", "seed", "rounds", "new_clients", "samples")
    assert [getattr(there.task, f) for f in fields] == [getattr(here.task, f) for f in fields]


def test_own_data_and_model(tmp_path: Path) -> None:
    """Also a split from a file: they are found by their paths, and known by their content."""
    data, model = write(tmp_path / "mine.npz", np.arange(60) % 3), tmp_path / "mine.py"
    model.write_text(MODEL)
    made = resolve("fedavg", Config(data=data, partition="iid", clients=3))
    made.task.split.save(tmp_path / "split.npz")
    here = resolve("fedavg", Config(data=data, model=f"{model}:build", split=str(tmp_path / "split.npz")))
    assert are_identical(again(here).task.model.parameters, here.task.model.parameters)

    model.write_text(MODEL.replace("8", "9"))
    with pytest.raises(
        InvalidInputError, match=r"is something else on this machine \(configuration \w{12}, not "
    ):
        again(here)
    model.write_text(MODEL)
    again(here)
    write(tmp_path / "mine.npz", (np.arange(60) + 1) % 3)
    with pytest.raises(InvalidInputError, match=r"^'.*mine.npz' with model '.*' is something else") as error:
        again(here)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dataset": make_samples()}, "data"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10))}, "model"),
        ({"dataset": make_samples(), "model": pair}, "data and model"),
        ({"model": "mlp"}, ""),
    ],
)
def test_python_objects_have_none(given: dict[str, Any], why: str) -> None:
    made = resolve("fedavg", Config(), **given)
    assert made.in_memory == why
    assert (Recipe.of(made) is None) == bool(why)
