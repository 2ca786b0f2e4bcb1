"""What SQLite's files beside a run promise. It leaves out what is damaged in a WAL, and all that came after,
without a word; so what was committed is counted before it opens the run, and what it used of that afterwards.

The formats: https://sqlite.org/fileformat2.html#walformat and https://sqlite.org/walformat.html. What cannot
be known: a WAL that is gone together with its index (`-shm`), as when only `run.sqlite` was copied.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from feddbe.runs.sqlite_file import FILE, damaged

__all__ = ["Pages", "committed", "left_beside", "lost"]


class Pages(NamedTuple):
    """Of a WAL."""

    committed: int
    """By its index, or by the marks in itself."""
    copied: int
    """So many of them are in the run's file already."""


def left_beside(folder: Path) -> bool:
    """Whether somebody uses the run, or did not get to close it."""
    return any((folder / f"{FILE}-{kind}").exists() for kind in ("wal", "shm"))


def committed(folder: Path) -> Pages:
    """Nobody may have the run open: closing its files would let go of the locks that SQLite has on them."""
    index = _index(folder)
    salts, marked = _marks(folder)
    if index is None:
        return Pages(marked, 0)
    known, pages = index
    return pages._replace(committed=max(pages.committed, marked)) if salts == known else pages


def lost(folder: Path, before: Pages) -> str:
    """What to say if SQLite, which has opened the run now, used less than was committed before."""
    index = _index(folder)
    used = index[1].committed if index else before.committed
    if used >= before.committed or before.committed <= before.copied:
        return ""
    if 0 < used < before.copied:  # older pages over newer ones
        raise damaged(folder, f"{FILE}-wal has {used} whole pages of {before.committed}")
    return f"{FILE}-wal was damaged or cut: {used} of {before.committed} pages could be used"


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""


def _index(folder: Path) -> tuple[bytes, Pages] | None:
    """(salts of the WAL, its pages), if the index is whole."""
    head = _read(folder / f"{FILE}-shm", 100)
    if len(head) < 100 or head[:48] != head[48:96] or not head[12]:
        return None
    (pages,), (copied,) = struct.unpack("=I", head[16:20]), struct.unpack("=I", head[96:100])
    return head[32:40], Pages(pages, copied)


def _marks(folder: Path) -> tuple[bytes, int]:
    """(salts, the last page that a transaction ends with), by the WAL itself, whole or not."""
    path = folder / f"{FILE}-wal"
    head = _read(path, 32)
    if len(head) < 32:
        return b"", 0
    salts, step, last = head[16:24], 24 + int.from_bytes(head[8:12], "big"), 0
    if step - 24 not in [2**k for k in range(9, 17)]:
        return salts, 0
    with path.open("rb") as file:
        for number in range(1, (path.stat().st_size - 32) // step + 1):
            file.seek(32 + (number - 1) * step)
            frame = file.read(24)
            if frame[8:16] == salts and any(frame[4:8]):
                last = number
    return salts, last
