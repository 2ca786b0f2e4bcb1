"""One run on disk: a folder with one SQLite file. A round is one transaction, so a kill at any moment loses
at most the round in flight. States are safetensors blobs; nothing pickled is ever read."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feddbe.document import Accuracy, Entry
from feddbe.errors import StoreError
from feddbe.state import Receipt, State, decode, encode, nbytes, sha256

__all__ = ["FILE", "Store"]

FILE = "run.sqlite"
_FORMAT = 2
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, moment TEXT, before TEXT, adapted TEXT, after TEXT, validation TEXT,
    auc REAL, train_loss REAL,
    seconds REAL NOT NULL, bytes_up INTEGER NOT NULL, bytes_down INTEGER NOT NULL);
CREATE TABLE client_rounds (
    round INTEGER, client INTEGER, test_samples INTEGER, correct INTEGER, auc REAL, test_loss REAL,
    correct_adapted INTEGER, correct_after INTEGER, train_loss REAL, bytes_up INTEGER,
    bytes_down INTEGER, seconds REAL,
    PRIMARY KEY (round, client)) WITHOUT ROWID;
CREATE TABLE server (which TEXT PRIMARY KEY, round INTEGER NOT NULL, state BLOB NOT NULL);
CREATE TABLE clients (client INTEGER PRIMARY KEY, round INTEGER NOT NULL, state BLOB NOT NULL);
CREATE TABLE uploads (client INTEGER PRIMARY KEY, round INTEGER NOT NULL, state BLOB NOT NULL);
"""


