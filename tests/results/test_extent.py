"""How far runs have come, and runs cut to the rounds asked for."""

from __future__ import annotations

from feddbe.results.document import best_so_far, is_finished, run_extent, truncate_run
from tests.documents import document


def test_a_run_ends_by_rounds_or_by_the_published_rule() -> None:
    still = document("fedavg", [0.1, 0.5, 0.4, 0.3])
    assert best_so_far(still, 3, None)
    assert not best_so_far(still, 4, None)
    assert not best_so_far(still, 4, 3)
    assert best_so_far(still, 4, 2)  # three evaluations since the best, itself counted
    assert not best_so_far(document("fedavg", [0.1, None]), 1, None)


def test_a_run_that_was_stopped_before_its_patience_ended_it_is_not_finished() -> None:
    curve = [0.1, 0.5, 0.4, 0.3]
    assert is_finished(document("fedavg", curve, rounds=9, patience=2))
    assert not is_finished(document("fedavg", curve, rounds=9, patience=5))


def test_a_cut_run_is_what_it_was_then() -> None:
    long = document("fedavg", [0.1, 0.5, 0.4, 0.9], rounds=3)
    long["diverged"] = {"round": 4, "client": 0, "what": "loss", "value": "nan"}
    found = truncate_run(long, 2, None)
    assert found["best"] is not None
    assert found["last"] is not None
    assert (found["best"]["round"], found["last"]["round"], found["config"]["rounds"]) == (1, 2, 2)
    assert found["diverged"] is None
    assert found["cost"]["seconds"] == 1.75
    assert long["best"] is not None
    assert long["best"]["round"] == 3, "the document itself is as it was"


def test_patience_cuts_where_it_ends_a_run() -> None:
    """After entry 3 the best is more than two evaluations old; entry 4 was under way and is evaluated."""
    long = document("fedavg", [0.1, 0.5, 0.4, 0.3, 0.2, 0.9], rounds=5)
    assert [entry["round"] for entry in truncate_run(long, 5, 2)["rounds"]] == [0, 1, 2, 3, 4]
    assert [entry["round"] for entry in truncate_run(long, 5, 4)["rounds"]] == [0, 1, 2, 3, 4, 5]
    late = document("fedavg", [0.1, 0.5, 0.4, 0.3, 0.9, 0.2], rounds=5)
    assert len(truncate_run(late, 5, 2)["rounds"]) == 6, "entry 4 is the best, so that the run resumes"


def test_runs_that_one_patience_ended_are_equally_long() -> None:
    early = document("fedavg", [0.1, 0.5, 0.4, 0.3], rounds=9, patience=2)
    later = document("moon", [0.1, 0.2, 0.5, 0.4, 0.3], rounds=9, patience=2)
    assert run_extent(early) == run_extent(later)
    assert run_extent(early) != run_extent(document("fedavg", [0.1, 0.5, 0.4, 0.3], rounds=9, patience=5))
    assert run_extent(document("a", [0.1, 0.2], rounds=9)) == run_extent(document("b", [0.1, 0.2], rounds=1))
