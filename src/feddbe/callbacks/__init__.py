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
from feddbe.callbacks.tensorboard import TensorBoard

__all__ = [
    "Callback",
    "CallbackList",
    "MessagesOnly",
    "NotebookProgress",
    "ProgressBars",
    "ProgressLines",
    "TensorBoard",
    "TimeEstimate",
    "bar_columns",
    "default_callback",
    "is_notebook",
]