class Store:
    """An open run. `read` and `stage` are the engines' view of the clients' states."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder, self._db = folder, connection
        self._round = 0

    @classmethod
    def create(cls, folder: Path, meta: Mapping[str, Any], server: State) -> Store:
        """A new run in a folder that has none; all of it or nothing is written."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the folder '{folder}': {error.strerror}") from error
        new = folder / f".{FILE}"  # gets its name when it is whole: a kill or a full disk leaves no half run
        try:
            _remove(new)
            with _clear(folder):
                # large states are written in half the time if pages are large
                store = cls(folder, _connect(new, page=32768 if nbytes(server) > 2**20 else 4096))
                try:
                    with store.transaction(-1):
                        for statement in _SCHEMA.split(";"):
                            store._db.execute(statement)
                        for key, value in {"format": _FORMAT, **meta}.items():
                            store.set_meta(key, value)
                        store.write_server("last", server)
                finally:
                    store.close()
            new.rename(folder / FILE)
        except BaseException as error:
            _remove(new)
            if isinstance(error, OSError):
                raise StoreError(f"cannot make '{folder / FILE}': {error.strerror}") from error
            raise
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """The run in this folder."""
        if not cls.is_run(folder):
            raise StoreError(f"'{folder}' holds no run (no {FILE} in it)")
        with _clear(folder):
            store = cls(folder, _connect(folder / FILE))
            try:
                found = store.meta("format")
            except sqlite3.OperationalError:  # killed before its first transaction was through
                raise StoreError(f"'{folder}' holds a run that never began; remove the folder") from None
            if found != _FORMAT:
                raise StoreError(f"'{folder}' has format {found}, this feddbe reads {_FORMAT}")
        return store

    @staticmethod
    def is_run(folder: Path) -> bool:
        """Whether there is a run in this folder."""
        return (folder / FILE).is_file()

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self, round: int) -> Iterator[None]:
        """What is written inside belongs to this round, and is there entirely or not at all."""
        self._round = round
        with _clear(self.folder):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    # --- the run itself

    def meta(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def last_round(self) -> int:
        """The last finished round; -1 before the preparation."""
        found: int | None = self._db.execute("SELECT max(round) FROM rounds").fetchone()[0]
        return -1 if found is None else found

    def entries(self) -> list[Entry]:
        """All rounds in order."""
        rows = self._db.execute(
            "SELECT round, moment, before, adapted, after, validation, auc, train_loss, seconds, bytes_up, "
            "bytes_down FROM rounds ORDER BY round"
        )
        return [
            Entry(
                round=r,
                accuracy=_load(adapted if when == "adapted" else before),
                when=when or "before",
                before=_load(before),
                adapted=_load(adapted),
                after=_load(after),
                validation=_load(validation),
                auc=auc,
                train_loss=loss,
                seconds=seconds,
                bytes_up=up,
                bytes_down=down,
            )
            for r, when, before, adapted, after, validation, auc, loss, seconds, up, down in rows
        ]

    def write_exchange(self, seconds: float, up: int, down: int, train_loss: float | None) -> None:
        """The round's row; its accuracy comes when clients evaluate what they then deploy."""
        self._db.execute(
            "INSERT INTO rounds (round, seconds, bytes_up, bytes_down, train_loss) VALUES (?, ?, ?, ?, ?)",
            (self._round, seconds, up, down, train_loss),
        )

    def write_evaluation(
        self,
        round: int,
        when: str,
        measured: Mapping[str, Accuracy | None],
        auc: float | None,
        loss: float | None,
    ) -> None:
        """What the clients `measured` of entry `round` at each moment; `when` is the one that counts. `loss`,
        if given, replaces the one from training."""
        moments = {name: _dump(accuracy) for name, accuracy in measured.items()}
        columns = "".join(f"{name} = ?, " for name in moments)
        self._db.execute(
            f"UPDATE rounds SET {columns}moment = ?, auc = ?, train_loss = coalesce(?, train_loss) "
            "WHERE round = ?",
            (*moments.values(), when, auc, loss, round),
        )

    def write_client(self, round: int, client: int, **columns: float | None) -> None:
        """Set columns of one client's row of one round."""
        names = ", ".join(columns)
        marks = ", ".join("?" * len(columns))
        update = ", ".join(f"{name} = excluded.{name}" for name in columns)
        self._db.execute(
            f"INSERT INTO client_rounds (round, client, {names}) VALUES (?, ?, {marks}) "
            f"ON CONFLICT DO UPDATE SET {update}",
            (round, client, *columns.values()),
        )

    def client_rows(self, round: int) -> list[dict[str, Any]]:
        """All clients' rows of one round."""
        cursor = self._db.execute("SELECT * FROM client_rounds WHERE round = ? ORDER BY client", (round,))
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def calls(self) -> int:
        """How often a client took part in a round."""
        query = "SELECT count(*) FROM client_rounds WHERE round > 0 AND bytes_down IS NOT NULL"
        count: int = self._db.execute(query).fetchone()[0]
        return count

    def contacted(self) -> set[int]:
        """Clients that have taken part in a round, and so know the constants."""
        query = "SELECT DISTINCT client FROM client_rounds WHERE round > 0 AND bytes_down IS NOT NULL"
        return {client for (client,) in self._db.execute(query)}

    # --- states

    def server(self, which: str = "last") -> State:
        """The server's state of the `last` or the `best` round."""
        row = self._db.execute("SELECT state FROM server WHERE which = ?", (which,)).fetchone()
        if row is None:
            raise StoreError(f"'{self.folder}' has no {which} round yet")
        return decode(row[0])

    def write_server(self, which: str, state: State, round: int | None = None) -> None:
        values = (which, self._round if round is None else round, encode(state))
        self._db.execute("INSERT OR REPLACE INTO server VALUES (?, ?, ?)", values)

    def read(self, client: int) -> bytes | None:
        row = self._db.execute("SELECT state FROM clients WHERE client = ?", (client,)).fetchone()
        return None if row is None else row[0]

    def stage(self, client: int, state: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO clients VALUES (?, ?, ?)", (client, self._round, state))

    def upload(self, client: int) -> State:
        """A client's last upload, of methods that keep them."""
        row = self._db.execute("SELECT state FROM uploads WHERE client = ?", (client,)).fetchone()
        if row is None:
            raise StoreError(f"'{self.folder}' has no upload of client {client}")
        return decode(row[0])

    def keep_upload(self, client: int, state: State) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO uploads VALUES (?, ?, ?)", (client, self._round, encode(state))
        )

    def clients(self) -> Iterator[tuple[int, State]]:
        """The clients' states, one at a time; not those that are kept elsewhere."""
        for client, blob in self._staged():
            if Receipt.decode(blob) is None:
                yield client, decode(blob)

    def hashes(self) -> tuple[str, dict[str, str]]:
        """SHA-256 of the server's state and of each client's."""
        receipts = {client: Receipt.decode(blob) for client, blob in self._staged()}
        elsewhere = {str(client): receipt.sha256 for client, receipt in receipts.items() if receipt}
        return sha256(self.server()), elsewhere | {str(c): sha256(state) for c, state in self.clients()}

    def _staged(self) -> Iterator[tuple[int, bytes]]:
        yield from self._db.execute("SELECT client, state FROM clients ORDER BY client")


def _remove(path: Path) -> None:
    """A database with the files that SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _connect(path: Path, page: int = 0) -> sqlite3.Connection:
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


@contextmanager
def _clear(folder: Path) -> Iterator[None]:
    """Turn what SQLite says into one line."""
    try:
        yield
    except sqlite3.Error as error:
        locked = "locked" in str(error)
        reason = "another process is writing this run" if locked else str(error)
        raise StoreError(f"cannot use the run in '{folder}': {reason}; what was there is intact") from error


def _dump(value: Accuracy | None) -> str | None:
    return None if value is None else json.dumps(value)


def _load(value: str | None) -> Accuracy | None:
    loaded: Accuracy | None = None if value is None else json.loads(value)
    return loaded
