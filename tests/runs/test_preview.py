"""What a run would cost: of every method, whatever is asked of it."""

from __future__ import annotations

from typing import Any

import pytest

from feddbe.runs.timing import preview_run
from feddbe.state import nbytes
from tests.federation import COMBINATIONS, experiment

OPTIONS: list[dict[str, Any]] = [
    {"validation": 0.2}, {"new_clients": 1, "adapt_epochs": 2}, {"participation": 0.4, "eval": "cohort"},
    {"eval": "sample:1", "eval_after": False, "patience": 1}, {"rounds": 0},
    {"lr": 1e30}, {"engine": "serial"},
]  # fmt: skip


@pytest.mark.parametrize("name", [*(n for n in COMBINATIONS if "fedgen" not in n), "fedgen(steps=2)"])
def test_every_method_has_an_estimate(name: str) -> None:
    found = preview_run(experiment(name, engine="pool(workers=2)", adapt_epochs=1))
    assert found["estimate"]["seconds"] > 0
    assert found["estimate"]["workers"] == 2
    assert found["method"] == name


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whatever_is_asked(options: dict[str, Any]) -> None:
    found = preview_run(experiment("fedavg+ft", **{"adapt_epochs": 1, **options}))
    assert found["estimate"]["seconds"] > 0
    assert set(found["settings"]["lr"]) == {"value", "from"}


def test_it_grows_with_the_rounds_and_the_data() -> None:
    few, many = (preview_run(experiment("fedavg", rounds=rounds))["estimate"] for rounds in (5, 5000))
    assert many["seconds"] > 50 * few["seconds"]


def test_phases_of_a_client_of_middling_size() -> None:
    """Of 60, 44 and 28 samples the middle one has 33 to train on and 11 to test with, before and after."""
    e = experiment("fedavg+dbe", local_epochs=2, batch_size=10, engine="pool(workers=2)")
    found = preview_run(e)
    client = found["client"]
    assert (client["steps"], client["predictions"]) == (2 * 3, 2 * 11)
    assert client["milliseconds"].keys() == {"training", "evaluation", "states", "store"}
    assert all(taken > 0 for taken in client["milliseconds"].values())
    assert found["trainers"]
    assert client["bytes_up"] == nbytes(e.task.model.parameters)


@pytest.mark.parametrize(("method", "models"), [("fedavg", 0), ("ditto", 1), ("fedfomo", 2)])
def test_bytes_that_a_client_keeps(method: str, models: int) -> None:
    kept = preview_run(experiment(method, engine="serial"))["client"]["bytes_kept"]
    assert models * 4 * 4810 <= kept < models * 4 * 4810 + 2000
