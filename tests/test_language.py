"""Language of sources, tests and docs: names, phrases and docstrings follow CONTRIBUTING.md.

A failure lists each violation with its file and line.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest

import feddbe
from feddbe import cli

ROOT = Path(__file__).parents[1]
SOURCE_DIR = ROOT / "src"
SOURCES = sorted(SOURCE_DIR.rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
TEXT_SUFFIXES = (".py", ".md", ".js", ".css", ".toml", ".ipynb")

VAGUE_NAMES = {
    "again", "alone", "answer", "apart", "asked", "at", "each", "every", "found", "given", "held", "here",
    "impatient", "its", "look", "looks", "made", "mine", "now", "of", "one", "own", "perform", "place",
    "places", "reopened", "said", "sealed", "seen", "sent", "shown", "some", "steady", "taken", "tell",
    "there", "told", "untold", "wanted",
}  # fmt: skip
"""Names that cannot be understood without the code around them.

`carry` is allowed: it is the state that a training step passes to the next one, as in jax.lax.scan.
"""

PHRASES = (
    "goes on", "go on", "carried on", "carry on", "anew", "so many", "is told", "are told", "nobody",
    "somebody", "lies in", "of its own", "by itself", "in good order", "come to nothing", "without a word",
    "was not kept",
    "is no (?!longer|more)[a-z]+",
)  # fmt: skip
"""Regular expressions of banned phrases; a blank also matches line breaks in text and comments."""

FIRST_WORDS = (
    "What", "Who", "Whose", "Of", "Those", "That", "The same", "Where", "Whether", "Why", "How", "When",
    "So many", "All that", "Is told",
)  # fmt: skip
"""Words with which no docstring begins."""


def compile_phrases(phrases: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the phrases as whole words, also across line breaks."""
    alternatives = "|".join(phrase.replace(" ", r"[\s#]+") for phrase in phrases)
    return re.compile(rf"\b({alternatives})\b", re.IGNORECASE)


PHRASE = compile_phrases(PHRASES)
FIRST_WORD = re.compile(rf"({'|'.join(FIRST_WORDS)})\b")


class Violation(NamedTuple):
    """A violation of a rule, with its location."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


def assert_none(violations: Iterable[Violation]) -> None:
    """Fail with a line per violation."""
    lines = [str(violation) for violation in sorted(violations)]
    if lines:
        pytest.fail("\n".join([f"{len(lines)} violations", *lines]), pytrace=False)


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


# Phrases


def text_files() -> list[Path]:
    """Return the files that users and contributors read; third-party scripts are left out."""
    folders = ("src", "tests", "docs", "examples", "benchmarks")
    paths = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXT_SUFFIXES
    ]
    third_party = {ROOT / "docs" / "assets" / "iframe-worker.js"}
    return [
        *sorted(ROOT.glob("*.md")),
        *(path for path in sorted(paths) if "uplot" not in path.parts and path not in third_party),
    ]


def find_phrases(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each banned phrase."""
    for match in PHRASE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())


def test_no_file_has_a_banned_phrase() -> None:
    assert_none(
        Violation(path, line, f"phrase {phrase!r}")
        for path in text_files()
        if path != Path(__file__)
        for line, phrase in find_phrases(path.read_text(encoding="utf-8"))
    )


def all_commands(command: click.Command, name: str) -> dict[str, click.Command]:
    """Return a command and its subcommands by their full names."""
    commands = {name: command}
    for subcommand_name, subcommand in getattr(command, "commands", {}).items():
        commands |= all_commands(subcommand, f"{name} {subcommand_name}")
    return commands


@pytest.mark.parametrize("name", all_commands(cli.app, "feddbe"))
def test_help_has_no_banned_phrase(name: str) -> None:
    command = all_commands(cli.app, "feddbe")[name]
    help_text = command.get_help(click.Context(command, info_name=name))
    assert help_text.startswith("Usage: feddbe")
    assert list(find_phrases(help_text)) == []


# Names


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of all functions, classes, parameters, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


@pytest.mark.parametrize("paths", [SOURCES, TESTS], ids=["src", "tests"])
def test_no_name_is_vague(paths: list[Path]) -> None:
    assert_none(
        Violation(path, line, f"name {name!r}")
        for path in paths
        for line, name in defined_names(parse(path))
        if name.strip("_").lower() in VAGUE_NAMES
    )


