"""Overhead: sums over the rounds of a run."""

from __future__ import annotations

from feddbe.results.fairness import compute_overhead
from tests.documents import document


def test_overhead_by_hand() -> None:
    """Rounds take 99 s (round 0), 1.25, 2.25 and 3.25; the best is round 2. All clients send 1.22 MB and
    receive 46.6 MB in every round, including the setup."""
    overhead = compute_overhead(document("fedavg+dbe", [0.1, 0.5, 0.9, 0.8]), 512)
    assert overhead == {
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


def test_overhead_of_run_without_evaluated_round() -> None:
    overhead = compute_overhead(document("fedavg", [None]), None)
    assert (overhead["best"], overhead["seconds_to_best"], overhead["kept"]) == (None, None, None)
