"""Clients on a Ray cluster, as tasks: nodes may come and go, and no process has to be looked after.

Bit-identical to serial: a client's work is a pure function of its job, on one thread, of its own copies of
all that it is given. The task lies in Ray's object store, once per node that asks for it, and so does the
message that all clients get in a round; a state is read when its client's turn comes, and no more jobs are in
flight than keep the cluster busy. Ray pickles what it carries. That is states as safetensors bytes, and
Python objects as bytes that are looked into only where `versions` are the same.

The cluster is Ray's business: `ray.init` joins the one at the user's address, or starts one of this machine.
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
    Broadcasts,
    ClientStates,
    EngineConfig,
    TimeoutPolicy,
    as_portable,
)
from feddbe.simulation.engines.pool import MAX_TRIES, available_cores, task_cost
from feddbe.state import decode, encode
from feddbe.training.task import Task

_LOOK = 1.0
"""Seconds after which it is looked again who is there, and who is late."""

_QUIET: dict[str, Any] = {
    "log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR,
}  # fmt: skip
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # its default is about to change, and Ray warns of that
}
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""With 0, a Ray that is started at 127.0.0.1 listens there only, on any system; undocumented, and tested."""
START = 60.0
"""Seconds that a worker may need to begin, which Ray does not tell apart from its work: they are added to a
limit of its time."""


class _Run(NamedTuple):
    """What is the same for all jobs of a run; built-in types only, for workers of other versions."""

    key: str
    versions: dict[str, str]
    task: list[Any]
    """Where (task, method) lies in the object store, pickled; a list, so that Ray does not send it along."""


@dataclass
class _SubmittedTask:
    """A job in flight."""

    client_task: ClientTask
    since: float | None = None
    """When it was its turn to be worked at."""
    told: bool = False
    """Whether somebody was told that it takes long."""


@dataclass
class _Worker:
    """What a worker process keeps: the run's task, and the message to all of the last call."""

    key: str = ""
    call: int = 0
    task: Task | None = None
    method: Method | None = None
    shared: bytes = b""


_worker = _Worker()


class RayTasks:
    """The cluster that this process is connected to; jobs are given out longest first."""

    def __init__(self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY) -> None:
        self.task, self.waiting = task, timeouts
        self._ray = ray = _import_ray()
        reference = ray.put(ray.cloudpickle.dumps((task, method)))
        self._run: tuple[Any, ...] = tuple(_Run(secrets.token_hex(8), versions(), [reference]))
        self._calls, self._known_slots, self._look_again = 0, 0, 0.0
        # Not retried by Ray: we count tries, and a lost client's state is read again.
        self._work = ray.remote(num_cpus=1, max_retries=0)(_work)

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        self._calls += 1
        shared = [self._ray.put(encode(messages.shared))]
        queue = deque(sorted(tasks, key=partial(task_cost, self.task), reverse=True))
        busy, tries = dict[Any, _SubmittedTask](), Counter[int]()
        try:
            while queue or busy:
                slots = self._slots()
                while queue and len(busy) < 2 * slots:  # one at work, one that is there when it is done
                    job = queue.popleft()
                    tries[job.client] += 1
                    self._check_tries(job, tries[job.client])
                    each = None if messages.each is None else encode(messages.each(job.client))
                    given = pickle.dumps(job), each, states.read(job.client)
                    busy[self._work.remote(self._run, self._calls, shared, *given)] = _SubmittedTask(job)
                for reference in self._overdue(busy, slots):
                    queue.appendleft(busy.pop(reference).client_task)
                done, _ = self._ray.wait(list(busy), num_returns=1, timeout=_LOOK) if busy else ((), ())
                for reference in done:
                    job = busy.pop(reference).client_task
                    answer = self._get(reference)
                    if answer is None:
                        queue.appendleft(job)
                        continue
                    reply, private = _opened(answer)
                    if private is not None:
                        states.write_pending(job.client, private)
                    yield reply
        finally:
            for reference in busy:  # something went wrong: nobody waits for these
                self._ray.cancel(reference)

    def _get(self, reference: Any) -> tuple[Any, ...] | None:
        """What a worker answered; None if it died."""
        errors = self._ray.exceptions
        try:
            answer: tuple[Any, ...] = self._ray.get(reference)
            return answer
        except (
            errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError,
        ):  # fmt: skip
            return None
        except errors.RayError as error:
            last = str(error).strip().splitlines() or [type(error).__name__]
            raise FeddbeError(
                f"a node of the Ray cluster cannot do a client's work: {one_line(RuntimeError(last[-1]))}; "
                "is the same feddbe[ray] installed on every node (docs/cluster.md)?"
            ) from None

    def _check_tries(self, client_task: ClientTask, number: int) -> None:
        if number > MAX_TRIES:
            raise FeddbeError(
                f"client {client_task.client} in round {client_task.round}: its worker died {MAX_TRIES} times "
                f"(out of memory{', or of time' * bool(self.waiting.timeout)}? try --engine serial)"
            )

    def close(self) -> None:
        """Release the task. The cluster stays for the next run: starting it takes as long as a small one."""
        self._run = ()  # nobody needs it in the object store any more

    def _slots(self) -> int:
        """How many clients the cluster, as it is now, can work at."""
        if time.monotonic() < self._look_again:
            return self._known_slots
        slots = int(self._ray.cluster_resources().get("CPU", 0))
        if not slots:
            raise FeddbeError("the Ray cluster has no CPU; start a node that has, --resume continues")
        self._known_slots, self._look_again = slots, time.monotonic() + _LOOK
        return slots

    def _overdue(self, busy: dict[Any, _SubmittedTask], slots: int) -> list[Any]:
        """Those whose time is up, which are given up; of those that take long, somebody is told.

        Ray does not say which jobs are at work and which wait: it is the first ones.
        """
        late, now, timeout = [], time.monotonic(), self.waiting.timeout
        limit = float("inf") if timeout is None else timeout + START
        for reference, given in islice(busy.items(), slots):
            if given.since is None:
                given.since = now
            waited, who = (
                now - given.since,
                f"client {given.client_task.client} in round {given.client_task.round}",
            )
            if waited >= limit:
                self.waiting.warn(f"{who} did not answer for {waited:.0f} s and is done again")
                self._ray.cancel(reference, force=True)
                late.append(reference)
            elif not given.told and waited >= min(self.waiting.warn_after, limit / 2):
                given.told = True
                most = "--worker-timeout sets a limit" if timeout is None else f"at most {limit:g} s"
                self.waiting.warn(f"waiting for {who} for {waited:.0f} s; {most}")
        return late


