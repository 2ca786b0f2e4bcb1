"""Runs as one page to read: a file that needs nothing else, or served while they go on.

Python says what there is, as sections of blocks (`blocks.py`); the scripts in `assets/` draw each kind of
block and know nothing of runs.
"""

from feddbe.page.html import write_report

__all__ = ["report", "write_report"]

report = write_report
"""Its name in `feddbe`."""
