"""Engines by name: `serial`, `pool`, `pool:N`, or `auto`."""

from __future__ import annotations

import os
import re

from feddbe.engines.base import ClientStates, Engine, Messages, Missing, Receipt
from feddbe.engines.pool import Pool
from feddbe.engines.serial import Serial
from feddbe.errors import unknown
from feddbe.methods.base import Method
from feddbe.task import Task

__all__ = ["ClientStates", "Engine", "Messages", "Missing", "Pool", "Receipt", "Serial", "make", "workers"]


def workers(spec: str) -> int:
    """How many worker processes an engine's name means; 0 is serial."""
    match = re.fullmatch(r"auto|serial|pool(?::([1-9][0-9]{0,3}))?", spec)
    if match is None:
        raise unknown("engine", spec, ["auto", "serial", "pool", "pool:N"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if spec == "serial" or (spec == "auto" and cores == 1):
        return 0
    return int(match[1] or cores)


def make(spec: str, task: Task, method: Method) -> Engine:
    """The engine of this name, ready to work."""
    count = min(workers(spec), task.split.clients)
    return (
        Pool(task, method, count) if count and not (spec == "auto" and count == 1) else Serial(task, method)
    )
