"""The examples run without changes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
REQUIRED_LIBRARIES = {"hugging_face": "datasets", "table_of_texts": "pyarrow"}
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore::ResourceWarning:datasets")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_runs(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = REQUIRED_LIBRARIES.get(script.stem)
    if library:
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out
    assert [*Path("runs").glob("*/run.sqlite")]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    """The notebook is stored without outputs and runs in a new kernel."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    import nbformat

    document = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") for cell in document.cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(document, timeout=300, kernel_name="python3", resources=resources)
    done = client.execute()
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    assert any("fedavg+dbe" in output.get("text", "") for output in outputs)
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []


def test_readme_lists_every_example() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert SCRIPTS
    assert NOTEBOOKS
    assert [file.name for file in SCRIPTS + NOTEBOOKS if f"({file.name})" not in readme] == []
