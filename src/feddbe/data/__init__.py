"""Data sets by name, and how they are divided among clients."""

from feddbe.data.dataset import Dataset
from feddbe.data.registry import SOURCES, Source, find, in_memory, load

__all__ = ["SOURCES", "Dataset", "Source", "find", "in_memory", "load"]
