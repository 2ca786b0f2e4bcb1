"""The map in docs/architecture.md holds: arrows go one way, modules and functions stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from docs.imports import PACKAGES, imported_modules, modules, package_of
from docs.size import frames_to_first_step

SOURCES = sorted(modules())


def test_every_module_is_in_a_room() -> None:
    assert {package_of(name) for name in SOURCES} <= set(PACKAGES)


@pytest.mark.parametrize("module", SOURCES)
def test_arrows_go_one_way(module: str) -> None:
    """A room imports those before it in the list, and itself."""
    allowed = PACKAGES[: PACKAGES.index(package_of(module)) + 1]
    assert {used for used in imported_modules(module) if package_of(used) not in allowed} == set()


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


def test_few_calls_from_the_command_to_local_training(capsys: pytest.CaptureFixture[str]) -> None:
    """At most 14 in 8 files, 8 of them below the round loop, and three from the request to the round."""
    frames = frames_to_first_step()
    names = [frame.name for frame in frames]
    assert len(frames) <= 14
    assert len({frame.filename for frame in frames}) <= 8
    assert len(names) - names.index("run_experiment") - 1 <= 8
    assert names.index("run_round") - names.index("run_requests") == 3
