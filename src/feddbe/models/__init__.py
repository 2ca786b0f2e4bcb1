"""Models by name, and where they are split."""

from feddbe.models.registry import MODELS, FromFile, Known, ModelSource, build, builder, find, fitting
from feddbe.models.split_model import Forward, SplitModel

__all__ = [
    "MODELS",
    "Forward",
    "FromFile",
    "Known",
    "ModelSource",
    "SplitModel",
    "build",
    "builder",
    "find",
    "fitting",
]
