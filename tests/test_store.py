"""The run's file: all of a round or nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import torch

from feddbe.errors import StoreError
from feddbe.state import encode
from feddbe.store import FILE, Store


def new(folder: Path) -> Store:
    return Store.create(folder, {"config_hash": "x"}, {"w": torch.zeros(2)})


def test_a_round_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = new(tmp_path / "run")
    with store.transaction(0):
        store.stage(3, encode({"p": torch.ones(1)}))
        store.write_exchange(1.0, 10, 20, None)
    with pytest.raises(KeyboardInterrupt), store.transaction(1):  # noqa: PT012
        store.stage(3, encode({"p": torch.full((1,), 2.0)}))
        store.stage(4, encode({"p": torch.ones(1)}))
        store.write_server("last", {"w": torch.ones(2)})
        store.write_exchange(1.0, 10, 20, 0.5)
        raise KeyboardInterrupt
    store.close()
    store = Store.open(tmp_path / "run")
    assert store.last_round() == 0
    assert [(c, s["p"].item()) for c, s in store.clients()] == [(3, 1.0)]
    assert torch.equal(store.server()["w"], torch.zeros(2))
    store.close()


def test_clients_rows_are_filled_from_two_sides(tmp_path: Path) -> None:
    """The exchange of round t and the evaluation of entry t come in different transactions."""
    store = new(tmp_path)
    with store.transaction(1):
        store.write_client(1, 5, bytes_up=7, bytes_down=9, seconds=0.5, train_loss=1.5)
    with store.transaction(2):
        store.write_client(1, 5, test_samples=4, correct=3)
        store.write_client(1, 6, test_samples=2, correct=1)
    rows = store.client_rows(1)
    assert [(r["client"], r["bytes_up"], r["correct"]) for r in rows] == [(5, 7, 3), (6, None, 1)]
    assert store.contacted() == {5}
    assert store.calls() == 1
    store.close()


def test_two_writers_are_told_apart(tmp_path: Path) -> None:
    one = new(tmp_path)
    two = Store.open(tmp_path)
    two._db.execute("PRAGMA busy_timeout = 10")
    locked = pytest.raises(StoreError, match="another process is writing this run")
    with one.transaction(0), locked, two.transaction(0):
        pass
    one.close()
    two.close()


def test_a_full_disk_is_one_line_and_keeps_what_was_there(tmp_path: Path) -> None:
    store = new(tmp_path)
    with store.transaction(0):
        store.write_exchange(1.0, 0, 0, None)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    full = pytest.raises(StoreError, match=r"cannot use the run in .*full.*what was there is intact")
    with full as error, store.transaction(1):
        store.write_server("last", {"w": torch.zeros(100_000)})
    assert "\n" not in str(error.value)
    assert store.last_round() == 0
    assert store.server()["w"].numel() == 2
    store.close()


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        Store.open(tmp_path)
    (tmp_path / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        Store.open(tmp_path)
    (tmp_path / "empty").mkdir()
    sqlite3.connect(tmp_path / "empty" / FILE).close()
    (tmp_path / "empty" / FILE).touch()
    with pytest.raises(StoreError, match="never began"):
        Store.open(tmp_path / "empty")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot make the folder"):
        new(tmp_path / "file" / "run")


def test_hashes_tell_states_apart(tmp_path: Path) -> None:
    store = new(tmp_path)
    before = store.hashes()
    with store.transaction(0):
        store.stage(1, encode({"p": torch.zeros(1)}))
    assert store.hashes()[0] == before[0]
    assert store.hashes()[1].keys() == {"1"}
    store.close()


def test_a_run_that_cannot_begin_leaves_no_file(tmp_path: Path) -> None:
    """What fails, or is killed, while the file is made never gets the run's name."""
    with pytest.raises(TypeError):
        Store.create(tmp_path / "run", {"not": object()}, {"w": torch.zeros(2)})
    assert list((tmp_path / "run").iterdir()) == []
    new(tmp_path / "run").close()
    assert Store.is_run(tmp_path / "run")
