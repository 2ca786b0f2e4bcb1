"""feddbe: personalized federated learning with the Domain Bias Eliminator."""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing, which takes half of the time until Ctrl-C is one line
if TYPE_CHECKING:
    from feddbe.api import draw, load, measure, run
    from feddbe.data.dataset import Dataset
    from feddbe.data.partition import partition
    from feddbe.data.split import Split, load_split
    from feddbe.errors import BadInput, Diverged, FeddbeError, StoreError
    from feddbe.export import export_model, predict
    from feddbe.methods import METHODS, MR, PRBM, Method
    from feddbe.methods.fedavg import FedAvg
    from feddbe.models import SplitModel
    from feddbe.page import report
    from feddbe.runs.watch import Watch
    from feddbe.show.run import Run, Runs, Sweep
    from feddbe.studies.sweep import compare

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
    "Run",
    "Runs",
    "Split",
    "SplitModel",
    "StoreError",
    "Sweep",
    "Watch",
    "compare",
    "draw",
    "export_model",
    "load",
    "load_split",
    "measure",
    "partition",
    "predict",
    "report",
    "run",
]

_HOMES = (
    "errors",
    "studies.sweep",
    "api",
    "methods",
    "methods.fedavg",
    "models",
    "data.dataset",
    "data.partition",
    "data.split",
    "show.run",
    "runs.watch",
    "page",
    "export",
)


def __getattr__(name: str) -> object:
    """The names above when they are first used: `feddbe --help` need not wait for torch."""
    from importlib import import_module

    if name in ("testing", "watch"):
        return import_module(f"feddbe.{name}")
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"feddbe.{home}")
            if name in module.__all__:
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module 'feddbe' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
