"""Who is told how a run goes on."""

from __future__ import annotations

from pathlib import Path

__all__ = ["Watch"]


class Watch:
    """Is told how a run goes on; this one does nothing with it."""

    def begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        """The run in `folder` starts, or goes on after `done` of `rounds`."""

    def client(self, done: int, of: int) -> None:
        """So many clients of this call are through."""

    def round(self, done: int, accuracy: float | None) -> None:
        """A round is written; `accuracy` is the latest that is known."""

    def remark(self, text: str) -> None:
        """What a person should know now: one line, no reason to stop."""
