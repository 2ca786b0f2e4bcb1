"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from feddbe.errors import InvalidInputError
from feddbe.paths import expand_path


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
