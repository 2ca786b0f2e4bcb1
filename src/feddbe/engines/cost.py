"""What a job costs, so that engines can begin with the long ones and give out short ones many at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Sequence
from itertools import islice

from feddbe.engines.client import Job
from feddbe.training.task import Task

__all__ = ["Queue", "cost"]


def cost(task: Task, job: Job) -> float:
    """Samples passed through the model; training one costs about three times a prediction."""
    client = job.client
    tested, samples, adapt = len(task.split.test[client]), task.samples[client], job.adapt or 0
    epochs = (job.work != "none") * task.training.epochs
    epochs += adapt * (adapt + 1) // 2 if job.newcomer else adapt  # a newcomer is looked at after each
    return (job.evaluate + job.after) * tested + 3 * epochs * samples


class Queue:
    """Jobs for some workers, the longest first. At most `together` are given out at a time, and of all that
    is left no more than a worker's half share: the last ones should end at one time."""

    def __init__(self, task: Task, jobs: Sequence[Job], workers: int, together: int) -> None:
        costs = [(cost(task, job), job) for job in jobs]
        self._jobs = deque(sorted(costs, key=lambda one: one[0], reverse=True))
        self._left, self._workers, self._together = sum(c for c, _ in costs), workers, together
        self.tries = Counter[int]()
        """How often a client's job was given out."""

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def take(self, holds: Container[int] = ()) -> list[Job]:
        """At least one; one that was given out before goes alone, it may be what its worker died of. `holds`:
        clients whose states the worker has; of the next ones such a one is first."""
        soon = islice(self._jobs, 4 * self._workers)
        if mine := next((one for one in soon if one[1].client in holds), None):
            self._jobs.remove(mine)
            self._jobs.appendleft(mine)
        share, taken = self._left / (2 * self._workers), list[Job]()
        while self._jobs and len(taken) < self._together:
            its, job = self._jobs[0]
            again = job.client in self.tries
            if taken and (its > share or again):
                break
            share -= its
            self._left -= its
            taken.append(self._jobs.popleft()[1])
            if again:
                break
        self.tries.update(job.client for job in taken)
        return taken

    def give_back(self, jobs: Sequence[Job]) -> None:
        """They were not done, and come next."""
        self._jobs.extendleft((0.0, job) for job in reversed(jobs))
