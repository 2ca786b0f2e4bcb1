"""Engines by name: `serial`, `pool`, `pool(workers=4)`, or `auto`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from feddbe.engines.base import ClientStates, Engine, Messages, Missing, Receipt
from feddbe.engines.pool import Pool
from feddbe.engines.serial import Serial
from feddbe.methods.base import Method
from feddbe.options import Parameters, grammar, parameter
from feddbe.training.task import Task

__all__ = [
    "ENGINES",
    "ClientStates",
    "Engine",
    "Messages",
    "Missing",
    "Pool",
    "Receipt",
    "Serial",
    "make",
    "workers",
]


@dataclass(frozen=True)
class Workers(Parameters):
    """What can be chosen of the pool."""

    name: ClassVar[str] = "pool"

    workers: int | None = parameter(None, "processes; by default one per core", low=1, high=9999)


ENGINES: dict[str, type[Parameters]] = {"auto": Parameters, "serial": Parameters, "pool": Workers}


def workers(spec: str) -> int:
    """How many worker processes an engine's name means; 0 is serial."""
    engine = grammar.find("engine", spec, ENGINES, also=["pool(workers=N)"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if engine.name == "serial" or (engine.name == "auto" and cores == 1):
        return 0
    return getattr(engine.options, "workers", None) or cores


def make(spec: str, task: Task, method: Method) -> Engine:
    """The engine of this name, ready to work."""
    count = min(workers(spec), task.split.clients)
    return (
        Pool(task, method, count) if count and not (spec == "auto" and count == 1) else Serial(task, method)
    )
