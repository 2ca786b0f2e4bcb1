"""Publishers' files: where they are kept, and how they get there whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from http.client import IncompleteRead
from pathlib import Path
from typing import TYPE_CHECKING, cast

from filelock import FileLock, Timeout

from feddbe.errors import BadInput, DataMissingError, one_line
from feddbe.paths import expand

if TYPE_CHECKING:
    from requests import RequestException


Progress = Callable[[int, int | None], None]
"""Called with the bytes of this file that are here and, if the server says so, the bytes in all."""

_log = logging.getLogger("feddbe")
_CHUNK = 1 << 18
_TIMEOUT = 30.0
_TRIES = 3
_PAUSE = 0.25


class Verification(IntEnum):
    """How far files are known to be what was published; of several files the highest counts."""

    VERIFIED = 0
    UNCHANGED = 1
    NO_CHECKSUM = 2
    OTHER_CHECKSUM = 3
    NOT_PUBLISHED = 4


VERIFICATION_TEXTS = {
    Verification.VERIFIED: "verified",
    Verification.UNCHANGED: "unchanged since it was downloaded",
    Verification.NO_CHECKSUM: "not verified: there is no checksum",
    Verification.OTHER_CHECKSUM: "not verified: its checksum is not the published one",
    Verification.NOT_PUBLISHED: "not verified: these are not the publisher's files",
}


def download(
    url: str,
    target: Path,
    checksum: str | None = None,
    progress: Progress | None = None,
    again: bool = False,
) -> str:
    """Fetch a file, which gets its name only when its length and checksum are right.

    Its SHA-256 is kept beside it in `target.sha256`. One process at a time: the second waits, and finds the
    file there.

    Args:
        url: Where it is.
        target: Where to put it.
        checksum: The published one, "md5:HEX" or "sha256:HEX".
        progress: Called while bytes arrive.
        again: Fetch also what is there and right.

    Returns:
        The SHA-256 of the file.

    Raises:
        BadInput: If it cannot be fetched or written, or has another checksum.
    """
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            if target.exists() and not again and _is_right(target, checksum):
                return _recorded(target, checksum)
            try:
                _fetch(url, target, part, progress)
                got = _sums(part, checksum)[0] if checksum else None
                if got != checksum:
                    raise BadInput(
                        f"{target.name} from {url} has the checksum {got}, expected {checksum}; the download "
                        "was removed, try again later or fetch the file from elsewhere"
                    )
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
            sha256 = _recorded(target, checksum)
        if checksum is None:
            _log.warning(
                "feddbe: %s is not verified, its publisher gives no checksum; its SHA-256 %s is kept in %s",
                target, sha256, _record(target).name,
            )  # fmt: skip
        return sha256
    except OSError as error:
        raise BadInput(
            f"cannot write {target}: {error.strerror or error}; choose another --data-dir"
        ) from None


def verify(path: Path, checksum: str | None) -> Verification:
    """Compare a file with its published checksum and with the one that was kept when it was downloaded.

    Returns:
        How far it is verified. A file from elsewhere, perhaps packed differently, is not damaged.

    Raises:
        BadInput: If it was downloaded and is not what was published, or has changed since.
    """
    try:
        record = _record(path)
        known = f"sha256:{record.read_text().partition(' ')[0]}" if record.exists() else None
        expected = [wanted for wanted in (checksum, known) if wanted]
        found = _sums(path, *expected)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot verify {path}: {one_line(error)}; fetch it anew with --again") from None
    wrong = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    if wrong and known:
        raise BadInput(
            f"{path} is damaged: it has the checksum {wrong[0][0]}, expected {wrong[0][1]}; "
            "fetch it anew with --again"
        )
    if wrong:
        return Verification.OTHER_CHECKSUM
    if checksum:
        return Verification.VERIFIED
    return Verification.UNCHANGED if known else Verification.NO_CHECKSUM


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """No other process downloads this file meanwhile."""
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.warning("feddbe: another process downloads %s; waiting for it", target)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _record(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _is_right(target: Path, checksum: str | None) -> bool:
    """Whether what is there has the published sum or, if none is published, the one that was recorded."""
    try:
        return verify(target, checksum) in (Verification.VERIFIED, Verification.UNCHANGED)
    except BadInput:
        return False


def _sums(path: Path, *kinds: str) -> list[str]:
    """The file's sum by the algorithm of each of these, "md5:..." or "sha256:...", in one pass."""
    digests = [hashlib.new(kind.partition(":")[0], usedforsecurity=False) for kind in kinds]
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            for digest in digests:
                digest.update(chunk)
    return [f"{digest.name}:{digest.hexdigest()}" for digest in digests]


