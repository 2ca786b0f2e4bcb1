"""A run of format 2, which had a column for every number, read as what format 3 stores."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddbe.measures.rows import ALL, Row
from feddbe.runs.lock import alone
from feddbe.runs.sqlite_file import FILE, connect, damaged, format_of

if TYPE_CHECKING:
    from feddbe.runs.store import Store

__all__ = ["in_memory", "migrate"]


def migrate(kind: type[Store], folder: Path) -> None:
    """Put a run of the present format in the place of one of format 2."""
    with alone(folder, wait=60):
        if format_of(folder) != 2:  # another process was faster
            return
        old = connect(folder / FILE)
        try:
            # fails while an older feddbe uses the run; leaves no WAL for the new file to take for its own
            old.execute("PRAGMA journal_mode = DELETE")
            old.execute("BEGIN EXCLUSIVE")
            ((largest,),) = old.execute("SELECT max(length(state)) FROM server")
            kind.build(folder, lambda store: _copy(old, store), large=largest > 2**20)
        finally:
            old.close()


def in_memory(kind: type[Store], folder: Path) -> Store:
    """A run of format 2 that can only be read."""
    old, new = connect(folder / FILE), sqlite3.connect(":memory:", isolation_level=None)
    try:
        store = kind(folder, new)
        store.begin(lambda store: _copy(old, store))
    finally:
        old.close()
    new.execute("PRAGMA query_only = ON")
    return store


def _copy(old: sqlite3.Connection, new: Store) -> None:
    """All that the old run has, into a new one that is empty."""
    try:
        for key, value in _meta(old).items():
            new.set_meta(key, value)
        new.write_rows(_rows(old))
        for kind, client, round, state in _states(old):
            new.write_state(kind, client, state, round)
    except (KeyError, TypeError, ValueError) as error:  # it has no checksums
        raise damaged(new.folder, f"format 2: {error}") from error


def _meta(old: sqlite3.Connection) -> dict[str, Any]:
    """What is written about the run. The readings of newcomers have become rows; the moment that counts was
    said in every round, and is said once."""
    found = {key: json.loads(value) for key, value in old.execute("SELECT key, value FROM meta")}
    found.pop("format")
    if found.get("newcomers"):
        found["newcomers"] = {key: found["newcomers"][key] for key in ("round", "clients", "epochs")}
    when = old.execute("SELECT max(moment) FROM rounds").fetchone()[0]
    return found | ({"when": when} if when else {})


def _rows(old: sqlite3.Connection) -> Iterator[Row]:
    """What was measured, of each client and of all."""
    yield from _clients(old)
    yield from _rounds(old)
    found = old.execute("SELECT value FROM meta WHERE key = 'newcomers'").fetchone()
    if newcomers := json.loads(found[0]) if found else {}:
        for moment in ("before", "adapted"):
            yield from _readings(newcomers["round"], f"newcomers {moment}", newcomers[moment])


def _states(old: sqlite3.Connection) -> Iterator[tuple[str, int, int, bytes]]:
    """(kind, client, round, safetensors bytes) of every state, one at a time."""
    yield from old.execute(f"SELECT which, {ALL}, round, state FROM server")
    yield from old.execute("SELECT 'private', client, round, state FROM clients")
    yield from old.execute("SELECT 'upload', client, round, state FROM uploads")


def _clients(old: sqlite3.Connection) -> Iterator[Row]:
    old_rows = old.execute(
        "SELECT round, client, coalesce(moment, 'before'), test_samples, correct, correct_adapted, "
        "correct_after, c.auc, test_loss, c.train_loss, c.bytes_up, c.bytes_down, c.seconds "
        "FROM client_rounds c JOIN rounds USING (round)"
    )
    for round, client, when, n, correct, adapted, after, auc, loss, trained, up, down, seconds in old_rows:
        for moment, hits in {"before": correct, "adapted": adapted, "after": after}.items():
            if n and hits is not None:
                yield Row(round, client, moment, "accuracy", hits / n, n)
        for name, value in {"auc": auc, "loss": loss}.items():
            if n and value is not None:
                yield Row(round, client, when, name, value, n)
        # over how many samples the loss was is not known any more
        training = {"loss": trained, "bytes_up": up, "bytes_down": down, "seconds": seconds}
        for name, value in training.items():
            if value is not None:
                yield Row(round, client, "training", name, value, 1)


def _rounds(old: sqlite3.Connection) -> Iterator[Row]:
    old_rows = old.execute(
        "SELECT round, coalesce(moment, 'before'), before, adapted, after, validation, auc, train_loss, "
        "seconds, bytes_up, bytes_down, "
        "(SELECT count(bytes_down) FROM client_rounds c WHERE c.round = rounds.round) FROM rounds"
    )
    for round, when, before, adapted, after, validation, auc, loss, seconds, up, down, clients in old_rows:
        moments = {"before": before, "adapted": adapted, "after": after, "validation": validation}
        for moment, text in moments.items():
            yield from _readings(round, moment, json.loads(text) if text else None)
        if auc is not None:
            yield Row(round, ALL, when, "auc", auc, 1)
        if loss is not None:
            yield Row(round, ALL, "training", "loss", loss, 1)
        for name, total in {"seconds": seconds, "bytes_up": up, "bytes_down": down}.items():
            yield Row(round, ALL, "round", name, total, clients)


def _readings(round: int, moment: str, accuracy: dict[str, float] | None) -> Iterator[Row]:
    for reading, value in (accuracy or {}).items():
        name = "accuracy" if reading == "weighted" else f"accuracy/{reading}"
        yield Row(round, ALL, moment, name, value, 1)
