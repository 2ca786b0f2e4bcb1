"""Ready ones to give as `watch=`, and what shows progress by itself."""

from __future__ import annotations

import sys

from feddbe.runs.watch import Several, Watch
from feddbe.watch.bars import Bars
from feddbe.watch.lines import Lines, Remarks
from feddbe.watch.notebook import Notebook, in_notebook
from feddbe.watch.tensorboard import TensorBoard

__all__ = ["Bars", "Lines", "Notebook", "Remarks", "Several", "TensorBoard", "Watch", "progress"]


def progress(*, quiet: bool = False) -> Watch:
    """What a person can look at while Python works: bars on a terminal, a cell's output in a notebook, and
    nothing elsewhere."""
    if quiet:
        return Watch()
    if in_notebook():
        return Notebook()
    return Bars() if sys.stderr is not None and sys.stderr.isatty() else Watch()
