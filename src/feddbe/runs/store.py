"""The run's file: one SQLite database, its lock, its checksums, and the check of all its parts."""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from filelock import FileLock, Timeout

from feddbe.errors import CorruptRunError, StoreError
from feddbe.metrics.records import ALL, AT, Record
from feddbe.results.document import RoundResult, build_round_result
from feddbe.simulation.engines.base import ClientStates
from feddbe.state import Receipt, State, check_stored_layout, decode, encode, nbytes, sha256

LOCK = ".lock"
"""Its name; only a kill leaves it, and the next run there takes it."""


def make_folder(folder: Path) -> None:
    """The folder of a run, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder '{folder}': {error.strerror}") from error


@contextmanager
def exclusive(folder: Path, wait: float = 1.0) -> Iterator[None]:
    """No other process, and nobody else in this one, works on the run in this folder meanwhile.

    It waits a moment: a run that was killed is let go when its last worker has ended.
    """
    path = folder / LOCK
    lock = FileLock(path)
    try:
        lock.acquire(timeout=wait)
    except Timeout as error:
        raise StoreError(
            f"'{folder}' is in use: another process works on this run; wait for it, or choose another --out"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot lock the run in '{folder}': {error.strerror or error}") from error
    try:
        yield
    finally:
        with suppress(
            OSError
        ):  # before it is let go: who gets it then sees that the file is gone, and asks again
            path.unlink()
        lock.release()


def checksum(values: tuple[Any, ...]) -> int:
    """Of numbers and text as SQLite gives them back."""
    return crc32(repr(values).encode())


def with_checksum(row: Record) -> tuple[Any, ...]:
    """A row as SQLite gives it back, and its checksum."""
    round, client, moment, name, value, weight = row
    number = None if value is None or math.isnan(value) else float(value) + 0.0  # SQLite has no nan and no -0
    values = (int(round), int(client), moment, name, number, float(weight))
    return (*values, checksum(values))


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
            raise corrupt_run_error(folder, "file is empty")
        raise StoreError(f"'{folder}' holds a run that never began; remove the folder")
    if not head.startswith(b"SQLite format 3\0"):
        raise corrupt_run_error(folder, "file is not a database")
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


def corrupt_run_error(folder: Path, what: str) -> CorruptRunError:
    """The error that names the file and the part of it, which may quote damaged text."""
    shown = " ".join(what.split())[:200]
    return CorruptRunError(f"'{folder / FILE}' is damaged ({shown}); restore it from a copy or start again")


def check_meta(key: str, value: str, crc: int, folder: Path) -> None:
    """Refuse a value of `meta` that has another checksum or is not JSON, which a stranger can write."""
    try:
        is_whole = checksum((key, value)) == crc
        json.loads(value)
    except (ValueError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise corrupt_run_error(folder, f"what is written about it: {key}")


@contextmanager
def translate_errors(folder: Path) -> Iterator[None]:
    """Turn what SQLite says into one line."""
    try:
        yield
    except UnicodeDecodeError as error:  # from Python's sqlite3, which quotes a damaged schema
        raise corrupt_run_error(folder, "its tables") from error
    except sqlite3.Error as error:
        # Python's own complaint, about text that is no text, has no code
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code & 0xFF not in _OUTSIDE or code == sqlite3.SQLITE_IOERR_SHORT_READ:
            raise corrupt_run_error(folder, str(error)) from error
        is_locked = code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        reason = "another process is writing this run" if is_locked else str(error)
        intact = "" if code & 0xFF == sqlite3.SQLITE_IOERR else "; what was there is intact"
        raise StoreError(f"cannot use the run in '{folder}': {reason}{intact}") from error


RETAINED = {"private": "PRIVATE", "upload": "UPLOAD"}
"""The kind of a state that is kept for the best entry."""
_WRITTEN = {"best": "last", **{kept: kind for kind, kept in RETAINED.items()}}
"""And back: as what it was written, the server's best state too."""
_ASIDE = {kind: kind.title() for kind in RETAINED}


