"""Engine with worker processes of one torch thread each, which share the data with this process.

It is bit-identical to serial: a client's result is a pure function of its task, computed on one thread. A
worker that dies or exceeds the timeout is replaced, and its clients are run again.
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
    MAX_ATTEMPTS,
    Broadcasts,
    ClientStates,
    EngineConfig,
    TimeoutPolicy,
    as_portable,
    describe_client_task,
    worker_died_error,
)
from feddbe.state import State, as_bytes, decode, encode
from feddbe.training.task import Task

GROUP_SECONDS = 0.02
"""Seconds of work that a worker receives at once: short tasks are sent in groups."""
# A forked worker shares the data and the model without a copy; forking is safe on Linux only.
_PROCESSES: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass
class _Worker:
    """A worker process, as the parent sees it."""

    process: BaseProcess
    pipe: Connection
    buffer: int
    """Shared memory for large states in both directions."""
    cached_states: dict[int, Hashable] = field(default_factory=dict)
    """Versions of the states that the worker caches, by client."""
    broadcasts: Broadcasts | None = None
    """The messages whose shared part the worker has."""
    started: float = 0.0
    """Time at which its current tasks were sent."""
    is_reported: bool = False
    """True if the user was warned that its current tasks take long."""

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()  # a stopped process ignores SIGTERM
        self.process.join()
        self.process.close()
        _close_buffer(self.buffer)


class _BusyWorker(NamedTuple):
    worker: _Worker
    tasks: list[ClientTask]


class PoolEngine:
    """Engine with `workers` processes; the longest tasks are sent first, so that all workers end together."""

    def __init__(
        self, task: Task, method: Method, workers: int, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY
    ) -> None:
        self.task = task
        self.method = method
        self.timeouts = timeouts
        self._seconds: deque[float] = deque(maxlen=1000)
        """Duration of the last tasks."""
        self._median_seconds = 0.0
        """Median of the durations; 0 before the first task."""
        self._cpu_seconds: deque[float] = deque(maxlen=1000)
        """Processor time of the last tasks, which other processes on the machine do not change."""
        self._common_buffer = _make_inherited_buffer()
        """Shared memory for the message to all workers."""
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(self._start_worker())

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        self._median_seconds = median(self._seconds) if self._seconds else 0.0
        group_size = max(1, int(GROUP_SECONDS / median(self._cpu_seconds))) if self._cpu_seconds else 1
        queue = TaskQueue(self.task, tasks, len(self._workers), group_size)
        shared = pack(messages.shared, self._common_buffer)
        idle = list(self._workers)
        busy = dict[Any, _BusyWorker]()
        while queue or busy:
            # 1. Send tasks to idle workers.
            while queue and idle:
                worker = idle.pop()
                group = self._pop_tasks(queue, worker)
                worker.started = time.monotonic()
                try:
                    self._send_tasks(worker, group, messages, shared, states)
                except OSError as error:  # the worker died while idle
                    self._warn_if_timed_out(worker, group, error)
                    queue.put_back(group)
                    idle.append(self._replace_worker(worker))
                    continue
                worker.is_reported = False
                busy[worker.pipe] = _BusyWorker(worker, group)

            # 2. Replace workers that exceed the timeout.
            for worker, group in self._find_overdue(busy.values()):
                del busy[worker.pipe]
                queue.put_back(group)
                idle.append(self._replace_worker(worker))

            # 3. Receive results.
            ready = wait(list(busy), self._seconds_to_wait(busy.values())) if busy else []
            for pipe in ready:
                worker, group = busy.pop(pipe)
                try:
                    (results, cpu_seconds), payloads = receive_message(worker.pipe, worker.buffer)
                except (EOFError, OSError) as error:  # the worker died at work
                    self._warn_if_timed_out(worker, group, error)
                    queue.put_back(group)
                    idle.append(self._replace_worker(worker))
                    continue
                if isinstance(results, Exception):
                    raise results
                self._seconds.append((time.monotonic() - worker.started) / len(group))
                self._cpu_seconds.append(cpu_seconds / len(group))
                idle.append(worker)
                for result, payload in zip(results, payloads, strict=True):
                    private = payload.pop(STATE_KEY, None)
                    if private is not None:
                        states.write_pending(result.client, private)
                    if payload.pop(CACHED_KEY, None) is not None:
                        worker.cached_states[result.client] = states.version(result.client)
                    yield result.with_tensors(payload)

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()
        self._workers = []
        _close_buffer(self._common_buffer)
        self._common_buffer = NO_BUFFER

    def _pop_tasks(self, queue: TaskQueue, worker: _Worker) -> list[ClientTask]:
        """Return the next tasks for this worker."""
        group = queue.pop(worker.cached_states)
        for client_task in group:
            if queue.attempts[client_task.client] > MAX_ATTEMPTS:
                raise worker_died_error(self.task, client_task, self.timeouts)
        return group

    def _warning_delay(self) -> float:
        """Return the seconds after which the user is warned that a worker takes long."""
        delay = max(self.timeouts.warn_after, 10 * self._median_seconds)
        return min(delay, (self.timeouts.timeout or math.inf) / 2)

    def _find_overdue(self, busy: Iterable[_BusyWorker]) -> list[_BusyWorker]:
        """Return the workers that exceed the timeout; warn the user of those that take long."""
        overdue = []
        current_time = time.monotonic()
        timeout = self.timeouts.timeout
        for entry in busy:
            worker, tasks = entry
            seconds = current_time - worker.started
            if timeout is not None and seconds >= timeout:
                overdue.append(entry)
                self._warn_if_timed_out(worker, tasks, BlockingIOError())
            elif not worker.is_reported and seconds >= self._warning_delay():
                worker.is_reported = True
                limit = "--worker-timeout sets a limit" if timeout is None else f"at most {timeout:g} s"
                waiting = f"waiting for {self._describe(worker, tasks)} for {seconds:.0f} s"
                self.timeouts.warn(f"{waiting}; {limit}")
        return overdue

    def _describe(self, worker: _Worker, tasks: list[ClientTask]) -> str:
        """Return the clients that a worker trains, for messages."""
        first, *others = tasks
        name = self.task.dataset.describe_client(first.client)
        more = f" and {len(others)} more" if others else ""
        return f"{name}{more} in round {first.round} (worker {worker.process.pid})"

    def _warn_if_timed_out(self, worker: _Worker, tasks: list[ClientTask], error: Exception) -> None:
        """Warn the user if the error is a `BlockingIOError`, the timeout in the middle of a message."""
        if isinstance(error, BlockingIOError):
            seconds = time.monotonic() - worker.started
            client = self._describe(worker, tasks)
            self.timeouts.warn(f"{client} did not reply for {seconds:.0f} s and is run again")

    def _seconds_to_wait(self, busy: Iterable[_BusyWorker]) -> float | None:
        """Return the seconds until the next warning or timeout; None if there is none."""
        delay, timeout = self._warning_delay(), self.timeouts.timeout
        deadlines = [worker.started + delay for worker, _ in busy if not worker.is_reported]
        if timeout is not None:
            deadlines += [worker.started + timeout for worker, _ in busy]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    @staticmethod
    def _send_tasks(
        worker: _Worker,
        tasks: list[ClientTask],
        messages: Broadcasts,
        shared: PackedState,
        states: ClientStates,
    ) -> None:
        """Send tasks with the messages and states that the worker does not have yet."""
        if worker.broadcasts is not messages:
            worker.pipe.send((None, [shared]))
            worker.broadcasts = messages
        payloads = list[Payload]()
        for client_task in tasks:
            payload: Payload = {}
            if messages.per_client is not None:
                payload |= messages.per_client(client_task.client)
            payload |= _state_payload(worker, client_task.client, states)
            payloads.append(payload)
        send_message(worker.pipe, worker.buffer, tasks, payloads)

    def _start_worker(self) -> _Worker:
        parent_pipe, worker_pipe = _PROCESSES.Pipe()
        # A forked child also inherits the parent's ends of all pipes. It must close them: a worker notices
        # the parent's end by its pipe closing, which requires that no other process has that end open.
        inherited_pipes = []
        if _PROCESSES.get_start_method() == "fork":
            inherited_pipes = [parent_pipe, *(worker.pipe for worker in self._workers)]
        inherited_buffers = [worker.buffer for worker in self._workers if worker.buffer != NO_BUFFER]
        buffer = _make_inherited_buffer()
        process = _PROCESSES.Process(
            target=run_worker,
            args=(
                worker_pipe,
                inherited_pipes,
                inherited_buffers,
                (self._common_buffer, buffer),
                self.task,
                self.method,
            ),
            name="feddbe-worker",
            daemon=True,
        )
        process.start()
        worker_pipe.close()
        if self.timeouts.timeout is not None:
            _set_pipe_timeout(parent_pipe, self.timeouts.timeout)
        return _Worker(process, parent_pipe, buffer)

    def _replace_worker(self, dead: _Worker) -> _Worker:
        self._workers.remove(dead)
        dead.close()
        worker = self._start_worker()
        self._workers.append(worker)
        return worker


@dataclass(frozen=True)
class PoolConfig(EngineConfig):
    """Options of the pool."""

    name: ClassVar[str] = "pool"

    workers: int | None = parameter(None, "processes; by default one per core", low=1, high=9999)

    def processes(self) -> int:
        return self.workers or available_cores()

    def create(
        self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY
    ) -> PoolEngine:
        return PoolEngine(task, method, min(self.processes(), task.split.clients), timeouts)


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _state_payload(worker: _Worker, client: int, states: ClientStates) -> dict[str, bytes]:
    """Return the client's state, or a reference to the copy that the worker caches."""
    version = worker.cached_states.pop(client, None)  # unknown until the worker replies
    if version is not None and version == states.version(client):
        return {CACHED_KEY: b""}
    state = states.read(client)
    return {} if state is None else {STATE_KEY: state}


