"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from feddbe.errors import InvalidInputError, one_line, truncate

RUNS_DIR = Path("runs")
"""Default parent folder of runs."""


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
