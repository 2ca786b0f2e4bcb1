"""What an engine is and what it promises: it decides where the clients' part of a method runs, and where what
they keep lies."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from feddbe.config.parameters import Parameters
from feddbe.methods.base import Method
from feddbe.simulation.client import Job, Missing, Reply
from feddbe.state import State
from feddbe.training.task import Task


class ClientStates(Protocol):
    """What the run's file has of the clients' states: read as the last accepted round left them, staged for
    the next.

    What is staged becomes a client's state with the round's transaction, and not before: a round that fails
    after clients have staged leaves every state as it was, and is done again from there. An engine whose
    clients keep their states elsewhere stages a `Receipt` instead; what it then reads is the last one that
    was accepted, and exactly that state is the one to go on from, even if the client has made a newer one.
    """

    def read(self, client: int) -> bytes | None: ...

    def stage(self, client: int, state: bytes) -> None: ...

    def stamp(self, client: int) -> Hashable:
        """What tells what `read` would give now from all else; None: nothing does."""


class Messages:
    """What the clients are sent: one state for all, or one for each made when it is needed."""

    def __init__(self, shared: State, each: Callable[[int], State] | None = None) -> None:
        self.shared, self.each = shared, each

    def to(self, client: int) -> State:
        """The whole message to one client."""
        return self.shared if self.each is None else self.shared | self.each(client)


class Engine(Protocol):
    """Runs jobs in any order and place, and gives one answer to each.

    Each is `client.perform` of the job, its message and the client's state, with the same bits as `Serial`; a
    job may be done twice, but only once staged and answered. The replies carry no kept state any more. A
    client that does not answer is `Missing`: then nothing is staged for it, whatever it may have done.
    """

    def run(
        self, jobs: Sequence[Job], messages: Messages, states: ClientStates
    ) -> Iterator[Reply | Missing]: ...

    def close(self) -> None: ...


def _nothing(text: str) -> None:
    pass


@dataclass(frozen=True)
class Waiting:
    """How long a worker is waited for, and who is told that one is."""

    timeout: float | None = None
    """Seconds after which it counts as dead; None: never."""
    word_after: float = 60.0
    """Seconds, or ten times what a job takes at the median, after which somebody is told; in any case at half
    the timeout."""
    remark: Callable[[str], None] = _nothing


WAITING = Waiting()


@dataclass(frozen=True)
class Choice(Parameters):
    """What a user can say of an engine: its name, and its options as fields."""

    def processes(self) -> int:
        """Worker processes on this machine; 0: clients work in this one."""
        return 0

    def is_local(self) -> bool:
        """Whether it works on this machine only."""
        return True

    def make(self, task: Task, method: Method, waiting: Waiting = WAITING) -> Engine:
        """The engine, ready to work."""
        raise NotImplementedError


def portable(error: Exception) -> Exception:
    """The error, or one that says the same if it cannot be pickled."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    told = RuntimeError(f"{type(error).__name__}: {error}")
    for note in error.__notes__:
        told.add_note(note)
    return told
