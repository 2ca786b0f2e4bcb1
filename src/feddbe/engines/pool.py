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
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any, ClassVar

import torch

from feddbe.engines.base import WAITING, Choice, ClientStates, Messages, Waiting
from feddbe.engines.client import Job, Reply, perform
from feddbe.engines.cost import cost
from feddbe.engines.shared_memory import Parcel, pack, receive, send
from feddbe.errors import FeddbeError
from feddbe.methods.base import Method
from feddbe.options import parameter
from feddbe.state import State, decode, encode
from feddbe.training.task import Task

__all__ = ["TRIES", "Pool", "PoolChoice", "cores", "end_with_parent", "portable"]

TRIES = 3
"""How often a client's work is started when its worker dies."""
# A forked worker shares the data and the model without a copy; elsewhere than on Linux forking is not safe.
_START: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    knows: Messages | None = None
    """The messages whose shared part it has."""
    since: float = 0.0
    """When it got its job."""
    told: bool = False
    """Whether somebody was told that it takes long."""


class Pool:
    """`workers` processes; jobs are given out longest first, so that none is left over at the end."""

    def __init__(self, task: Task, method: Method, workers: int, waiting: Waiting = WAITING) -> None:
        self.task, self.method, self.waiting = task, method, waiting
        self._took: deque[float] = deque(maxlen=1000)
        """Seconds of the last jobs."""
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(self._start())

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [w.process.pid for w in self._workers if w.process.pid is not None]

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply]:
        queue = deque(sorted(jobs, key=partial(cost, self.task), reverse=True))
        idle, busy, tries = list(self._workers), dict[Any, tuple[_Worker, Job]](), Counter[int]()
        with pack(messages.shared) as shared:
            while queue or busy:
                while queue and idle:
                    worker, job = idle.pop(), queue.popleft()
                    tries[job.client] += 1
                    if tries[job.client] > TRIES:
                        raise FeddbeError(
                            f"client {job.client} in round {job.round}: its worker died {TRIES} times "
                            f"(out of memory{', or of time' * bool(self.waiting.timeout)}? "
                            "try --engine serial)"
                        )
                    worker.since = time.monotonic()
                    try:
                        self._give(worker, job, messages, shared, states.read(job.client))
                    except OSError as error:  # it died while idle
                        self._tell_if_late(worker, job, error)
                        queue.appendleft(job)
                        idle.append(self._replace(worker))
                        continue
                    worker.told = False
                    busy[worker.pipe] = worker, job
                for worker, job in self._overdue(busy.values()):
                    del busy[worker.pipe]
                    queue.appendleft(job)
                    idle.append(self._replace(worker))
                for pipe in wait(list(busy), self._patience(busy.values())) if busy else ():
                    worker, job = busy.pop(pipe)
                    try:
                        answer = worker.pipe.recv()
                        tensors = {} if isinstance(answer, Exception) else receive(worker.pipe)
                    except (EOFError, OSError) as error:  # it died at work
                        self._tell_if_late(worker, job, error)
                        queue.appendleft(job)
                        idle.append(self._replace(worker))
                        continue
                    if isinstance(answer, Exception):
                        raise answer
                    reply, private = answer
                    if private is not None:
                        states.stage(job.client, private)
                    self._took.append(time.monotonic() - worker.since)
                    idle.append(worker)
                    yield reply.with_tensors(tensors)

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()  # a worker that waits for work ends by itself
            worker.process.kill()  # not SIGTERM, which one that is stopped does not see
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
        self._workers = []

    def _word_after(self) -> float:
        after = (
            max(self.waiting.word_after, 10 * median(self._took)) if self._took else self.waiting.word_after
        )
        return min(after, (self.waiting.timeout or math.inf) / 2)

    def _overdue(self, busy: Iterable[tuple[_Worker, Job]]) -> list[tuple[_Worker, Job]]:
        """Those whose time is up; of those that take long, somebody is told."""
        late, now, timeout = [], time.monotonic(), self.waiting.timeout
        for worker, job in busy:
            waited = now - worker.since
            if timeout is not None and waited >= timeout:
                late.append((worker, job))
                self._tell_if_late(worker, job, BlockingIOError())
            elif not worker.told and waited >= self._word_after():
                worker.told = True
                limit = "--worker-timeout sets a limit" if timeout is None else f"at most {timeout:g} s"
                self.waiting.remark(f"waiting for {_who(worker, job)} for {waited:.0f} s; {limit}")
        return late

    def _tell_if_late(self, worker: _Worker, job: Job, error: Exception) -> None:
        """`BlockingIOError`: the time was up in the middle of a message."""
        if isinstance(error, BlockingIOError):
            waited = time.monotonic() - worker.since
            self.waiting.remark(f"{_who(worker, job)} did not answer for {waited:.0f} s and is done again")

    def _patience(self, busy: Iterable[tuple[_Worker, Job]]) -> float | None:
        """Seconds until there is something to do though nobody answers."""
        ends = [w.since + self._word_after() for w, _ in busy if not w.told]
        if self.waiting.timeout is not None:
            ends += [w.since + self.waiting.timeout for w, _ in busy]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    @staticmethod
    def _give(worker: _Worker, job: Job, messages: Messages, shared: Parcel, private: bytes | None) -> None:
        """A job, with the messages that the worker does not have yet."""
        if worker.knows is not messages:
            worker.pipe.send(None)
            send(worker.pipe, shared)
            worker.knows = messages
        worker.pipe.send((job, messages.each is not None, private))
        if messages.each is not None:
            with pack(messages.each(job.client)) as parcel:
                send(worker.pipe, parcel)

    def _start(self) -> _Worker:
        ours, theirs = _START.Pipe()
        # A forked child also inherits our ends of the pipes. It must close them: a worker notices that we are
        # gone by its pipe closing, and it does not close while anyone else holds our end.
        inherited = [ours, *(w.pipe for w in self._workers)] if _START.get_start_method() == "fork" else []
        process = _START.Process(
            target=_work, args=(theirs, inherited, self.task, self.method), name="feddbe-worker", daemon=True
        )
        process.start()
        theirs.close()
        if self.waiting.timeout is not None:
            _limit(ours, self.waiting.timeout)
        return _Worker(process, ours)

    def _replace(self, dead: _Worker) -> _Worker:
        self._workers.remove(dead)
        dead.pipe.close()
        dead.process.kill()
        dead.process.join()
        dead.process.close()
        worker = self._start()
        self._workers.append(worker)
        return worker


