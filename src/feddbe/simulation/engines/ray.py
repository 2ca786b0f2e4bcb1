"""Engine on a Ray cluster: clients are Ray tasks, and nodes may join and leave during a run.

It is bit-identical to serial: a client's result is a pure function of its task, computed on one thread from
its own copies. The learning task and the message to all clients are in Ray's object store, at most once per
node. A client's state is read when its task is submitted, and only as many tasks are submitted as keep the
cluster busy. Ray pickles its arguments: states are safetensors bytes, and Python objects are bytes that a
worker unpickles only if its `versions` are equal.

Ray manages the cluster: `ray.init` joins the one at the user's address, or starts one on this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import platform
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from feddbe.config.parameters import parameter
from feddbe.errors import FeddbeError, InvalidInputError, one_line
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
from feddbe.simulation.engines.pool import available_cores, task_cost
from feddbe.state import decode, encode
from feddbe.training.task import Task

_POLL_SECONDS = 1.0
"""Seconds between checks of the cluster's size and of late tasks."""

_QUIET: dict[str, Any] = {
    "log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR,
}  # fmt: skip
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns that this default will change
}
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray on 127.0.0.1 listen only there, on any system. It is undocumented, and tested."""
STARTUP_SECONDS = 60.0
"""Seconds for the start of a worker, added to the timeout: Ray does not distinguish it from the work."""


class _Run(NamedTuple):
    """Values that all tasks of a run share; built-in types only, for workers with other versions."""

    key: str
    versions: dict[str, str]
    task: list[Any]
    """Reference to the pickled (task, method) in the object store; in a list, which Ray does not resolve."""


@dataclass
class _SubmittedTask:
    """A task that was submitted to Ray."""

    client_task: ClientTask
    started: float | None = None
    """Time at which its execution could begin."""
    is_reported: bool = False
    """True if the user was warned that it takes long."""


@dataclass
class _WorkerCache:
    """Values cached in a worker process: the run's task and method, and the last message to all clients."""

    key: str = ""
    call: int = 0
    task: Task | None = None
    method: Method | None = None
    shared: bytes = b""


_cache = _WorkerCache()


