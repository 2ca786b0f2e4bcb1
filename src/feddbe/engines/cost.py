"""What a job costs, so that engines can begin with the long ones."""

from __future__ import annotations

from feddbe.engines.client import Job
from feddbe.training.task import Task

__all__ = ["cost"]


def cost(task: Task, job: Job) -> float:
    """Samples passed through the model; training one costs about three times a prediction."""
    client = job.client
    tested, samples, adapt = len(task.split.test[client]), task.samples[client], job.adapt or 0
    epochs = (job.work != "none") * task.training.epochs
    epochs += adapt * (adapt + 1) // 2 if job.newcomer else adapt  # a newcomer is looked at after each
    return (job.evaluate + job.after) * tested + (job.train_pass + 3 * epochs) * samples
