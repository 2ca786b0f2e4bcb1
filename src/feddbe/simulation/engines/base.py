"""Interface of an engine, which decides where clients run and where their states are kept; use of memory."""

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
from feddbe.errors import FeddbeError
from feddbe.methods.base import Method
from feddbe.simulation.client import ClientResult, ClientTask, MissingClient
from feddbe.state import State, decode, encode
from feddbe.training.task import Task

MAX_ATTEMPTS = 3
"""Number of times that a client's task is started if its worker dies."""


class ClientStates(ABC):
    """The clients' states in the run's file: those of the last committed round, and pending new ones.

    An engine in this process passes tensors (`load`, `save`); one that sends states elsewhere passes bytes
    (`read`, `write_pending`). Loaded tensors are copies, and saved ones are copied immediately: later changes
    by a method do not reach the run's file.

    A pending state becomes the client's state with the round's transaction. A round that fails leaves every
    state unchanged and is repeated from there. An engine whose clients keep their states elsewhere writes a
    `Receipt` instead. It then reads the last committed receipt, and the client must continue from exactly
    that state, even if it has a newer one.
    """

    @abstractmethod
    def read(self, client: int) -> bytes | None:
        """Return the bytes of a client's state or receipt; None if it has neither."""

    @abstractmethod
    def write_pending(self, client: int, state: bytes) -> None:
        """Make these bytes the client's state with the round's transaction."""

    @property
    def run_id(self) -> str:
        """Identifier of the run, under which clients that keep their states elsewhere store them."""
        return ""

    def referenced(self, client: int) -> list[bytes]:
        """Return all states or receipts of a client that the run refers to: the client must keep them."""
        state = self.read(client)
        return [] if state is None else [state]

    @abstractmethod
    def version(self, client: int) -> Hashable:
        """Return a value that identifies the result of `read`; None if it has no version."""

    def load(self, client: int) -> State | None:
        """Return a client's state; None if it has none."""
        data = self.read(client)
        return None if data is None else decode(data)

    def save(self, client: int, state: State) -> None:
        """Make this the client's state with the round's transaction."""
        self.write_pending(client, encode(state))


class Broadcasts:
    """Messages to the clients: a part for all, and a part per client that is built when it is needed."""

    def __init__(self, shared: State, per_client: Callable[[int], State] | None = None) -> None:
        self.shared = shared
        self.per_client = per_client

    def message_for(self, client: int) -> State:
        """Return the whole message to one client."""
        return self.shared if self.per_client is None else self.shared | self.per_client(client)


class Engine(Protocol):
    """Executor of client tasks, which yields one result for each, in any order.

    A result has the bits of `run_client` in the serial engine. A task may be executed twice, but its state is
    written and its result yielded once. Results have no private state: the engine has written it as pending.
    For a client that does not reply the engine yields `MissingClient` and writes nothing.
    """

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]: ...

    def close(self) -> None: ...


def _ignore_warning(message: str) -> None:
    pass


@dataclass(frozen=True)
class TimeoutPolicy:
    """Limits on the time of a worker's tasks, and the function that receives warnings."""

    timeout: float | None = None
    """Seconds after which a worker counts as dead; None: no limit."""
    warn_after: float = 60.0
    """Seconds before a warning: at least ten times a task's median duration, at most half the timeout."""
    warn: Callable[[str], None] = _ignore_warning


DEFAULT_TIMEOUT_POLICY = TimeoutPolicy()


@dataclass(frozen=True)
class EngineConfig(Parameters):
    """An engine's name, and its options as fields."""

    def processes(self) -> int:
        """Return the number of worker processes on this machine; 0: clients run in this process."""
        return 0

    def is_local(self) -> bool:
        """Return True if the engine uses this machine only."""
        return True

    def create(self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY) -> Engine:
        """Return the engine, ready for `run`."""
        raise NotImplementedError


def describe_client_task(task: Task, client_task: ClientTask) -> str:
    """Return a client, by its name if it has one, and the round, for messages."""
    return f"{task.dataset.describe_client(client_task.client)} in round {client_task.round}"


def worker_died_error(task: Task, client_task: ClientTask, timeouts: TimeoutPolicy) -> FeddbeError:
    """Return the error for a task that was started `MAX_ATTEMPTS` times."""
    or_timeout = " or time" if timeouts.timeout else ""
    return FeddbeError(
        f"{describe_client_task(task, client_task)}: its worker died {MAX_ATTEMPTS} times "
        f"(out of memory{or_timeout}? try --engine serial)"
    )


def as_portable(error: Exception) -> Exception:
    """Return the error, or one with the same text if it cannot be pickled."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    portable = RuntimeError(f"{type(error).__name__}: {error}")
    for note in error.__notes__:
        portable.add_note(note)
    return portable


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def peak_memory_mb() -> float:
    """Return the megabytes in use by this process and its workers; except on Linux, this process's peak.

    Shared pages are counted once.
    """
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):  # no such file system, or the worker has just ended
            continue
    if total:
        return total / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def keep_freed_memory() -> None:
    """Let this process and its forks keep up to 1 GB of freed memory, in pieces of up to 32 MB.

    A round allocates and frees the same states repeatedly, and getting a new page from the system takes
    longer than filling it. With another C library than glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, 2**30)