@dataclass(frozen=True)
class PoolChoice(Choice):
    """What can be chosen of the pool."""

    name: ClassVar[str] = "pool"

    workers: int | None = parameter(None, "processes; by default one per core", low=1, high=9999)

    def processes(self) -> int:
        return self.workers or cores()

    def make(self, task: Task, method: Method, waiting: Waiting = WAITING) -> Pool:
        return Pool(task, method, min(self.processes(), task.split.clients), waiting)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _who(worker: _Worker, job: Job) -> str:
    return f"client {job.client} in round {job.round} (worker {worker.process.pid})"


def _limit(pipe: Connection, seconds: float) -> None:
    """A worker that stops in the middle of a message is an OSError after this time, not a wait for ever."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for which in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


def end_with_parent() -> None:
    """One that is stopped does not notice that its pipe closes; Linux can end it all the same."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


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


def _work(pipe: Connection, inherited: list[Connection], task: Task, method: Method) -> None:
    """A worker: take jobs until the pipe closes."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may have its own way
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in good order
    end_with_parent()
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    gc.freeze()  # a search for garbage would write to every object's page, which is ours and the parent's now
    shared: State = {}
    while True:
        try:
            asked = pipe.recv()
            if asked is None:
                shared = receive(pipe)
                continue
            job, each, private = asked
            received = shared | receive(pipe) if each else shared
        except (EOFError, OSError):
            return
        answer: tuple[Reply, bytes | None] | Exception
        with ExitStack() as stack:
            try:
                reply = perform(task, method, job, received, None if private is None else decode(private))
                tensors = stack.enter_context(pack(reply.tensors()))
                kept = encode(reply.private) if reply.private else None
                answer = reply.with_tensors({})._replace(private=None), kept
            except FeddbeError as error:
                answer = error
            except Exception as error:
                error.add_note(f"in client {job.client}, round {job.round}:\n{traceback.format_exc()}")
                answer = portable(error)
            try:
                pipe.send(answer)
                if not isinstance(answer, Exception):
                    send(pipe, tensors)
            except OSError:
                return