def _make_inherited_buffer() -> int:
    """Return shared memory that a forked worker inherits; NO_BUFFER if workers are not forked."""
    return make_buffer() if _PROCESSES.get_start_method() == "fork" else NO_BUFFER


def _close_buffer(buffer: int) -> None:
    if buffer != NO_BUFFER:
        os.close(buffer)


def _set_pipe_timeout(pipe: Connection, seconds: float) -> None:
    """Make a worker that stops in the middle of a message an OSError after this time."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


STATE_KEY, CACHED_KEY = "<kept>", "<held>"
"""Keys of a payload: the bytes of the client's state, and a flag that the worker caches them."""
CACHE_BYTES = 2**28
"""Maximum bytes of states that a worker caches: large ones that it produced."""


def end_with_parent() -> None:
    """Let Linux kill this process with its parent: a stopped process does not notice that its pipe closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_worker(
    pipe: Connection,
    inherited_pipes: list[Connection],
    inherited_buffers: list[int],
    buffers: tuple[int, int],
    task: Task,
    method: Method,
) -> None:
    """Execute tasks from the pipe until it closes: the main function of a worker process.

    Args:
        pipe: Connection to the parent.
        inherited_pipes: Connections of other workers, to be closed.
        inherited_buffers: Shared memory of other workers, to be closed.
        buffers: Shared memory for all workers, and for this one.
        task: Model, data and training settings.
        method: The federated method.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may have its own handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    end_with_parent()
    for inherited_pipe in inherited_pipes:
        inherited_pipe.close()
    for inherited_buffer in inherited_buffers:
        os.close(inherited_buffer)
    torch.set_num_threads(1)
    gc.freeze()  # garbage collection would write to every object's page, and so copy what the parent shares
    common_buffer, own_buffer = buffers
    shared = State()
    cache = dict[int, bytes]()
    while True:
        try:
            tasks, packed_states = pipe.recv()
            if tasks is None:
                shared = packed_states[0].unpack(common_buffer)
                continue
            started = time.process_time()
            received = [packed.unpack(own_buffer) for packed in packed_states]
            results, payloads = _run_tasks(task, method, tasks, shared, received, cache)
            cpu_seconds = time.process_time() - started
            send_message(pipe, own_buffer, (results, cpu_seconds), payloads)
        except (EOFError, OSError):
            return


