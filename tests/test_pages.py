"""What the pages in docs/ show is executed, or at least read."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import parsed

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WALKED = ("tutorial",)
"""Pages of which every command and snippet is executed, in order, in one folder."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def sessions() -> list[Path]:
    return [page for page in PAGES if any(language == "pycon" for language, _ in blocks(page))]


@pytest.mark.parametrize("page", sessions(), ids=lambda page: page.stem)
def test_sessions(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of a page are one session; its output is what is printed, with ... for what may differ."""
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"^```.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    session = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST)
    said: list[str] = []
    done = runner.run(session, out=said.append)
    assert done.attempted
    assert "".join(said) == ""


def commands() -> list[tuple[str, str]]:
    """Page and command line of all that are shown."""
    lines = [
        (page.stem, line.strip())
        for page in PAGES
        for language, text in blocks(page)
        if language == "sh"
        for line in text.replace("\\\n", " ").splitlines()
    ]
    return [(page, line) for page, line in lines if line.startswith("feddbe ")]


@pytest.mark.parametrize(("page", "line"), commands())
def test_command(page: str, line: str) -> None:
    """Commands and options are those there are; what follows a pipe is others' business."""
    words = shlex.split(line, comments=True)[1:]
    end = next((at for at, word in enumerate(words) if word in ("|", ">", "&&", ";")), len(words))
    parsed(words[:end])


def alike(text: str) -> str:
    """A text without what differs from one machine to another: numbers, and how wide columns are."""
    return re.sub(r"[\s─]+", " ", re.sub(r"[+-]?\d+(\.\d+)?", "#", text)).strip()


@pytest.mark.parametrize("name", WALKED)
def test_walk(name: str, tmp_path: Path) -> None:
    """Step by step as a reader would; a block of text is what the step before it prints, but for numbers."""
    tools, work = tmp_path / "tools", tmp_path / "work"
    tools.mkdir()
    work.mkdir()
    for tool, words in {"feddbe": " -W error -m feddbe", "python": ""}.items():  # of this environment
        (tools / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n', encoding="utf-8")
        (tools / tool).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "MPLBACKEND": "agg", "COLUMNS": "80"}
    printed, steps = "", 0
    for language, text in blocks(DOCS / f"{name}.md"):
        if language == "text":
            for part in text.split("...\n"):
                assert alike(part) in alike(printed)
            continue
        command = {"sh": ["sh", "-e", "-c", text], "python": [sys.executable, "-W", "error", "-c", text]}
        done = subprocess.run(
            command[language], cwd=work, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        printed, steps = done.stdout, steps + 1
    assert steps
