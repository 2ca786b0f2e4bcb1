"""A node's private states: one SQLite file that only its owner can read.

There is a row for each run and round. A task names the receipt (round, sha256) of the state to start from,
and the rounds to which the run's file on the server refers. States that are older than that receipt and not
among these rounds are deleted. A lost reply, a repeated task and a round that the server never completed
therefore all find the state from which they start.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from feddbe.errors import InvalidInputError
from feddbe.federation.protocol import NotAllowedError, PrivateStateError
from feddbe.state import Receipt, State, decode, encode, sha256

FILE = "private.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs(
    run TEXT PRIMARY KEY, client INT, method TEXT, identity TEXT, begun TEXT DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE IF NOT EXISTS models(run TEXT PRIMARY KEY, description TEXT, message BLOB);
CREATE TABLE IF NOT EXISTS states(run TEXT, round INT, sha256 TEXT, state BLOB, PRIMARY KEY(run, round))
"""


def write_private_file(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(content)


def make_private_folder(folder: Path) -> None:
    """Create a folder that only its owner can read, unless it exists.

    Raises:
        InvalidInputError: The folder cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot create the folder '{folder}': {error.strerror}") from None


class StoredRun(NamedTuple):
    """A run in which the node takes part."""

    run: str
    client: int
    method: str
    begun: str


class PrivateStore:
    """An open file of private states."""

    def __init__(self, folder: Path) -> None:
        make_private_folder(folder)
        path = folder / FILE
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite's other files get the same mode
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            for setting in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
                self._db.execute(f"PRAGMA {setting}")
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
        except (OSError, sqlite3.Error) as error:
            raise InvalidInputError(f"cannot use '{path}' for private states: {error}") from None

    def register_run(self, run: str, client: int, method: str, identity: str) -> None:
        """Store a run at its first task.

        Args:
            run: Identifier of the run.
            client: Number of this client in the run.
            method: The method's name, for error messages.
            identity: Hash of everything that must not change during a run.

        Raises:
            NotAllowedError: The run began with another client number, method, model, seed or input form.
        """
        self._db.execute(
            "INSERT OR IGNORE INTO runs(run, client, method, identity) VALUES (?, ?, ?, ?)",
            (run, client, method, identity),
        )
        query = "SELECT client, method, identity FROM runs WHERE run = ?"
        known = self._db.execute(query, (run,)).fetchone()
        if known != (client, method, identity):
            raise NotAllowedError(
                f"run {run} began as client {known[0]} with {known[1]}; got client {client} with {method}, "
                "or another model, seed or form of inputs"
            )

    def read(self, run: str, base: Receipt | None) -> State | None:
        """Return exactly the state of this receipt; None before the first."""
        if base is None:
            return None
        query = "SELECT state FROM states WHERE run = ? AND round = ?"
        row = self._db.execute(query, (run, base.round)).fetchone()
        if row is None:
            raise PrivateStateError(f"no state of round {base.round} of run {run} is stored here")
        state = decode(row[0])
        if sha256(state) != base.sha256:
            raise PrivateStateError(
                f"the state of round {base.round} of run {run} is not the one that the server accepted"
            )
        return state

    def write(
        self, run: str, base: Receipt | None, keep: Iterable[int], round_: int, state: State
    ) -> Receipt:
        """Store the state of a round, delete states that are no longer needed, and return the receipt.

        Args:
            run: Identifier of the run.
            base: Receipt of the state from which the round started.
            keep: Rounds to which the run's file on the server refers.
            round_: Round of the new state.
            state: The new state.
        """
        receipt = Receipt(round_, sha256(state))
        kept = [*keep]
        oldest = -1 if base is None else base.round
        marks = ", ".join("?" * len(kept))
        self._db.execute("BEGIN IMMEDIATE")
        try:
            # Newer states stay: a late task must not delete the results of later ones.
            self._db.execute(
                f"DELETE FROM states WHERE run = ? AND round < ? AND round NOT IN ({marks})",
                (run, oldest, *kept),
            )
            self._db.execute(
                "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)",
                (run, round_, receipt.sha256, encode(state)),
            )
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        return receipt

    def rounds(self, run: str) -> list[int]:
        """Return the rounds of a run whose states are stored."""
        query = "SELECT round FROM states WHERE run = ? ORDER BY round"
        return [round_ for (round_,) in self._db.execute(query, (run,))]

    def runs(self) -> list[StoredRun]:
        """Return all runs, the oldest first."""
        query = "SELECT run, client, method, begun FROM runs ORDER BY begun, rowid"
        return [StoredRun(*row) for row in self._db.execute(query)]

    def keep_model(self, run: str, description: str, message: bytes) -> None:
        """Store the server's message of the best round: with the state of that round it is the model."""
        self._db.execute("INSERT OR REPLACE INTO models VALUES (?, ?, ?)", (run, description, message))

    def model(self, run: str) -> tuple[str, bytes]:
        """Return the description and the message that `keep_model` stored."""
        query = "SELECT description, message FROM models WHERE run = ?"
        row = self._db.execute(query, (run,)).fetchone()
        if row is None:
            known = [name for (name,) in self._db.execute("SELECT run FROM models")]
            raise InvalidInputError(
                f"no model of run '{run}' is stored here: the server sends it when the run ends; "
                f"stored: {', '.join(known) or 'none'}"
            )
        return row[0], row[1]

    def close(self) -> None:
        """Close the file."""
        self._db.close()