class RayEngine:
    """Engine on the connected Ray cluster; the longest tasks are submitted first."""

    def __init__(self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY) -> None:
        self.task = task
        self.timeouts = timeouts
        self._ray = ray = _import_ray()
        reference = ray.put(ray.cloudpickle.dumps((task, method)))
        self._run: tuple[Any, ...] = tuple(_Run(secrets.token_hex(8), versions(), [reference]))
        self._calls = 0
        self._slots = 0
        self._next_slots_check = 0.0
        # Ray does not retry: this class counts attempts, and reads the state of a lost client again.
        self._remote_task = ray.remote(num_cpus=1, max_retries=0)(_run_task)

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        self._calls += 1
        shared = [self._ray.put(encode(messages.shared))]
        queue = deque(sorted(tasks, key=partial(task_cost, self.task), reverse=True))
        busy = dict[Any, _SubmittedTask]()
        attempts = Counter[int]()
        try:
            while queue or busy:
                # 1. Submit two tasks per slot: one is executed while the other waits on the node.
                slots = self._count_slots()
                while queue and len(busy) < 2 * slots:
                    client_task = queue.popleft()
                    attempts[client_task.client] += 1
                    if attempts[client_task.client] > MAX_ATTEMPTS:
                        raise worker_died_error(self.task, client_task, self.timeouts)
                    reference = self._submit(client_task, shared, messages, states)
                    busy[reference] = _SubmittedTask(client_task)

                # 2. Give up tasks that exceed the timeout.
                for reference in self._cancel_overdue(busy, slots):
                    queue.appendleft(busy.pop(reference).client_task)

                # 3. Receive results.
                done = []
                if busy:
                    done, _ = self._ray.wait(list(busy), num_returns=1, timeout=_POLL_SECONDS)
                for reference in done:
                    client_task = busy.pop(reference).client_task
                    reply = self._get(reference)
                    if reply is None:
                        queue.appendleft(client_task)
                        continue
                    result, private = _decode_reply(reply)
                    if private is not None:
                        states.write_pending(client_task.client, private)
                    yield result
        finally:
            for reference in busy:  # after an error these results are not used
                self._ray.cancel(reference)

    def _submit(
        self, client_task: ClientTask, shared: list[Any], messages: Broadcasts, states: ClientStates
    ) -> Any:
        """Submit a task to Ray and return the reference to its reply."""
        message = None if messages.per_client is None else encode(messages.per_client(client_task.client))
        private = states.read(client_task.client)
        return self._remote_task.remote(
            self._run, self._calls, shared, pickle.dumps(client_task), message, private
        )

    def _get(self, reference: Any) -> tuple[Any, ...] | None:
        """Return a worker's reply; None if the worker died."""
        errors = self._ray.exceptions
        try:
            reply: tuple[Any, ...] = self._ray.get(reference)
            return reply
        except (
            errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError,
        ):  # fmt: skip
            return None
        except errors.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise FeddbeError(
                f"a node of the Ray cluster cannot run a client: {one_line(RuntimeError(lines[-1]))}; "
                "is the same feddbe[ray] installed on every node (docs/cluster.md)?"
            ) from None

    def close(self) -> None:
        """Release the task. The cluster stays for the next run, because starting one takes long."""
        self._run = ()  # frees the task in the object store

    def _count_slots(self) -> int:
        """Return the number of clients that the cluster can currently run in parallel."""
        if time.monotonic() < self._next_slots_check:
            return self._slots
        slots = int(self._ray.cluster_resources().get("CPU", 0))
        if not slots:
            raise FeddbeError("the Ray cluster has no CPU; start a node with CPUs, --resume continues")
        self._slots = slots
        self._next_slots_check = time.monotonic() + _POLL_SECONDS
        return slots

    def _cancel_overdue(self, busy: dict[Any, _SubmittedTask], slots: int) -> list[Any]:
        """Cancel tasks that exceed the timeout and return them; warn the user of those that take long.

        Ray does not report which tasks are running; it is assumed to be the first ones.
        """
        overdue = []
        current_time = time.monotonic()
        timeout = self.timeouts.timeout
        limit = float("inf") if timeout is None else timeout + STARTUP_SECONDS
        for reference, submitted in islice(busy.items(), slots):
            if submitted.started is None:
                submitted.started = current_time
            seconds = current_time - submitted.started
            client = describe_client_task(self.task, submitted.client_task)
            if seconds >= limit:
                self.timeouts.warn(f"{client} did not reply for {seconds:.0f} s and is run again")
                self._ray.cancel(reference, force=True)
                overdue.append(reference)
            elif not submitted.is_reported and seconds >= min(self.timeouts.warn_after, limit / 2):
                submitted.is_reported = True
                note = "--worker-timeout sets a limit" if timeout is None else f"at most {limit:g} s"
                self.timeouts.warn(f"waiting for {client} for {seconds:.0f} s; {note}")
        return overdue


