"""Where data files are looked for, and what to say when they are not there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from feddbe.errors import BadInput
from feddbe.paths import expand

__all__ = ["cache_folder", "cache_folders", "find_first", "folders", "missing", "plain"]


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


def missing(title: str, name: str, data_dir: Path | None, files: str, *also: str) -> BadInput:
    """The error for a data set that is nowhere: where it was looked for, and what to put where."""
    looked = ", ".join(map(str, folders(name, data_dir)))
    ways = [f"run 'feddbe data get {name}'", *also, f"or put {files} into {cache_folder(name, data_dir)}"]
    return BadInput(f"{title} is in none of {looked}; {', '.join(ways)}")


def plain(path: Path) -> None:
    """Refuse what is neither file nor folder: opening a pipe waits for ever, a device has no end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise BadInput(f"{path} is neither a file nor a folder; data is read from these only")
