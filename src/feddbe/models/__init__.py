"""Models by name, and models split at a cut."""

from feddbe.models.registry import (
    MODELS,
    ModelEntry,
    ModelFromFile,
    ModelSource,
    build_model,
    default_model,
    load_builder,
    parse_model,
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
    "load_builder",
    "parse_model",
]
