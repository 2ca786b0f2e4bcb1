"""Estimated cost of a run, for every method."""

from __future__ import annotations

from typing import Any

import pytest

from feddbe.runs.timing import preview_run
from feddbe.state import nbytes
from tests.small_runs import COMBINATIONS, experiment

OPTIONS: list[dict[str, Any]] = [
    {"validation": 0.2}, {"new_clients": 1, "adapt_epochs": 2}, {"participation": 0.4, "eval": "cohort"},
    {"eval": "sample:1", "eval_after": False, "patience": 1}, {"rounds": 0},
    {"lr": 1e30}, {"engine": "serial"},
]  # fmt: skip


@pytest.mark.parametrize("name", [*(n for n in COMBINATIONS if "fedgen" not in n), "fedgen(steps=2)"])
def test_every_method_has_an_estimate(name: str) -> None:
    preview = preview_run(experiment(name, engine="pool(workers=2)", adapt_epochs=1))
    assert preview["estimate"]["seconds"] > 0
    assert preview["estimate"]["workers"] == 2
    assert preview["method"] == name


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_estimate_with_other_options(options: dict[str, Any]) -> None:
    preview = preview_run(experiment("fedavg+ft", **{"adapt_epochs": 1, **options}))
    assert preview["estimate"]["seconds"] > 0
    assert set(preview["settings"]["lr"]) == {"value", "from"}


def test_estimate_grows_with_rounds_and_data() -> None:
    few, many = (preview_run(experiment("fedavg", rounds=rounds))["estimate"] for rounds in (5, 5000))
    assert many["seconds"] > 50 * few["seconds"]


def test_phases_of_a_client_of_median_size() -> None:
    """Of 60, 44 and 28 samples the middle one has 33 to train on and 11 to test with, before and after."""
    e = experiment("fedavg+dbe", local_epochs=2, batch_size=10, engine="pool(workers=2)")
    preview = preview_run(e)
    client = preview["client"]
    assert (client["steps"], client["predictions"]) == (2 * 3, 2 * 11)
    assert client["milliseconds"].keys() == {"training", "evaluation", "states", "store"}
    assert all(value > 0 for value in client["milliseconds"].values())
    assert preview["trainers"]
    assert client["bytes_up"] == nbytes(e.task.model.parameters)


@pytest.mark.parametrize(("method", "models"), [("fedavg", 0), ("ditto", 1), ("fedfomo", 2)])
def test_bytes_of_private_states(method: str, models: int) -> None:
    kept = preview_run(experiment(method, engine="serial"))["client"]["bytes_kept"]
    assert models * 4 * 4810 <= kept < models * 4 * 4810 + 2000
