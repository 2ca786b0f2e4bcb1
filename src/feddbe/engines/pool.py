"""Clients in parallel: worker processes with one torch thread each, which hold the data from the start.

Bit-identical to serial: a client's work is a pure function of its job, and each runs on one thread. A worker
that dies, or does not answer in time, is replaced and its client done again.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any, ClassVar

from feddbe.engines.base import WAITING, Choice, ClientStates, Messages, Waiting
from feddbe.engines.client import Job, Reply
from feddbe.engines.cost import Queue
from feddbe.engines.shared_memory import NONE, Parcel, desk, pack, receive, send
from feddbe.engines.worker import HELD, KEPT, work
from feddbe.errors import FeddbeError
from feddbe.methods.base import Method
from feddbe.options import parameter
from feddbe.training.task import Task

__all__ = ["TRIES", "Pool", "PoolChoice", "cores"]

TRIES = 3
"""How often a client's work is started when its worker dies."""
TOGETHER = 0.02
"""Seconds of work that go to a worker at once: clients that take less go together."""
# A forked worker shares the data and the model without a copy; elsewhere than on Linux forking is not safe.
_START: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    desk: int
    """Where large states lie on their way to it and back."""
    holds: dict[int, Hashable] = field(default_factory=dict)
    """The stamps of the states that it holds, by client."""
    knows: Messages | None = None
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
        _close(self.desk)


class Pool:
    """`workers` processes; jobs are given out longest first, so that none is left over at the end."""

    def __init__(self, task: Task, method: Method, workers: int, waiting: Waiting = WAITING) -> None:
        self.task, self.method, self.waiting = task, method, waiting
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

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Reply]:
        self._usual = median(self._took) if self._took else 0.0
        together = max(1, int(TOGETHER / median(self._worked))) if self._worked else 1
        queue = Queue(self.task, jobs, len(self._workers), together)
        idle, busy = list(self._workers), dict[Any, tuple[_Worker, list[Job]]]()
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
                    answer, tensors = receive(worker.pipe, worker.desk)
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
                        states.stage(reply.client, private)
                    if its.pop(HELD, None) is not None:
                        worker.holds[reply.client] = states.stamp(reply.client)
                    yield reply.with_tensors(its)

    def _next(self, queue: Queue, worker: _Worker) -> list[Job]:
        """What this worker does next."""
        for job in (some := queue.take(worker.holds)):
            if queue.tries[job.client] > TRIES:
                raise FeddbeError(
                    f"client {job.client} in round {job.round}: its worker died {TRIES} times "
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
        return min(max(self.waiting.word_after, 10 * self._usual), (self.waiting.timeout or math.inf) / 2)

    def _overdue(self, busy: Iterable[tuple[_Worker, list[Job]]]) -> list[tuple[_Worker, list[Job]]]:
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
                self.waiting.remark(f"waiting for {_who(worker, jobs)} for {waited:.0f} s; {limit}")
        return late

    def _tell_if_late(self, worker: _Worker, jobs: list[Job], error: Exception) -> None:
        """`BlockingIOError`: the time was up in the middle of a message."""
        if isinstance(error, BlockingIOError):
            waited = time.monotonic() - worker.since
            self.waiting.remark(f"{_who(worker, jobs)} did not answer for {waited:.0f} s and is done again")

    def _patience(self, busy: Iterable[tuple[_Worker, list[Job]]]) -> float | None:
        """Seconds until there is something to do though nobody answers."""
        ends = [w.since + self._word_after() for w, _ in busy if not w.told]
        if self.waiting.timeout is not None:
            ends += [w.since + self.waiting.timeout for w, _ in busy]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    @staticmethod
    def _give(
        worker: _Worker, jobs: list[Job], messages: Messages, shared: Parcel, states: ClientStates
    ) -> None:
        """Jobs, with the messages and states that the worker does not have yet."""
        if worker.knows is not messages:
            worker.pipe.send((None, [shared]))
            worker.knows = messages
        each = [{} if messages.each is None else messages.each(job.client) for job in jobs]
        kept = [_kept(worker, job.client, states) for job in jobs]
        send(worker.pipe, worker.desk, jobs, [a | b for a, b in zip(each, kept, strict=True)])

    def _start(self) -> _Worker:
        ours, theirs = _START.Pipe()
        # A forked child also inherits our ends of the pipes. It must close them: a worker notices that we are
        # gone by its pipe closing, and it does not close while anyone else holds our end.
        inherited = [ours, *(w.pipe for w in self._workers)] if _START.get_start_method() == "fork" else []
        own, others = _desk(), [w.desk for w in self._workers if w.desk != NONE]
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


def _kept(worker: _Worker, client: int, states: ClientStates) -> dict[str, bytes]:
    """What the worker needs to have the client's state."""
    stamp = worker.holds.pop(client, None)  # until it answers nobody knows
    if stamp is not None and stamp == states.stamp(client):
        return {HELD: b""}
    state = states.read(client)
    return {} if state is None else {KEPT: state}


def _who(worker: _Worker, jobs: list[Job]) -> str:
    first, *others = jobs
    more = f" and {len(others)} more" * bool(others)
    return f"client {first.client}{more} in round {first.round} (worker {worker.process.pid})"


def _desk() -> int:
    """One that a worker has too, because it is forked."""
    return desk() if _START.get_start_method() == "fork" else NONE


def _close(desk: int) -> None:
    if desk != NONE:
        os.close(desk)


def _limit(pipe: Connection, seconds: float) -> None:
    """A worker that stops in the middle of a message is an OSError after this time, not a wait for ever."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for which in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
