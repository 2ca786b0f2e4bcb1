"""A command that reads runs opens each run's file once."""

from __future__ import annotations

import shlex
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddbe
from feddbe.cli.main import main
from feddbe.data.builtin import digits
from feddbe.runs.store import RUN_FILE, RunStore, sharing_stores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("runs")
    feddbe.compare(
        ["fedavg", "fedavg+dbe"], data="digits", clients=3, partition="iid", engine="serial", rounds=1,
        model="mlp", out=str(root / "both"), quiet=True,
    )  # fmt: skip
    return root


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the connections to each run's file, by the name of its folder."""
    counts: Counter[str] = Counter()
    connect = sqlite3.connect

    def count(path: Any, *args: Any, **options: Any) -> Any:
        if Path(path).name == RUN_FILE:
            counts[Path(path).parent.name] += 1
        return connect(path, *args, **options)

    monkeypatch.setattr("feddbe.runs.store.sqlite3.connect", count)
    return counts


COMMANDS = {
    "show": "show both",
    "clients": "show both --clients",
    "report": "report both",
    "runs": "runs both",
    "check": "verify both",
    "fairness": "fairness both",
    "overhead": "overhead both",
    "measure": "analyze both --analyses probe,tsne --moment before --samples 100",
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_each_run_is_opened_once(
    words: str, folder: Path, openings: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(shlex.split(words)) == 0
    assert openings == {"fedavg": 1, "fedavg+dbe": 1}


@pytest.mark.parametrize("words", ["predict both/fedavg --data new.npz", "export both/fedavg --out model"])
def test_run_of_a_client_model_is_opened_once(
    words: str, folder: Path, openings: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    np.savez("new.npz", x=digits.load().x[:3].numpy())
    assert main([*shlex.split(words), "--client", "0"]) == 0
    assert openings == {"fedavg": 1}


def test_shared_store_is_closed_at_the_end_of_the_block(folder: Path) -> None:
    with sharing_stores():
        first = RunStore.open(folder / "both" / "fedavg")
        second = RunStore.open(folder / "both" / "fedavg")
        assert first is second
        first.snapshot()
        first.close()
        assert second.last_round() == 1, "another one still reads it"
        second.close()
        with first.transaction(1):  # what was held has ended
            pass
    with pytest.raises(feddbe.StoreError):
        first.last_round()
    assert RunStore.open(folder / "both" / "fedavg") is not first
