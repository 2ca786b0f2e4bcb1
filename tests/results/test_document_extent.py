"""Length of runs, and runs truncated to a number of rounds."""

from __future__ import annotations

from feddbe.results.document import has_completed, is_finished, run_extent, truncate_run
from tests.documents import document


def test_run_is_complete_by_rounds_or_by_patience() -> None:
    still = document("fedavg", [0.1, 0.5, 0.4, 0.3])
    assert has_completed(still, 3, None)
    assert not has_completed(still, 4, None)
    assert not has_completed(still, 4, 3)
    assert has_completed(still, 4, 2)  # three evaluations since the best, itself counted
    assert not has_completed(document("fedavg", [0.1, None]), 1, None)


def test_run_stopped_before_its_patience_is_not_finished() -> None:
    curve = [0.1, 0.5, 0.4, 0.3]
    assert is_finished(document("fedavg", curve, rounds=9, patience=2))
    assert not is_finished(document("fedavg", curve, rounds=9, patience=5))


def test_truncated_run_has_the_state_of_its_last_round() -> None:
    long = document("fedavg", [0.1, 0.5, 0.4, 0.9], rounds=3)
    long["diverged"] = {"round": 4, "client": 0, "what": "loss", "value": "nan"}
    truncated = truncate_run(long, 2, None)
    assert truncated["best"] is not None
    assert truncated["last"] is not None
    assert (truncated["best"]["round"], truncated["last"]["round"], truncated["config"]["rounds"]) == (
        1,
        2,
        2,
    )
    assert truncated["diverged"] is None
    assert truncated["cost"]["seconds"] == 1.75
    assert long["best"] is not None
    assert long["best"]["round"] == 3, "the original document is unchanged"


def test_patience_truncates_where_it_ends_a_run() -> None:
    """After round 3 the best is more than two evaluations old; round 4 was running and is evaluated."""
    long = document("fedavg", [0.1, 0.5, 0.4, 0.3, 0.2, 0.9], rounds=5)
    assert [result["round"] for result in truncate_run(long, 5, 2)["rounds"]] == [0, 1, 2, 3, 4]
    assert [result["round"] for result in truncate_run(long, 5, 4)["rounds"]] == [0, 1, 2, 3, 4, 5]
    late = document("fedavg", [0.1, 0.5, 0.4, 0.3, 0.9, 0.2], rounds=5)
    assert len(truncate_run(late, 5, 2)["rounds"]) == 6, "round 4 is the best, so the run continues"


def test_runs_ended_by_equal_patience_have_equal_extent() -> None:
    early = document("fedavg", [0.1, 0.5, 0.4, 0.3], rounds=9, patience=2)
    later = document("moon", [0.1, 0.2, 0.5, 0.4, 0.3], rounds=9, patience=2)
    assert run_extent(early) == run_extent(later)
    assert run_extent(early) != run_extent(document("fedavg", [0.1, 0.5, 0.4, 0.3], rounds=9, patience=5))
    assert run_extent(document("a", [0.1, 0.2], rounds=9)) == run_extent(document("b", [0.1, 0.2], rounds=1))
