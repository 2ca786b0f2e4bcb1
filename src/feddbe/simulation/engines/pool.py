"""Clients in parallel: worker processes with one torch thread each, which hold the data from the start.

Bit-identical to serial: a client's work is a pure function of its job, and each runs on one thread. A worker
that dies, or does not answer in time, is replaced and its client done again.
"""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any, ClassVar, NamedTuple

import torch

from feddbe.config.parameters import parameter
from feddbe.errors import FeddbeError
from feddbe.methods.base import Method
from feddbe.simulation.client import ClientResult, ClientTask, run_client
from feddbe.simulation.engines.base import (
    DEFAULT_TIMEOUT_POLICY,
    Broadcasts,
    ClientStates,
    EngineConfig,
    TimeoutPolicy,
    as_portable,
)
from feddbe.state import State, as_bytes, decode, encode
from feddbe.training.task import Task

MAX_TRIES = 3
"""How often a client's work is started when its worker dies."""
TOGETHER = 0.02
"""Seconds of work that go to a worker at once: clients that take less go together."""
# A forked worker shares the data and the model without a copy; elsewhere than on Linux forking is not safe.
_START: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    buffer: int
    """Where large states lie on their way to it and back."""
    cached_states: dict[int, Hashable] = field(default_factory=dict)
    """The stamps of the states that it holds, by client."""
    knows: Broadcasts | None = None
    """The messages whose shared part it has."""
    since: float = 0.0
    """When it got its job."""
    told: bool = False
    """Whether somebody was told that it takes long."""

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()  # not SIGTERM, which one that is stopped does not see
        self.process.join()
        self.process.close()
        _close(self.buffer)


