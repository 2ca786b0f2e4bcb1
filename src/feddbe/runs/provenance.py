"""What is written about a run when it begins: its configuration, and where and with what it is made."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from feddbe.runs.experiment import Experiment, label_counts
from feddbe.training.trainers import fasttext

__all__ = ["describe"]

_LABELS_AT_MOST = 100_000
"""Label counts of larger federations are not stored: nobody can look at them."""


def describe(experiment: Experiment) -> dict[str, Any]:
    """What is written about a run when it begins."""
    task = experiment.task
    small = task.split.clients * task.dataset.classes <= _LABELS_AT_MOST
    packages = ("feddbe", "torch", "numpy", "scikit-learn", "safetensors", *["numba"] * fasttext.available())
    return {
        "config": experiment.config,
        "config_hash": experiment.config_hash,
        "floor": experiment.floor,
        "bn_buffers": experiment.options.bn_buffers if task.model.buffers else None,
        "note": task.dataset.note,
        "remarks": experiment.remarks,
        "labels": label_counts(task.dataset, task.split).tolist() if small else None,
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
        "machine": platform.platform(),
        "git_commit": _git_commit(),
        "seeds": {"run": task.seed, "partition": experiment.options.partition_seed},
    }


def _git_commit() -> str | None:
    """The commit that the working directory is at, if it is a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
