"""Rules of docs/architecture.md: imports point downwards, functions are short, the call stack is shallow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from docs.imports import PACKAGES, imported_modules, modules, package_of
from docs.size import frames_to_first_step

SOURCES = sorted(modules())


def test_every_module_is_in_a_listed_package() -> None:
    assert {package_of(name) for name in SOURCES} <= set(PACKAGES)


@pytest.mark.parametrize("module", SOURCES)
def test_package_imports_only_packages_below(module: str) -> None:
    """`PACKAGES` lists them from bottom to top."""
    allowed = PACKAGES[: PACKAGES.index(package_of(module)) + 1]
    assert {name for name in imported_modules(module) if package_of(name) not in allowed} == set()


@pytest.mark.parametrize("module", SOURCES)
def test_functions_have_at_most_60_lines(module: str) -> None:
    """Docstrings are not counted."""
    text = modules()[module].read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert count_code_lines(node) <= 60, node.name


def count_code_lines(function: ast.FunctionDef) -> int:
    """Return the number of lines of a function without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    docstring = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return lines


def test_page_shows_the_figure_of_imports() -> None:
    page = Path("docs/architecture.md").read_text(encoding="utf-8")
    assert "images/imports.png" in page
    assert "python -m docs.imports" in page


def test_local_training_is_few_calls_below_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Count at most 14 calls in 9 files, 8 of them below the round loop, and 3 from request to round."""
    frames = frames_to_first_step()
    names = [frame.name for frame in frames]
    assert len(frames) <= 14
    assert len({frame.filename for frame in frames}) <= 9
    assert len(names) - names.index("run_experiment") - 1 <= 8
    assert names.index("run_round") - names.index("run_requests") == 3