# Docstrings


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of all docstrings, also those of fields and constants."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value.strip()


def test_docstrings_do_not_begin_with_a_question_or_pronoun() -> None:
    assert_none(
        Violation(path, line, f"docstring {text.splitlines()[0]!r}")
        for path in SOURCES
        for line, text in docstrings(parse(path))
        if FIRST_WORD.match(text)
    )


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def module_files() -> dict[str, Path]:
    """Return the source files by module name."""
    files = {}
    for path in SOURCES:
        parts = path.relative_to(SOURCE_DIR).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def package_of(module: str) -> str:
    """Return the package below feddbe that a module belongs to, as in `data`."""
    return module.split(".")[1] if "." in module else ""


@cache
def imported_names(module: str) -> dict[str, tuple[str, str]]:
    """Return local name -> (module, name) for all imports of names from feddbe."""
    names = {}
    for node in ast.walk(parse(module_files()[module])):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "feddbe":
            for alias in node.names:
                names[alias.asname or alias.name] = (node.module, alias.name)
    return names


def find_definition(module: str, name: str) -> tuple[str, Definition] | None:
    """Return the module and node of a function or class, following re-exports; None for other values."""
    if module not in module_files():
        return None
    for node in parse(module_files()[module]).body:
        if isinstance(node, Definition) and node.name == name:
            return module, node
    origin = imported_names(module).get(name)
    return find_definition(*origin) if origin else None


def used_definitions(module: str) -> Iterator[tuple[str, Definition]]:
    """Yield the functions and classes of feddbe that a module imports, or uses as `module.name`."""
    imported_modules = {}
    for local_name, (origin, name) in imported_names(module).items():
        if f"{origin}.{name}" in module_files():
            imported_modules[local_name] = f"{origin}.{name}"
        else:
            definition = find_definition(origin, name)
            if definition is not None:
                yield definition
    for node in ast.walk(parse(module_files()[module])):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used_module = imported_modules.get(node.value.id)
            definition = find_definition(used_module, node.attr) if used_module else None
            if definition is not None:
                yield definition


def test_definitions_used_by_other_packages_have_a_docstring() -> None:
    violations = set()
    for module in module_files():
        for origin, node in used_definitions(module):
            is_public = not node.name.startswith("_")
            if is_public and package_of(origin) != package_of(module) and not ast.get_docstring(node):
                violations.add(Violation(module_files()[origin], node.lineno, f"no docstring: {node.name}"))
    assert_none(violations)


@pytest.mark.parametrize("name", feddbe.__all__)
def test_public_name_has_a_docstring(name: str) -> None:
    value = getattr(feddbe, name)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        value = type(value)
    docstring = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert docstring, f"{inspect.getsourcefile(value)}: {name}"
    assert not docstring.startswith(f"{value.__name__}("), "generated by dataclass"


PUBLIC_FUNCTIONS = [name for name in feddbe.__all__ if inspect.isfunction(getattr(feddbe, name))]


@pytest.mark.parametrize("name", PUBLIC_FUNCTIONS)
def test_docstring_of_public_function_describes_every_argument(name: str) -> None:
    function = getattr(feddbe, name)
    module = importlib.import_module(function.__module__)
    path, line = Path(str(module.__file__)), inspect.getsourcelines(function)[1]
    _, _, section = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    section = re.split(r"\n\S", section)[0]
    described = re.findall(r"^ {4}\*{0,2}(\w+):", section, re.MULTILINE)
    parameters = list(inspect.signature(function).parameters)
    assert_none(
        Violation(path, line, f"{name}: argument {parameter!r} is not in Args")
        for parameter in parameters
        if parameter not in described
    )
    assert described == parameters, f"{path}:{line}: order of Args"


@pytest.mark.parametrize("name", PUBLIC_FUNCTIONS)
def test_docstring_of_public_function_describes_results_and_errors(name: str) -> None:
    function = getattr(feddbe, name)
    docstring = inspect.getdoc(function) or ""
    returns_a_value = inspect.signature(function).return_annotation not in (None, "None")
    assert ("\nReturns:\n" in docstring) == returns_a_value
    assert ("\nRaises:\n" in docstring) == (name != "list_runs"), "a run that cannot be read is a record"
