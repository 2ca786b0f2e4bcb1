"""The run's file: one SQLite database with its lock, its checksums and its verification."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sqlite3
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple
from zlib import crc32

from filelock import FileLock, Timeout

from feddbe.errors import CorruptRunError, FeddbeError, StoreError, one_line, truncate
from feddbe.metrics.client_values import ALL, LAYER_SEPARATOR, Record
from feddbe.results.document import RoundResult, build_round_result, run_id
from feddbe.runs.metadata import REQUIRED, check_sizes, decode_document
from feddbe.simulation.engines.base import ClientStates
from feddbe.state import Receipt, State, check_stored_layout, decode, encode, nbytes, sha256

LOCK_FILE = ".lock"
"""Name of the lock's file. It remains only after a kill, and is then reused."""


def make_folder(folder: Path) -> None:
    """Create the folder of a run, unless it exists."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot create the folder '{folder}': {error.strerror}") from error


@contextmanager
def exclusive(folder: Path, wait: float = 1.0) -> Iterator[None]:
    """Lock the run in this folder against other processes and other users in this process.

    Args:
        folder: Folder of the run.
        wait: Seconds to wait for the lock. A killed run is unlocked when its last worker has ended.

    Raises:
        StoreError: The run is in use, or cannot be locked.
    """
    path = folder / LOCK_FILE
    lock = FileLock(path)
    try:
        lock.acquire(timeout=wait)
    except Timeout as error:
        raise StoreError(
            f"'{folder}' is in use by another process; wait for it, or choose another --out"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot lock the run in '{folder}': {error.strerror or error}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before the release: the next owner notices that the file is gone, and locks again
        lock.release()


MAX_VALUE = 1e100
"""Largest absolute value of a record: sums and squares of larger ones are not finite."""


def checksum(values: tuple[Any, ...]) -> int:
    """Return the checksum of values as SQLite returns them."""
    return crc32(repr(values).encode())


def with_checksum(record: Record) -> tuple[Any, ...]:
    """Return the values of a record as SQLite returns them, and their checksum."""
    round_, client, moment, name, value, weight = record
    is_number = value is not None and abs(value) <= MAX_VALUE
    number = float(value) + 0.0 if value is not None and is_number else None  # SQLite has no nan and no -0
    values = (int(round_), int(client), moment, name, number, float(weight))
    return (*values, checksum(values))


RUN_FILE = "run.sqlite"
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
_ENVIRONMENT_ERRORS = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS,
}  # fmt: skip
"""Errors of the environment. All others mean that the file is corrupt, since the queries are fixed."""


def read_format(folder: Path) -> int:
    """Return the format of a run's file from its first bytes, without opening the database."""
    try:
        with (folder / RUN_FILE).open("rb") as file:
            head = file.read(100)
    except OSError as error:
        raise StoreError(f"cannot read '{folder / RUN_FILE}': {error.strerror}") from error
    if not head:
        other_files = {path.name for path in folder.iterdir() if path.stat().st_size} - {LOCK_FILE}
        if other_files:  # figures, or a WAL: the file once had content
            raise corrupt_run_error(folder, "file is empty")
        raise StoreError(f"'{folder}' contains a run that never began; remove the folder")
    if not head.startswith(b"SQLite format 3\0"):
        raise corrupt_run_error(folder, "file is not a database")
    return int.from_bytes(head[60:64], "big")


def _remove_files(path: Path, suffixes: Sequence[str]) -> None:
    for suffix in suffixes:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@contextmanager
def creating_run_file(folder: Path) -> Iterator[Path]:
    """Yield the path at which to create the run's file; it is renamed when the block ends.

    A kill or a full disk leaves no incomplete run, and an existing file stays until then. Auxiliary files of
    SQLite are removed first, because the new database would use them.
    """
    path = folder / RUN_FILE
    new = folder / f".{RUN_FILE}"
    try:
        _remove_files(new, ("", *_AUXILIARY_FILES))
        yield new
        _remove_files(path, _AUXILIARY_FILES)
        new.rename(path)
    except BaseException as error:
        _remove_files(new, ("", *_AUXILIARY_FILES))
        if isinstance(error, OSError):
            raise StoreError(f"cannot create '{path}': {error.strerror}") from error
        raise


