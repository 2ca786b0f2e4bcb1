"""Models by name, and where they are split."""

from feddbe.models.registry import (
    MODELS,
    ModelEntry,
    ModelFromFile,
    ModelSource,
    build_model,
    default_model,
    find_model,
    resolve_builder,
)
from feddbe.models.split_model import Forward, SplitModel

__all__ = [
    "MODELS",
    "Forward",
    "ModelEntry",
    "ModelFromFile",
    "ModelSource",
    "SplitModel",
    "build_model",
    "default_model",
    "find_model",
    "resolve_builder",
]
