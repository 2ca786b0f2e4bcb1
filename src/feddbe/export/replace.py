"""A folder that is written as a whole: under another name first, which is changed when all is there."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from feddbe.errors import BadInput, short

__all__ = ["replaced_folder"]

_CACHE = "__pycache__"
"""Python adds it when a script in the folder is executed."""


@contextmanager
def replaced_folder(folder: Path, names: Collection[str], mark: str) -> Iterator[Path]:
    """Give a new folder to write into, which takes the place of `folder` when the block ends.

    If the block fails or the process is killed, what was there stays as it was. Nothing is written through a
    link, neither `folder` itself nor one in it.

    Args:
        folder: Where the result is to be. It may not exist, be empty, or hold an older result.
        names: Files that a result may have; a folder with others is not replaced.
        mark: The one of them that every result has.

    Raises:
        BadInput: `folder` is a link or holds something else.
        OSError: It cannot be written.
    """
    _check_replaceable(folder, names, mark)
    place = folder.parent.resolve() / folder.name
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(place)
    new = place.with_name(f"{_prefix(place)}{os.getpid()}-{secrets.token_hex(4)}.new")
    old = new.with_suffix(".old")
    new.mkdir()
    try:
        yield new
        if place.exists():
            place.rename(old)
        try:
            new.rename(place)
        except OSError:
            if old.exists():
                old.rename(place)
            raise
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _check_replaceable(folder: Path, names: Collection[str], mark: str) -> None:
    """Refuse a folder that is a link, the working directory, or holds other files than a result's."""
    if folder.is_symlink():
        raise BadInput(f"'{folder}' is a link, through which nothing is written; choose another --out")
    if folder.name in ("", "..") or (folder.exists() and Path.cwd().is_relative_to(folder.resolve())):
        raise BadInput(f"'{folder}' is the working directory or above it; choose a folder in it for --out")
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    others = there - {*names, _CACHE}
    if others or (there and mark not in there):
        shown = short(min(others or there))
        raise BadInput(f"'{folder}' holds something else ('{shown}'); choose another --out")


def _prefix(place: Path) -> str:
    """Return how names of unfinished folders begin that a process on this machine makes for this place."""
    machine = "".join(letter for letter in platform.node() if letter.isalnum())
    return f".{place.name}.{machine}-"


def _remove_leftovers(place: Path) -> None:
    """Remove what processes of this machine left here that were killed."""
    pattern = re.compile(rf"{re.escape(_prefix(place))}(\d+)-[0-9a-f]+\.(new|old)")
    for path in place.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not _is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's process
        return True
    return True
