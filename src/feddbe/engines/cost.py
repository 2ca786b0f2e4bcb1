"""What a job costs, so that engines can begin with the long ones."""

from __future__ import annotations

from feddbe.engines.client import Job
from feddbe.training.task import Task

__all__ = ["cost"]


def cost(task: Task, job: Job) -> float:
    """Samples passed through the model; training one costs about three times a prediction."""
    client = job.client
    evaluations = (job.evaluate + job.after) * len(task.split.test[client]) + job.train_pass * task.samples[
        client
    ]
    epochs = (job.work != "none") * task.training.epochs + (job.adapt or 0)
    return evaluations + 3 * epochs * task.samples[client]
