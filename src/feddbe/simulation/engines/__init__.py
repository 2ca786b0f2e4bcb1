"""Engines by name."""

from feddbe.simulation.client import MissingClient
from feddbe.simulation.engines.base import Broadcasts, ClientStates, Engine, TimeoutPolicy
from feddbe.simulation.engines.pool import PoolEngine
from feddbe.simulation.engines.registry import ENGINES, SerialEngine, create_engine, find_engine
from feddbe.state import Receipt

__all__ = [
    "ENGINES",
    "Broadcasts",
    "ClientStates",
    "Engine",
    "MissingClient",
    "PoolEngine",
    "Receipt",
    "SerialEngine",
    "TimeoutPolicy",
    "create_engine",
    "find_engine",
]
