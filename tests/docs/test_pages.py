"""Examples and commands in docs/: sessions are executed, commands are parsed."""

from __future__ import annotations

import doctest
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import feddbe
from tests.docs.test_readme import parse_command
from tests.waiting import PATIENCE

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXECUTED_PAGES = ("tutorial",)
"""Pages whose commands and snippets are all executed, in order, in one folder."""


def read_blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and text of each code block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def pages_with_sessions() -> list[Path]:
    return [page for page in PAGES if any(language == "pycon" for language, _ in read_blocks(page))]


@pytest.mark.parametrize("page", pages_with_sessions(), ids=lambda page: page.stem)
def test_session_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All examples of a page are one session; `...` matches any output."""
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"^```.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    session = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST)
    failures: list[str] = []
    results = runner.run(session, out=failures.append)
    assert results.attempted
    assert "".join(failures) == ""


@pytest.mark.parametrize("name", feddbe.__all__)
def test_public_name_has_an_example(name: str) -> None:
    """The example follows the name's entry, before the next entry, and uses the name or what it returned."""
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    _, entry, rest = text.partition(f"\n::: feddbe.{name}\n")
    assert entry, f"docs/api.md has no entry for {name}"
    assert text.count(entry) == 1
    examples = re.split(r"^(?::::|##) ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    assert ">>> " in examples, f"docs/api.md has no example for {name}"


def dotted_names() -> list[str]:
    """Return all names such as `feddbe.models.registry` in the pages."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return sorted(set(re.findall(r"`(feddbe(?:\.\w+)+)", text)))


@pytest.mark.parametrize("name", dotted_names())
def test_name_in_a_page_exists(name: str) -> None:
    pkgutil.resolve_name(name)


def test_paths_in_pages_exist() -> None:
    root = DOCS.parent
    missing = [
        (page.name, path)
        for page in (*PAGES, *root.glob("*.md"))
        for path in re.findall(r"`((?:src|tests|benchmarks)/[\w./-]+)`", page.read_text(encoding="utf-8"))
        if not (root / path).exists()
    ]
    assert not missing


def list_commands() -> list[tuple[str, str]]:
    """Return page and command line of every command."""
    lines = [
        (page.stem, line.strip())
        for page in PAGES
        for language, text in read_blocks(page)
        if language == "sh"
        for line in text.replace("\\\n", " ").splitlines()
    ]
    return [(page, line) for page, line in lines if line.startswith("feddbe ")]


@pytest.mark.parametrize(("page", "line"), list_commands())
def test_command_and_options_exist(page: str, line: str) -> None:
    """Only the part before a pipe or redirection is parsed."""
    words = shlex.split(line, comments=True)[1:]
    ends = [index for index, word in enumerate(words) if word in ("|", ">", "&&", ";")]
    parse_command(words[: ends[0]] if ends else words)


def normalize(text: str) -> str:
    """Return the text with placeholders for numbers, and single blanks between columns."""
    return re.sub(r"[\s─]+", " ", re.sub(r"[+-]?\d+(\.\d+)?", "#", text)).strip()


@pytest.mark.parametrize("name", EXECUTED_PAGES)
def test_page_can_be_followed_step_by_step(name: str, tmp_path: Path) -> None:
    """A text block is the output of the step before it, except for numbers."""
    bin_dir = tmp_path / "bin"
    work_dir = tmp_path / "work"
    bin_dir.mkdir()
    work_dir.mkdir()
    for tool, words in {"feddbe": " -W error -m feddbe", "python": ""}.items():  # as in this environment
        (bin_dir / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n', encoding="utf-8")
        (bin_dir / tool).chmod(0o755)
    env = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "MPLBACKEND": "agg", "COLUMNS": "80"}
    printed, steps = "", 0
    for language, text in read_blocks(DOCS / f"{name}.md"):
        if language == "text":
            for part in text.split("...\n"):
                assert normalize(part) in normalize(printed)
            continue
        command = {"sh": ["sh", "-e", "-c", text], "python": [sys.executable, "-W", "error", "-c", text]}
        done = subprocess.run(
            command[language], cwd=work_dir, env=env, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        printed, steps = done.stdout, steps + 1
    assert steps
