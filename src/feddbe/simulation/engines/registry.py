"""Engines by name: `serial`, `pool`, `pool(workers=4)`, `ray`, or `auto`; the serial engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from feddbe.config import parameters as grammar
from feddbe.errors import InvalidInputError
from feddbe.methods.base import Method
from feddbe.simulation.client import ClientResult, ClientTask, run_client
from feddbe.simulation.engines.base import (
    DEFAULT_TIMEOUT_POLICY,
    Broadcasts,
    ClientStates,
    Engine,
    EngineConfig,
    TimeoutPolicy,
    keep_freed_memory,
)
from feddbe.simulation.engines.pool import PoolConfig, available_cores
from feddbe.simulation.engines.ray import RayConfig
from feddbe.training import backends
from feddbe.training.task import Task
from feddbe.training.task import find_device as find_device


class Serial:
    """The engine that needs nothing, and that the others are compared with."""

    def __init__(self, task: Task, method: Method) -> None:
        self.task, self.method = task, method

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        for job in tasks:
            received, kept = messages.message_for(job.client), states.load(job.client)
            reply = run_client(self.task, self.method, job, received, kept)
            if reply.private:
                states.save(job.client, reply.private)
            yield reply._replace(private=None)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class SerialConfig(EngineConfig):
    """There is nothing to choose."""

    name: ClassVar[str] = "serial"

    def create(self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY) -> Serial:
        return Serial(task, method)


@dataclass(frozen=True)
class AutoConfig(EngineConfig):
    """The pool where it can help."""

    name: ClassVar[str] = "auto"

    def processes(self) -> int:
        return available_cores() if available_cores() > 1 else 0

    def create(self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY) -> Engine:
        several = min(self.processes(), task.split.clients) > 1
        return (PoolConfig() if several else SerialConfig()).create(task, method, timeouts)


ENGINES: dict[str, type[EngineConfig]] = {
    choice.name: choice for choice in (AutoConfig, SerialConfig, PoolConfig, RayConfig)
}


def find_engine(spec: str) -> EngineConfig:
    """The engine of this name, as in `pool(workers=4)`, with its options."""
    return grammar.find_class(
        "engine", spec, ENGINES, other_names=["pool(workers=N)", "ray(address=HOST:PORT)"]
    ).options


def create_engine(
    spec: str, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY
) -> Engine:
    """The same, ready to work."""
    choice, where = find_engine(spec), find_device(task.training.device)
    if where.type != "cpu":
        if choice.name not in ("auto", "serial"):
            raise InvalidInputError(f"engine = {spec}; on device {where} one process works: serial or auto")
        return Serial(task.to(where), method)
    backends.warm_up_kernels(task, timeouts.warn)  # both before there are processes
    keep_freed_memory()
    return choice.create(task, method, timeouts)