def _run_tasks(
    task: Task,
    method: Method,
    tasks: list[ClientTask],
    shared: State,
    received: list[Payload],
    cache: dict[int, bytes],
) -> tuple[list[ClientResult] | Exception, list[Payload]]:
    """Return the results without tensors, and their payloads; or the error of the first task that fails."""
    results, payloads = list[ClientResult](), list[Payload]()
    for client_task, message in zip(tasks, received, strict=True):
        try:
            cached = cache.pop(client_task.client, None)
            is_cached = message.pop(CACHED_KEY, None) is not None
            state: bytes | None = cached if is_cached else message.pop(STATE_KEY, None)
            private = None if state is None else decode(state)
            broadcast = shared | message if message else shared
            result = run_client(task, method, client_task, broadcast, private)
            payload: Payload = result.tensors()
            if result.private:
                state = payload[STATE_KEY] = encode(result.private)
            cached_bytes = sum(map(len, cache.values()))
            if state and len(state) >= LARGE_BYTES and cached_bytes + len(state) <= CACHE_BYTES:
                cache[client_task.client] = state
                payload[CACHED_KEY] = b""
            payloads.append(payload)
            results.append(result.without_tensors())
        except FeddbeError as error:
            return error, []
        except Exception as error:
            where = describe_client_task(task, client_task)
            error.add_note(f"{where}:\n{traceback.format_exc()}")
            return as_portable(error), []
    return results, payloads


