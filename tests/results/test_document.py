"""A run read at another moment."""

from __future__ import annotations

from feddbe.results.document import Accuracy, RunDocument, at_moment
from feddbe.results.seeds import group_seeds
from tests.documents import document


def _accuracy(weighted: float) -> Accuracy:
    return {"weighted": weighted, "mean": weighted, "worst_tenth": weighted, "std": 0.0}


def validated(seed: int = 0) -> RunDocument:
    """Held-out data say round 1; test data after local training say round 2."""
    run = document("fedavg", [0.1, 0.6, 0.5], seed=seed, validation=0.2)
    for entry, held_out, after in zip(run["rounds"], (0.1, 0.9, 0.8), (0.2, 0.7, 0.95), strict=True):
        entry["validation"], entry["after"] = _accuracy(held_out), _accuracy(after)
    run["best"] = run["rounds"][1]
    return run


def test_another_moment_keeps_the_round_that_held_out_data_chose() -> None:
    found = at_moment(validated(), "after")
    assert found["best"] is not None
    assert found["best"]["round"] == 1
    assert found["best"]["accuracy"] == _accuracy(0.7)
    assert found["last"] is not None
    assert found["last"]["accuracy"] == _accuracy(0.95)


def test_tables_over_seeds_keep_the_round_that_held_out_data_chose() -> None:
    (found,) = group_seeds([at_moment(validated(seed), "after") for seed in (0, 1)])
    assert found.best is not None
    assert found.validation is not None
    assert round(found.best.mean, 9) == 70
    assert round(found.validation.mean, 9) == 90


def test_without_held_out_data_the_best_round_is_that_of_the_moment() -> None:
    run = validated()
    for entry in run["rounds"]:
        entry["validation"] = None
    found = at_moment(run, "after")
    assert found["best"] is not None
    assert found["best"]["round"] == 2
