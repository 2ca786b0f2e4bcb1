"""kill -9 at any moment: the run continues, and ends with the same bits as one that was left alone."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from feddbe import load
from tests.federation import states

COMMAND = [
    "run", "fedavg+dbe", "--clients", "6", "--partition", "iid", "--rounds", "6", "--epochs", "3",
    "--join", "0.67", "--model", "mlp",
]  # fmt: skip
# In the process itself, so that the clock starts after the imports; the thread strikes also while the main
# one is inside SQLite.
CHILD = """
import json, os, signal, sys, threading, time
from feddbe.cli import progress
from feddbe.show import pictures, tables
from feddbe.cli import main
delay, arguments = float(sys.argv[1]), sys.argv[2:]
def strike():
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)
if delay:
    threading.Thread(target=strike, daemon=True).start()
start = time.perf_counter()
code = main([*arguments, "--json"])
print(json.dumps(time.perf_counter() - start), file=sys.stderr)
sys.exit(code)
"""


def feddbe(delay: float, folder: Path, engine: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that is killed after `delay` seconds (0: never)."""
    words = [*COMMAND, "--engine", engine, "--out", str(folder), *more]
    child = [sys.executable, "-c", CHILD, str(delay), *words]
    return subprocess.run(child, capture_output=True, text=True, timeout=120)


def result(folder: Path) -> dict[str, Any]:
    """All that a run leaves, without the times."""
    document = load(folder)
    rounds = [{**entry, "seconds": 0.0} for entry in document["rounds"]]
    found = {"rounds": rounds, "server": document["server_sha256"], "clients": document["clients_sha256"]}
    return found | {"states": states(folder)}


@pytest.mark.parametrize("engine", ["serial", "pool(workers=2)"])
def test_kill_and_resume(engine: str, tmp_path: Path) -> None:
    whole = feddbe(0, tmp_path / "whole", engine)
    assert whole.returncode == 0, whole.stderr
    seconds = json.loads(whole.stderr.splitlines()[-1])
    wanted = result(tmp_path / "whole")
    assert len(wanted["rounds"]) == 7
    assert len(wanted["clients"]) >= 4

    rng, folder, reached = random.Random(engine), tmp_path / "killed", list[int]()
    for _ in range(5):
        begun = (folder / "run.sqlite").exists()
        ended = feddbe(rng.uniform(0.2, 0.9) * seconds, folder, engine, *(["--resume"] * begun))
        if ended.returncode == 0 and reached:
            break
        if ended.returncode == 0:  # it was faster than the one that was timed: once more
            shutil.rmtree(folder)
            continue
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        if (folder / "run.sqlite").exists():
            reached.append(len(load(folder)["rounds"]))
    assert reached, "no run was killed after it had begun"
    last = feddbe(0, folder, engine, "--resume")
    assert last.returncode == 0, last.stderr
    assert result(folder) == wanted