class Pool:
    """`workers` processes; jobs are given out longest first, so that none is left over at the end."""

    def __init__(
        self, task: Task, method: Method, workers: int, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY
    ) -> None:
        self.task, self.method, self.waiting = task, method, timeouts
        self._took: deque[float] = deque(maxlen=1000)
        """Seconds of the last jobs."""
        self._usual = 0.0
        """The median of them; 0: there are none yet."""
        self._worked: deque[float] = deque(maxlen=1000)
        """Their processor time, which neighbours on the machine do not change."""
        self._desk = _desk()
        """For what all of them get."""
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(self._start())

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [w.process.pid for w in self._workers if w.process.pid is not None]

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        self._usual = median(self._took) if self._took else 0.0
        together = max(1, int(TOGETHER / median(self._worked))) if self._worked else 1
        queue = TaskQueue(self.task, tasks, len(self._workers), together)
        idle, busy = list(self._workers), dict[Any, tuple[_Worker, list[ClientTask]]]()
        shared = pack(messages.shared, self._desk)
        while queue or busy:
            while queue and idle:
                worker = idle.pop()
                some = self._next(queue, worker)
                worker.since = time.monotonic()
                try:
                    self._give(worker, some, messages, shared, states)
                except OSError as error:  # it died while idle
                    self._tell_if_late(worker, some, error)
                    queue.give_back(some)
                    idle.append(self._replace(worker))
                    continue
                worker.told = False
                busy[worker.pipe] = worker, some
            for worker, some in self._overdue(busy.values()):
                del busy[worker.pipe]
                queue.give_back(some)
                idle.append(self._replace(worker))
            for pipe in wait(list(busy), self._patience(busy.values())) if busy else ():
                worker, some = busy.pop(pipe)
                try:
                    answer, tensors = receive(worker.pipe, worker.buffer)
                except (EOFError, OSError) as error:  # it died at work
                    self._tell_if_late(worker, some, error)
                    queue.give_back(some)
                    idle.append(self._replace(worker))
                    continue
                answers, worked = answer
                if isinstance(answers, Exception):
                    raise answers
                self._took.append((time.monotonic() - worker.since) / len(some))
                self._worked.append(worked / len(some))
                idle.append(worker)
                for reply, its in zip(answers, tensors, strict=True):
                    if (private := its.pop(KEPT, None)) is not None:
                        states.write_pending(reply.client, private)
                    if its.pop(HELD, None) is not None:
                        worker.cached_states[reply.client] = states.version(reply.client)
                    yield reply.with_tensors(its)

    def _next(self, queue: TaskQueue, worker: _Worker) -> list[ClientTask]:
        """What this worker does next."""
        for job in (some := queue.pop(worker.cached_states)):
            if queue.tries[job.client] > MAX_TRIES:
                raise FeddbeError(
                    f"client {job.client} in round {job.round}: its worker died {MAX_TRIES} times "
                    f"(out of memory{', or of time' * bool(self.waiting.timeout)}? try --engine serial)"
                )
        return some

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()
        self._workers = []
        _close(self._desk)
        self._desk = NONE

    def _word_after(self) -> float:
        return min(max(self.waiting.warn_after, 10 * self._usual), (self.waiting.timeout or math.inf) / 2)

    def _overdue(
        self, busy: Iterable[tuple[_Worker, list[ClientTask]]]
    ) -> list[tuple[_Worker, list[ClientTask]]]:
        """Those whose time is up; of those that take long, somebody is told."""
        late, now, timeout = [], time.monotonic(), self.waiting.timeout
        for worker, jobs in busy:
            waited = now - worker.since
            if timeout is not None and waited >= timeout:
                late.append((worker, jobs))
                self._tell_if_late(worker, jobs, BlockingIOError())
            elif not worker.told and waited >= self._word_after():
                worker.told = True
                limit = "--worker-timeout sets a limit" if timeout is None else f"at most {timeout:g} s"
                self.waiting.warn(f"waiting for {_who(worker, jobs)} for {waited:.0f} s; {limit}")
        return late

    def _tell_if_late(self, worker: _Worker, jobs: list[ClientTask], error: Exception) -> None:
        """`BlockingIOError`: the time was up in the middle of a message."""
        if isinstance(error, BlockingIOError):
            waited = time.monotonic() - worker.since
            self.waiting.warn(f"{_who(worker, jobs)} did not answer for {waited:.0f} s and is done again")

    def _patience(self, busy: Iterable[tuple[_Worker, list[ClientTask]]]) -> float | None:
        """Seconds until there is something to do though nobody answers."""
        ends = [w.since + self._word_after() for w, _ in busy if not w.told]
        if self.waiting.timeout is not None:
            ends += [w.since + self.waiting.timeout for w, _ in busy]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    @staticmethod
    def _give(
        worker: _Worker,
        jobs: list[ClientTask],
        messages: Broadcasts,
        shared: PackedState,
        states: ClientStates,
    ) -> None:
        """Jobs, with the messages and states that the worker does not have yet."""
        if worker.knows is not messages:
            worker.pipe.send((None, [shared]))
            worker.knows = messages
        each = [{} if messages.each is None else messages.each(job.client) for job in jobs]
        kept = [_kept(worker, job.client, states) for job in jobs]
        send(worker.pipe, worker.buffer, jobs, [a | b for a, b in zip(each, kept, strict=True)])

    def _start(self) -> _Worker:
        ours, theirs = _START.Pipe()
        # A forked child also inherits our ends of the pipes. It must close them: a worker notices that we are
        # gone by its pipe closing, and it does not close while anyone else holds our end.
        inherited = [ours, *(w.pipe for w in self._workers)] if _START.get_start_method() == "fork" else []
        own, others = _desk(), [w.buffer for w in self._workers if w.buffer != NONE]
        process = _START.Process(
            target=work,
            args=(theirs, inherited, others, (self._desk, own), self.task, self.method),
            name="feddbe-worker",
            daemon=True,
        )
        process.start()
        theirs.close()
        if self.waiting.timeout is not None:
            _limit(ours, self.waiting.timeout)
        return _Worker(process, ours, own)

    def _replace(self, dead: _Worker) -> _Worker:
        self._workers.remove(dead)
        dead.close()
        worker = self._start()
        self._workers.append(worker)
        return worker


@dataclass(frozen=True)
class PoolConfig(EngineConfig):
    """What can be chosen of the pool."""

    name: ClassVar[str] = "pool"

    workers: int | None = parameter(None, "processes; by default one per core", low=1, high=9999)

    def processes(self) -> int:
        return self.workers or available_cores()

    def create(self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY) -> Pool:
        return Pool(task, method, min(self.processes(), task.split.clients), timeouts)


def available_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kept(worker: _Worker, client: int, states: ClientStates) -> dict[str, bytes]:
    """What the worker needs to have the client's state."""
    stamp = worker.cached_states.pop(client, None)  # until it answers nobody knows
    if stamp is not None and stamp == states.version(client):
        return {HELD: b""}
    state = states.read(client)
    return {} if state is None else {KEPT: state}


