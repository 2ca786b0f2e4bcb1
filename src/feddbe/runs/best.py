"""The clients' states with which the best entry was evaluated stay in the run's file when they are replaced.

Entry t is evaluated in the round that replaces the states that it was evaluated with. So a state that is
replaced is set aside until the end of the round; then it is known which entry is the best, and whether the
state was that one's. Nothing is copied: only the kind of a row changes, which its checksum does not cover.
All kinds of a state have names of one length, because SQLite then changes a row where it lies.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from zlib import crc32

from feddbe.runs.checksums import crc_of

__all__ = ["KEPT", "forget", "seals", "set_aside", "settle"]

KEPT = {"private": "PRIVATE", "upload": "UPLOAD"}
"""The kind of a state that is kept for the best entry."""
_WRITTEN = {"best": "last", **{kept: kind for kind, kept in KEPT.items()}}
"""And back: as what it was written, the server's best state too."""
_ASIDE = {kind: kind.title() for kind in KEPT}


def seals(kind: str, client: int, round: int, state: bytes) -> Iterator[int]:
    """Checksums that a state may have: as what it was written; once, the server's best as itself."""
    return (crc32(state, crc_of((name, client, round))) for name in (_WRITTEN.get(kind, kind), kind))


def set_aside(db: sqlite3.Connection, kind: str, client: int) -> None:
    """A client's state is about to be replaced, perhaps once more in the same round."""
    move = "UPDATE OR IGNORE states SET kind = ? WHERE kind = ? AND client = ?"
    db.execute(move, (_ASIDE[kind], kind, client))


def forget(db: sqlite3.Connection) -> None:
    """Another entry is the best from now on."""
    db.executemany("DELETE FROM states WHERE kind = ?", [(kept,) for kept in KEPT.values()])


def settle(db: sqlite3.Connection) -> None:
    """Of the states that were replaced keep those of the best entry: made before it or in it. Where one is
    younger, the best entry's is kept already, or there was none yet. A run begun with --no-keep-best keeps
    none."""
    entry = db.execute("SELECT round FROM states WHERE kind = 'best'").fetchone()
    if db.execute("SELECT 1 FROM meta WHERE key = 'keeps_best' AND value = 'false'").fetchone():
        entry = None
    for kind, aside in _ASIDE.items():
        if entry:
            move = "UPDATE states SET kind = ? WHERE kind = ? AND round <= ?"
            db.execute(move, (KEPT[kind], aside, entry[0]))
        db.execute("DELETE FROM states WHERE kind = ?", (aside,))
