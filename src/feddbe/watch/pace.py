"""How far a run is, in words: for those who read lines rather than bars."""

from __future__ import annotations

import time
from datetime import timedelta

__all__ = ["Pace"]


class Pace:
    """One run's rounds against the clock."""

    def __init__(self, name: str, done: int, rounds: int) -> None:
        self._name, self._rounds = name, rounds
        self._first = self._done = done
        self._began = time.monotonic()

    def round(self, done: int, accuracy: float | None) -> str:
        """What to say when a round is written; nothing before there is something to say."""
        of = done if done == self._done else done - 1  # only the last one is told twice
        self._done = done
        if accuracy is None:
            return ""
        passed = time.monotonic() - self._began
        words = [f"{self._name}: round {done} of {self._rounds}", f"{100 * accuracy:.2f} % in round {of}"]
        words.append(str(timedelta(seconds=round(passed))))
        if done > self._first and self._rounds > done:
            left = passed / (done - self._first) * (self._rounds - done)
            words.append(f"{timedelta(seconds=round(left))} left")
        return ", ".join(words)
