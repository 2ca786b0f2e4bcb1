"""feddbe: personalized federated learning with the Domain Bias Eliminator."""

from __future__ import annotations

from feddbe.api import compare, draw, load, run
from feddbe.data.dataset import Dataset
from feddbe.data.partition import Split, load_split, partition
from feddbe.errors import BadInput, Diverged, FeddbeError, StoreError
from feddbe.methods import METHODS, MR, PRBM, FedAvg, Method
from feddbe.models import SplitModel

__all__ = [
    "METHODS",
    "MR",
    "PRBM",
    "BadInput",
    "Dataset",
    "Diverged",
    "FedAvg",
    "FeddbeError",
    "Method",
    "Split",
    "SplitModel",
    "StoreError",
    "compare",
    "draw",
    "load",
    "load_split",
    "partition",
    "run",
]
