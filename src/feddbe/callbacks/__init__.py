"""Notified while runs proceed."""

from feddbe.callbacks.base import Several, Watch
from feddbe.callbacks.display import Bars, Lines, Notebook, Pace, Remarks, columns, in_notebook, progress
from feddbe.callbacks.tensorboard import TensorBoard

__all__ = [
    "Bars",
    "Lines",
    "Notebook",
    "Pace",
    "Remarks",
    "Several",
    "TensorBoard",
    "Watch",
    "columns",
    "in_notebook",
    "progress",
]