def _who(worker: _Worker, jobs: list[ClientTask]) -> str:
    first, *others = jobs
    more = f" and {len(others)} more" * bool(others)
    return f"client {first.client}{more} in round {first.round} (worker {worker.process.pid})"


def _desk() -> int:
    """One that a worker has too, because it is forked."""
    return make_buffer() if _START.get_start_method() == "fork" else NONE


def _close(desk: int) -> None:
    if desk != NONE:
        os.close(desk)


def _limit(pipe: Connection, seconds: float) -> None:
    """A worker that stops in the middle of a message is an OSError after this time, not a wait for ever."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for which in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


KEPT, HELD = "<kept>", "<held>"
"""Among the tensors that travel with a client: the bytes of its state; that the worker holds them, too."""
ROOM = 2**28
"""Bytes of states that a worker holds at most: large ones that it made, so that they need not come back."""


def end_with_parent() -> None:
    """One that is stopped does not notice that its pipe closes; Linux can end it all the same."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def work(
    pipe: Connection,
    inherited: list[Connection],
    others: list[int],
    desks: tuple[int, int],
    task: Task,
    method: Method,
) -> None:
    """`others`: descriptors of other workers' desks; `desks`: the one for all workers, and its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may have its own way
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in good order
    end_with_parent()
    for other in inherited:
        other.close()
    for one in others:
        os.close(one)
    torch.set_num_threads(1)
    gc.freeze()  # a search for garbage would write to every object's page, which is ours and the parent's now
    shared, held, (common, own) = State(), dict[int, bytes](), desks
    while True:
        try:
            jobs, parcels = pipe.recv()
            if jobs is None:
                shared = parcels[0].unpack(common)
                continue
            began = time.process_time()
            states = [one.unpack(own) for one in parcels]
            answers, tensors = _answers(task, method, jobs, shared, states, held)
            send(pipe, own, (answers, time.process_time() - began), tensors)
        except (EOFError, OSError):
            return


def _answers(
    task: Task,
    method: Method,
    jobs: list[ClientTask],
    shared: State,
    states: list[Items],
    held: dict[int, bytes],
) -> tuple[list[ClientResult] | Exception, list[Items]]:
    """To all jobs, and what goes beside them; or what went wrong."""
    answers, tensors = list[ClientResult](), list[Items]()
    for job, each in zip(jobs, states, strict=True):
        try:
            mine = held.pop(job.client, None)
            kept: bytes | None = mine if each.pop(HELD, None) is not None else each.pop(KEPT, None)
            private = None if kept is None else decode(kept)
            reply = run_client(task, method, job, shared | each if each else shared, private)
            tensors.append(reply.tensors())
            if reply.private:
                kept = tensors[-1][KEPT] = encode(reply.private)
            if kept and len(kept) >= LARGE and sum(map(len, held.values())) + len(kept) <= ROOM:
                held[job.client] = kept
                tensors[-1][HELD] = b""
            answers.append(reply.with_tensors({})._replace(private=None))
        except FeddbeError as error:
            return error, []
        except Exception as error:
            error.add_note(f"in client {job.client}, round {job.round}:\n{traceback.format_exc()}")
            return as_portable(error), []
    return answers, tensors


def task_cost(task: Task, client_task: ClientTask) -> float:
    """Samples passed through the model; training one costs about three times a prediction."""
    client = client_task.client
    tested, samples, adapt = len(task.split.test[client]), task.samples[client], client_task.adapt_epochs or 0
    epochs = (client_task.work != "none") * task.training.local_epochs
    epochs += (
        adapt * (adapt + 1) // 2 if client_task.is_new_client else adapt
    )  # a newcomer is looked at after each
    return (client_task.evaluate + client_task.evaluate_after) * tested + 3 * epochs * samples


class TaskQueue:
    """Jobs for some workers, the longest first. At most `together` are given out at a time, and of all that
    is left no more than a worker's half share: the last ones should end at one time."""

    def __init__(self, task: Task, tasks: Sequence[ClientTask], workers: int, together: int) -> None:
        costs = [(task_cost(task, job), job) for job in tasks]
        self._jobs = deque(sorted(costs, key=lambda one: one[0], reverse=True))
        self._left, self._workers, self._together = sum(c for c, _ in costs), workers, together
        self.tries = Counter[int]()
        """How often a client's job was given out."""

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def pop(self, holds: Container[int] = ()) -> list[ClientTask]:
        """At least one; one that was given out before goes alone, it may be what its worker died of. `holds`:
        clients whose states the worker has; of the next ones such a one is first."""
        soon = islice(self._jobs, 4 * self._workers)
        if mine := next((one for one in soon if one[1].client in holds), None):
            self._jobs.remove(mine)
            self._jobs.appendleft(mine)
        share, taken = self._left / (2 * self._workers), list[ClientTask]()
        while self._jobs and len(taken) < self._together:
            its, job = self._jobs[0]
            again = job.client in self.tries
            if taken and (its > share or again):
                break
            share -= its
            self._left -= its
            taken.append(self._jobs.popleft()[1])
            if again:
                break
        self.tries.update(job.client for job in taken)
        return taken

    def give_back(self, tasks: Sequence[ClientTask]) -> None:
        """They were not done, and come next."""
        self._jobs.extendleft((0.0, job) for job in reversed(tasks))


