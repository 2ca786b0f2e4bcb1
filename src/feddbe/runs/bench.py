"""Where the time of a user's own model and data goes, and what was chosen for them."""

from __future__ import annotations

from typing import TypedDict

from feddbe import engines
from feddbe.runs import preview
from feddbe.runs.experiment import Experiment
from feddbe.runs.probe import CLIENTS, ROUND, probe

__all__ = ["Bench", "bench"]

_BATCHES, _TESTED = 50, 1000


class Bench(TypedDict):
    """What a client of middling size takes in a round."""

    method: str
    model: str
    parameters: int
    trainers: list[str]
    """Who trained."""
    remarks: list[str]
    """Why it was not another one, and what else a reader must know."""
    engine: str
    """What `auto` stands for here."""
    steps: int
    """Of the client's training in a round."""
    tested: int
    """Samples that it predicts in a round."""
    milliseconds: dict[str, float]
    """Its `training`, `evaluation`, `states` (made into bytes and back), `store` (what it keeps is read and
    written)."""
    server: float
    """Milliseconds of the server in a round of two clients: combine, write rows and its own state."""
    bytes: dict[str, int]
    """`up`: what it sends; `kept`: what stays with it."""
    estimate: preview.Estimate


def bench(experiment: Experiment) -> Bench:
    """Measured with a part of the data, told for all of it."""
    task, options = experiment.task, experiment.options
    found = probe(experiment, _BATCHES, _TESTED)
    middle = sorted(range(task.members), key=lambda k: task.samples[k])[(task.members - 1) // 2]
    size, tests = task.samples[middle], len(task.split.test[middle])
    used, batch = len(found.split.train[0]), min(options.batch, size)
    seconds = {phase: taken / CLIENTS for phase, taken in found.seconds[ROUND].items()}
    seconds["training"] *= (size // batch) / max(1, used // min(options.batch, used))
    seconds["evaluation"] *= (1 + options.eval_after) * tests / max(1, len(found.split.test[0]))
    workers = min(engines.find(options.engine).processes(), task.split.clients)
    return {
        "method": experiment.name,
        "model": str(options.model),
        "parameters": sum(p.numel() for p in task.model.parameters.values()),
        "trainers": found.trainers,
        "remarks": [*experiment.remarks, *found.remarks],
        "engine": f"pool(workers={workers})" if workers > 1 else "serial",
        "steps": options.epochs * (size // batch),
        "tested": (1 + options.eval_after) * tests,
        "milliseconds": {phase: 1000 * taken for phase, taken in seconds.items()},
        "server": 1000 * found.server,
        "bytes": {"up": found.up, "kept": found.kept},
        "estimate": preview.estimate(experiment, found),
    }
