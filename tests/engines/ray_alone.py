"""`feddbe run --engine ray` on a machine with a network, and Ctrl-C: python -m tests.engines.ray_alone FOLDER

In a network of its own (`unshare --net --mount`), which has an address that others could reach, a default
route and a name server out there: it looks who listens, and counts the packets that leave. Prints JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import feddbe

HERE, OUTSIDE, METADATA = "192.0.2.77", "192.0.2.99", "169.254.169.254"
RUN = ["run", "fedavg+dbe", "--clients", "4", "--partition", "iid", "--epochs", "2"]
PATIENCE = 120.0
MARK = "FEDDBE_TEST_MARK"
"""In the environment of all processes that are begun here."""


def make_network(place: Path) -> None:
    """One cable, whose other end nobody listens to."""
    names = place / "resolv.conf"
    names.write_text(f"nameserver {OUTSIDE}\noptions timeout:1 attempts:1\n")
    for line in (
        "ip link set lo up", "ip link add out type veth peer name far", "ip link set far up",
        f"ip addr add {HERE}/24 dev out", "sysctl -q -w net.ipv6.conf.all.disable_ipv6=1",
        "ip link set out up", f"ip route add default via {OUTSIDE}",
        f"mount --bind {names} {Path('/etc/resolv.conf').resolve()}",
    ):  # fmt: skip
        subprocess.run(line.split(), check=True)


def sent() -> int:
    """Packets to the outside; asking for the way there counts."""
    rows = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(row.split(":")[1].split()[9]) for row in rows if row.split(":")[0].strip() == "out")


def listeners() -> list[str]:
    """Addresses on which anybody in this network waits for connections."""
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = row.split()
            if state == "0A":
                words = bytes.fromhex(local.split(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, packed).removeprefix("::ffff:"))
    return sorted(found)


def belonging(mark: str) -> Iterator[Path]:
    """Processes that were begun with this in their environment, and are alive."""
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                yield process
        except OSError:
            continue


def until(true: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.1)


def rounds_written(folder: Path) -> int:
    try:
        return len(feddbe.load(folder, hashes=False)["rounds"]) - 1
    except feddbe.FeddbeError:
        return -1


def begin(place: Path, temporary: Path) -> subprocess.Popen[str]:
    """A run that does not end by itself, in a group of its own."""
    words = [*RUN, "--rounds", "100000", "--engine", "ray(cpus=2)", "--out", str(place)]
    return subprocess.Popen(
        [sys.executable, "-m", "feddbe", *words],
        env={**os.environ, MARK: str(os.getpid()), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and its last word."""
    _, said = process.communicate(timeout=PATIENCE)
    return process.returncode, said.strip().splitlines()[-1]


def look(place: Path, temporary: Path, other: Path) -> dict[str, Any]:
    """What can be seen of a run, and what is left of it after Ctrl-C; also of one whose Ray only begins."""
    mark, before = f"{MARK}={os.getpid()}", sent()
    early = begin(place / "early", other)
    until(lambda: any(other.glob("feddbe-ray-*")) or early.poll() is not None, "a folder")
    os.killpg(early.pid, signal.SIGINT)
    process = begin(place / "run", temporary)
    until(lambda: rounds_written(place / "run") >= 2 or process.poll() is not None, "two rounds")
    assert process.poll() is None, process.communicate()
    (folder,) = temporary.glob("feddbe-ray-*")
    found: dict[str, Any] = {
        "listeners": listeners(),
        "folder": oct(folder.stat().st_mode & 0o777),
        "token": oct((folder / "token").stat().st_mode & 0o777),
        "daemons": sum(1 for _ in belonging(mark)) > 3,
    }
    (port,) = folder.glob("ray/session_2*/gcs_server_port_*")
    found["intruder"] = intrude(port.read_text(), place)
    os.killpg(process.pid, signal.SIGINT)
    found |= dict(zip(("exit", "said"), end(process), strict=True)) | {"early": end(early)}
    until(lambda: not list(belonging(mark)), "the end of all processes")
    left = [path.name for folder in (temporary, other) for path in folder.iterdir()]
    found |= {"left": left, "packets": sent() - before}
    try:
        socket.create_connection((METADATA, 80), timeout=1)
    except OSError:
        found["a look-up would be seen"] = sent() > before
    return found


def intrude(port: str, place: Path) -> str:
    """What one hears who knows where Ray is, and not the token."""
    token = place / "guessed"
    token.write_text("0" * 64)
    environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(token), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    words = [*RUN, "--rounds", "1", "--engine", f"ray(address=127.0.0.1:{port})"]
    done = subprocess.run(
        [sys.executable, "-m", "feddbe", *words], env=environment, cwd=place, capture_output=True, text=True
    )
    return f"{done.returncode} {done.stderr}"


if __name__ == "__main__":
    make_network(Path(sys.argv[1]))
    places = [Path(tempfile.mkdtemp(dir="/tmp")) for _ in range(2)]  # Ray's paths have to be short
    try:
        print(json.dumps(look(Path(sys.argv[1]), *places)))
    finally:  # also of one who waited in vain
        for process in belonging(f"{MARK}={os.getpid()}"):
            os.kill(int(process.name), signal.SIGKILL)
        for place in places:
            shutil.rmtree(place)
