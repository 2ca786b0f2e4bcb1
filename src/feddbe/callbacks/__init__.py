"""Notified while runs proceed."""

from feddbe.callbacks.base import Callback, CallbackList
from feddbe.callbacks.display import (
    Bars,
    Lines,
    MessagesOnly,
    Notebook,
    TimeEstimate,
    bar_columns,
    default_callback,
    in_notebook,
)
from feddbe.callbacks.tensorboard import TensorBoard

__all__ = [
    "Bars",
    "Callback",
    "CallbackList",
    "Lines",
    "MessagesOnly",
    "Notebook",
    "TensorBoard",
    "TimeEstimate",
    "bar_columns",
    "default_callback",
    "in_notebook",
]
