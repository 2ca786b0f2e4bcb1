"""Paths as users write them, and small files that may come from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from feddbe.errors import InvalidInputError, one_line, truncate

RUNS_DIR = Path("runs")
"""Default parent folder of runs."""
_MAX_TEXT_BYTES = 2**26


def expand_path(text: str | Path) -> Path:
    """Return the path with a leading `~` replaced by the user's home folder.

    Raises:
        InvalidInputError: The path cannot be opened, printed or stored in a run's file.
    """
    try:
        str(text).encode()
        if "\0" in str(text):
            raise ValueError("it contains a NUL character")
        return Path(text).expanduser()
    except UnicodeEncodeError:
        reason = "it is not UTF-8"
    except (ValueError, RuntimeError) as error:
        reason = one_line(error).rstrip(".")
    raise InvalidInputError(
        f"cannot use the path '{truncate(text)}': {reason}; use another path, or rename it"
    )


def read_text_file(path: Path) -> str:
    """Return the text of a file.

    Raises:
        OSError: The file cannot be read, is a pipe or a device, or is too large for a text.
        ValueError: The file is not UTF-8.
    """
    status = path.stat()
    if not path.is_file():
        raise OSError(None, "it is not a plain file")  # a pipe blocks, and a device has no end
    if status.st_size > _MAX_TEXT_BYTES:
        raise OSError(None, f"it has {status.st_size} bytes; expected at most {_MAX_TEXT_BYTES}")
    return path.read_text(encoding="utf-8")


def read_json_file(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: The file cannot be read, see `read_text_file`.
        ValueError: The file is not JSON, or nested too deeply.
    """
    try:
        return msgspec.json.decode(read_text_file(path))
    except RecursionError:
        raise ValueError("nested too deeply") from None
