"""Engines by name."""

from feddbe.simulation.client import Missing
from feddbe.simulation.engines.base import ClientStates, Engine, Messages, Waiting
from feddbe.simulation.engines.pool import Pool
from feddbe.simulation.engines.registry import ENGINES, Serial, find, make
from feddbe.state import Receipt

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
