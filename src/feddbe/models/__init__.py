"""Models by name, and where they are split."""

from feddbe.models.registry import (
    MODELS,
    Forward,
    FromFile,
    Known,
    ModelSource,
    SplitModel,
    build,
    builder,
    find,
    fitting,
)

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
