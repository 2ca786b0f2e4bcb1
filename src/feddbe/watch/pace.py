"""How far a run is, in words: for those who read lines rather than bars."""

from __future__ import annotations

import time
from datetime import timedelta

__all__ = ["Pace"]

_FIRST, _EVERY = 2.0, 15.0
"""Seconds until the first line about a part, and between two."""
_SURE = 0.01
"""Share of a part from which on its pace says how long the rest takes."""


class Pace:
    """One run's rounds against the clock."""

    def __init__(self, name: str, done: int, rounds: int) -> None:
        self._name, self._rounds = name, rounds
        self._first = self._done = done
        self._began = self._part_began = time.monotonic()
        self._next_line = self._began + _FIRST

    def round(self, done: int, accuracy: float | None) -> str:
        """What to say when a round is written; nothing before there is something to say."""
        of = done if done == self._done else done - 1  # only the last one is told twice
        self._done = done
        self._part_began = time.monotonic()
        if accuracy is None:
            return ""
        passed = self._part_began - self._began
        words = [f"{self._name}: round {done} of {self._rounds}", f"{100 * accuracy:.2f} % in round {of}"]
        words.append(str(timedelta(seconds=round(passed))))
        if done > self._first and self._rounds > done:
            left = passed / (done - self._first) * (self._rounds - done)
            words.append(f"{timedelta(seconds=round(left))} left")
        return ", ".join(words)

    def part(self, share: float) -> str:
        """Return a line on the part that is under way, if the last one is old; parts are taken for equal."""
        now = time.monotonic()
        if now < self._next_line:
            return ""
        self._next_line = now + _EVERY
        words = [f"{self._name}: {share:.0%} of step {self._done + 1} of {self._rounds}"]
        words.append(str(timedelta(seconds=round(now - self._began))))
        if share >= _SURE:
            left = (now - self._part_began) / share * (self._rounds - self._done - share)
            words.append(f"about {timedelta(seconds=round(left))} left")
        return ", ".join(words)
