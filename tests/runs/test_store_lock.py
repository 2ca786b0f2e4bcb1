"""The lock of a run: one process at a time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.callbacks.base import Callback
from feddbe.errors import StoreError
from feddbe.runs.store import exclusive

OPTIONS: dict[str, Any] = {"clients": 3, "partition": "iid", "engine": "serial"}


def test_lock_is_exclusive_and_removed(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path),
        pytest.raises(StoreError, match=r"is in use by .* another --out$"),
        exclusive(tmp_path, 0),
    ):
        pass
    with exclusive(tmp_path, 0):
        pass
    assert list(tmp_path.iterdir()) == []


def _count(folder: Path, times: int) -> None:
    for _ in range(times):
        with exclusive(folder, wait=60):
            number = folder / "number"
            number.write_text(str(int(number.read_text()) + 1))


def test_waiting_processes_get_the_lock_in_turn(tmp_path: Path) -> None:
    """Though its file goes away each time."""
    (tmp_path / "number").write_text("0")
    spawn = multiprocessing.get_context("fork")
    others = [spawn.Process(target=_count, args=(tmp_path, 30)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert (tmp_path / "number").read_text() == "90"


class ResumingCallback(Callback):
    """Tries to resume the same run while it is in progress, and reads it."""

    message = ""
    read = -1

    def __init__(self, out: str) -> None:
        self.out = out

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        if done == 1 and not self.message:
            with pytest.raises(StoreError) as error:
                feddbe.run("fedavg", **OPTIONS, rounds=2, out=self.out, resume=True)
            self.message, self.read = str(error.value), len(feddbe.load_run(self.out)["rounds"])


def test_run_in_progress_cannot_be_resumed_elsewhere(tmp_path: Path) -> None:
    callback = ResumingCallback(str(tmp_path / "run"))
    document = feddbe.run("fedavg", **OPTIONS, rounds=2, out=callback.out, callback=callback)
    assert callback.message.startswith(f"'{callback.out}' is in use by another process;")
    assert callback.read == 2
    assert len(document["rounds"]) == 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["run.sqlite"]
