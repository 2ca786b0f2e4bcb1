"""Run documents written by hand, for the tests of what is drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feddbe.results.document import Accuracy, RoundResult, RunDocument

__all__ = ["document"]


def _accuracy(weighted: float) -> Accuracy:
    """The other numbers lie at fixed distances, so that a test can tell which one was shown."""
    return {"weighted": weighted, "mean": weighted - 0.01, "worst_tenth": weighted - 0.05, "std": 0.02}


def document(
    method: str,
    curve: Sequence[float | None],
    *,
    floor: float = 0.2,
    moment: str = "before",
    bn_buffers: str | None = None,
    **config: Any,
) -> RunDocument:
    """A run whose entry t has the weighted accuracy curve[t]; round t took t + 0.25 seconds, the start 99."""
    rounds: list[RoundResult] = [
        {
            "round": t,
            "accuracy": None if weighted is None else _accuracy(weighted),
            "moment": moment,
            "before": None,
            "adapted": None,
            "validation": None,
            "after": None,
            "auc": None,
            "train_loss": None,
            "seconds": t + 0.25 if t else 99.0,
            "bytes_up": 20 * 61_000,
            "bytes_down": 20 * 2_330_000,
            "metrics": {},
        }
        for t, weighted in enumerate(curve)
    ]
    shown = [(entry["accuracy"]["weighted"], entry) for entry in rounds if entry["accuracy"]]
    return {
        "method": method,
        "config": {"clients": 20, "participation": 1.0, "seed": 0, "data": "digits", **config},
        "config_hash": "0" * 64,
        "rounds": rounds,
        "best": max(shown, key=lambda pair: pair[0])[1] if shown else None,
        "last": shown[-1][1] if shown else None,
        "majority_accuracy": floor,
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
