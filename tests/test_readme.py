"""What the README shows works: its Python is executed, its commands are read, and the quick ones executed."""

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
from tests.progress import without_progress

ROOT = Path(__file__).parents[1]
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


def test_there_is_something_to_test() -> None:
    assert SNIPPETS
    assert COMMANDS


def test_first_command_after_demo_works_in_a_new_shell(tmp_path: Path) -> None:
    """The lines of the README up to its first feddbe command, where `make demo` left a .venv."""
    if not (Path(sys.prefix) / "bin" / "activate").exists():
        pytest.skip("not a virtual environment")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    block = next(text for language, text in BLOCKS if language == "sh" and "\nfeddbe " in f"\n{text}")
    before, _, after = f"\n{block}".partition("\nfeddbe ")
    first = shlex.join(["feddbe", *small(words_of(f"feddbe {after.splitlines()[0]}"))])
    done = subprocess.run(
        ["sh", "-ec", f"{before}\n{first}"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_python(snippet: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout, "a snippet should show something"


def words_of(line: str) -> list[str]:
    return shlex.split(line.removeprefix("$ "), comments=True)[1:]


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command's name and its values, as click reads them; what it does not know raises."""
    command: Any = cli.app
    name = ""
    while commands := getattr(command, "commands", None):
        assert words[0] in commands
        name, words = f"{name} {words[0]}".strip(), words[1:]
        command = commands[name.split()[-1]]
    return name, dict(command.make_context(name, list(words)).params)


def small(words: list[str]) -> list[str]:
    """The same command in seconds; an option is given once."""
    fewer = {"--rounds": "1", "--clients": "4", "--partition": "iid", "--engine": "serial"}
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word not in fewer and before not in fewer
    ]
    return [*kept, *(part for option in fewer.items() for part in option)]


@pytest.mark.parametrize("line", COMMANDS)
def test_command(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options, methods and values are right; on digits the command is executed, small."""
    monkeypatch.chdir(tmp_path)
    words = words_of(line)
    name, values = parsed(words)
    if name in ("run", "compare"):
        methods, _ = values.pop("methods"), values.pop("dry_run")
        assert [values.pop("code"), values.pop("trust")] == [(), False]
        if any(method.endswith(".toml") for method in methods):
            return  # the file is the reader's own
        if values.pop("seeds") or "," in str(values["lr"] or ""):  # many runs, and a line for each
            assert cli.main(small(words)) == 0
            return
        names, chosen, _ = options.parse_options(methods, values)
        for method in names:
            parse_method(method)
        if chosen.data != "digits" or chosen.resume:
            return
        for method in names:
            resolve(method, chosen)
        words = small(words)
    elif name in ("data get", "show", "measure", "fairness", "report", "export") or (
        name == "data show" and values["name"] != "digits"
    ):
        return  # needs what a test does not have: the network, other data, a run
    code = cli.main(words)
    assert (code, without_progress(capsys.readouterr().err)) == (0, "")
