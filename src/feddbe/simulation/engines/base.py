"""Interface of an engine, which decides where the clients' part of a method runs and where their states are
kept; memory of this process and its workers.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from feddbe.config.parameters import Parameters
from feddbe.methods.base import Method
from feddbe.simulation.client import ClientResult, ClientTask, MissingClient
from feddbe.state import State, decode, encode
from feddbe.training.task import Task


class ClientStates(ABC):
    """The clients' states in the run's file: read as the last accepted round left them, staged for the next.

    An engine that works in this process passes tensors (`load`, `save`); one that sends states elsewhere
    passes bytes (`read`, `stage`). Loaded tensors are copies, and saved ones are copied at once: nothing that
    a method does to them later reaches the run's file.

    What is staged becomes a client's state with the round's transaction, and not before: a round that fails
    after clients have staged leaves every state as it was, and is done again from there. An engine whose
    clients keep their states elsewhere stages a `Receipt` instead; what it then reads is the last one that
    was accepted, and exactly that state is the one to go on from, even if the client has made a newer one.
    """

    @abstractmethod
    def read(self, client: int) -> bytes | None:
        """Return the bytes of a client's state, or of its receipt; None before the first."""

    @abstractmethod
    def write_pending(self, client: int, state: bytes) -> None:
        """Make these bytes the client's state with the round's transaction."""

    @abstractmethod
    def version(self, client: int) -> Hashable:
        """Return a value that identifies what `read` would return now; None: nothing does."""

    def load(self, client: int) -> State | None:
        """Return a client's state; None before the first."""
        data = self.read(client)
        return None if data is None else decode(data)

    def save(self, client: int, state: State) -> None:
        """Make this the client's state with the round's transaction."""
        self.write_pending(client, encode(state))


class Broadcasts:
    """What the clients are sent: one state for all, or one for each made when it is needed."""

    def __init__(self, shared: State, each: Callable[[int], State] | None = None) -> None:
        self.shared, self.each = shared, each

    def message_for(self, client: int) -> State:
        """The whole message to one client."""
        return self.shared if self.each is None else self.shared | self.each(client)


class Engine(Protocol):
    """Runs jobs in any order and place, and gives one answer to each.

    Each is `client.perform` of the job, its message and the client's state, with the same bits as `Serial`; a
    job may be done twice, but only once staged and answered. The replies carry no kept state any more. A
    client that does not answer is `Missing`: then nothing is staged for it, whatever it may have done.
    """

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]: ...

    def close(self) -> None: ...


def _nothing(text: str) -> None:
    pass


@dataclass(frozen=True)
class TimeoutPolicy:
    """How long a worker is waited for, and who is told that one is."""

    timeout: float | None = None
    """Seconds after which it counts as dead; None: never."""
    warn_after: float = 60.0
    """Seconds, or ten times what a job takes at the median, after which somebody is told; in any case at half
    the timeout."""
    warn: Callable[[str], None] = _nothing


DEFAULT_TIMEOUT_POLICY = TimeoutPolicy()


@dataclass(frozen=True)
class EngineConfig(Parameters):
    """What a user can say of an engine: its name, and its options as fields."""

    def processes(self) -> int:
        """Worker processes on this machine; 0: clients work in this one."""
        return 0

    def is_local(self) -> bool:
        """Whether it works on this machine only."""
        return True

    def create(self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY) -> Engine:
        """The engine, ready to work."""
        raise NotImplementedError


def as_portable(error: Exception) -> Exception:
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


_TRIM, _MMAP = -1, -3
"""Names of two limits of glibc's `mallopt`."""


def peak_memory_mb() -> float:
    """Megabytes in use now (Linux: shared pages counted once, summed); elsewhere this process's peak."""
    pids = [os.getpid(), *(p.pid for p in multiprocessing.active_children() if p.pid)]
    total = 0
    for pid in pids:
        try:
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
        except (OSError, StopIteration):  # no such file system, or the worker has just ended
            continue
    if total:
        return total / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def keep_freed_memory() -> None:
    """From now on this process, and what is forked from it, keeps up to a gigabyte of what it freed, in
    pieces of up to 32 MB. A round takes and gives back the same states over and over, and to get a new page
    from the system takes longer than to fill it. Where the C library is another one, nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP, 2**25)
        mallopt(_TRIM, 2**30)
