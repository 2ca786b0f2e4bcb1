"""Engines by name."""

from feddbe.simulation.engines.registry import (
    ENGINES,
    ClientStates,
    Engine,
    Messages,
    Missing,
    Pool,
    Receipt,
    Serial,
    Waiting,
    find,
    make,
)

__all__ = [
    "ENGINES",
    "ClientStates",
    "Engine",
    "Messages",
    "Missing",
    "Pool",
    "Receipt",
    "Serial",
    "Waiting",
    "find",
    "make",
]
