"""Where the time goes: every phase is there, of the client that is meant."""

from __future__ import annotations

import pytest

from feddbe.runs.timing import bench
from feddbe.state import nbytes
from tests.federation import experiment


def test_phases_of_a_client_of_middling_size() -> None:
    """Of 60, 44 and 28 samples the middle one has 33 to train on and 11 to test with, before and after."""
    e = experiment("fedavg+dbe", epochs=2, batch=10, engine="pool(workers=2)")
    found = bench(e)
    assert (found["steps"], found["tested"]) == (2 * 3, 2 * 11)
    assert found["milliseconds"].keys() == {"training", "evaluation", "states", "store"}
    assert all(taken > 0 for taken in found["milliseconds"].values())
    assert found["server"] > 0
    assert found["trainers"]
    assert found["engine"] == "pool(workers=2)"
    assert found["bytes"]["up"] == nbytes(e.task.model.parameters)
    assert found["parameters"] == 4810


@pytest.mark.parametrize(("method", "models"), [("fedavg", 0), ("ditto", 1), ("fedfomo", 2)])
def test_what_a_client_keeps(method: str, models: int) -> None:
    kept = bench(experiment(method, engine="serial"))["bytes"]["kept"]
    assert models * 4 * 4810 <= kept < models * 4 * 4810 + 2000