def task_cost(task: Task, client_task: ClientTask) -> float:
    """Return the samples passed through the model; training on one counts as three predictions."""
    client = client_task.client
    epochs = 0 if client_task.work == "none" else task.training.local_epochs
    adapt_epochs = client_task.adapt_epochs or 0
    if client_task.is_new_client:
        epochs += adapt_epochs * (adapt_epochs + 1) // 2  # one adaptation for each number of epochs
    else:
        epochs += adapt_epochs
    evaluations = client_task.evaluate + client_task.evaluate_after
    return evaluations * len(task.split.test[client]) + 3 * epochs * task.samples[client]


class TaskQueue:
    """Tasks for `workers` workers, the longest first.

    At most `group_size` tasks leave at a time, and at most half of a worker's share of the remaining cost, so
    that all workers end at about the same time.
    """

    def __init__(self, task: Task, tasks: Sequence[ClientTask], workers: int, group_size: int) -> None:
        with_costs = [(task_cost(task, client_task), client_task) for client_task in tasks]
        self._tasks = deque(sorted(with_costs, key=lambda pair: pair[0], reverse=True))
        self._remaining_cost = sum(cost for cost, _ in with_costs)
        self._workers = workers
        self._group_size = group_size
        self.attempts = Counter[int]()
        """Number of times that each client's task left the queue."""

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def pop(self, cached_clients: Container[int] = ()) -> list[ClientTask]:
        """Return the next tasks, at least one.

        A task that left before is returned alone, because it may be what its worker died of.

        Args:
            cached_clients: Clients whose states the worker caches; one of them is preferred if it is near.
        """
        for pair in islice(self._tasks, 4 * self._workers):
            if pair[1].client in cached_clients:
                self._tasks.remove(pair)
                self._tasks.appendleft(pair)
                break
        budget = self._remaining_cost / (2 * self._workers)
        group = list[ClientTask]()
        while self._tasks and len(group) < self._group_size:
            cost, client_task = self._tasks[0]
            is_repeated = client_task.client in self.attempts
            if group and (cost > budget or is_repeated):
                break
            budget -= cost
            self._remaining_cost -= cost
            group.append(client_task)
            self._tasks.popleft()
            if is_repeated:
                break
        self.attempts.update(client_task.client for client_task in group)
        return group

    def put_back(self, tasks: Sequence[ClientTask]) -> None:
        """Return unfinished tasks to the front of the queue."""
        self._tasks.extendleft((0.0, client_task) for client_task in reversed(tasks))


