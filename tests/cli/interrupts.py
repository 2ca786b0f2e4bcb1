"""Runs that are interrupted after some rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.callbacks.base import Callback

__all__ = ["OPTIONS", "InterruptAtStart", "compare_interrupted"]

OPTIONS: dict[str, Any] = {
    "clients": 3, "partition": "iid", "model": "mlp", "engine": "serial", "rounds": 3,
}  # fmt: skip
"""The options `SMALL` of the command line, with three rounds."""


class InterruptAtRound(Callback):
    """Raises KeyboardInterrupt after a round of a method."""

    def __init__(self, method: str, last_round: int) -> None:
        self.method = method
        self.last_round = last_round
        self.current_method = ""

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.current_method = name

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        if self.current_method == self.method and done == self.last_round:
            raise KeyboardInterrupt


class InterruptAtStart(Callback):
    """Raises KeyboardInterrupt before the first round."""

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        raise KeyboardInterrupt


def compare_interrupted(methods: Sequence[str], last_round: int, **options: Any) -> None:
    """Compare methods with `OPTIONS`, interrupted after a round of the last method."""
    with pytest.raises(KeyboardInterrupt):
        feddbe.compare(methods, callback=InterruptAtRound(methods[-1], last_round), **OPTIONS, **options)
