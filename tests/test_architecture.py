"""The map in docs/architecture.md holds: arrows go one way, modules and functions stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from docs.imports import ROOMS, modules, room, uses

SOURCES = sorted(modules())


def test_every_module_is_in_a_room() -> None:
    assert {room(name) for name in SOURCES} <= set(ROOMS)


@pytest.mark.parametrize("module", SOURCES)
def test_arrows_go_one_way(module: str) -> None:
    """A room imports those before it in the list, and itself."""
    allowed = ROOMS[: ROOMS.index(room(module)) + 1]
    assert {used for used in uses(module) if room(used) not in allowed} == set()


@pytest.mark.parametrize("module", SOURCES)
def test_functions_are_short(module: str) -> None:
    """No function over 60 lines (what numba compiles to one may be longer)."""
    text = modules()[module].read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno:
            assert node.end_lineno - node.lineno < 60, node.name


def test_the_picture_is_of_this_code() -> None:
    """It is drawn from what `uses` finds; the page shows it."""
    page = Path("docs/architecture.md").read_text(encoding="utf-8")
    assert "images/imports.png" in page
    assert "python -m docs.imports" in page
