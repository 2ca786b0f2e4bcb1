"""The run's file: a round is written completely or not at all."""

from __future__ import annotations

import math
import random
import re
import shutil
import sqlite3
from pathlib import Path
from zlib import crc32

import pytest
import torch

from feddbe.errors import StoreError
from feddbe.metrics.client_values import ALL, Record
from feddbe.runs.store import RUN_FILE, RunStore, checksum
from feddbe.state import encode
from tests.small_runs import experiment, run_outcome


def new(folder: Path) -> RunStore:
    return RunStore.create(folder, {"config_hash": "x"}, {"w": torch.zeros(2)})


def finished(round: int) -> Record:
    """What stands for a round that three clients took part in."""
    return Record(round, ALL, "round", "seconds", 1.0, 3.0)


def test_failed_round_is_rolled_back(tmp_path: Path) -> None:
    store = new(tmp_path / "run")
    with store.transaction(0):
        store.write_pending(3, encode({"p": torch.ones(1)}))
        store.write_records([finished(0)])
        store.write_server_state("last", {"w": torch.zeros(2)})
    with pytest.raises(KeyboardInterrupt), store.transaction(1):  # noqa: PT012
        store.write_pending(3, encode({"p": torch.full((1,), 2.0)}))
        store.write_pending(4, encode({"p": torch.ones(1)}))
        store.write_server_state("last", {"w": torch.ones(2)})
        store.write_records([finished(1)])
        raise KeyboardInterrupt
    store.close()
    store = RunStore.open(tmp_path / "run")
    assert store.last_round() == 0
    assert [(c, s["p"].item()) for c, s in store.private_states()] == [(3, 1.0)]
    assert torch.equal(store.server_state()["w"], torch.zeros(2))
    store.close()


def test_records_of_a_round_are_written_in_two_transactions(tmp_path: Path) -> None:
    """The exchange of round t and the evaluation of entry t come in different transactions."""
    store = new(tmp_path)
    exchanged = [Record(1, 5, "training", "bytes_down", 9.0, 1.0), finished(1)]
    with store.transaction(1):
        store.write_records(exchanged)
    evaluated = [Record(1, 5, "before", "accuracy", 0.75, 4.0), Record(1, 6, "before", "accuracy", None, 2.0)]
    with store.transaction(2):
        store.write_records(evaluated)
    assert store.records(1) == [finished(1), evaluated[0], exchanged[0], evaluated[1]]
    assert store.aggregate_records() == [finished(1)]
    assert store.participants() == {5}
    with store.transaction(2):
        store.drop_records(1, ["before", "after"])
    assert store.records(1) == [finished(1), exchanged[0]]
    store.close()


def test_nan_and_negative_zero_are_stored(tmp_path: Path) -> None:
    """It turns nan and infinity into nothing and -0 into 0; checksums must not take that for damage."""
    store = new(tmp_path)
    values = [math.nan, -0.0, math.inf, 5, 2**60 + 1, 1e-320]
    with store.transaction(0):
        store.write_records(Record(0, client, "before", "x", value, 1) for client, value in enumerate(values))
    assert [row.value for row in store.records(0)] == [None, 0.0, None, 5.0, float(2**60 + 1), 1e-320]
    store.close()


def test_snapshot_is_consistent(tmp_path: Path) -> None:
    """Between two of its questions a round may be written."""
    writer = new(tmp_path)
    with writer.transaction(0):
        writer.write_records([finished(0)])
        writer.write_server_state("last", {"w": torch.zeros(2)})
    reader = RunStore.open(tmp_path)
    reader.snapshot()
    assert reader.last_round() == 0
    with writer.transaction(1):
        writer.write_records([finished(1)])
        writer.write_server_state("last", {"w": torch.zeros(2)})
    assert reader.last_round() == 0
    reader.close()
    reader = RunStore.open(tmp_path)
    assert reader.last_round() == 1
    reader.close()
    writer.close()