def _recorded(target: Path, checksum: str | None) -> str:
    """The SHA-256 of the file under its own name, kept beside it; the published sum must be right too."""
    found, *published = _sums(target, "sha256", *filter(None, [checksum]))
    if checksum and published != [checksum]:
        raise BadInput(f"{target} has the checksum {published[0]}, expected {checksum}; fetch it again")
    sha256 = found.partition(":")[2]
    _record(target).write_text(f"{sha256}  {target.name}\n")
    return sha256


def _fetch(url: str, target: Path, part: Path, progress: Progress | None) -> None:
    """Download to `part`, trying again where that may help."""
    import requests
    from pooch import HTTPDownloader

    headers = {"User-Agent": "feddbe", "Accept-Encoding": "identity"}  # archives must arrive packed
    for attempt in range(1, _TRIES + 1):
        bar = _Bar(progress)
        fetch = HTTPDownloader(progressbar=bar, chunk_size=_CHUNK, timeout=_TIMEOUT, headers=headers)
        try:
            fetch(url, str(part), None)
            return
        except requests.RequestException as error:
            answer = error.response
            if answer is not None:
                answer.close()  # pooch leaves it open
            if attempt == _TRIES or (answer is not None and answer.status_code < 500):
                raise BadInput(
                    f"cannot fetch {url} ({_reason(error)}); try again later, or fetch {target.name} from "
                    f"there by other means and put it at {target}"
                ) from None
        time.sleep(_PAUSE * attempt)


def _reason(error: RequestException) -> str:
    """Say in short why a request failed: requests wraps the cause several times."""
    if error.response is not None:
        return f"the server answers {error.response.status_code} {error.response.reason}"
    cause: BaseException = error
    while cause.__context__:
        cause = cause.__context__
    if isinstance(cause, IncompleteRead):
        received = cast(int, cause.partial)  # of urllib3's: a number of bytes, not the bytes
        total = received + (cause.expected or 0)
        return f"the connection ended after {received} of {total} bytes"
    return one_line(cause)


class _Bar:
    """Pooch's idea of a progress bar, as a call of `progress` whenever there are more bytes."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.total = 0
        self.done = 0

    def update(self, size: int) -> None:
        """Count a chunk; the last one is smaller than it says."""
        done = min(self.done + size, self.total) if self.total else self.done + size
        if self.progress and done > self.done:
            self.progress(done, self.total or None)
        self.done = done

    def reset(self) -> None:
        """Pooch begins anew only to reach `total`, which `update` has done."""

    def close(self) -> None:
        """There is nothing to close."""


def _roots(data_dir: Path | None) -> list[Path]:
    named = [place for place in (data_dir, os.environ.get("FEDDBE_DATA")) if place]
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "feddbe"
    return [expand(root) for root in (*named, home)]


def folders(name: str, data_dir: Path | None) -> list[Path]:
    """Where a data set's files are looked for, in order: each place itself, then its subfolder `name`."""
    return [folder for root in _roots(data_dir) for folder in (root, root / name)]


def cache_folders(name: str, data_dir: Path | None) -> list[Path]:
    """Where a data set's files can be written, the place to try first first."""
    return [root / name for root in _roots(data_dir)]


def cache_folder(name: str, data_dir: Path | None) -> Path:
    """Where a data set's files are downloaded to."""
    return cache_folders(name, data_dir)[0]


def find_first(name: str, data_dir: Path | None, candidates: Sequence[str]) -> Path | None:
    """The first of these files or folders that is in one of the data set's places."""
    places = [folder / candidate for folder in folders(name, data_dir) for candidate in candidates]
    return next((place for place in places if place.is_file() or place.is_dir()), None)


def missing(title: str, name: str, data_dir: Path | None, files: str, *also: str) -> DataMissingError:
    """The error for a data set that is nowhere: where it was looked for, and what to put where."""
    looked = ", ".join(map(str, folders(name, data_dir)))
    ways = [f"run 'feddbe data get {name}'", *also, f"or put {files} into {cache_folder(name, data_dir)}"]
    return DataMissingError(f"{title} is in none of {looked}; {', '.join(ways)}")


def plain(path: Path) -> None:
    """Refuse what is neither file nor folder: opening a pipe waits for ever, a device has no end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise BadInput(f"{path} is neither a file nor a folder; data is read from these only")
