"""Paths as users write them, and small files that may come from anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from feddbe.cli.main import main
from feddbe.errors import InvalidInputError
from feddbe.paths import expand_path, read_json_file, read_text_file


def test_tilde_is_expanded_to_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    assert expand_path("~/runs") == Path("/home/user/runs")
    assert expand_path("a/~b") == Path("a/~b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("~nosuchuser/x", "cannot use the path '~nosuchuser/x': Could not determine home directory;"),
        ("a\0b", "cannot use the path 'a.b': it contains a NUL character;"),
        ("a\udcffb", "cannot use the path 'a.b': it is not UTF-8;"),
    ],
)
def test_invalid_path_is_answered_with_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as error:
        expand_path(text)
    assert "\n" not in str(error.value)


def test_files_that_are_not_small_texts_are_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(2**40)
    for name, message in {"pipe": "not a plain file", "large": "has 1099511627776 bytes"}.items():
        with pytest.raises(OSError, match=message):
            read_text_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_text_file(tmp_path / "none")


@pytest.mark.parametrize("content", [b"{", b"NaN", b"\xff", b"[" * 100_000, b'"\\ud800"'])
def test_file_that_is_not_json_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"truncated|malformed|utf-8|nested|surrogate"):
        read_json_file(tmp_path / "a.json")


def _write_pipe(path: Path) -> None:
    os.mkfifo(path)


def _write_nested(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("write", [_write_pipe, _write_nested])
@pytest.mark.parametrize("name", ["run.toml", "a.invitation", "data.json", "federation.toml"])
def test_pipes_and_nested_texts_are_one_line(
    write: Callable[[Path], None], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "federation.toml").write_text('host = "localhost"\nport = 8443\nlisten = "localhost"\n')
    (tmp_path / name).unlink(missing_ok=True)
    write(tmp_path / name)
    words = {
        "run.toml": ["run", str(tmp_path / name)],
        "a.invitation": ["federation", "join", str(tmp_path / name), "--data", "digits", "--state", "s"],
        "data.json": ["federation", "invite", str(tmp_path), "a"],
        "federation.toml": ["federation", "status", str(tmp_path)],
    }[name]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line or "is not a federation" in line
