"""One process at a time works on a run; reading needs no lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from feddbe.errors import StoreError

__all__ = ["LOCK", "alone", "make_folder"]

LOCK = ".lock"
"""Its name; only a kill leaves it, and the next run there takes it."""


def make_folder(folder: Path) -> None:
    """The folder of a run, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder '{folder}': {error.strerror}") from error


@contextmanager
def alone(folder: Path, wait: float = 1.0) -> Iterator[None]:
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