Items = dict[str, Any]
"""A state, with bytes among its tensors if need be."""
LARGE = 2**18
"""Bytes from which a parcel lies on a desk. Below, the pipe is as fast."""
NONE = -1
"""No desk: all goes through the pipe."""
_ALIGNED = 64
"""Where tensors begin, as torch has it: the last bits of a product depend on it."""
_TYPES = {dtype: name for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}
"""By their names types are pickled ten times as fast."""


class PackedState(NamedTuple):
    """A state ready to be sent."""

    offsets: Sequence[tuple[str, str, tuple[int, ...], int]] = ()
    """Names, types, shapes and places among the bytes."""
    data: bytearray | None = bytearray()
    """The bytes, if they are few; None: they are on the desk."""
    size: int = 0
    offset: int = 0
    """Where on the desk."""

    def unpack(self, desk: int) -> Items:
        """The state, which is the receiver's own."""
        held: Any = self.data
        if held is None:
            held = torch.empty(self.size, dtype=torch.uint8).numpy()
            _move(lambda rest, at: os.preadv(desk, [rest], at), memoryview(held), self.offset)
        found: Items = {}
        for name, kind, shape, place in self.offsets:
            n = math.prod(shape)
            if kind == "bytes":
                found[name] = bytes(memoryview(held)[place : place + n])
                continue
            dtype = getattr(torch, kind)
            some = torch.frombuffer(held, dtype=dtype, count=n, offset=place) if n else torch.empty(0)
            found[name] = some.to(dtype).view(shape)
        return found


def make_buffer() -> int:
    """A new one, to be closed by `os.close`; NONE, if this system has no such memory."""
    return os.memfd_create("feddbe") if hasattr(os, "memfd_create") else NONE


def pack(state: Mapping[str, Any], desk: int = NONE, at: int = 0) -> PackedState:
    """A copy of the state, if it is large on the desk from `at` on."""
    places, pieces, size = [], list[memoryview](), 0
    for name, value in state.items():
        if isinstance(value, bytes):
            kind, shape, piece = "bytes", (len(value),), memoryview(value)
        else:
            kind, shape, piece = _TYPES[value.dtype], tuple(value.shape), as_bytes(value)
        places.append((name, kind, shape, size))
        pieces += [piece, memoryview(bytes(-len(piece) % _ALIGNED))]
        size += len(piece) + len(pieces[-1])
    if size < LARGE or desk == NONE:
        return PackedState(places, bytearray().join(pieces), size)
    end = at
    for piece in pieces:
        _move(lambda rest, to: os.pwrite(desk, rest, to), piece, end)
        end += len(piece)
    return PackedState(places, None, size, at)


def _move(some: Callable[[memoryview, int], int], piece: memoryview, at: int) -> None:
    """All of it: one call of the system moves no more than two gigabytes."""
    while piece:
        if not (moved := some(piece, at)):
            raise EOFError("a desk holds less than was said")
        piece, at = piece[moved:], at + moved


def send(pipe: Connection, desk: int, message: object, states: Sequence[Mapping[str, Any]] = ()) -> None:
    """To the `receive` at the other end."""
    parcels, at = list[PackedState](), 0
    for state in states:
        parcels.append(pack(state, desk, at))
        at += parcels[-1].size
    pipe.send((message, parcels))


def receive(pipe: Connection, desk: int) -> tuple[Any, list[Items]]:
    """The message, and the states that came with it."""
    message, parcels = pipe.recv()
    return message, [parcel.unpack(desk) for parcel in parcels]
