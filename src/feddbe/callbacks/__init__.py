"""Callbacks: hooks that are called while runs proceed."""

from feddbe.callbacks.base import Callback, CallbackList
from feddbe.callbacks.display import (
    MessagesOnly,
    NotebookProgress,
    ProgressBars,
    ProgressLines,
    TimeEstimate,
    bar_columns,
    default_callback,
    is_notebook,
)
from feddbe.callbacks.tracking import MLflow, TensorBoard, WandB, make_callback, replay

__all__ = [
    "Callback",
    "CallbackList",
    "MLflow",
    "MessagesOnly",
    "NotebookProgress",
    "ProgressBars",
    "ProgressLines",
    "TensorBoard",
    "TimeEstimate",
    "WandB",
    "bar_columns",
    "default_callback",
    "is_notebook",
    "make_callback",
    "replay",
]