def seals(kind: str, client: int, round: int, state: bytes) -> Iterator[int]:
    """Checksums that a state may have: as what it was written; once, the server's best as itself."""
    return (crc32(state, checksum((name, client, round))) for name in (_WRITTEN.get(kind, kind), kind))


def set_aside(db: sqlite3.Connection, kind: str, client: int) -> None:
    """A client's state is about to be replaced, perhaps once more in the same round."""
    move = "UPDATE OR IGNORE states SET kind = ? WHERE kind = ? AND client = ?"
    db.execute(move, (_ASIDE[kind], kind, client))


def forget(db: sqlite3.Connection) -> None:
    """Another entry is the best from now on."""
    db.executemany("DELETE FROM states WHERE kind = ?", [(kept,) for kept in RETAINED.values()])


def retain_best(db: sqlite3.Connection) -> None:
    """Of the states that were replaced keep those of the best entry: made before it or in it. Where one is
    younger, the best entry's is kept already, or there was none yet. A run begun with --no-keep-best keeps
    none."""
    entry = db.execute("SELECT round FROM states WHERE kind = 'best'").fetchone()
    if db.execute("SELECT 1 FROM meta WHERE key = 'keeps_best' AND value = 'false'").fetchone():
        entry = None
    for kind, aside in _ASIDE.items():
        if entry:
            move = "UPDATE states SET kind = ? WHERE kind = ? AND round <= ?"
            db.execute(move, (RETAINED[kind], aside, entry[0]))
        db.execute("DELETE FROM states WHERE kind = ?", (aside,))


_open_stores: ContextVar[dict[Path, RunStore] | None] = ContextVar("open_stores", default=None)


@contextmanager
def sharing_stores() -> Iterator[None]:
    """Open each run's file at most once in this block, for commands that read runs.

    `Store.open` returns the same store for the same folder, and all stores are closed at the end of the
    block.
    """
    if _open_stores.get() is not None:
        yield  # an outer block shares them already
        return
    stores = dict[Path, RunStore]()
    token = _open_stores.set(stores)
    try:
        yield
    finally:
        _open_stores.reset(token)
        for store in stores.values():
            store._db.close()