def test_second_writer_is_rejected(tmp_path: Path) -> None:
    first = new(tmp_path)
    two = RunStore.open(tmp_path)
    two._db.execute("PRAGMA busy_timeout = 10")
    locked = pytest.raises(StoreError, match="another process is writing this run")
    with first.transaction(0), locked, two.transaction(0):
        pass
    first.close()
    two.close()


def test_full_disk_is_a_one_line_error_and_keeps_the_content(tmp_path: Path) -> None:
    store = new(tmp_path)
    with store.transaction(0):
        store.write_records([finished(0)])
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    full = pytest.raises(StoreError, match=r"cannot use the run in .*full.*what was there is intact")
    with full as error, store.transaction(1):
        store.write_server_state("last", {"w": torch.zeros(100_000)})
    assert "\n" not in str(error.value)
    assert store.last_round() == 0
    assert store.server_state()["w"].numel() == 2
    store.close()


def test_folder_without_a_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="contains no run"):
        RunStore.open(tmp_path)
    (tmp_path / RUN_FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        RunStore.open(tmp_path)
    (tmp_path / "empty").mkdir()
    sqlite3.connect(tmp_path / "empty" / RUN_FILE).close()
    (tmp_path / "empty" / RUN_FILE).touch()
    with pytest.raises(StoreError, match="never began"):
        RunStore.open(tmp_path / "empty")


def test_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot create the folder"):
        new(tmp_path / "file" / "run")


def test_hashes_distinguish_states(tmp_path: Path) -> None:
    store = new(tmp_path)
    before = store.hashes()
    with store.transaction(0):
        store.write_pending(1, encode({"p": torch.zeros(1)}))
    assert store.hashes()[0] == before[0]
    assert store.hashes()[1].keys() == {"1"}
    store.close()


@pytest.mark.parametrize("moves", [False, True])
def test_the_last_server_state_becomes_the_best(moves: bool, tmp_path: Path) -> None:
    """As a copy, or itself with another in its place; one that was the best before makes room."""
    store = RunStore.create(tmp_path, {}, {"w": torch.zeros(300_000)})
    for t in (1, 2):
        with store.transaction(t):
            store.write_server_state("last", {"w": torch.full((300_000,), float(t))})
        with pytest.raises(KeyboardInterrupt), store.transaction(t + 1):  # noqa: PT012
            store.promote_to_best(move=moves)
            raise KeyboardInterrupt
        with store.transaction(t + 1):
            store.promote_to_best(move=moves)
            if moves:
                store.write_server_state("last", {"w": torch.full((300_000,), 9.0)})
        assert (store.server_state("best")["w"] == t).all()
        assert (store.server_state()["w"] == (9 if moves else t)).all()
    store.close()
    with sqlite3.connect(tmp_path / RUN_FILE) as db:
        assert db.execute("SELECT kind, round FROM states ORDER BY kind").fetchall() == [
            ("best", 2),
            ("last", 3 if moves else 2),
        ]
    db.close()


def test_best_state_with_its_own_checksum_is_read(tmp_path: Path) -> None:
    """As runs have it that are older than its renaming in place."""
    store, state = new(tmp_path), encode({"w": torch.ones(2)})
    store.close()
    with sqlite3.connect(tmp_path / RUN_FILE) as db:
        values = ("best", ALL, 3, crc32(state, checksum(("best", ALL, 3))), state)
        db.execute("INSERT INTO states VALUES (?, ?, ?, ?, ?)", values)
    db.close()
    store = RunStore.open(tmp_path)
    assert (store.server_state("best")["w"] == 1).all()
    store.close()


def test_failed_creation_leaves_no_file(tmp_path: Path) -> None:
    """What fails, or is killed, while the file is made never gets the run's name."""
    with pytest.raises(TypeError):
        RunStore.create(tmp_path / "run", {"not": object()}, {"w": torch.zeros(2)})
    assert list((tmp_path / "run").iterdir()) == []
    new(tmp_path / "run").close()
    assert RunStore.is_run(tmp_path / "run")


def test_auxiliary_files_of_another_run_are_removed(tmp_path: Path) -> None:
    """As after a kill, and with `run.sqlite` removed: the WAL has all of the old run."""
    old = RunStore.create(tmp_path / "old", {"config_hash": "old"}, {"w": torch.zeros(2)})
    with old.transaction(0):
        old.write_records([finished(0)])
    (tmp_path / "new").mkdir()
    for suffix in ("-wal", "-shm"):
        (tmp_path / "new" / f"{RUN_FILE}{suffix}").write_bytes(
            (tmp_path / "old" / f"{RUN_FILE}{suffix}").read_bytes()
        )
    old.close()
    store = RunStore.create(tmp_path / "new", {"config_hash": "new"}, {"w": torch.ones(2)})
    assert (store.meta("config_hash"), store.last_round()) == ("new", -1)
    assert torch.equal(store.server_state()["w"], torch.ones(2))
    store.close()


def test_removed_folder_is_detected_at_the_next_write(tmp_path: Path) -> None:
    store = new(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StoreError, match=r"^'.*run.sqlite' was removed or replaced"), store.transaction(0):
        pass
    store.close()


def test_newer_format_is_rejected(tmp_path: Path) -> None:
    new(tmp_path).close()
    db = sqlite3.connect(tmp_path / RUN_FILE)
    db.execute("PRAGMA user_version = 4")
    db.close()
    with pytest.raises(StoreError, match=r"^'.*' has format 4; this version of feddbe reads format 3$"):
        RunStore.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "UPDATE meta SET value = '\"y\"' WHERE key = 'config_hash'",
            "its metadata: config_hash",
        ),
        (
            "UPDATE meta SET key = 'config_hush' WHERE key = 'config_hash'",
            "its metadata: config_hush",
        ),
        ("UPDATE rows SET value = 0.5 WHERE client = 1 AND round = 1", "round 1, client 1: "),
        ("UPDATE rows SET weight = 0.5 WHERE client = -1 AND round = 2", "round 2, all clients: "),
        ("UPDATE rows SET client = 7 WHERE client = 1 AND round = 1", "round 1, client 7: "),
        ("DELETE FROM rows WHERE client = -1 AND round = 1", "not all rounds up to 2 have their records"),
        ("UPDATE states SET state = zeroblob(9) WHERE kind = 'last'", "the state 'last', round 2"),
        ("UPDATE states SET state = 'x' WHERE kind = 'last'", "the state 'last', round 2"),
        ("UPDATE states SET round = 1 WHERE client = 2", "the state 'private of client 2', round 1"),
    ],
)
def test_every_value_is_verified_when_it_is_read(change: str, words: str, tmp_path: Path) -> None:
    e = experiment("fedavg+dbe")
    run_outcome(e, tmp_path)
    db = sqlite3.connect(tmp_path / RUN_FILE)
    db.execute(change)
    db.commit()
    db.close()
    line = rf"run.sqlite' is damaged \({re.escape(words)}.*\); restore it from a copy or start again$"
    with pytest.raises(StoreError, match=line):
        run_outcome(experiment("fedavg+dbe", rounds=3), tmp_path)


def test_flipped_bits_are_detected_or_harmless(tmp_path: Path) -> None:
    run_outcome(experiment("fedavg+dbe"), tmp_path)

    def everything() -> str:
        store = RunStore.open(tmp_path)
        try:
            store.verify()
            return repr((store.round_results(), store.hashes(), store.meta("config_hash"), store.records(1)))
        finally:
            store.close()

    expected, whole, rng = everything(), (tmp_path / RUN_FILE).read_bytes(), random.Random(0)
    noticed = 0
    for _ in range(60):
        for path in tmp_path.iterdir():
            path.unlink()
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        (tmp_path / RUN_FILE).write_bytes(damaged)
        try:
            assert everything() == expected
        except StoreError:
            noticed += 1
    assert noticed > 20