@dataclass(frozen=True)
class RayConfig(EngineConfig):
    """Options of the Ray engine."""

    name: ClassVar[str] = "ray"

    address: str | None = parameter(None, "HOST:PORT of a cluster; none: Ray starts on this machine")
    cpus: int | None = parameter(
        None, "clients in parallel without a cluster; by default one per core", low=1, high=9999
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.cpus is not None:
            raise InvalidInputError(
                f"ray cpus = {self.cpus} with an address; the nodes of a cluster set their own CPUs"
            )

    def processes(self) -> int:
        if self.address:
            return 0  # unknown before the cluster is joined
        return self.cpus or available_cores()

    def is_local(self) -> bool:
        return self.address is None

    def create(
        self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY
    ) -> RayEngine:
        connect(self.address, self.processes())
        return RayEngine(task, method, timeouts)


def _import_ray() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise InvalidInputError(
            f"--engine ray needs Ray ({one_line(error)}): pip install 'feddbe[ray]'"
        ) from None
    return ray


def connect(address: str | None, cpus: int) -> None:
    """Join the cluster at HOST:PORT, or start Ray on this machine, unless this process uses Ray already.

    Raises:
        InvalidInputError: The address is malformed, nothing listens there, or Ray does not start.
    """
    if address is not None:
        _check_reachable(address)
    elif "ray" not in sys.modules:
        os.environ.update(LOOPBACK_ONLY)  # read when Ray is imported
    ray = _import_ray()
    if ray.is_initialized():
        return
    # Ray would print "a worker died" to standard output, which --json uses.
    ray._private.worker._worker_logs_enabled = False
    try:
        with _sigterm_restored():
            if address is None:
                # "local" ignores RAY_ADDRESS, which may name a cluster
                ray.init(
                    "local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **_QUIET
                )
            else:
                ray.init(address, **_QUIET)
    except Exception as error:
        raise _connection_error(address, error) from None


def _check_reachable(address: str) -> None:
    """Fail immediately if nothing listens: Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InvalidInputError(f"ray address = '{address}'; allowed: HOST:PORT, as in 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise _connection_error(address, error) from None


def _connection_error(address: str | None, error: Exception) -> InvalidInputError:
    reason = one_line(RuntimeError(" ".join(str(error).split()))).rstrip(".")
    if address is None:
        return InvalidInputError(f"--engine ray: cannot start Ray on this machine: {reason}")
    return InvalidInputError(
        f"--engine ray: cannot join the cluster at '{address}': {reason} (docs/cluster.md)"
    )


@contextlib.contextmanager
def _sigterm_restored() -> Iterator[None]:
    """Keep the handler of SIGTERM, which ends a run cleanly; `ray.init` installs its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@cache
def versions() -> dict[str, str]:
    """Return the versions on this machine of everything that the bits of a result depend on."""
    package, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    packages = dict.fromkeys(("feddbe", "torch", "numpy", "safetensors", "numba"), "none")
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "Python": platform.python_version(),
        **packages,
        "feddbe's sources": digest.hexdigest()[:12],
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def differences(expected: Mapping[str, str]) -> str:
    """Return the differences between this machine's versions and those of the driver, as text."""
    actual = versions()
    return ", ".join(
        f"{name} {actual.get(name, 'none')} there, {value} here"
        for name, value in expected.items()
        if actual.get(name) != value
    )


def _run_task(
    run: tuple[Any, ...],
    call: int,
    shared: list[Any],
    pickled_task: bytes,
    message: bytes | None,
    private: bytes | None,
) -> tuple[Any, ...]:
    """Run a client in a worker of the cluster and return (result, tensors, private state), encoded.

    The function is pure, so that any worker can repeat it. It works on copies, because all processes of the
    node share the object store.
    """
    run_values = _Run(*run)
    version_differences = differences(run_values.versions)
    if version_differences:
        return f"node {socket.gethostname()} differs: {version_differences}", None, None
    client_task: ClientTask = pickle.loads(pickled_task)
    task = None
    try:
        task, method = _update_cache(run_values, call, shared)
        received = decode(_cache.shared)
        if message is not None:
            received |= decode(message)
        kept = None if private is None else decode(private)
        result = run_client(task, method, client_task, received, kept)
        new_private = encode(result.private) if result.private else None
        return pickle.dumps(result.without_tensors()), encode(result.tensors()), new_private
    except FeddbeError as error:
        return pickle.dumps(error), None, None
    except Exception as error:
        where = describe_client_task(task, client_task) if task else f"round {client_task.round}"
        error.add_note(f"{where}:\n{traceback.format_exc()}")
        return pickle.dumps(as_portable(error)), None, None


def _update_cache(run: _Run, call: int, shared: list[Any]) -> tuple[Task, Method]:
    """Fetch what is not cached in this worker; return the run's task and method."""
    import ray

    if _cache.key != run.key:
        torch.set_num_threads(1)
        _cache.task, _cache.method = pickle.loads(ray.get(run.task[0]))
        _cache.key, _cache.call = run.key, 0
    if _cache.call != call:
        _cache.shared, _cache.call = ray.get(shared[0]), call
    assert _cache.task
    assert _cache.method
    return _cache.task, _cache.method


def _decode_reply(reply: tuple[Any, ...]) -> tuple[ClientResult, bytes | None]:
    """Return the result and private state in a worker's reply, or raise the worker's error."""
    result_or_reason, tensors, private = reply
    if isinstance(result_or_reason, str):
        raise InvalidInputError(f"{result_or_reason}; install the same on every node (docs/cluster.md)")
    result = pickle.loads(result_or_reason)
    if isinstance(result, Exception):
        raise result
    return result.with_tensors(decode(tensors)), private
