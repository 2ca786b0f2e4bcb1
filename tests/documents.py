"""Run documents written by hand, for tests of tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feddbe.results.document import Accuracy, RoundResult, RunDocument

__all__ = ["document"]


def _accuracy(weighted: float) -> Accuracy:
    """Return an accuracy whose statistics have fixed differences, so that tests can identify each."""
    return {"weighted": weighted, "mean": weighted - 0.01, "worst_tenth": weighted - 0.05, "std": 0.02}


def document(
    method: str,
    curve: Sequence[float | None],
    *,
    majority_accuracy: float = 0.2,
    moment: str = "before",
    bn_buffers: str | None = None,
    **config: Any,
) -> RunDocument:
    """Return a run with weighted accuracy curve[t] in round t, which took t + 0.25 seconds (round 0: 99)."""
    rounds: list[RoundResult] = [
        {
            "round": round_,
            "accuracy": None if weighted is None else _accuracy(weighted),
            "moment": moment,
            "before": None,
            "adapted": None,
            "validation": None,
            "after": None,
            "auc": None,
            "train_loss": None,
            "seconds": round_ + 0.25 if round_ else 99.0,
            "bytes_up": 20 * 61_000,
            "bytes_down": 20 * 2_330_000,
            "metrics": {},
        }
        for round_, weighted in enumerate(curve)
    ]
    evaluated = [(result["accuracy"]["weighted"], result) for result in rounds if result["accuracy"]]
    return {
        "method": method,
        "config": {"clients": 20, "participation": 1.0, "seed": 0, "data": "digits", **config},
        "config_hash": "0" * 64,
        "rounds": rounds,
        "best": max(evaluated, key=lambda pair: pair[0])[1] if evaluated else None,
        "last": evaluated[-1][1] if evaluated else None,
        "deployed_moment": moment,
        "test_samples": 1000,
        "majority_accuracy": majority_accuracy,
        "new_clients": None,
        "analyses": [],
        "bn_buffers": bn_buffers,
        "note": "",
        "remarks": [],
        "diverged": None,
        "trainers": ["autograd"],
        "label_names": [],
        "client_names": [],
        "shift_labels": [],
        "cost": {"up": 61_000.0, "down": 2_330_000.0, "seconds": 1.0},
        "server_sha256": "",
        "clients_sha256": {},
        "peak_rss_mb": 0.0,
        "begun": "2026-11-17T05:20:00.000+00:00",
        "versions": {},
        "folder": "run",
    }
