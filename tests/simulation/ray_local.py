"""`--engine ray` on this machine alone: python -m tests.simulation.ray_local FOLDER. Prints JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from feddbe.methods.addons import MR, PRBM, Composed
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import are_identical, experiment, run_outcome

ORDERS = "FEDDBE_TEST_FOLDER"


class DyingFedAvg(FedAvg):
    """FedAvg whose first client ends its process once, if there is a file `die`."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        order = Path(os.environ[ORDERS]) / "die"
        if trainer.client == 0 and order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(ctx, trainer, received, private)


def listening_addresses() -> list[str]:
    """Return the addresses on which Ray's processes, which have our RAY_TMPDIR, listen."""
    sockets = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A":
                words = bytes.fromhex(local.split(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                sockets[rest[5]] = socket.inet_ntop(family, packed).removeprefix("::ffff:")
    addresses = set[str]()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            is_ours = b"RAY_TMPDIR=" + os.environ["RAY_TMPDIR"].encode() in (process / "environ").read_bytes()
            links = [str(fd.readlink()) for fd in (process / "fd").iterdir()] if is_ours else []
        except OSError:
            continue
        inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}
        addresses.update(address for inode, address in sockets.items() if inode in inodes)
    return sorted(addresses)


def main(folder: Path) -> None:
    def handler(number: int, frame: object) -> None:
        pass

    signal.signal(signal.SIGTERM, handler)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short:
        os.environ["RAY_TMPDIR"] = short
        os.environ[ORDERS] = str(folder)
        method = Composed(DyingFedAvg(), (PRBM(), MR()))
        e = replace(experiment("fedavg+dbe"), method=method)
        serial = run_outcome(e, folder / "serial")
        (folder / "die").touch()
        local = run_outcome(e, folder / "ray", "ray(cpus=2)")
        result = {
            "same bits": are_identical(serial.server, local.server)
            and serial.clients.keys() == local.clients.keys(),
            "a worker died": not (folder / "die").exists(),
            "addresses": listening_addresses(),
            "SIGTERM is ours": signal.getsignal(signal.SIGTERM) is handler,
        }
        sys.modules["ray"].shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
