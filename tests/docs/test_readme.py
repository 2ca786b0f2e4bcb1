"""Examples in the README: Python is executed, commands are parsed, and on digits also executed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from feddbe import cli
from feddbe.config import options
from feddbe.methods.registry import parse_method
from feddbe.runs.experiment import resolve
from tests.progress import remove_progress
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SNIPPETS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line.strip()
    for language, text in BLOCKS
    if language in ("sh", "bash", "console", "shell")
    for line in text.replace("\\\n", " ").splitlines()
    if line.strip().removeprefix("$ ").startswith("feddbe ")
]


def test_readme_has_snippets_and_commands() -> None:
    assert SNIPPETS
    assert COMMANDS


def test_first_command_works_in_a_new_shell_after_make_demo(tmp_path: Path) -> None:
    """Execute the lines up to the first feddbe command, next to a .venv as `make demo` creates it."""
    if not (Path(sys.prefix) / "bin" / "activate").exists():
        pytest.skip("not a virtual environment")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    block = next(text for language, text in BLOCKS if language == "sh" and "\nfeddbe " in f"\n{text}")
    before, _, after = f"\n{block}".partition("\nfeddbe ")
    first = shlex.join(["feddbe", *shorten(split_words(f"feddbe {after.splitlines()[0]}"))])
    done = subprocess.run(
        ["sh", "-ec", f"{before}\n{first}"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs_and_prints(snippet: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    progress = [line for line in done.stderr.splitlines() if not re.match(r"\S+: round \d+ of \d+", line)]
    assert progress == [], "only lines of progress"
    assert done.stdout, "a snippet should print something"


def split_words(line: str) -> list[str]:
    """Return the words of a command after feddbe."""
    return shlex.split(line.removeprefix("$ "), comments=True)[1:]


def parse_command(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the command's name and its values; click raises an error if it does not know them."""
    command: Any = cli.app
    name = ""
    while commands := getattr(command, "commands", None):
        assert words[0] in commands
        name, words = f"{name} {words[0]}".strip(), words[1:]
        command = commands[name.split()[-1]]
    return name, dict(command.make_context(name, list(words)).params)


def shorten(words: list[str]) -> list[str]:
    """Return the command with options that let it end in seconds."""
    short_options = {"--rounds": "1", "--clients": "4", "--partition": "iid", "--engine": "serial"}
    kept = [
        word
        for previous, word in zip(["", *words], words, strict=False)
        if word not in short_options and previous not in short_options
    ]
    return [*kept, *(part for option in short_options.items() for part in option)]


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_valid_and_runs_on_digits(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that needs the network, other data or an existing run is only parsed."""
    monkeypatch.chdir(tmp_path)
    words = split_words(line)
    name, values = parse_command(words)
    if name in ("run", "compare"):
        methods, _ = values.pop("methods"), values.pop("dry_run")
        assert [values.pop("code"), values.pop("trust"), values.pop("callback")] == [(), False, ()]
        if any(method.endswith(".toml") for method in methods):
            return  # the user's own file
        if values.pop("seeds") or "," in str(values["lr"] or ""):  # a sweep prints a line per run
            assert cli.main(shorten(words)) == 0
            return
        del values["partition_seeds"], values["name"]
        names, config, _ = options.parse_options(methods, values)
        for method in names:
            parse_method(method)
        if config.data != "digits" or config.resume:
            return
        for method in names:
            resolve(method, config)
        words = shorten(words)
    elif name in ("data get", "show", "verify", "analyze", "fairness", "report", "export") or (
        name == "data show" and values["name"] != "digits"
    ):
        return
    code = cli.main(words)
    assert (code, remove_progress(capsys.readouterr().err)) == (0, "")