class RunStore(ClientStates):
    """An open run. `read` and `stage` are the engines' view of the clients' states."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder, self._db = folder, connection
        self._round = 0
        self._file: os.stat_result | None = None
        """What was opened."""
        self._is_shared, self._users = False, 0
        """Whether it is shared in a block, and by how many that have not closed it yet."""

    @classmethod
    def create(cls, folder: Path, meta: Mapping[str, Any], server: State) -> RunStore:
        """A new run in a folder that has none; all of it or nothing is written."""
        make_folder(folder)

        def fill(store: RunStore) -> None:
            for key, value in {"keeps_best": True, **meta}.items():
                store.set_meta(key, value)
            store.write_server_state("last", server)

        cls.build(folder, fill, large=nbytes(server) > 2**20)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> RunStore:
        """Return the run in this folder, with everything that it says about itself verified."""
        shared = _open_stores.get()
        path = folder.resolve()
        if shared is not None and path in shared:
            shared[path]._users += 1
            return shared[path]
        if not cls.is_run(folder):
            raise StoreError(f"'{folder}' holds no run (no {FILE} in it)")
        with translate_errors(folder):
            found = format_of(folder)
            if found != FORMAT:
                raise StoreError(
                    f"'{folder}' has format {found}; this version of feddbe reads format {FORMAT}"
                )
            store = cls(folder, connect(folder / FILE))
            try:
                store._file = (folder / FILE).stat()
                store._verify_meta()
            except BaseException:
                store.close()
                raise
            if shared is not None:
                shared[path] = store
                store._is_shared, store._users = True, 1
            return store

    @staticmethod
    def is_run(folder: Path) -> bool:
        """Whether there is a run in this folder."""
        return (folder / FILE).is_file()

    def close(self) -> None:
        """Close the file; a store that is shared in a block is closed at its end."""
        if not self._is_shared:
            self._db.close()
            return
        self._users -= 1
        if not self._users and self._db.in_transaction:
            self._db.execute("ROLLBACK")  # ends `hold`, nothing was written

    def snapshot(self) -> None:
        """All that is read from now on is of one moment, whoever writes meanwhile."""
        if not self._db.in_transaction:
            self._db.execute("BEGIN")

    @contextmanager
    def transaction(self, round: int) -> Iterator[None]:
        """What is written inside belongs to this round, and is there entirely or not at all."""
        self._round = round
        with translate_errors(self.folder):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                check_there(self.folder, self._file)
                yield
                retain_best(self._db)
                check_there(self.folder, self._file)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def verify(self) -> None:
        """Read all that a run is carried on with but the states: those are verified when they are needed."""
        self.check_pages()
        self.check_rows()

    def check_pages(self) -> None:
        """SQLite's own check, which finds what hides a row."""
        for (answer,) in self._read("PRAGMA integrity_check(1)"):
            if answer != "ok":
                raise corrupt_run_error(self.folder, answer)

    def check_rows(self) -> None:
        deque(self._rows(), 0)

    def check_states(self) -> None:
        for kind, client in list(self._read("SELECT kind, client FROM states")):
            self.state(kind, client)

    def meta(self, key: str) -> Any:
        found = next(self._read("SELECT value FROM meta WHERE key = ?", key), None)
        return None if found is None else json.loads(found[0])

    def set_meta(self, key: str, value: Any) -> None:
        text = json.dumps(value)
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (key, text, checksum((key, text))))

    def _verify_meta(self) -> None:
        """All of it when the run is opened: of a damaged key nobody would ask for the value."""
        for key, value, crc in self._read("SELECT key, value, crc FROM meta"):
            check_meta(key, value, crc, self.folder)

    def last_round(self) -> int:
        """The last finished round; -1 before the preparation."""
        return next((row.round for row in self._rows("WHERE round = (SELECT max(round) FROM rows)")), -1)

    # --- what was measured

    def write_records(self, rows: Iterable[Record]) -> None:
        """Rows of any round; one that is there already is replaced."""
        self._db.executemany(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", map(with_checksum, rows)
        )

    def drop_records(self, round: int, moments: Sequence[str], later: str = "") -> None:
        """Forget what clients measured of this round at these moments; or what was measured of it `later`
        under this name, which stays otherwise: the round is the same."""
        names = "(name = ?3 OR instr(name, ?3 || '/') = 1)" if later else f"instr(name, '{AT}') = 0"
        where = f"round = ?1 AND moment = ?2 AND {names}"
        every = [(round, moment, *[later] * bool(later)) for moment in moments]
        self._db.executemany(f"DELETE FROM rows WHERE {where}", every)

    def records(self, round: int, only: str = "", *values: Any) -> list[Record]:
        """All rows of one round, by client, or those that a condition picks (`AND client = ?`)."""
        return list(self._rows(f"WHERE round = ? {only}", round, *values))

    def aggregate_records(self) -> list[Record]:
        """The rows of all clients together, by round: few, however many clients there are."""
        # one seek per round; an index could lose rows when it is damaged
        every = "WITH RECURSIVE t(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM t WHERE n < ?) SELECT n FROM t"
        return list(self._rows(f"WHERE client = {ALL} AND round IN ({every})", self.last_round()))

    def round_results(self) -> list[RoundResult]:
        """All rounds in order; none is missing up to that of the server's state."""
        when, last = self.meta("moment") or "before", self.round_of("last")
        try:
            rounds = groupby(self.aggregate_records(), key=lambda row: row.round)
            found = [build_round_result(round, when, list(rows)) for round, rows in rounds]
        except KeyError:
            found = []
        if [e["round"] for e in found] != list(range(len(found))) or last != len(found) - 1:
            raise corrupt_run_error(self.folder, f"not all rounds up to {last} have their rows")
        return found

    def participants(self) -> set[int]:
        """Clients that have taken part in a round, and so know the constants."""
        where = "WHERE round > 0 AND moment = 'training' AND name = 'bytes_down'"
        return {row.client for row in self._rows(where)} - {ALL}

    # --- states

    def round_of(self, kind: str, client: int = ALL) -> int | None:
        """Of which round the state of this kind is (`last` and `best` are the server's); None: of none."""
        query = "SELECT round FROM states WHERE kind = ? AND client = ?"
        return next((int(round) for (round,) in self._read(query, kind, client)), None)

    def server_state(self, which: str = "last") -> State:
        """The server's state of the `last` or the `best` round."""
        if (found := self.state(which)) is None:
            raise StoreError(f"'{self.folder}' has no {which} round yet")
        return decode(found)

    def promote_to_best(self, *, moves: bool) -> None:
        """The `last` server state becomes the `best`, as a copy; it `moves` if another takes its place."""
        forget(self._db)
        if moves:
            self._db.execute("DELETE FROM states WHERE kind = 'best'")
            self._db.execute("UPDATE states SET kind = 'best' WHERE kind = 'last'")
        else:
            self.write_state("best", ALL, self.state("last") or b"", self.round_of("last"))

    def write_server_state(self, which: str, state: State, round: int | None = None) -> None:
        self.write_state(which, ALL, encode(state), round)

    def read(self, client: int) -> bytes | None:
        return self.state("private", client)

    def write_pending(self, client: int, state: bytes) -> None:
        set_aside(self._db, "private", client)
        self.write_state("private", client, state)

    def version(self, client: int) -> tuple[int, int] | None:
        query = "SELECT round, crc FROM states WHERE kind = 'private' AND client = ?"
        return next(self._read(query, client), None)

    def upload(self, client: int) -> State:
        """A client's last upload, of methods that keep them."""
        if (found := self.state("upload", client)) is None:
            raise StoreError(f"'{self.folder}' has no upload of client {client}")
        return decode(found)

    def keep_upload(self, client: int, state: State) -> None:
        set_aside(self._db, "upload", client)
        self.write_state("upload", client, encode(state))

    def clients(self) -> Iterator[tuple[int, State]]:
        """The clients' states, one at a time; not those that are kept elsewhere."""
        for client, blob in self._staged():
            if Receipt.decode(blob) is None:
                yield client, decode(blob)

    def hashes(self) -> tuple[str, dict[str, str]]:
        """SHA-256 of the server's state and of each client's."""
        blobs = ((str(client), Receipt.decode(blob), blob) for client, blob in self._staged())
        return sha256(self.server_state()), {
            c: r.sha256 if r else sha256(decode(blob)) for c, r, blob in blobs
        }

    def _staged(self) -> Iterator[tuple[int, bytes]]:
        for (client,) in list(self._read("SELECT client FROM states WHERE kind = 'private' ORDER BY client")):
            if (state := self.read(client)) is not None:
                yield client, state

    def state(self, kind: str, client: int = ALL) -> bytes | None:
        """The bytes of a state, verified."""
        query = "SELECT round, crc, state FROM states WHERE kind = ? AND client = ?"
        for round, crc, state in self._read(query, kind, client):
            whose = kind if client == ALL else f"{kind} of client {client}"
            if isinstance(state, bytes) and crc in seals(kind, client, round, state):
                return state
            raise corrupt_run_error(self.folder, f"the state '{whose}', round {round}")
        return None

    def write_state(self, kind: str, client: int, state: bytes, round: int | None = None) -> None:
        of = self._round if round is None else round
        values = (kind, client, of, next(seals(kind, client, of, state)), state)
        self._db.execute("INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)", values)

    def _read(self, query: str, *values: Any) -> Iterator[Any]:
        with translate_errors(self.folder):
            yield from self._db.execute(query, values)

    def _rows(self, where: str = "", *values: Any) -> Iterator[Record]:
        order = "ORDER BY round, client, moment, name"
        for *fields, crc in self._read(f"SELECT * FROM rows {where} {order}", *values):
            row = Record(*fields)
            if checksum(tuple(fields)) != crc:
                whose = "all clients" if row.client == ALL else f"client {row.client}"
                raise corrupt_run_error(self.folder, f"round {row.round}, {whose}: {row.moment} {row.name}")
            yield row

    @classmethod
    def build(cls, folder: Path, fill: Callable[[RunStore], None], *, large: bool) -> None:
        """The run's file with what `fill` writes."""
        with replacing(folder) as new, translate_errors(folder):
            # large states are written in half the time if pages are large
            store = cls(folder, connect(new, page=32768 if large else 4096))
            try:
                store.begin(fill)
            finally:
                store.close()

    def begin(self, fill: Callable[[RunStore], None]) -> None:
        """The tables, and what `fill` writes."""
        with self.transaction(-1):
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            fill(self)