@dataclass(frozen=True)
class RayConfig(EngineConfig):
    """What can be chosen of Ray."""

    name: ClassVar[str] = "ray"

    address: str | None = parameter(None, "HOST:PORT of a cluster; none: Ray starts on this machine")
    cpus: int | None = parameter(
        None, "clients at once on this machine, if it is alone; by default one per core", low=1, high=9999
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.cpus is not None:
            raise InvalidInputError(
                f"ray cpus = {self.cpus} with an address; the nodes of a cluster say what they have"
            )

    def processes(self) -> int:
        return (
            0 if self.address else self.cpus or available_cores()
        )  # of a cluster nobody knows before it is joined

    def is_local(self) -> bool:
        return self.address is None

    def create(
        self, task: Task, method: Method, timeouts: TimeoutPolicy = DEFAULT_TIMEOUT_POLICY
    ) -> RayTasks:
        connect(self.address, self.processes())
        return RayTasks(task, method, timeouts)


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
        BadInput: The address is malformed, nothing answers there, or Ray does not start.
    """
    if address is not None:
        _check_reachable(address)
    elif "ray" not in sys.modules:
        os.environ.update(LOOPBACK_ONLY)  # read when Ray is imported
    ray = _import_ray()
    if ray.is_initialized():
        return
    ray._private.worker._worker_logs_enabled = (
        False  # "a worker died", on standard output, which --json needs
    )
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
    """Fail at once where nothing listens: Ray itself would try for a quarter of an hour."""
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
        return InvalidInputError(f"--engine ray: cannot start Ray here: {reason}")
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
    """Return the versions on this machine of everything that the bits of a client's work depend on."""
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
    """Return in which versions this machine differs from those of the machine that gives out the work."""
    here = versions()
    return ", ".join(
        f"{name} {here.get(name, 'none')} there, {value} here"
        for name, value in expected.items()
        if here.get(name) != value
    )


def _work(
    run: tuple[Any, ...], call: int, shared: list[Any], job: bytes, each: bytes | None, private: bytes | None
) -> tuple[Any, ...]:
    """In a worker of the cluster: the job's answer. It is pure, so that it can be done again anywhere, and it
    works on copies: what lies in the object store belongs to all processes of the node."""
    about = _Run(*run)
    if others := differences(about.versions):
        return f"node {socket.gethostname()} differs: {others}", None, None
    asked: ClientTask = pickle.loads(job)
    try:
        task, method = _hold(about, call, shared)
        received = decode(_worker.shared) | ({} if each is None else decode(each))
        reply = run_client(task, method, asked, received, None if private is None else decode(private))
        kept = encode(reply.private) if reply.private else None
        return pickle.dumps(reply.with_tensors({})._replace(private=None)), encode(reply.tensors()), kept
    except FeddbeError as error:
        return pickle.dumps(error), None, None
    except Exception as error:
        error.add_note(f"in client {asked.client}, round {asked.round}:\n{traceback.format_exc()}")
        return pickle.dumps(as_portable(error)), None, None


def _hold(run: _Run, call: int, shared: list[Any]) -> tuple[Task, Method]:
    """The run's task and method, and in `_worker` this call's message to all: fetched if they are new."""
    import ray

    if _worker.key != run.key:
        torch.set_num_threads(1)
        _worker.task, _worker.method = pickle.loads(ray.get(run.task[0]))
        _worker.key, _worker.call = run.key, 0
    if _worker.call != call:
        _worker.shared, _worker.call = ray.get(shared[0]), call
    assert _worker.task
    assert _worker.method
    return _worker.task, _worker.method


def _opened(answer: tuple[Any, ...]) -> tuple[ClientResult, bytes | None]:
    """A worker's answer, or the error that it is."""
    said, tensors, private = answer
    if isinstance(said, str):
        raise InvalidInputError(f"{said}; install the same on every node (docs/cluster.md)")
    reply = pickle.loads(said)
    if isinstance(reply, Exception):
        raise reply
    return reply.with_tensors(decode(tensors)), private
