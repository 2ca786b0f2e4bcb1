"""The SQLite file of a run: its tables, how it is opened, and what is said when that fails."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feddbe.errors import Damaged, StoreError
from feddbe.runs.checksums import crc_of
from feddbe.runs.lock import LOCK

__all__ = [
    "FILE", "FORMAT", "SCHEMA", "check_meta", "check_there", "clear", "connect", "damaged", "format_of",
    "replacing",
]  # fmt: skip

FILE = "run.sqlite"
FORMAT = 3
"""SQLite's `user_version`."""
SCHEMA = f"""
PRAGMA user_version = {FORMAT};
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE rows (
    round INTEGER, client INTEGER, moment TEXT, name TEXT, value REAL, weight REAL, crc INTEGER NOT NULL,
    PRIMARY KEY (round, client, moment, name)) WITHOUT ROWID;
CREATE TABLE states (
    kind TEXT, client INTEGER, round INTEGER NOT NULL, crc INTEGER NOT NULL, state BLOB NOT NULL,
    PRIMARY KEY (kind, client));
"""
_OUTSIDE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR,
}  # fmt: skip
"""Errors that come from around the file. All others come from within: what we ask does not change."""


def format_of(folder: Path) -> int:
    """The format of the run in this folder, from its first bytes: nothing is opened that may be replaced."""
    try:
        with (folder / FILE).open("rb") as file:
            head = file.read(100)
    except OSError as error:
        raise StoreError(f"cannot read '{folder / FILE}': {error.strerror}") from error
    if not head:
        others = {path.name for path in folder.iterdir() if path.stat().st_size} - {LOCK}
        if others:  # pictures, or a WAL: it was more once
            raise damaged(folder, "file is empty")
        raise StoreError(f"'{folder}' holds a run that never began; remove the folder")
    if not head.startswith(b"SQLite format 3\0"):
        raise damaged(folder, "file is not a database")
    return int.from_bytes(head[60:64], "big")


def _remove(path: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Where to make the run's file. It gets its name when it is whole: a kill or a full disk leaves no half
    run, and what had that name stays until then.

    What SQLite keeps beside a file is removed first: of no use without it, and taken for the new one's own.
    """
    path, new, beside = folder / FILE, folder / f".{FILE}", ("-wal", "-shm", "-journal")
    try:
        _remove(new, "", *beside)
        yield new
        _remove(path, *beside)
        new.rename(path)
    except BaseException as error:
        _remove(new, "", *beside)
        if isinstance(error, OSError):
            raise StoreError(f"cannot make '{path}': {error.strerror}") from error
        raise


def connect(path: Path, page: int = 0) -> sqlite3.Connection:
    if not os.access(path.parent, os.W_OK):  # another's run, or a read-only medium: it can still be read
        how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
        address = f"{path.resolve().as_uri()}?{how}"
        return sqlite3.connect(address, uri=True, isolation_level=None)
    connection = sqlite3.connect(path, timeout=5, isolation_level=None)
    if page:
        connection.execute(f"PRAGMA page_size = {page}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def check_there(folder: Path, opened: os.stat_result | None) -> None:
    """Whether the file is still the one that was opened: SQLite writes on into one that has no name."""
    path = folder / FILE
    if opened and not (path.exists() and os.path.samestat(path.stat(), opened)):
        raise StoreError(f"'{path}' was removed or replaced while the run went on; nothing more is written")


def damaged(folder: Path, what: str) -> Damaged:
    """The error that names the file and the part of it, which may quote damaged text."""
    shown = " ".join(what.split())[:200]
    return Damaged(f"'{folder / FILE}' is damaged ({shown}); restore it from a copy or start again")


def check_meta(key: str, value: str, crc: int, folder: Path) -> None:
    """Refuse a value of `meta` that has another checksum or is not JSON, which a stranger can write."""
    try:
        is_whole = crc_of((key, value)) == crc
        json.loads(value)
    except (ValueError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise damaged(folder, f"what is written about it: {key}")


@contextmanager
def clear(folder: Path) -> Iterator[None]:
    """Turn what SQLite says into one line."""
    try:
        yield
    except UnicodeDecodeError as error:  # from Python's sqlite3, which quotes a damaged schema
        raise damaged(folder, "its tables") from error
    except sqlite3.Error as error:
        # Python's own complaint, about text that is no text, has no code
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code & 0xFF not in _OUTSIDE or code == sqlite3.SQLITE_IOERR_SHORT_READ:
            raise damaged(folder, str(error)) from error
        reason = "another process is writing this run" if "locked" in str(error) else str(error)
        intact = "" if code & 0xFF == sqlite3.SQLITE_IOERR else "; what was there is intact"
        raise StoreError(f"cannot use the run in '{folder}': {reason}{intact}") from error
