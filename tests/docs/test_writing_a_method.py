"""docs/writing_a_method.md: its files are written, its snippets and commands are executed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from feddbe import cli, testing
from feddbe.methods.base import Method
from tests.waiting import PATIENCE

PAGE = (Path(__file__).parents[2] / "docs" / "writing_a_method.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r'^```(\w+)(?: title="(\S+)")?\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
FILES = {file: text for _, file, text in BLOCKS if file}
SNIPPETS = [text for language, file, text in BLOCKS if language == "python" and not file]
COMMANDS = [line for language, _, text in BLOCKS if language == "sh" for line in text.splitlines()]


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of the page."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    return tmp_path


def test_snippets_print_what_the_page_shows(page_folder: Path) -> None:
    """All snippets are executed in one process."""
    words = [sys.executable, "-W", "error", "-c", "\nprint('-----')\n".join(SNIPPETS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    progress = [line for line in done.stderr.splitlines() if not re.match(r"\S+: round \d+ of \d+", line)]
    assert (done.returncode, progress) == (0, [])
    checked, checked_with_model, rejected, compared = done.stdout.split("-----\n")
    assert checked_with_model.startswith("my_method.py:MyProx: same bits on pool(workers=2), ")
    assert [line.split(": ")[0] for line in checked.splitlines()] == [
        "my_method.py:MyProx", "my_method.py:MyProx+dbe", "my_method.py:MyProx",
    ]  # fmt: skip
    assert "decay (0.9, 0.45)" in checked
    assert " ".join(rejected.split()) in " ".join(PAGE.split()), "the page should show what is printed"
    assert compared.strip() == "['fedavg', 'my_method.py:MyProx(mu=0.5)']"


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs(line: str, page_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    assert words.pop(0) == "feddbe"
    assert cli.main([*words, *["--engine", "serial"] * (words[0] != "methods")]) == 0
    assert words[1].partition("(")[0] in capsys.readouterr().out or words[0] == "compare"


def test_sending_a_secret_fails_the_check(page_folder: Path) -> None:
    testing.check("my_mix.py:MyMix", addons=[])
    keeps = 'keeps: ClassVar[tuple[str, ...]] = ("own/",)'
    assert keeps in FILES["my_mix.py"]
    secret = FILES["my_mix.py"].replace(keeps, f'{keeps}\n    secret: ClassVar[tuple[str, ...]] = ("own/",)')
    Path("my_mix.py").write_text(secret, encoding="utf-8")
    with pytest.raises(AssertionError, match=r"^my_mix.py:MyMix: a secret is sent: own/"):
        testing.check("my_mix.py:MyMix", addons=[])


def test_private_body_stays_on_the_client(page_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    testing.check("my_lg.py:LGFedAvg", engines=[], addons=[])
    assert cli.main(["methods", "my_lg.py:LGFedAvg"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    page = " ".join(PAGE.split())
    for text in (
        "receives head; sends head; keeps personal/ (secret)",
        "evaluated: the client's body with the new head",
    ):
        assert text in printed
        assert text in page


def test_tables_have_every_hook_and_declaration() -> None:
    names = {name for name in vars(Method) if not name.startswith("_")} | {"name"}
    names -= {"from_options"}
    tables = PAGE[PAGE.index("## All hooks") :].partition("\n## ")[0]
    listed = {
        name
        for line in tables.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert listed == names
