"""One client after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from feddbe.methods.base import Method
from feddbe.simulation.client import Job, Reply, perform
from feddbe.simulation.engines.base import WAITING, Choice, ClientStates, Messages, Waiting
from feddbe.state import decode, encode
from feddbe.training.task import Task


class Serial:
    """The engine that needs nothing, and that the others are compared with."""

    def __init__(self, task: Task, method: Method) -> None:
        self.task, self.method = task, method

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply]:
        for job in jobs:
            kept = states.read(job.client)
            reply = perform(
                self.task, self.method, job, messages.to(job.client), None if kept is None else decode(kept)
            )
            if reply.private:
                states.stage(job.client, encode(reply.private))
            yield reply._replace(private=None)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class SerialChoice(Choice):
    """There is nothing to choose."""

    name: ClassVar[str] = "serial"

    def make(self, task: Task, method: Method, waiting: Waiting = WAITING) -> Serial:
        return Serial(task, method)
