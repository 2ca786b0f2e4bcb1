"""Publishers' files: where they are kept, and how they get there whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from feddbe.errors import BadInput

__all__ = ["Progress", "download"]

Progress = Callable[[int, int | None], None]
"""Called with the bytes of this file that are here and, if the server says so, the bytes in all."""

_log = logging.getLogger("feddbe")
_CHUNK = 1 << 18
_TIMEOUT = 30.0
_TRIES = 3  # in a row without a new byte
_PAUSE = 0.25


class _Interrupted(Exception):
    """The connection failed in a way that another try may mend."""


def download(url: str, target: Path, checksum: str | None = None, progress: Progress | None = None) -> str:
    """Fetch `url` to `target`, going on where an earlier try stopped; returns the file's SHA-256.

    `checksum` is "md5:HEX" or "sha256:HEX". The bytes gather in `target.part`, which gets its name only
    when length and sum are right; the SHA-256 is kept beside it in `target.sha256`.
    """
    part, record = (target.with_name(target.name + suffix) for suffix in (".part", ".sha256"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and checksum and _sum(target, checksum) == checksum:
            return _recorded(target, record)
        if checksum is None:
            part.unlink(missing_ok=True)  # without a sum nobody would notice that two versions got mixed
        _fetch(url, target, part, progress)
        got = _sum(part, checksum) if checksum else None
        if got != checksum:
            part.unlink()
            raise BadInput(
                f"{target.name} from {url} has the checksum {got}, expected {checksum}; the download was "
                "removed, try again later or fetch the file from elsewhere"
            )
        part.replace(target)
        sha256 = _recorded(target, record)
        if checksum is None:
            _log.warning(
                "feddbe: %s is not verified, its publisher gives no checksum; its SHA-256 %s is kept in %s",
                target, sha256, record.name,
            )  # fmt: skip
        return sha256
    except OSError as error:
        raise BadInput(
            f"cannot write {target}: {error.strerror or error}; choose another --data-dir"
        ) from None


def _sum(path: Path, kind: str) -> str:
    algorithm = kind.partition(":")[0]
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return f"{algorithm}:{digest.hexdigest()}"


def _recorded(target: Path, record: Path) -> str:
    sha256 = _sum(target, "sha256").partition(":")[2]
    record.write_text(f"{sha256}  {target.name}\n")
    return sha256


def _fetch(url: str, target: Path, part: Path, progress: Progress | None) -> None:
    """Bring `part` to its full length, trying again as long as tries bring new bytes."""
    best, failures = _size(part), 0
    while True:
        try:
            return _try(url, part, progress)
        except HTTPError as error:
            with error:
                reason, temporary = f"the server answers {error.code} {error.reason}", error.code >= 500
        except _Interrupted as error:
            reason, temporary = str(error), True
        if _size(part) > best:  # not the last size: a server without Range starts anew each time
            best, failures = _size(part), 0
        else:
            failures += 1
        if not temporary or failures == _TRIES:
            raise BadInput(
                f"cannot fetch {url} ({reason}); try again later, or fetch {target.name} from there by other "
                f"means and put it at {target}"
            )
        time.sleep(_PAUSE * max(failures, 1))


def _try(url: str, part: Path, progress: Progress | None) -> None:
    """One request for what is missing."""
    have = _size(part)
    try:
        response = _ask(url, have)
    except HTTPError as error:
        if error.code != 416:
            raise
        with error:  # nothing there to send: the part is complete, or it is not a part of this file
            if _total(error.headers.get("Content-Range")) == have:
                return
        part.unlink(missing_ok=True)
        raise _Interrupted("the server refuses to continue the download") from None
    with response:
        content_range = response.headers.get("Content-Range")
        resumed = response.status == 206
        if resumed and not (content_range or "").startswith(f"bytes {have}-"):
            part.unlink(missing_ok=True)
            raise _Interrupted(f"the server sends {content_range or 'an unnamed range'}, asked for {have}-")
        total = _total(content_range if resumed else response.headers.get("Content-Length"))
        done = have if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            while chunk := _read(response):
                file.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
    if total is not None and done != total:
        raise _Interrupted(f"the connection ended after {done} of {total} bytes")


def _ask(url: str, have: int) -> HTTPResponse:
    request = Request(url, headers={"User-Agent": "feddbe"} | ({"Range": f"bytes={have}-"} if have else {}))
    try:
        response: HTTPResponse = urlopen(request, timeout=_TIMEOUT)
    except HTTPError:
        raise
    except (OSError, HTTPException) as error:
        raise _Interrupted(getattr(error, "reason", None) or error) from None
    return response


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as error:
        raise _Interrupted(f"the connection broke: {error}") from None


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _total(header: str | None) -> int | None:
    """The file's full length from 'bytes 5-9/10', 'bytes */10' or '10', if it is said."""
    total = (header or "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None
