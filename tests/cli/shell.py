"""The command line in this process, with captured output."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from feddbe import cli
from tests.progress import remove_progress

__all__ = ["SMALL", "Result", "Shell", "list_tree"]

SMALL = "--clients 3 --partition iid --model mlp --engine serial"
"""Options with which a run takes a fraction of a second."""


class Result(NamedTuple):
    """Exit code and output of a command; progress lines are removed from `err`."""

    code: int
    out: str
    err: str


class Shell:
    """A shell that executes `feddbe ...`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: str) -> Result:
        """Execute the command line without its first word, feddbe."""
        self._capsys.readouterr()
        code = cli.main(shlex.split(line))
        out, err = self._capsys.readouterr()
        return Result(code, out, remove_progress(err))

    def json(self, line: str) -> dict[str, Any]:
        """Return the JSON document that a successful command prints."""
        code, out, err = self(f"{line} --json")
        assert (code, err) == (0, "")
        document: dict[str, Any] = json.loads(out)
        return document


def list_tree(folder: Path) -> dict[str, bytes | None]:
    """Return all paths below a folder, with the content of files."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}
