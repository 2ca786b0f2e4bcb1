"""Engines by name: `serial`, `pool`, `pool(workers=4)`, `ray`, or `auto`; the serial engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from feddbe.config import parameters as grammar
from feddbe.errors import BadInput
from feddbe.methods.base import Method
from feddbe.simulation.client import Job, Reply, perform
from feddbe.simulation.engines.base import (
    WAITING,
    Choice,
    ClientStates,
    Engine,
    Messages,
    Waiting,
    keep_freed,
)
from feddbe.simulation.engines.pool import PoolChoice, cores
from feddbe.simulation.engines.ray import RayChoice
from feddbe.training import backends
from feddbe.training.task import Task
from feddbe.training.task import find as find_device


class Serial:
    """The engine that needs nothing, and that the others are compared with."""

    def __init__(self, task: Task, method: Method) -> None:
        self.task, self.method = task, method

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply]:
        for job in jobs:
            received, kept = messages.to(job.client), states.load(job.client)
            reply = perform(self.task, self.method, job, received, kept)
            if reply.private:
                states.save(job.client, reply.private)
            yield reply._replace(private=None)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class SerialChoice(Choice):
    """There is nothing to choose."""

    name: ClassVar[str] = "serial"

    def make(self, task: Task, method: Method, waiting: Waiting = WAITING) -> Serial:
        return Serial(task, method)


@dataclass(frozen=True)
class Auto(Choice):
    """The pool where it can help."""

    name: ClassVar[str] = "auto"

    def processes(self) -> int:
        return cores() if cores() > 1 else 0

    def make(self, task: Task, method: Method, waiting: Waiting = WAITING) -> Engine:
        several = min(self.processes(), task.split.clients) > 1
        return (PoolChoice() if several else SerialChoice()).make(task, method, waiting)


ENGINES: dict[str, type[Choice]] = {
    choice.name: choice for choice in (Auto, SerialChoice, PoolChoice, RayChoice)
}


def find(spec: str) -> Choice:
    """The engine of this name, as in `pool(workers=4)`, with its options."""
    return grammar.find("engine", spec, ENGINES, also=["pool(workers=N)", "ray(address=HOST:PORT)"]).options


def make(spec: str, task: Task, method: Method, waiting: Waiting = WAITING) -> Engine:
    """The same, ready to work."""
    choice, where = find(spec), find_device(task.training.device)
    if where.type != "cpu":
        if choice.name not in ("auto", "serial"):
            raise BadInput(f"engine = {spec}; on device {where} one process works: serial or auto")
        return Serial(task.on(where), method)
    backends.warm_up(task, waiting.remark)  # both before there are processes
    keep_freed()
    return choice.make(task, method, waiting)
