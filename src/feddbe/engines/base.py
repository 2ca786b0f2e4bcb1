"""What an engine is: it decides where the clients' part of a method runs, and keeps what is private."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from feddbe.client import Job, Reply
from feddbe.state import State

__all__ = ["Engine", "Messages", "PrivateStates"]


class PrivateStates(Protocol):
    """Where private states are kept: read as the last accepted round left them, staged for the next."""

    def read(self, client: int) -> bytes | None: ...

    def stage(self, client: int, state: bytes) -> None: ...


class Messages:
    """What the clients are sent: one state for all, or one for each made when it is needed."""

    def __init__(self, shared: State, each: Callable[[int], State] | None = None) -> None:
        self.shared, self.each = shared, each

    def to(self, client: int) -> State:
        """The whole message to one client."""
        return self.shared if self.each is None else self.shared | self.each(client)


class Engine(Protocol):
    """Runs jobs in any order and place; the replies carry no private state any more."""

    def run(self, jobs: Sequence[Job], messages: Messages, states: PrivateStates) -> Iterator[Reply]: ...

    def close(self) -> None: ...
