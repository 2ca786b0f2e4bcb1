"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from feddbe.errors import BadInput

__all__ = ["expand"]


def expand(text: str | Path) -> Path:
    """The path, with the user's home folder for a `~` at its beginning."""
    if "\0" in str(text):
        raise BadInput(f"the path {str(text)!r} has a NUL character in it")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise BadInput(f"'{text}': there is no user of that name here, so no home folder") from error
