"""The command line, for tests of studies."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from feddbe.cli.main import main


class Result(NamedTuple):
    code: int
    out: str
    err: str


Shell = Callable[[str], Result]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """`feddbe ...` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(line: str) -> Result:
        capsys.readouterr()
        return Result(main(shlex.split(line)), *capsys.readouterr())

    return run
