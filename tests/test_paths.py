"""User paths, and files with excessive numbers or nesting."""

from __future__ import annotations

from pathlib import Path

import pytest

from feddbe.config.options import parse_options
from feddbe.errors import InvalidInputError
from feddbe.methods.registry import parse_method
from feddbe.paths import expand_path


def test_expand_path_of_home(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_invalid_path_raises_one_line_error(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as error:
        expand_path(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", ["x = " + "[" * 3000 + "]" * 3000, "rounds = " + "9" * 5000, 'out = "\xff"'],
    ids=["nested", "digits", "not UTF-8"],
)  # fmt: skip
def test_invalid_toml_raises_one_line_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidInputError, match=r"e\.toml' is not valid TOML: ") as error:
        parse_options([str(tmp_path / "e.toml")])
    assert len(str(error.value)) < 400 + len(str(tmp_path))


def test_sizes_have_upper_limits() -> None:
    for name in (
        "fedgen(noise=1e12)",
        "fedgen(hidden=1e12)",
        "fedgen(gen_batch=1e12)",
        "moon(projection=1e12)",
    ):
        with pytest.raises(InvalidInputError, match="allowed: a whole number >= "):
            parse_method(name)
