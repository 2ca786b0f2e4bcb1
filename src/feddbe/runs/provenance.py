"""What is written about a run when it begins: its configuration, and where and with what it is made."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from feddbe import methods
from feddbe.data.federated import label_counts
from feddbe.runs.experiment import Experiment
from feddbe.simulation.layout import layout_of
from feddbe.state import State
from feddbe.training.compiled import backend

_LABELS_AT_MOST = 100_000
"""Label counts of larger federations are not stored: nobody can look at them."""


def describe(experiment: Experiment, start: State) -> dict[str, Any]:
    """What is written about a run when it begins; `start` is the server's state then."""
    task = experiment.task
    small = task.split.clients * task.dataset.classes <= _LABELS_AT_MOST
    return {
        "config": experiment.config,
        "config_hash": experiment.config_hash,
        "layout": layout_of(start),
        "floor": experiment.floor,
        "bn_buffers": experiment.options.bn_buffers if task.model.buffers else None,
        "note": task.dataset.note,
        "remarks": experiment.remarks,
        "label_names": list(task.dataset.labels),
        "client_names": list(task.dataset.client_names) if small else [],
        "looks": list(task.dataset.looks),
        "preprocessing": task.dataset.about.to_json(),
        "labels": label_counts(task.dataset, task.split).tolist() if small else None,
        "keeps_best": experiment.options.keep_best,
        "begun": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "sources": {kind: source._asdict() for kind, source in experiment.sources.items()},
        "versions": versions(experiment),
        "machine": platform.platform(),
        "git_commit": _git_commit(),
        "seeds": {"run": task.seed, "partition": experiment.options.partition_seed},
    }


def versions(experiment: Experiment) -> dict[str, str]:
    """Of what numbers depend on, the package that brings the method among it."""
    packages = ("feddbe", "torch", "numpy", "scikit-learn", "safetensors", *["numba"] * backend.available())
    found = {name: version(name) for name in packages} | {"python": platform.python_version()}
    return found | methods.package_versions(experiment.method)


def other_versions(recorded: Mapping[str, str], experiment: Experiment) -> str:
    """What to say if a run goes on with others than it began with; its bits may then be others, too."""
    now = versions(experiment)
    others = [
        f"{name} {recorded.get(name, 'none')} then, {now.get(name, 'none')} now"
        for name in sorted({*recorded, *now})
        if recorded.get(name) != now.get(name)
    ]
    return f"carried on with other versions: {', '.join(others)}" if others else ""


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