class PartStatus(Enum):
    """Result of reading one part of a run's file."""

    INTACT = "whole"
    SKIPPED = "skipped"
    DAMAGED = "damaged"


class Part(NamedTuple):
    """One part of a run's file: its status, and as text what is wrong or why the part was not compared."""

    status: PartStatus
    text: str = "whole"


@dataclass(frozen=True)
class VerificationResult:
    """Result of checking one run.

    Attributes:
        folder: the run's folder.
        round: the last finished round, from which the run can continue; -1 before the preparation, None if
            the run cannot continue.
        parts: every part that was read, by name.
    """

    folder: str
    round: int | None
    parts: dict[str, Part]

    @property
    def is_intact(self) -> bool:
        """Whether no part is damaged."""
        return all(part.status is not PartStatus.DAMAGED for part in self.parts.values())

    def texts(self, status: PartStatus) -> list[str]:
        """Return the texts of the parts with this status."""
        return [part.text for part in self.parts.values() if part.status is status]

    def as_json(self) -> dict[str, Any]:
        """Return the values that JSON can hold, each part as its text."""
        parts = {name: part.text for name, part in self.parts.items()}
        return {"folder": self.folder, "whole": self.is_intact, "round": self.round, "parts": parts}


def verify_run(folder: Path) -> VerificationResult:
    """Read all of a run's file and return the status of its parts; nothing is repaired."""
    try:
        store = RunStore.open(folder)
    except StoreError as error:
        return VerificationResult(str(folder), None, {"file": Part(PartStatus.DAMAGED, str(error))})
    try:
        checks: dict[str, Callable[[], object]] = {
            "SQLite": store.check_pages,
            "rows": store.check_rows,
            "states": store.check_states,
            "rounds": store.round_results,
        }
        parts = {"meta": Part(PartStatus.INTACT)}  # otherwise the file could not have been opened
        for name, read in checks.items():
            try:
                read()
                parts[name] = Part(PartStatus.INTACT)
            except StoreError as error:
                parts[name] = Part(PartStatus.DAMAGED, str(error))
        parts["model"] = _check_layout(store)
        found = VerificationResult(str(folder), None, parts)
        return replace(found, round=store.last_round()) if found.is_intact else found
    finally:
        store.close()


def _check_layout(store: RunStore) -> Part:
    """Compare the server's states with the layout that the run's file states. Nothing that a run names is
    built, read or executed."""
    try:
        layout = store.meta("layout")
        if not isinstance(layout, dict):
            return Part(PartStatus.SKIPPED, "not compared: the run does not say what its model is like")
        for which in ("last", "best"):
            if store.round_of(which) is not None:
                check_stored_layout(store.server_state(which), layout, store.folder)
    except StoreError as error:
        return Part(PartStatus.DAMAGED, str(error))
    return Part(PartStatus.INTACT)