Payload = dict[str, Any]
"""A state that may also contain bytes."""
LARGE_BYTES = 2**18
"""Size from which a state is sent through shared memory. Below it the pipe is as fast."""
NO_BUFFER = -1
"""Placeholder for shared memory: everything is sent through the pipe."""
_ALIGNMENT = 64
"""Alignment of tensors, as in torch: the last bits of a product depend on it."""
_DTYPE_NAMES = {dtype: name for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}
"""Names of torch's types: they are pickled ten times as fast as the types."""


class PackedState(NamedTuple):
    """A state ready to be sent."""

    layout: Sequence[tuple[str, str, tuple[int, ...], int]] = ()
    """Name, type, shape and offset of each value."""
    data: bytearray | None = bytearray()
    """The bytes, if they are few; None: they are in the buffer."""
    size: int = 0
    offset: int = 0
    """Start in the buffer."""

    def unpack(self, buffer: int) -> Payload:
        """Return the state as a copy that belongs to the receiver."""
        data: Any = self.data
        if data is None:
            data = torch.empty(self.size, dtype=torch.uint8).numpy()
            _transfer(lambda part, start: os.preadv(buffer, [part], start), memoryview(data), self.offset)
        state: Payload = {}
        for name, kind, shape, offset in self.layout:
            count = math.prod(shape)
            if kind == "bytes":
                state[name] = bytes(memoryview(data)[offset : offset + count])
                continue
            dtype = getattr(torch, kind)
            if count:
                flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
            else:
                flat = torch.empty(0, dtype=dtype)
            state[name] = flat.view(shape)
        return state


def make_buffer() -> int:
    """Return the descriptor of new shared memory, closed by `os.close`; NO_BUFFER if the system has none."""
    return os.memfd_create("feddbe") if hasattr(os, "memfd_create") else NO_BUFFER


def pack(state: Mapping[str, Any], buffer: int = NO_BUFFER, offset: int = 0) -> PackedState:
    """Return a copy of the state; if it is large, its bytes are written to the buffer from `offset` on."""
    layout, pieces, size = [], list[memoryview](), 0
    for name, value in state.items():
        if isinstance(value, bytes):
            kind, shape, piece = "bytes", (len(value),), memoryview(value)
        else:
            kind, shape, piece = _DTYPE_NAMES[value.dtype], tuple(value.shape), as_bytes(value)
        padding = memoryview(bytes(-len(piece) % _ALIGNMENT))
        layout.append((name, kind, shape, size))
        pieces += [piece, padding]
        size += len(piece) + len(padding)
    if size < LARGE_BYTES or buffer == NO_BUFFER:
        return PackedState(layout, bytearray().join(pieces), size)
    end = offset
    for piece in pieces:
        _transfer(lambda part, start: os.pwrite(buffer, part, start), piece, end)
        end += len(piece)
    return PackedState(layout, None, size, offset)


def _transfer(system_call: Callable[[memoryview, int], int], piece: memoryview, offset: int) -> None:
    """Read or write the whole piece: one system call transfers at most two gigabytes."""
    while piece:
        count = system_call(piece, offset)
        if not count:
            raise EOFError("shared memory has fewer bytes than announced")
        piece = piece[count:]
        offset += count


def send_message(
    pipe: Connection, buffer: int, message: object, states: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Send a message and states to `receive_message` at the other end."""
    packed_states, offset = list[PackedState](), 0
    for state in states:
        packed = pack(state, buffer, offset)
        packed_states.append(packed)
        offset += packed.size
    pipe.send((message, packed_states))


def receive_message(pipe: Connection, buffer: int) -> tuple[Any, list[Payload]]:
    """Return the next message and its states."""
    message, packed_states = pipe.recv()
    return message, [packed.unpack(buffer) for packed in packed_states]
