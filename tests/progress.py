"""Progress lines on standard error, which tests of other output remove."""

from __future__ import annotations

import re

__all__ = ["PROGRESS_LINE", "remove_progress"]

PROGRESS_LINE = re.compile(
    r"^.+: round (?P<done>\d+) of (?P<rounds>\d+), (?P<accuracy>[\d.]+) % in round (?P<evaluated>\d+), "
    r"\d+:\d\d:\d\d(, (?P<left>\d+:\d\d:\d\d) left)?\n",
    re.MULTILINE,
)
"""The line that is printed after each round if standard error is not a terminal."""


def remove_progress(err: str) -> str:
    """Return the text without progress lines."""
    return PROGRESS_LINE.sub("", err)
