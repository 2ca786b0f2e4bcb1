"""Waiting for other processes, which may be slow on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["PATIENCE", "wait_until"]

PATIENCE = 300.0
"""Seconds after which a process counts as hanging; long, because a machine that tests is busy."""


def wait_until(
    condition: Callable[[], Any], description: str, seconds: float = PATIENCE, pause: float = 0.05
) -> Any:
    """Return the first true value of the condition, which is evaluated after pauses in seconds.

    Raises:
        AssertionError: There was none in time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(pause)
    raise AssertionError(f"{description} did not happen in {seconds:g} s")
