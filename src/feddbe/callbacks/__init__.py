"""Notified while runs proceed."""

from feddbe.callbacks.display import (
    Bars,
    Lines,
    Notebook,
    Pace,
    Remarks,
    Several,
    TensorBoard,
    Watch,
    columns,
    in_notebook,
    progress,
)

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
