"""The document of a run at another moment."""

from __future__ import annotations

from feddbe.results.document import Accuracy, RunDocument, at_moment
from feddbe.results.repetitions import group_seeds
from tests.documents import document


def _accuracy(weighted: float) -> Accuracy:
    return {"weighted": weighted, "mean": weighted, "worst_tenth": weighted, "std": 0.0}


def validated(seed: int = 0) -> RunDocument:
    """Return a run whose validation data selects round 1, and test data after local training round 2."""
    run = document("fedavg", [0.1, 0.6, 0.5], seed=seed, validation=0.2)
    for result, held_out, after in zip(run["rounds"], (0.1, 0.9, 0.8), (0.2, 0.7, 0.95), strict=True):
        result["validation"], result["after"] = _accuracy(held_out), _accuracy(after)
    run["best"] = run["rounds"][1]
    return run


def test_another_moment_keeps_the_round_selected_on_validation_data() -> None:
    document_after = at_moment(validated(), "after")
    assert document_after["best"] is not None
    assert document_after["best"]["round"] == 1
    assert document_after["best"]["accuracy"] == _accuracy(0.7)
    assert document_after["last"] is not None
    assert document_after["last"]["accuracy"] == _accuracy(0.95)


def test_seed_groups_keep_the_round_selected_on_validation_data() -> None:
    (group,) = group_seeds([at_moment(validated(seed), "after") for seed in (0, 1)])
    assert group.best is not None
    assert group.validation is not None
    assert round(group.best.mean, 9) == 70
    assert round(group.validation.mean, 9) == 90


def test_best_round_without_validation_data_depends_on_the_moment() -> None:
    run = validated()
    for result in run["rounds"]:
        result["validation"] = None
    document_after = at_moment(run, "after")
    assert document_after["best"] is not None
    assert document_after["best"]["round"] == 2
