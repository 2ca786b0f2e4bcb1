"""Who is told how a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from feddbe.results.document import RoundResult


class Callback:
    """Is told how runs go on; this one does nothing with it. It is entered before the first of them and left
    after the last, whatever happens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """All runs are over."""

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        """The run in `folder` starts, or goes on after `done` of `rounds`."""

    def on_client_end(self, done: int, of: int) -> None:
        """So many clients of this call are through."""

    def on_analysis_progress(self, share: float) -> None:
        """This share of the next measurement of representations is done, from 0 to 1."""

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        """A round is written; `accuracy` is the latest that is known, which is that of the round before until
        the last one has been evaluated."""

    def on_evaluation(self, result: RoundResult) -> None:
        """All that there is to know of a round: it is evaluated with the round after it, or at the end."""

    def on_message(self, text: str) -> None:
        """What a person should know now: one line, no reason to stop."""


class CallbackList(Callback):
    """Tells each of them."""

    def __init__(self, watches: Sequence[Callback]) -> None:
        self._all = watches

    def __enter__(self) -> Self:
        self._each(lambda watch: watch.__enter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._each(lambda watch: watch.__exit__(kind, error, trace))

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self._each(lambda watch: watch.on_run_begin(name, folder, done, rounds))

    def on_client_end(self, done: int, of: int) -> None:
        self._each(lambda watch: watch.on_client_end(done, of))

    def on_analysis_progress(self, share: float) -> None:
        self._each(lambda watch: watch.on_analysis_progress(share))

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self._each(lambda watch: watch.on_round_end(done, accuracy))

    def on_evaluation(self, result: RoundResult) -> None:
        self._each(lambda watch: watch.on_evaluation(result))

    def on_message(self, text: str) -> None:
        self._each(lambda watch: watch.on_message(text))

    def _each(self, tell: Callable[[Callback], object]) -> None:
        for watch in self._all:
            tell(watch)


class StudyCallback:
    """Base class for callbacks of a study, whose runs proceed in parallel; every hook does nothing."""

    def run_callback(self, folder: Path) -> Callback:
        """Return the callback of the run in `folder`, which starts or resumes now."""
        return Callback()

    def on_run_end(self, folder: Path, error: Exception | None) -> None:
        """The run in `folder` is complete, or failed with this error."""
