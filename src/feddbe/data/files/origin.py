"""The source files of a cache, known by their content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

__all__ = ["Origin"]


class Origin:
    """Files, or folders of files, that something was made from."""

    def __init__(self, sources: Sequence[Path]) -> None:
        self.sources = sources
        self.stamp = _stamp(sources)
        """Changes whenever a file does: the time of a change cannot be set, as that of writing can."""

    @cached_property
    def content(self) -> list[list[str]]:
        """Name of each source and SHA-256 of its bytes; reads all of them."""
        return [[source.name, _sha256(source)] for source in self.sources]


def _stamp(sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in (file for source in sources for file in _files(source)):
        stat = path.stat()
        parts = path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_dev, stat.st_ino
        digest.update(repr(parts).encode())
    return digest.hexdigest()


def _sha256(source: Path) -> str:
    """Return the hash of a file, or of the names and hashes of a folder's files."""
    digest = hashlib.sha256()
    for path in _files(source):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.is_file()) if source.is_dir() else [source]
