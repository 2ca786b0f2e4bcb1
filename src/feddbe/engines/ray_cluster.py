"""The cluster of `--engine ray`: started here and closed to all others, or joined.

What Ray does by default is not closed: it listens on every interface, leaves its token readable by all, asks
the network for its address and cloud providers' metadata services where it is, and reports that it was told
not to report. Some of what stops that is undocumented (`_CLOSED`), so `tests/engines/test_ray.py` looks at
the result: who listens, and which packets leave.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from feddbe.errors import BadInput, FeddbeError, one_line

__all__ = ["connect", "differences", "disconnect", "import_ray", "versions"]

LOOPBACK = "127.0.0.1"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": f"http://{LOOPBACK}:9",  # where even "disabled" is not reported
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a call that comes too late starts a cluster of its own
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # its default is about to change, which it would tell
}
_SHORT = 20
"""Letters of a folder in which the paths of Ray's sockets have less than the 108 that a system allows."""
_CLOSED = {
    **_QUIET,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 0: the address of this machine is the loopback, on any system
    "RAY_AUTH_MODE": "token",
}
_JOINING = {
    "RAY_AUTH_MODE": "token",
    "RAY_NUM_REDIS_GET_RETRIES": "5",  # tries to connect, a second or more each
}
_SILENT: dict[str, Any] = {
    "log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR,
}  # fmt: skip


class _Open(NamedTuple):
    """What this process is connected to."""

    address: str | None
    cpus: int
    folder: Path | None
    """Ours alone: the token, the home directory of Ray's daemons, and in it Ray's own files."""
    before: Mapping[str, str | None]
    """The environment, where it was changed."""
    guard: subprocess.Popen[bytes] | None = None
    """Who removes the folder if this process cannot."""


_open: _Open | None = None


def import_ray() -> Any:
    """Ray, which takes seconds, or the line that says how to get it."""
    try:
        import ray
    except ImportError as error:
        raise BadInput(f"--engine ray needs Ray ({one_line(error)}): pip install 'feddbe[ray]'") from None
    return ray


def connect(address: str | None, cpus: int) -> None:
    """Join the cluster at HOST:PORT, or start one of this machine alone. It is kept until this process ends:
    starting takes as long as a small run. A Ray that the program itself has begun is used as it is."""
    global _open
    if _begun() and (_open is None or (_open.address, _open.cpus) == (address, cpus)):
        return
    disconnect()
    if address is not None:
        _check_reachable(address)
    _open = _planned(address, cpus)
    atexit.register(disconnect)
    heard = list[bytes]()
    try:
        with _signals_kept(_open):
            _prepare(_open)
            _open = _open._replace(guard=_guard(_open.folder))
            ray = import_ray()
            ray._private.worker._worker_logs_enabled = False  # "a worker died", on standard output
            if address is None:
                _start(ray, _open)
            else:
                with _stderr_aside(heard):
                    ray.init(address=address, **_SILENT)
    except (Exception, SystemExit) as error:
        disconnect()
        if isinstance(error, FeddbeError):
            raise
        raise _cannot(address, error, heard) from None
    except BaseException:
        disconnect()
        raise


def _check_reachable(address: str) -> None:
    """Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise BadInput(f"ray address = '{address}'; allowed: HOST:PORT, as in 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise _cannot(address, error) from None


def _cannot(address: str | None, error: BaseException, heard: Sequence[bytes] = ()) -> BadInput:
    """The line for somebody who is not connected."""
    said = one_line(RuntimeError(" ".join(str(error).split()))).rstrip(".")
    if address is None:
        return BadInput(f"--engine ray: cannot start Ray here: {said}")
    if b"InvalidAuthToken" in b"".join(heard):
        said = "its token is another than the one in the file that RAY_AUTH_TOKEN_PATH names"
    return BadInput(f"--engine ray: cannot join the cluster at '{address}': {said} (docs/cluster.md)")


def _begun() -> bool:
    """Whether this process is connected to a cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def disconnect() -> None:
    """Leave the cluster; one that was started here ends."""
    global _open
    left, _open = _open, None
    if left is None:
        return
    try:
        if ray := sys.modules.get("ray"):
            ray.shutdown()  # also of what was begun in vain
    finally:
        for name, value in left.before.items():
            _set(name, value)
        if left.folder:
            shutil.rmtree(left.folder, ignore_errors=True)
        if left.guard:
            left.guard.communicate()
        atexit.unregister(disconnect)