_AUXILIARY_FILES = ("-wal", "-shm", "-journal")
_MAX_SPARSE_RATIO = 100
"""A file that is longer than this many times its space on the disk was not written by SQLite."""


def check_files(path: Path) -> None:
    """Raise an error if a file would block SQLite, or keep it reading for hours."""
    for suffix in ("", *_AUXILIARY_FILES):
        file = path.with_name(path.name + suffix)
        with suppress(FileNotFoundError):
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"'{file}' is not a plain file; remove it")
            space = max(status.st_blocks * 512, 2**20)
            if status.st_size > _MAX_SPARSE_RATIO * space:
                raise StoreError(
                    f"'{file}' has {status.st_size} bytes, nearly all of them empty space, which SQLite does "
                    "not write; remove it"
                )


def connect(path: Path, page_size: int = 0) -> sqlite3.Connection:
    """Open the database; read-only if its folder is not writable or its disk is full.

    Args:
        path: The database.
        page_size: Size of the pages of a new file; 0 for an existing one.
    """
    check_files(path)
    log = path.with_name(f"{path.name}-wal")
    has_log = log.exists() and log.stat().st_size > 0
    if not os.access(path.parent, os.W_OK):
        return _connect_readonly(path, "mode=ro" if log.exists() else "immutable=1")
    connection = sqlite3.connect(path, timeout=5, isolation_level=None)
    try:
        if page_size:
            connection.execute(f"PRAGMA page_size = {page_size}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.OperationalError as error:
        connection.close()
        is_full = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
        if page_size or has_log or not is_full:
            raise
        return _connect_readonly(path, "immutable=1")  # a complete run needs no auxiliary files
    return connection


def _connect_readonly(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?{mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None)


def check_not_replaced(folder: Path, opened: os.stat_result | None) -> None:
    """Raise an error if the file is not the opened one; SQLite would write to a deleted file."""
    path = folder / RUN_FILE
    if opened and not (path.exists() and os.path.samestat(path.stat(), opened)):
        raise StoreError(f"'{path}' was removed or replaced during the run; nothing more is written")


def corrupt_run_error(folder: Path, problem: str) -> CorruptRunError:
    """Return the error that names the file and the problem, which may quote damaged text."""
    problem = truncate(" ".join(problem.split()))
    path = folder / RUN_FILE
    return CorruptRunError(f"'{path}' is damaged ({problem}); restore it from a copy or start again")


def decode_meta(key: str, value: str, crc: int, folder: Path) -> Any:
    """Return a document; raise an error if it has another checksum or does not fit its type."""
    problem = f"its metadata: {key}"
    if not isinstance(key, str) or not isinstance(value, str):
        raise corrupt_run_error(folder, problem)
    try:
        is_intact = checksum((key, value)) == crc
        document = decode_document(key, value)
    except ValueError as error:
        raise corrupt_run_error(folder, f"{problem}: {error}") from None
    if not is_intact:
        raise corrupt_run_error(folder, problem)
    return document


def _is_valid(record: Record) -> bool:
    """Return True if the fields have their types and limits; other types only fit the checksum."""
    round_, client, moment, name, value, weight = record
    has_types = type(round_) is int and type(client) is int and type(moment) is str and type(name) is str
    is_value = value is None or (type(value) is float and abs(value) <= MAX_VALUE)
    has_weight = type(weight) is float and 0 <= weight <= MAX_VALUE
    return has_types and is_value and has_weight and round_ >= 0 and client >= ALL


@cache
def _expected_tables() -> frozenset[tuple[str, ...]]:
    """Return the tables and indexes of a run's file, as SQLite describes them."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return frozenset(db.execute(_TABLES))


_TABLES = "SELECT type, name, tbl_name, sql FROM sqlite_schema"


def check_tables(db: sqlite3.Connection, folder: Path) -> None:
    """Raise an error if the file has other tables, columns, views or triggers than a run's file.

    A view in place of a table could compute forever, and a trigger change what a resumed run writes.
    """
    if frozenset(db.execute(_TABLES)) != _expected_tables():
        raise corrupt_run_error(folder, "its tables")


_STEPS_PER_CALL = 1_000_000
"""Steps of SQLite's virtual machine after which a query's limit is checked."""
_MAX_STEPS_PER_BYTE = 2
"""The integrity check of the smallest records takes 0.64 steps per byte, more than any other query."""


@contextmanager
def _limited_steps(db: sqlite3.Connection, folder: Path) -> Iterator[None]:
    """Stop a query that takes more steps than the content of its file needs.

    A page that is the child of several pages is read for each of them, so that a small file could have any
    number of records.
    """
    calls, is_exceeded = 0, False

    def check_limit() -> bool:
        nonlocal calls, is_exceeded
        calls += 1
        files = [folder / name for name in (RUN_FILE, f"{RUN_FILE}-wal")]
        size = sum(file.stat().st_size for file in files if file.exists())
        is_exceeded = calls * _STEPS_PER_CALL > _MAX_STEPS_PER_BYTE * size
        return is_exceeded

    db.set_progress_handler(check_limit, _STEPS_PER_CALL)
    try:
        yield
    except sqlite3.OperationalError as error:
        # Python's own error, about invalid text, has no code
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_INTERRUPT:
            raise
        if not is_exceeded:  # SQLite also stops if a signal interrupts the check
            raise KeyboardInterrupt from None
        raise corrupt_run_error(folder, "its tables use a page more than once") from None
    finally:
        with suppress(sqlite3.ProgrammingError):  # the file was closed
            db.set_progress_handler(None, 0)


def _find_cause(folder: Path) -> str:
    """Return why the system refuses to open or write the file; empty if unknown."""
    try:
        with ExitStack() as files:
            for _ in ("", *_AUXILIARY_FILES):  # as many files as SQLite opens
                with suppress(FileNotFoundError):  # it is to be created
                    files.enter_context((folder / RUN_FILE).open("rb"))
            if not os.statvfs(folder).f_bavail:
                return os.strerror(errno.ENOSPC)
    except OSError as error:
        return error.strerror or ""
    return ""


def _find_lock_cause(folder: Path) -> str:
    """Return why the file is locked: SQLite reports a missing lock of the file system as a lock in use."""
    with suppress(OSError), TemporaryFile(dir=folder) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.strerror or str(error)
    return "another process is writing this run"


def is_environment_error(error: BaseException) -> bool:
    """Return True if SQLite failed because of the machine, and not because of the file."""
    # Python's own error, about invalid text, has no code
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF in _ENVIRONMENT_ERRORS and code != sqlite3.SQLITE_IOERR_SHORT_READ


@contextmanager
def translate_errors(folder: Path) -> Iterator[None]:
    """Convert errors of SQLite into a `StoreError` of one line."""
    try:
        yield
    except UnicodeDecodeError as error:  # from Python's sqlite3, which quotes a damaged schema
        raise corrupt_run_error(folder, "its tables") from error
    except sqlite3.Error as error:
        if not is_environment_error(error):
            raise corrupt_run_error(folder, str(error)) from error
        code = error.sqlite_errorcode
        is_locked = code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        reason = _find_lock_cause(folder) if is_locked else _find_cause(folder) or str(error)
        intact = "" if code & 0xFF == sqlite3.SQLITE_IOERR else "; what was there is intact"
        raise StoreError(f"cannot use the run in '{folder}': {reason}{intact}") from error


RETAINED = {"private": "PRIVATE", "upload": "UPLOAD"}
"""Kind of a client's state of the best round, by kind of the last state."""
_ORIGINAL_KIND = {"best": "last", **{retained: kind for kind, retained in RETAINED.items()}}
"""Kind as which a retained state was written."""
_REPLACED = {kind: kind.title() for kind in RETAINED}
"""Kind of a state that was replaced in the present transaction."""


def state_checksums(kind: str, client: int, round_: int, state: bytes) -> Iterator[int]:
    """Yield the checksums that a state may have: of the kind as which it was written, and of its kind."""
    for name in (_ORIGINAL_KIND.get(kind, kind), kind):
        yield crc32(state, checksum((name, client, round_)))


def set_replaced_aside(db: sqlite3.Connection, kind: str, client: int) -> None:
    """Set aside a client's state before it is replaced, at most once per round."""
    move = "UPDATE OR IGNORE states SET kind = ? WHERE kind = ? AND client = ?"
    db.execute(move, (_REPLACED[kind], kind, client))


def delete_retained(db: sqlite3.Connection) -> None:
    """Delete the retained states, because another round is the best now."""
    db.executemany("DELETE FROM states WHERE kind = ?", [(kind,) for kind in RETAINED.values()])


def retain_best(db: sqlite3.Connection) -> None:
    """Retain replaced states of the best round, and delete all others.

    A state belongs to the best round if it was written in it or before. If a state is newer, that of the best
    round is retained already, or there was none. A run with --no-keep-best retains none.
    """
    best_round = db.execute("SELECT round FROM states WHERE kind = 'best'").fetchone()
    if db.execute("SELECT 1 FROM meta WHERE key = 'keeps_best' AND value = 'false'").fetchone():
        best_round = None
    for kind, replaced in _REPLACED.items():
        if best_round:
            move = "UPDATE states SET kind = ? WHERE kind = ? AND round <= ?"
            db.execute(move, (RETAINED[kind], replaced, best_round[0]))
        db.execute("DELETE FROM states WHERE kind = ?", (replaced,))


_open_stores: ContextVar[dict[Path, RunStore] | None] = ContextVar("open_stores", default=None)


@contextmanager
def sharing_stores() -> Iterator[None]:
    """Open each run's file at most once in this block, for commands that read runs.

    `RunStore.open` returns the same store for the same folder. All stores are closed at the end of the block.
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
    """An open run. Engines use `read`, `write_pending` and `version` for the clients' states."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder, self._db = folder, connection
        self._round = 0
        self._file: os.stat_result | None = None
        """Identity of the opened file."""
        self._is_shared = False
        self._users = 0
        """Number of users that have not closed a shared store yet."""

    @classmethod
    def create(cls, folder: Path, meta: Mapping[str, Any], server: State) -> RunStore:
        """Create a run in a folder that has none, in one transaction.

        Args:
            folder: Folder of the run.
            meta: Description of the run.
            server: Initial state of the server.
        """
        make_folder(folder)

        def fill(store: RunStore) -> None:
            for key, value in {"keeps_best": True, **meta}.items():
                store.set_meta(key, value)
            store.write_server_state("last", server)

        cls.build(folder, fill, large=nbytes(server) > 2**20)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> RunStore:
        """Return the run in this folder, with its metadata verified."""
        shared = _open_stores.get()
        path = folder.resolve()
        if shared is not None and path in shared:
            shared[path]._users += 1
            return shared[path]
        if not cls.is_run(folder):
            raise StoreError(f"'{folder}' contains no run (no {RUN_FILE} in it)")
        with translate_errors(folder):
            file_format = read_format(folder)
            if file_format != FORMAT:
                raise StoreError(
                    f"'{folder}' has format {file_format}; this version of feddbe reads format {FORMAT}"
                )
            store = cls(folder, connect(folder / RUN_FILE))
            try:
                store._file = (folder / RUN_FILE).stat()
                check_tables(store._db, folder)
                store._verify_meta()
                store.check_last_round()
            except BaseException:
                store.close()
                raise
            if shared is not None:
                shared[path] = store
                store._is_shared, store._users = True, 1
            return store

    @staticmethod
    def is_run(folder: Path) -> bool:
        """Return True if this folder contains a run."""
        return (folder / RUN_FILE).is_file()

    def close(self) -> None:
        """Close the file; a store that is shared in a block is closed at its end."""
        if not self._is_shared:
            self._db.close()
            return
        self._users -= 1
        if not self._users and self._db.in_transaction:
            self._db.execute("ROLLBACK")  # ends `snapshot`; nothing was written

    def snapshot(self) -> None:
        """Let all later reads see the present content, even if other processes write."""
        if not self._db.in_transaction:
            self._db.execute("BEGIN")

    @contextmanager
    def transaction(self, round_: int) -> Iterator[None]:
        """Write everything in this block as part of a round, completely or not at all."""
        self._round = round_
        with translate_errors(self.folder):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                check_not_replaced(self.folder, self._file)
                yield
                retain_best(self._db)
                check_not_replaced(self.folder, self._file)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def verify(self) -> None:
        """Verify what is needed to resume, except states, which are verified when they are read."""
        self.check_pages()
        self.check_records()
        if self.last_round() >= 0:
            self.round_results()

    def check_pages(self) -> None:
        """Run SQLite's integrity check, which detects hidden rows."""
        for (status,) in self._read("PRAGMA integrity_check(1)"):
            if status != "ok":
                raise corrupt_run_error(self.folder, status)

    def check_records(self) -> None:
        """Verify the checksums of all records."""
        deque(self._read_records(), 0)

    def check_states(self) -> None:
        """Read all states."""
        for kind, client in list(self._read("SELECT kind, client FROM states")):
            self._decode(kind, client, self.state(kind, client) or b"")

    def meta(self, key: str) -> Any:
        """Return a value of the run's metadata, or None."""
        row = next(self._read("SELECT value, crc FROM meta WHERE key = ?", key), None)
        if row is None and key in REQUIRED:
            raise corrupt_run_error(self.folder, f"its metadata: {key} is missing")
        if row is None:
            return None
        value, crc = row
        return decode_meta(key, value, crc, self.folder)

    def set_meta(self, key: str, value: Any) -> None:
        """Write a document, which must fit its type: otherwise the run could not be opened again."""
        text = json.dumps(value)
        try:
            decode_document(key, text)
        except ValueError as error:
            raise StoreError(f"cannot store the run's {key}: {truncate(error)}") from error
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (key, text, checksum((key, text))))

    def _verify_meta(self) -> None:
        """Verify all metadata, since a damaged key would never be read."""
        documents = {}
        for key, value, crc in self._read("SELECT key, value, crc FROM meta"):
            documents[key] = decode_meta(key, value, crc, self.folder)
        try:
            check_sizes(documents)
        except ValueError as error:
            raise corrupt_run_error(self.folder, f"its metadata: {error}") from None

    def check_last_round(self) -> None:
        """Verify that the last record is of the round of the server's state."""
        query = (
            "SELECT coalesce((SELECT max(round) FROM rows), -1), "
            f"(SELECT round FROM states WHERE kind = 'last' AND client = {ALL})"
        )
        for last, state_round in self._read(query):
            if type(last) is not int or last != state_round:
                raise corrupt_run_error(
                    self.folder, f"records up to round {last}, and the server's state of round {state_round}"
                )

    def last_round(self) -> int:
        """Return the last finished round; -1 before the setup."""
        records = self._read_records("WHERE round = (SELECT max(round) FROM rows)")
        return next((record.round for record in records), -1)

    # --- records

    def write_records(self, records: Iterable[Record]) -> None:
        """Write records of any round; existing ones are replaced."""
        self._db.executemany(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", map(with_checksum, records)
        )

    def drop_records(self, round_: int, moments: Sequence[str], analysis: str = "") -> None:
        """Delete the metrics of a round at these moments, or the records of one `analysis` of it.

        Analyses are kept unless they are named, because their round does not change.
        """
        names = f"instr(name, '{LAYER_SEPARATOR}') = 0"
        parameters: list[tuple[Any, ...]] = [(round_, moment) for moment in moments]
        if analysis:
            names = "(name = ?3 OR instr(name, ?3 || '/') = 1)"
            parameters = [(round_, moment, analysis) for moment in moments]
        where = f"round = ?1 AND moment = ?2 AND {names}"
        self._db.executemany(f"DELETE FROM rows WHERE {where}", parameters)

    def records(self, round_: int, condition: str = "", *values: Any) -> list[Record]:
        """Return the records of a round, by client; `condition` is SQL, as in `AND client = ?`."""
        return list(self._read_records(f"WHERE round = ? {condition}", round_, *values))

    def aggregate_records(self) -> list[Record]:
        """Return the records over all clients, by round; their number does not depend on that of clients."""
        # one seek for each round in the file; UNION ends the query if a damaged index goes in a circle
        all_rounds = (
            "WITH RECURSIVE t(n) AS (SELECT min(round) FROM rows UNION "
            "SELECT (SELECT min(round) FROM rows WHERE round > n) FROM t WHERE n IS NOT NULL) SELECT n FROM t"
        )
        return list(self._read_records(f"WHERE client = {ALL} AND round IN ({all_rounds})"))

    def round_results(self) -> list[RoundResult]:
        """Return the results of all rounds in order, up to the round of the server's state."""
        moment = self.meta("moment") or "before"
        last = self.round_of("last")
        results: list[RoundResult] = []
        try:
            for round_, records in groupby(self.aggregate_records(), key=lambda record: record.round):
                results.append(build_round_result(round_, moment, list(records)))
        except KeyError:
            results = []
        is_complete = [result["round"] for result in results] == list(range(len(results)))
        if not is_complete or last != len(results) - 1:
            raise corrupt_run_error(self.folder, f"not all rounds up to {last} have their records")
        return results

    def participants(self) -> set[int]:
        """Return the clients that have taken part in a round, and so have received the constants."""
        where = "WHERE round > 0 AND moment = 'training' AND name = 'bytes_down'"
        return {record.client for record in self._read_records(where)} - {ALL}

    # --- states

    @contextmanager
    def computing_with_states(self) -> Iterator[None]:
        """Convert errors of a computation that starts from the states in this file into one line.

        The same code, by content, has computed the rounds in the file, so that its failure comes from the
        states: shapes and values that a method adds to its state are known to the method alone.
        """
        try:
            yield
        except (FeddbeError, MemoryError, OSError):
            raise
        except Exception as error:
            problem = f"its states cannot be computed with: {type(error).__name__} {one_line(error)}"
            raise corrupt_run_error(self.folder, problem) from error

    def round_of(self, kind: str, client: int = ALL) -> int | None:
        """Return the round of a state, or None; kinds `last` and `best` are the server's."""
        query = "SELECT round FROM states WHERE kind = ? AND client = ?"
        (round_,) = next(self._read(query, kind, client), (None,))
        if round_ is not None and type(round_) is not int:
            raise self._state_error(kind, client, f"round {round_}")
        return round_

    def server_state(self, which: str = "last") -> State:
        """Return the server's state of the `last` or the `best` round."""
        state = self.state(which)
        if state is None:
            raise StoreError(f"'{self.folder}' has no {which} round yet")
        return self._decode(which, ALL, state)

    def promote_to_best(self, *, move: bool) -> None:
        """Make the `last` server state the `best`: a copy, or with `move` itself if it will be replaced."""
        delete_retained(self._db)
        if move:
            self._db.execute("DELETE FROM states WHERE kind = 'best'")
            self._db.execute("UPDATE states SET kind = 'best' WHERE kind = 'last'")
        else:
            self.write_state("best", ALL, self.state("last") or b"", self.round_of("last"))

    def write_server_state(self, which: str, state: State, round_: int | None = None) -> None:
        self.write_state(which, ALL, encode(state), round_)

    def read(self, client: int) -> bytes | None:
        return self.state("private", client)

    def write_pending(self, client: int, state: bytes) -> None:
        set_replaced_aside(self._db, "private", client)
        self.write_state("private", client, state)

    @property
    def run_id(self) -> str:
        return run_id(self.meta("config_hash") or "", self.meta("begun") or "")

    def referenced(self, client: int) -> list[bytes]:
        states = (self.state(kind, client) for kind in ("private", RETAINED["private"]))
        return [state for state in states if state is not None]

    def version(self, client: int) -> tuple[int, int] | None:
        query = "SELECT round, crc FROM states WHERE kind = 'private' AND client = ?"
        return next(self._read(query, client), None)

    def upload(self, client: int) -> State:
        """Return a client's last upload, for methods that keep uploads."""
        state = self.state("upload", client)
        if state is None:
            raise StoreError(f"'{self.folder}' has no upload of client {client}")
        return self._decode("upload", client, state)

    def keep_upload(self, client: int, state: State) -> None:
        set_replaced_aside(self._db, "upload", client)
        self.write_state("upload", client, encode(state))

    def private_states(self) -> Iterator[tuple[int, State]]:
        """Yield the clients' private states, except those that clients keep elsewhere."""
        for client, blob in self._read_private():
            if Receipt.decode(blob) is None:
                yield client, self._decode("private", client, blob)

    def hashes(self) -> tuple[str, dict[str, str]]:
        """Return the SHA-256 of the server's state and of each client's."""
        client_hashes = {}
        for client, blob in self._read_private():
            receipt = Receipt.decode(blob)
            state = {} if receipt else self._decode("private", client, blob)
            client_hashes[str(client)] = receipt.sha256 if receipt else sha256(state)
        return sha256(self.server_state()), client_hashes

    def _read_private(self) -> Iterator[tuple[int, bytes]]:
        for (client,) in list(self._read("SELECT client FROM states WHERE kind = 'private' ORDER BY client")):
            state = self.read(client)
            if state is not None:
                yield client, state

    def state(self, kind: str, client: int = ALL) -> bytes | None:
        """Return the verified bytes of a state, or None."""
        query = "SELECT round, crc, state FROM states WHERE kind = ? AND client = ?"
        row = next(self._read(query, kind, client), None)
        if row is None:
            return None
        round_, crc, state = row
        if isinstance(state, bytes) and crc in state_checksums(kind, client, round_, state):
            return state
        raise self._state_error(kind, client, f"round {round_}")

    def decoded_state(self, kind: str, client: int = ALL) -> State:
        """Return the tensors of a state; none if the state does not exist."""
        state = self.state(kind, client)
        return {} if state is None else self._decode(kind, client, state)

    def _decode(self, kind: str, client: int, state: bytes) -> State:
        """Return the tensors of a state; none if a client keeps it elsewhere."""
        try:
            return {} if Receipt.decode(state) else decode(state)
        except CorruptRunError as error:
            raise self._state_error(kind, client, str(error)) from None

    def _state_error(self, kind: str, client: int, problem: str) -> CorruptRunError:
        name = kind if client == ALL else f"{kind} of client {client}"
        return corrupt_run_error(self.folder, f"the state '{name}', {problem}")

    def write_state(self, kind: str, client: int, state: bytes, round_: int | None = None) -> None:
        """Write a state of the transaction's round, or of another `round_`."""
        if round_ is None:
            round_ = self._round
        crc = next(state_checksums(kind, client, round_, state))
        self._db.execute(
            "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)", (kind, client, round_, crc, state)
        )

    def _read(self, query: str, *values: Any) -> Iterator[Any]:
        with translate_errors(self.folder), _limited_steps(self._db, self.folder):
            yield from self._db.execute(query, values)

    def _read_records(self, where: str = "", *values: Any) -> Iterator[Record]:
        order = "ORDER BY round, client, moment, name"
        for *fields, crc in self._read(f"SELECT * FROM rows {where} {order}", *values):
            record = Record(*fields)
            if checksum(tuple(fields)) != crc or not _is_valid(record):
                owner = "all clients" if record.client == ALL else f"client {record.client}"
                name = f"{record.moment} {record.name}"
                raise corrupt_run_error(self.folder, f"round {record.round}, {owner}: {name}")
            yield record

    @classmethod
    def build(cls, folder: Path, fill: Callable[[RunStore], None], *, large: bool) -> None:
        """Create the run's file with the content that `fill` writes."""
        with creating_run_file(folder) as new, translate_errors(folder):
            # large pages halve the time in which large states are written
            store = cls(folder, connect(new, page_size=32768 if large else 4096))
            try:
                store.create_tables(fill)
            finally:
                store.close()

    def create_tables(self, fill: Callable[[RunStore], None]) -> None:
        """Create the tables and call `fill` in one transaction."""
        with self.transaction(-1):
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            fill(self)


class PartStatus(Enum):
    """Result of reading one part of a run's file."""

    INTACT = "intact"
    SKIPPED = "skipped"
    DAMAGED = "damaged"


class Part(NamedTuple):
    """One part of a run's file: its status, and the problem or the reason why it was skipped as text."""

    status: PartStatus
    text: str = "intact"


@dataclass(frozen=True)
class VerificationResult:
    """Result of verifying one run.

    Attributes:
        folder: the run's folder.
        round: the last finished round, from which the run can resume; -1 before the setup, None if
            the run cannot resume.
        parts: every part that was read, by name.
    """

    folder: str
    round: int | None
    parts: dict[str, Part]

    @property
    def is_intact(self) -> bool:
        """True if no part is damaged."""
        return all(part.status is not PartStatus.DAMAGED for part in self.parts.values())

    def texts(self, status: PartStatus) -> list[str]:
        """Return the texts of the parts with this status."""
        return [part.text for part in self.parts.values() if part.status is status]

    def as_json(self) -> dict[str, Any]:
        """Return the values that JSON can hold, each part as its text."""
        parts = {name: part.text for name, part in self.parts.items()}
        return {"folder": self.folder, "intact": self.is_intact, "round": self.round, "parts": parts}


def verify_run(folder: Path) -> VerificationResult:
    """Read the entire file of a run and return the status of its parts; nothing is repaired."""
    try:
        store = RunStore.open(folder)
    except StoreError as error:
        return VerificationResult(str(folder), None, {"file": Part(PartStatus.DAMAGED, str(error))})
    try:
        checks: dict[str, Callable[[], object]] = {
            "SQLite": store.check_pages,
            "rows": store.check_records,
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
        result = VerificationResult(str(folder), None, parts)
        return replace(result, round=store.last_round()) if result.is_intact else result
    finally:
        store.close()


def _check_layout(store: RunStore) -> Part:
    """Compare the server's states with the layout in the run's file; no code or data of the run is used."""
    try:
        layout = store.meta("layout")
        if not isinstance(layout, dict):
            return Part(PartStatus.SKIPPED, "not compared: the run does not store the layout of its model")
        for which in ("last", "best"):
            if store.round_of(which) is not None:
                check_stored_layout(store.server_state(which), layout, store.folder)
    except StoreError as error:
        return Part(PartStatus.DAMAGED, str(error))
    return Part(PartStatus.INTACT)
