"""Base classes for callbacks of runs and of studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from feddbe.results.document import RoundResult


class Callback:
    """Base class for callbacks; every hook does nothing.

    It is a context manager, entered before the first run and left after the last, also on errors.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release resources after the last run."""

    def on_run_config(self, config: Mapping[str, Any], run_id: str) -> None:
        """Called before `on_run_begin` with the run's options; `run_id` is the same when it is resumed."""

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        """Called when the run in `folder` starts, or resumes after `done` of `rounds` rounds."""

    def on_client_end(self, done: int, total: int) -> None:
        """Called when `done` of the `total` clients of this round have finished."""

    def on_analysis_progress(self, fraction: float) -> None:
        """Called during an analysis of representations with its finished fraction, from 0 to 1."""

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        """Called when round `done` is written; `accuracy` is the latest known.

        The accuracy is that of the previous round until the last round has been evaluated.
        """

    def on_evaluation(self, result: RoundResult) -> None:
        """Called with the complete result of a round: after the next round, or at the end."""

    def on_message(self, text: str) -> None:
        """Called with a message of one line for the user; the run continues."""


class CallbackList(Callback):
    """Callback that calls several callbacks in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def __enter__(self) -> Self:
        for callback in self._callbacks:
            callback.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for callback in self._callbacks:
            callback.__exit__(kind, error, trace)

    def on_run_config(self, config: Mapping[str, Any], run_id: str) -> None:
        for callback in self._callbacks:
            callback.on_run_config(config, run_id)

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        for callback in self._callbacks:
            callback.on_run_begin(name, folder, done, rounds)

    def on_client_end(self, done: int, total: int) -> None:
        for callback in self._callbacks:
            callback.on_client_end(done, total)

    def on_analysis_progress(self, fraction: float) -> None:
        for callback in self._callbacks:
            callback.on_analysis_progress(fraction)

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        for callback in self._callbacks:
            callback.on_round_end(done, accuracy)

    def on_evaluation(self, result: RoundResult) -> None:
        for callback in self._callbacks:
            callback.on_evaluation(result)

    def on_message(self, text: str) -> None:
        for callback in self._callbacks:
            callback.on_message(text)


class StudyCallback:
    """Base class for callbacks of a study, whose runs proceed in parallel; every hook does nothing."""

    def run_callback(self, folder: Path) -> Callback:
        """Return the callback of the run in `folder`, which starts or resumes now."""
        return Callback()

    def on_run_end(self, folder: Path, error: Exception | None) -> None:
        """Called when the run in `folder` is complete, or has failed with this error."""
