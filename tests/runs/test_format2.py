"""Runs of format 2, made by the feddbe that wrote it: opened, shown, carried on."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.errors import StoreError
from feddbe.runs.lock import LOCK
from feddbe.runs.sqlite_file import format_of
from feddbe.runs.store import FILE, Store
from feddbe.state import sha256
from tests.federation import experiment, outcome, same_bits

OLD = Path(__file__).parent / "format2"
NAMES = ["adapted", "stopped", "uploads"]


def copied(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of an old run, and the document that the old feddbe made of it."""
    shutil.copytree(OLD / name, folder / name)
    recorded: dict[str, Any] = json.loads((OLD / name / "document.json").read_text())
    return folder / name, recorded


def shown(folder: Path) -> dict[str, Any]:
    """The document as the old feddbe knew it."""
    document: dict[str, Any] = {**feddbe.load(folder)}
    del document["trainers"], document["versions"]
    assert document.pop("begun").startswith("2026-")
    assert document.pop("diverged") is None
    assert document.pop("measured") == []
    assert [document.pop(key) for key in ("label_names", "client_names", "looks")] == [[], [], []]
    if new := document["newcomers"]:
        assert (new.pop("way"), len(new.pop("by_epoch"))) == ("full", 1), "it adapted for one epoch"
    for entry in [*document["rounds"], document["best"], document["last"]]:
        entry.pop("measures", None)
    return document


@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_shows_what_it_showed(name: str, tmp_path: Path) -> None:
    folder, recorded = copied(name, tmp_path)
    for _ in range(2):  # migrated, and then as it is
        assert shown(folder) == {**recorded, "folder": str(folder)}
    assert format_of(folder) == 3
    assert sorted(path.name for path in folder.iterdir()) == ["document.json", FILE]


def test_an_old_run_is_carried_on_to_the_same_bits(tmp_path: Path) -> None:
    folder, recorded = copied("stopped", tmp_path)
    e = experiment("fedavg+dbe", rounds=4, validation=0.2, trainer="autograd")
    half = outcome(experiment("fedavg+dbe", rounds=2, validation=0.2, trainer="autograd"), tmp_path / "half")
    if sha256(half.server) != recorded["server_sha256"]:
        pytest.skip("this processor computes other bits than the one that made the run")
    whole, resumed = outcome(e, tmp_path / "whole"), outcome(e, folder)
    assert same_bits(whole.server, resumed.server)
    assert whole.clients.keys() == resumed.clients.keys()
    assert all(same_bits(whole.clients[c], resumed.clients[c]) for c in whole.clients)
    for key in ("accuracy", "after", "validation", "bytes_up", "bytes_down"):
        assert [entry[key] for entry in whole.entries] == [entry[key] for entry in resumed.entries]


def test_uploads_are_kept(tmp_path: Path) -> None:
    folder, _ = copied("uploads", tmp_path)
    store = Store.open(folder)
    assert {client: store.upload(client).keys() for client in range(2)}
    assert store.contacted() == {0, 1}
    store.close()


def test_what_an_old_run_has_in_its_wal_comes_along(tmp_path: Path) -> None:
    """It was killed: the last transaction is not in the file yet."""
    folder, recorded = copied("stopped", tmp_path)
    code = """
import os, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("INSERT OR REPLACE INTO meta VALUES ('note', '\\"late\\"')")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(folder / FILE)], check=False)
    assert (folder / f"{FILE}-wal").stat().st_size > 0
    assert shown(folder) == {**recorded, "folder": str(folder), "note": "late"}


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from feddbe.runs.store import Store
place, ended = 0, signal.SIGKILL
while ended == signal.SIGKILL:
    place += 1
    folder = Path(sys.argv[2]) / str(place)
    shutil.copytree(sys.argv[1], folder)
    if pid := os.fork():  # the imports take longer than all else
        ended = os.waitpid(pid, 0)[1]
        continue
    left = place
    def strike(frame, event, argument):
        global left
        left -= event == "c_call" and argument.__name__ in ("execute", "rename", "unlink", "close", "open")
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(strike)
    Store.open(folder).close()
    sys.setprofile(None)
    os._exit(0)
sys.exit(ended)
"""
"""Migrates copies of a run, and kills itself before the first, the second, ... call that may change a file,
until there is none left."""


def test_a_kill_while_it_is_migrated_leaves_the_old_run_or_the_new_one(tmp_path: Path) -> None:
    recorded = json.loads((OLD / "stopped" / "document.json").read_text())
    subprocess.run([sys.executable, "-c", KILLED, str(OLD / "stopped"), str(tmp_path)], check=True)
    folders = sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name))
    formats = [format_of(folder) for folder in folders]
    assert formats == sorted(formats)
    assert set(formats) == {2, 3}
    assert len(formats) > 20
    for folder in folders:
        assert shown(folder) == {**recorded, "folder": str(folder)}
        assert {path.name for path in folder.iterdir()} - {LOCK} == {"document.json", FILE}


def test_a_run_in_a_folder_that_cannot_be_written_is_read_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, recorded = copied("stopped", tmp_path)
    before = (folder / FILE).read_bytes()
    monkeypatch.setattr(
        os, "access", lambda path, mode: False
    )  # tests may run as root, who may write anywhere
    assert shown(folder) == {**recorded, "folder": str(folder)}
    store = Store.open(folder)
    with pytest.raises(StoreError, match="readonly database"), store.transaction(3):
        store.set_meta("lost", True)
    store.close()
    assert (folder / FILE).read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["document.json", FILE]


def test_a_run_that_an_older_feddbe_has_open_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = copied("stopped", tmp_path)
    other = sqlite3.connect(folder / FILE)
    other.execute("SELECT * FROM meta").fetchall()
    monkeypatch.setattr(sqlite3, "connect", lambda path, **named: CONNECT(path, **{**named, "timeout": 0.01}))
    with pytest.raises(StoreError, match="another process is writing this run"):
        Store.open(folder)
    other.close()
    assert format_of(folder) == 2
    Store.open(folder).close()


CONNECT: Any = sqlite3.connect


def test_an_old_run_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    folder, _ = copied("stopped", tmp_path)
    db = sqlite3.connect(folder / FILE)
    db.execute("UPDATE meta SET value = '{' WHERE key = 'config'")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match=r"run.sqlite' is damaged \(format 2: .*\); restore it from a copy"):
        Store.open(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["document.json", FILE]
