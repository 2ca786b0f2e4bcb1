"""The lines per round on standard error where that is no terminal, for tests of what else is said."""

from __future__ import annotations

import re

__all__ = ["LINE", "without_progress"]

LINE = re.compile(
    r"^.+: round (?P<done>\d+) of (?P<rounds>\d+), (?P<accuracy>[\d.]+) % in round (?P<of>\d+), "
    r"\d+:\d\d:\d\d(, (?P<left>\d+:\d\d:\d\d) left)?\n",
    re.MULTILINE,
)


def without_progress(err: str) -> str:
    return LINE.sub("", err)
