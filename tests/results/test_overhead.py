"""Overhead: what the table shows is what the run's entries sum to."""

from __future__ import annotations

from feddbe.results.fairness import compute_overhead
from tests.documents import document


def test_sums_by_hand() -> None:
    """Entries take 99 s (the start), 1.25, 2.25 and 3.25; the best is in round 2; all clients send 1.22 MB
    and get 46.6 MB in every round, the preparation too."""
    found = compute_overhead(document("fedavg+dbe", [0.1, 0.5, 0.9, 0.8]), 512)
    assert found == {
        "method": "fedavg+dbe",
        "rounds": 3,
        "seconds": 1.0,
        "preparation": 99.0,
        "best": 2,
        "seconds_to_best": 99 + 1.25 + 2.25,
        "up": 61_000.0,
        "down": 2_330_000.0,
        "total_up": 4 * 20 * 61_000,
        "total_down": 4 * 20 * 2_330_000,
        "kept": 512,
        "memory_mb": 0.0,
    }


def test_a_run_without_an_evaluated_round() -> None:
    found = compute_overhead(document("fedavg", [None]), None)
    assert (found["best"], found["seconds_to_best"], found["kept"]) == (None, None, None)
