"""feddbe: personalized federated learning with the Domain Bias Eliminator."""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing, which takes half of the time until Ctrl-C is one line
if TYPE_CHECKING:
    from feddbe import callbacks as callbacks
    from feddbe import testing as testing
    from feddbe.api import (
        analyze,
        compare,
        draw,
        fairness,
        list_runs,
        load,
        load_run,
        load_study,
        overhead,
        report,
        reproduce,
        run,
        tune,
    )
    from feddbe.callbacks.base import Callback
    from feddbe.data.dataset import Dataset
    from feddbe.data.split import Split, load_split, partition
    from feddbe.errors import DivergenceError, FeddbeError, InvalidInputError, StoreError
    from feddbe.export import export_model, predict
    from feddbe.methods.addons import MR, PRBM
    from feddbe.methods.base import Method
    from feddbe.methods.fedavg import FedAvg
    from feddbe.methods.registry import METHODS
    from feddbe.models.split_model import SplitModel
    from feddbe.reporting.run_objects import Run, Runs, Sweep

__all__ = [
    "METHODS",
    "MR",
    "PRBM",
    "Callback",
    "Dataset",
    "DivergenceError",
    "FedAvg",
    "FeddbeError",
    "InvalidInputError",
    "Method",
    "Run",
    "Runs",
    "Split",
    "SplitModel",
    "StoreError",
    "Sweep",
    "analyze",
    "compare",
    "draw",
    "export_model",
    "fairness",
    "list_runs",
    "load",
    "load_run",
    "load_split",
    "load_study",
    "overhead",
    "partition",
    "predict",
    "report",
    "reproduce",
    "run",
    "tune",
]

_MODULES = {
    "METHODS": "methods.registry",
    "MR": "methods.addons",
    "PRBM": "methods.addons",
    "Callback": "callbacks.base",
    "Dataset": "data.dataset",
    "DivergenceError": "errors",
    "FedAvg": "methods.fedavg",
    "FeddbeError": "errors",
    "InvalidInputError": "errors",
    "Method": "methods.base",
    "Run": "reporting.run_objects",
    "Runs": "reporting.run_objects",
    "Split": "data.split",
    "SplitModel": "models.split_model",
    "StoreError": "errors",
    "Sweep": "reporting.run_objects",
    "analyze": "api",
    "compare": "api",
    "draw": "api",
    "export_model": "export",
    "fairness": "api",
    "list_runs": "api",
    "load": "api",
    "load_run": "api",
    "load_split": "data.split",
    "load_study": "api",
    "overhead": "api",
    "partition": "data.split",
    "predict": "export",
    "report": "api",
    "reproduce": "api",
    "run": "api",
    "tune": "api",
}
"""Module of each public name."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `feddbe --help` need not wait for torch."""
    from importlib import import_module

    if name in ("callbacks", "testing"):
        return import_module(f"feddbe.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'feddbe' has no attribute '{name}'")
    globals()[name] = getattr(import_module(f"feddbe.{_MODULES[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
