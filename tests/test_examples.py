"""The examples run as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {"hugging_face": "datasets", "table_of_texts": "pyarrow"}
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.filterwarnings("ignore::ResourceWarning:datasets")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if library := NEEDS.get(script.stem):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out
    assert [*Path("runs").glob("*/run.sqlite")]


def test_the_list_is_complete() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert SCRIPTS
    assert [script.name for script in SCRIPTS if f"({script.name})" not in listed] == []
