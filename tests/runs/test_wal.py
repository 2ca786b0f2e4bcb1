"""A damaged or cut WAL: what was lost with it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from feddbe.errors import Damaged
from feddbe.measures.rows import ALL, Row
from feddbe.runs.check import check
from feddbe.runs.sqlite_file import FILE
from feddbe.runs.store import Store
from feddbe.runs.wal import Pages, lost


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The files of a run of five rounds as a kill leaves them: all in the WAL."""
    store = Store.create(tmp_path / "live", {"config_hash": "x"}, {"w": torch.zeros(2)})
    for round in range(5):
        with store.transaction(round):
            store.write_server("last", {"w": torch.full((2,), float(round))})
            whole = {"seconds": 1.0, "missing": 0, "bytes_up": 1, "bytes_down": 1}
            store.write_rows(Row(round, ALL, "round", name, value, 3) for name, value in whole.items())
    (tmp_path / "killed").mkdir()
    for suffix in ("", "-wal", "-shm"):
        name = f"{FILE}{suffix}"
        (tmp_path / "killed" / name).write_bytes((tmp_path / "live" / name).read_bytes())
    store.close()
    return tmp_path / "killed"


def rounds(folder: Path) -> tuple[int, str]:
    store = Store.open(folder)
    try:
        return store.last_round(), store.meta("lost") or ""
    finally:
        store.close()


def test_a_whole_one_loses_nothing(killed: Path) -> None:
    assert rounds(killed) == (4, "")


@pytest.mark.parametrize("index", [True, False])
def test_a_flipped_bit_in_the_middle(killed: Path, index: bool) -> None:
    """By the index, or by the marks in the WAL itself; it is said to whoever comes later, too."""
    wal = killed / f"{FILE}-wal"
    content = bytearray(wal.read_bytes())
    content[len(content) // 2] ^= 1
    wal.write_bytes(content)
    if not index:
        (killed / f"{FILE}-shm").unlink()
    last, said = rounds(killed)
    assert 0 <= last < 4
    assert said.startswith("run.sqlite-wal was damaged or cut: ")
    assert said.endswith(f"what came after round {last} is lost")
    assert rounds(killed) == (last, said)
    found = check(killed)
    assert (found["whole"], found["round"], found["lost"]) == (True, last, said)


@pytest.mark.parametrize("size", [0, 20, 5000])
def test_one_that_was_cut(killed: Path, size: int) -> None:
    with (killed / f"{FILE}-wal").open("r+b") as file:
        file.truncate(size)
    last, said = rounds(killed)
    assert last == -1
    assert "is lost" in said


def test_one_that_is_gone(killed: Path) -> None:
    (killed / f"{FILE}-wal").unlink()
    last, said = rounds(killed)
    assert last == -1
    assert "is lost" in said


def test_older_pages_over_newer_ones_are_damage(killed: Path) -> None:
    store = Store.open(killed)
    with store.transaction(5):
        store.set_meta("x", 1)
    with pytest.raises(Damaged, match="whole pages of 99"):
        lost(killed, Pages(99, 98))
    assert lost(killed, Pages(99, 99)) == ""
    store.close()
