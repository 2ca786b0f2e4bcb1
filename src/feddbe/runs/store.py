"""One run on disk: a folder with one SQLite file. A round is one transaction, so a kill at any moment loses
at most the round in flight. States are safetensors blobs; nothing pickled is ever read. Every value has a
checksum, which is verified when it is read."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from feddbe.errors import StoreError
from feddbe.measures.rows import ALL, AT, Row
from feddbe.results.document import Entry, entry
from feddbe.runs import best, sqlite_file
from feddbe.runs.checksums import crc_of, sealed
from feddbe.runs.lock import make_folder
from feddbe.runs.sqlite_file import FILE, FORMAT, SCHEMA, clear, connect, damaged, format_of, replacing
from feddbe.state import Receipt, State, decode, encode, nbytes, sha256

__all__ = ["FILE", "Store"]


class Store:
    """An open run. `read` and `stage` are the engines' view of the clients' states."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder, self._db = folder, connection
        self._round = 0
        self._file: os.stat_result | None = None
        """What was opened."""

    @classmethod
    def create(cls, folder: Path, meta: Mapping[str, Any], server: State) -> Store:
        """A new run in a folder that has none; all of it or nothing is written."""
        make_folder(folder)

        def fill(store: Store) -> None:
            for key, value in {"keeps_best": True, **meta}.items():
                store.set_meta(key, value)
            store.write_server("last", server)

        cls.build(folder, fill, large=nbytes(server) > 2**20)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Return the run in this folder, with everything that it says about itself verified."""
        if not cls.is_run(folder):
            raise StoreError(f"'{folder}' holds no run (no {FILE} in it)")
        with clear(folder):
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
            return store

    @staticmethod
    def is_run(folder: Path) -> bool:
        """Whether there is a run in this folder."""
        return (folder / FILE).is_file()

    def close(self) -> None:
        self._db.close()

    def hold(self) -> None:
        """All that is read from now on is of one moment, whoever writes meanwhile."""
        self._db.execute("BEGIN")

    @contextmanager
    def transaction(self, round: int) -> Iterator[None]:
        """What is written inside belongs to this round, and is there entirely or not at all."""
        self._round = round
        with clear(self.folder):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                sqlite_file.check_there(self.folder, self._file)
                yield
                best.settle(self._db)
                sqlite_file.check_there(self.folder, self._file)
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
                raise damaged(self.folder, answer)

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
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (key, text, crc_of((key, text))))

    def _verify_meta(self) -> None:
        """All of it when the run is opened: of a damaged key nobody would ask for the value."""
        for key, value, crc in self._read("SELECT key, value, crc FROM meta"):
            sqlite_file.check_meta(key, value, crc, self.folder)

    def last_round(self) -> int:
        """The last finished round; -1 before the preparation."""
        return next((row.round for row in self._rows("WHERE round = (SELECT max(round) FROM rows)")), -1)

    # --- what was measured

    def write_rows(self, rows: Iterable[Row]) -> None:
        """Rows of any round; one that is there already is replaced."""
        self._db.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", map(sealed, rows))

    def drop_rows(self, round: int, moments: Sequence[str], later: str = "") -> None:
        """Forget what clients measured of this round at these moments; or what was measured of it `later`
        under this name, which stays otherwise: the round is the same."""
        names = "(name = ?3 OR instr(name, ?3 || '/') = 1)" if later else f"instr(name, '{AT}') = 0"
        where = f"round = ?1 AND moment = ?2 AND {names}"
        every = [(round, moment, *[later] * bool(later)) for moment in moments]
        self._db.executemany(f"DELETE FROM rows WHERE {where}", every)

    def rows(self, round: int, only: str = "", *values: Any) -> list[Row]:
        """All rows of one round, by client, or those that a condition picks (`AND client = ?`)."""
        return list(self._rows(f"WHERE round = ? {only}", round, *values))

    def overall(self) -> list[Row]:
        """The rows of all clients together, by round: few, however many clients there are."""
        # one seek per round; an index could lose rows when it is damaged
        every = "WITH RECURSIVE t(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM t WHERE n < ?) SELECT n FROM t"
        return list(self._rows(f"WHERE client = {ALL} AND round IN ({every})", self.last_round()))

    def entries(self) -> list[Entry]:
        """All rounds in order; none is missing up to that of the server's state."""
        when, last = self.meta("when") or "before", self.round_of("last")
        try:
            rounds = groupby(self.overall(), key=lambda row: row.round)
            found = [entry(round, when, list(rows)) for round, rows in rounds]
        except KeyError:
            found = []
        if [e["round"] for e in found] != list(range(len(found))) or last != len(found) - 1:
            raise damaged(self.folder, f"not all rounds up to {last} have their rows")
        return found

    def contacted(self) -> set[int]:
        """Clients that have taken part in a round, and so know the constants."""
        where = "WHERE round > 0 AND moment = 'training' AND name = 'bytes_down'"
        return {row.client for row in self._rows(where)} - {ALL}

    # --- states

    def round_of(self, kind: str, client: int = ALL) -> int | None:
        """Of which round the state of this kind is (`last` and `best` are the server's); None: of none."""
        query = "SELECT round FROM states WHERE kind = ? AND client = ?"
        return next((int(round) for (round,) in self._read(query, kind, client)), None)

    def server(self, which: str = "last") -> State:
        """The server's state of the `last` or the `best` round."""
        if (found := self.state(which)) is None:
            raise StoreError(f"'{self.folder}' has no {which} round yet")
        return decode(found)

    def last_is_best(self, *, moves: bool) -> None:
        """The `last` server state becomes the `best`, as a copy; it `moves` if another takes its place."""
        best.forget(self._db)
        if moves:
            self._db.execute("DELETE FROM states WHERE kind = 'best'")
            self._db.execute("UPDATE states SET kind = 'best' WHERE kind = 'last'")
        else:
            self.write_state("best", ALL, self.state("last") or b"", self.round_of("last"))

    def write_server(self, which: str, state: State, round: int | None = None) -> None:
        self.write_state(which, ALL, encode(state), round)

    def read(self, client: int) -> bytes | None:
        return self.state("private", client)

    def stage(self, client: int, state: bytes) -> None:
        best.set_aside(self._db, "private", client)
        self.write_state("private", client, state)

    def stamp(self, client: int) -> tuple[int, int] | None:
        query = "SELECT round, crc FROM states WHERE kind = 'private' AND client = ?"
        return next(self._read(query, client), None)

    def upload(self, client: int) -> State:
        """A client's last upload, of methods that keep them."""
        if (found := self.state("upload", client)) is None:
            raise StoreError(f"'{self.folder}' has no upload of client {client}")
        return decode(found)

    def keep_upload(self, client: int, state: State) -> None:
        best.set_aside(self._db, "upload", client)
        self.write_state("upload", client, encode(state))

    def clients(self) -> Iterator[tuple[int, State]]:
        """The clients' states, one at a time; not those that are kept elsewhere."""
        for client, blob in self._staged():
            if Receipt.decode(blob) is None:
                yield client, decode(blob)

    def hashes(self) -> tuple[str, dict[str, str]]:
        """SHA-256 of the server's state and of each client's."""
        blobs = ((str(client), Receipt.decode(blob), blob) for client, blob in self._staged())
        return sha256(self.server()), {c: r.sha256 if r else sha256(decode(blob)) for c, r, blob in blobs}

    def _staged(self) -> Iterator[tuple[int, bytes]]:
        for (client,) in list(self._read("SELECT client FROM states WHERE kind = 'private' ORDER BY client")):
            if (state := self.read(client)) is not None:
                yield client, state

    def state(self, kind: str, client: int = ALL) -> bytes | None:
        """The bytes of a state, verified."""
        query = "SELECT round, crc, state FROM states WHERE kind = ? AND client = ?"
        for round, crc, state in self._read(query, kind, client):
            whose = kind if client == ALL else f"{kind} of client {client}"
            if isinstance(state, bytes) and crc in best.seals(kind, client, round, state):
                return state
            raise damaged(self.folder, f"the state '{whose}', round {round}")
        return None

    def write_state(self, kind: str, client: int, state: bytes, round: int | None = None) -> None:
        of = self._round if round is None else round
        values = (kind, client, of, next(best.seals(kind, client, of, state)), state)
        self._db.execute("INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)", values)

    def _read(self, query: str, *values: Any) -> Iterator[Any]:
        with clear(self.folder):
            yield from self._db.execute(query, values)

    def _rows(self, where: str = "", *values: Any) -> Iterator[Row]:
        order = "ORDER BY round, client, moment, name"
        for *fields, crc in self._read(f"SELECT * FROM rows {where} {order}", *values):
            row = Row(*fields)
            if crc_of(tuple(fields)) != crc:
                whose = "all clients" if row.client == ALL else f"client {row.client}"
                raise damaged(self.folder, f"round {row.round}, {whose}: {row.moment} {row.name}")
            yield row

    @classmethod
    def build(cls, folder: Path, fill: Callable[[Store], None], *, large: bool) -> None:
        """The run's file with what `fill` writes."""
        with replacing(folder) as new, clear(folder):
            # large states are written in half the time if pages are large
            store = cls(folder, connect(new, page=32768 if large else 4096))
            try:
                store.begin(fill)
            finally:
                store.close()

    def begin(self, fill: Callable[[Store], None]) -> None:
        """The tables, and what `fill` writes."""
        with self.transaction(-1):
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            fill(self)
