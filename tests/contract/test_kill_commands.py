"""kill -9 of `analyze`, `report` and `tune` while they write: repeated commands give the same results."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.cli.main import main
from tests.waiting import PATIENCE

KILLED = """
import os, signal, sys
from pathlib import Path
from feddbe.cli.main import main
from feddbe.runs.store import RunStore

remaining = int(sys.argv[1])

def kill_after(function):
    def call(*arguments, **options):
        global remaining
        result = function(*arguments, **options)
        remaining -= 1
        if not remaining:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

RunStore.write_records = kill_after(RunStore.write_records)  # before the transaction is committed
Path.write_text = kill_after(Path.write_text)  # before the file is renamed
main(sys.argv[2:])
"""
SMALL = "--clients 3 --partition iid --model mlp --engine serial --trainer autograd --quiet"


def kill(command: str, writes: int) -> None:
    """Execute a command in another process, which is killed within its n-th write."""
    words = [sys.executable, "-c", KILLED, str(writes), *shlex.split(command)]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert result.returncode == -signal.SIGKILL, result.stderr


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run in the working directory."""
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(f"run fedavg+dbe {SMALL} --rounds 2 --out run")) == 0
    return Path("run")


def read_analyses(folder: str) -> list[dict[str, Any]]:
    analyses = feddbe.load_run(folder)["analyses"]
    return [{key: value for key, value in result.items() if key != "seconds"} for result in analyses]


@pytest.mark.parametrize("writes", [1, 2])
def test_killed_analyze(writes: int, run: Path) -> None:
    shutil.copytree(run, "undisturbed")
    arguments = "--analyses confusion,tsne --moment before --samples 20"
    assert main(shlex.split(f"analyze undisturbed {arguments}")) == 0
    kill(f"analyze run {arguments}", writes)
    assert main(["verify", "run"]) == 0
    assert len(read_analyses("run")) == writes - 1
    assert main(shlex.split(f"analyze run {arguments}")) == 0
    assert read_analyses("run") == read_analyses("undisturbed")


def test_killed_report(run: Path) -> None:
    assert main(["report", "run"]) == 0
    page = run / "report.html"
    before = page.read_bytes()
    assert main(shlex.split(f"run --resume --out run {SMALL} --rounds 3")) == 0
    kill("report run", 1)
    assert page.read_bytes() == before
    assert main(["report", "run"]) == 0
    assert page.read_bytes() != before


@pytest.mark.parametrize("writes", [1, 4, 8])
def test_killed_tune(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna", reason="the extra tune is not installed")
    monkeypatch.chdir(tmp_path)
    command = f"tune fedavg+mr {SMALL} --rounds 2 --trials 2 --space kappa=1,5 --json"
    results = []
    kill(f"{command} --out killed", writes)
    for folder in ("killed", "undisturbed"):
        capfd.readouterr()
        assert main(shlex.split(f"{command} --out {folder}")) == 0
        results.append(json.loads(capfd.readouterr().out) | {"picture": ""})
    assert results[0] == results[1]
    assert len(results[0]["trials"]) == 2
