"""Engines by name: `serial`, `pool`, `pool(workers=4)`, `ray`, or `auto`; the serial engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from feddbe.config import parameters
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
from feddbe.training.task import Task, find_device


class SerialEngine:
    """Engine in this process; the others must produce the same bits."""

    def __init__(self, task: Task, method: Method) -> None:
        self.task = task
        self.method = method

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        for client_task in tasks:
            received = messages.message_for(client_task.client)
            private = states.load(client_task.client)
            result = run_client(self.task, self.method, client_task, received, private)
            if result.private:
                states.save(client_task.client, result.private)
            yield replace(result, private=None)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class SerialConfig(EngineConfig):
    """The serial engine, which has no options."""

    name: ClassVar[str] = "serial"

    def create(
        self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY
    ) -> SerialEngine:
        return SerialEngine(task, method)


@dataclass(frozen=True)
class AutoConfig(EngineConfig):
    """The pool if there are several cores and clients, otherwise the serial engine."""

    name: ClassVar[str] = "auto"

    def processes(self) -> int:
        return available_cores() if available_cores() > 1 else 0

    def create(self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY) -> Engine:
        is_parallel = min(self.processes(), task.split.clients) > 1
        config = PoolConfig() if is_parallel else SerialConfig()
        return config.create(task, method, timeouts)


ENGINES: dict[str, type[EngineConfig]] = {
    config.name: config for config in (AutoConfig, SerialConfig, PoolConfig, RayConfig)
}


def find_engine(spec: str) -> EngineConfig:
    """Return the configuration of an engine, as in `pool(workers=4)`."""
    return parameters.find_class(
        "engine", spec, ENGINES, other_names=["pool(workers=N)", "ray(address=HOST:PORT)"]
    ).options


def create_engine(
    spec: str, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY
) -> Engine:
    """Return the engine, ready for `run`; kernels are compiled before it starts processes.

    Args:
        spec: Name and options, as in `pool(workers=4)`.
        task: Model, data and training settings.
        method: The federated method.
        timeouts: Limits on the time of workers.

    Raises:
        InvalidInputError: The name or an option is unknown, or the device allows only one process.
    """
    config = find_engine(spec)
    device = find_device(task.training.device)
    if device.type != "cpu":
        if config.name not in ("auto", "serial"):
            raise InvalidInputError(
                f"engine = {spec}; device {device} allows one process: expected serial or auto"
            )
        return SerialEngine(task.to(device), method)
    backends.warm_up_kernels(task, timeouts.warn)
    keep_freed_memory()
    return config.create(task, method, timeouts)