def _planned(address: str | None, cpus: int) -> _Open:
    """What will be changed; nothing is yet."""
    folder, names = None, [*_QUIET, *_JOINING]
    if address is None:
        place = tempfile.gettempdir()
        folder = Path("/tmp" if len(place) > _SHORT else place) / f"feddbe-ray-{secrets.token_hex(4)}"
        names = [*_CLOSED, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"]
    return _Open(address, cpus, folder, {name: os.environ.get(name) for name in names})


def _prepare(ours: _Open) -> None:
    """The environment, before Ray is imported: it looks only then."""
    if ours.folder is None:
        for name, value in (_QUIET | _JOINING).items():
            os.environ.setdefault(name, value)
        return
    ours.folder.mkdir(mode=0o700)  # for this user only; nobody else has made it
    token = ours.folder / "token"
    with os.fdopen(os.open(token, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    (ours.folder / "ray_bootstrap_config.yaml").write_text("{}")  # else it asks metadata services
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would win over the file
    os.environ.update({**_CLOSED, "RAY_AUTH_TOKEN_PATH": str(token)})


def _guard(folder: Path | None) -> subprocess.Popen[bytes] | None:
    """A shell that removes the folder when this process has ended, however that came about: also by kill -9,
    or by Ray's own code, which ends a process whose cluster is gone. It waits for the end of a pipe."""
    if folder is None or os.name != "posix":
        return None
    words = 'read _; for i in 1 2 3 4 5 6 7 8; do rm -rf -- "$0"; [ -e "$0" ] || exit 0; sleep 1; done'
    return subprocess.Popen(
        ["/bin/sh", "-c", words, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _start(ray: Any, ours: _Open) -> None:
    assert ours.folder
    home = os.environ.get("HOME")
    try:
        os.environ["HOME"] = str(ours.folder)
        ray.init(
            address="local",  # not one that RAY_ADDRESS names, or that was started last
            num_cpus=ours.cpus,
            include_dashboard=False,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(ours.folder / "ray"),  # Ray opens it to all, but not the folder that it is in
            _system_config={"automatic_object_spilling_enabled": False},
            runtime_env={"env_vars": {"HOME": home}} if home else None,  # clients work in the user's
            **_SILENT,
        )
    finally:
        _set("HOME", home)
    if (found := ray.util.get_node_ip_address()) != LOOPBACK:
        raise RuntimeError(
            f"it would listen on {found}, where others can reach it; if ray was imported before feddbe, "
            "begin it yourself with ray.init"
        )


@contextlib.contextmanager
def _signals_kept(ours: _Open) -> Iterator[None]:
    """Ray takes SIGTERM for itself, by which a run ends in good order. Ctrl-C while it starts, which takes
    seconds, counts when it has started: an exception in its midst may get lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    pressed = list[int]()
    if ours.folder and callable(before[signal.SIGINT]):
        signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if pressed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _stderr_aside(heard: list[bytes]) -> Iterator[None]:
    """What Ray's own code writes while it tries to connect goes into this list."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            heard.append(file.read())


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@cache
def versions() -> dict[str, str]:
    """Of what the bits of a client's work depend on, on this machine."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
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


def differences(wanted: Mapping[str, str]) -> str:
    """Where this machine is not as the one that asks."""
    here = versions()
    return ", ".join(
        f"{name} {here.get(name, 'none')} there, {value} here"
        for name, value in wanted.items()
        if here.get(name) != value
    )
