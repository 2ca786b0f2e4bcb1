"""A recipe builds the same task in another process, or reports why not."""

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
from tests.small_runs import are_identical, make_dataset

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


def rebuild(experiment: Experiment) -> Experiment:
    """What another process makes of it."""
    recipe = Recipe.from_experiment(experiment)
    assert recipe is not None
    pickled = pickle.dumps(recipe)
    assert len(pickled) < 2000
    task, method = pickle.loads(pickled).build()
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
def test_recipe_rebuilds_the_same_task_and_method(name: str, options: dict[str, Any]) -> None:
    original = resolve(name, Config(**options))
    rebuilt = rebuild(original)
    assert rebuilt.method == original.method
    assert are_identical(rebuilt.task.model.parameters, original.task.model.parameters)
    assert rebuilt.task.dataset.sha256() == original.task.dataset.sha256()
    assert rebuilt.task.split.index_sha256() == original.task.split.index_sha256()
    fields = ("training", "seed", "rounds", "new_clients", "samples")
    assert [getattr(rebuilt.task, f) for f in fields] == [getattr(original.task, f) for f in fields]


def test_recipe_of_user_data_and_model(tmp_path: Path) -> None:
    """Also a split from a file: they are found by their paths, and known by their content."""
    data, model = write(tmp_path / "mine.npz", np.arange(60) % 3), tmp_path / "mine.py"
    model.write_text(MODEL)
    partitioned = resolve("fedavg", Config(data=data, partition="iid", clients=3))
    partitioned.task.split.save(tmp_path / "split.npz")
    original = resolve("fedavg", Config(data=data, model=f"{model}:build", split=str(tmp_path / "split.npz")))
    assert are_identical(rebuild(original).task.model.parameters, original.task.model.parameters)

    model.write_text(MODEL.replace("8", "9"))
    with pytest.raises(InvalidInputError, match=r"differs on this machine \(configuration \w{12}, not "):
        rebuild(original)
    model.write_text(MODEL)
    rebuild(original)
    write(tmp_path / "mine.npz", (np.arange(60) + 1) % 3)
    with pytest.raises(
        InvalidInputError, match=r"^'.*mine.npz' with model '.*' differs on this machine"
    ) as error:
        rebuild(original)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("objects", "kinds"),
    [
        ({"dataset": make_dataset()}, {"data"}),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10))}, {"model"}),
        ({"dataset": make_dataset(), "model": pair}, {"data", "model"}),
        ({"model": "mlp"}, set()),
    ],
)
def test_python_objects_have_no_recipe(objects: dict[str, Any], kinds: set[str]) -> None:
    experiment = resolve("fedavg", Config(), **objects)
    assert experiment.in_memory == kinds
    assert (Recipe.from_experiment(experiment) is None) == bool(kinds)
