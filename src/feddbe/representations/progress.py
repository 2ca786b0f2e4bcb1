"""Report which share of a long measurement is done, without a callback in the signature of every measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["in_parts", "listening", "report"]

Item = TypeVar("Item")
Listener = Callable[[float], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hand what is reported in the block to `listener`."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report(share: float) -> None:
    """Tell the listener, if there is one, which share of the measurement is done (0 to 1)."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(share)


def in_parts(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items; what is reported during each is a part of the whole."""

    def report_part(share: float) -> None:
        if whole is not None:
            whole((index + share) / len(items))

    whole = _LISTENER.get()
    for index, item in enumerate(items):  # noqa: B007  (report_part reads it)
        with listening(report_part):
            yield item
