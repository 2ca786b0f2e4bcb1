"""Exported folders: every way to use them gives the run's logits, without feddbe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import feddbe
from feddbe import cli
from feddbe.errors import InvalidInputError
from feddbe.export import export_model, load_client_model, predict
from tests.export.test_client_model import MODELS, OWN_RUN, RNG, images, table, texts, train_run

FILES = {
    "model.pt2", "model.safetensors", "preprocessing.json", "requirements.txt", "rows.py", "score.py",
}  # fmt: skip
EXAMPLE = Path(__file__).parents[2] / "examples" / "sequences.py"


@pytest.mark.parametrize(
    ("model", "method"),
    [("cnn_small", "fedrod"), ("mlp", "fedavg+dbe"), ("fasttext", "apfl"), ("own", "fedavg+dbe")],
)
def test_exported_program_gives_the_logits_of_the_run(tmp_path: Path, model: str, method: str) -> None:
    run = train_run(tmp_path, method, MODELS[model])
    folder = export_model(run, 1, out=tmp_path / "home", trust=True)
    client_model = load_client_model(run, 1, allowed=OWN_RUN)
    assert {path.name for path in folder.iterdir()} == FILES
    assert load_file(folder / "model.safetensors").keys() == client_model.module.state_dict().keys()
    program = torch.export.load(folder / "model.pt2").module()
    with torch.inference_mode():
        assert torch.allclose(program(client_model.sample), client_model.logits, atol=1e-5)
        assert torch.allclose(program(client_model.sample[:1]), client_model.logits[:1], atol=1e-5)


@pytest.mark.parametrize("function", ["gru", "transformer"])
def test_export_of_sequence_models(tmp_path: Path, function: str) -> None:
    def make(folder: Path) -> dict[str, Any]:
        y = np.arange(60) % 2
        x: Any = RNG.randn(60, 6, 3).astype(np.float32) if function == "gru" else RNG.randint(0, 20, (60, 6))
        np.savez(folder / "a.npz", x=x, y=y, client=np.arange(60) // 20, words=20)
        return {"data": str(folder / "a.npz"), "model": f"{EXAMPLE}:{function}"}

    run = train_run(tmp_path, "fedavg+dbe", make)
    export_model(run, 0, out=tmp_path / "home", code=[EXAMPLE])
    assert len(predict(run, 0, tmp_path / "a.npz", trust=True)["rows"]) == 60


def test_export_of_resnet_with_batch_norm(tmp_path: Path) -> None:
    def large(folder: Path) -> dict[str, Any]:
        x = RNG.randint(0, 256, (24, 3, 16, 16)).astype(np.uint8)
        np.savez(folder / "large.npz", x=x, y=np.arange(24) % 2, client=np.arange(24) // 12)
        return {"data": str(folder / "large.npz"), "model": "resnet18", "cut": "b2"}

    run = train_run(tmp_path, "fedavg+dbe", large, rounds=1)
    client_model = load_client_model(run, 0)
    folder = export_model(run, 0, out=tmp_path / "home")
    with torch.inference_mode():
        logits = torch.export.load(folder / "model.pt2").module()(client_model.sample)
    assert torch.allclose(logits, client_model.logits, atol=1e-4)


# --- new rows


def test_script_and_command_predict_label_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_run(tmp_path, "fedavg+dbe", table)
    (tmp_path / "new.csv").write_text("job,age\na,10\nb,0\n")
    predictions = predict(run, "y", tmp_path / "new.csv")
    assert predictions["labels"] == ["False", "True"]
    assert [row["label"] for row in predictions["rows"]] == ["True", "False"], "age above 5"
    assert all(sum(row["probabilities"]) == pytest.approx(1) for row in predictions["rows"])

    assert cli.main(["export", str(run), "--client", "y", "--out", str(tmp_path / "home")]) == 0
    output = capsys.readouterr().out
    assert "fedavg+dbe, client y, round" in output
    assert f"use     python {tmp_path / 'home' / 'score.py'} new.csv" in output
    # a process without feddbe, first with valid rows, then with invalid ones
    code = (
        "import runpy, sys\nsys.modules['feddbe'] = None\nsys.path.insert(0, sys.argv[1])\n"
        "for name in sys.argv[2:]:\n    sys.argv = ['score.py', name]\n"
        "    runpy.run_path(sys.path[0] + '/score.py', run_name='__main__')\n"
    )
    (tmp_path / "wrong.csv").write_text("age\n3\n")
    files = [str(tmp_path / name) for name in ("home", "new.csv", "wrong.csv")]
    process = subprocess.run([sys.executable, "-I", "-c", code, *files], capture_output=True, text=True)
    printed = process.stdout.splitlines()
    expected = [
        " ".join([r["label"], *(f"{p:.4f}" for p in r["probabilities"])]) for r in predictions["rows"]
    ]
    assert printed == expected

    assert cli.main(["predict", str(run), "--client", "y", "--data", str(tmp_path / "new.csv")]) == 0
    table_rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table_rows == [["label", "False", "True"], *(line.split() for line in expected)]
    assert process.stderr == f"{tmp_path}/wrong.csv: column 'job' is missing; the model takes age, job\n"


_OTHER_PACKAGES = ("feddbe", "safetensors", "pandas", "sklearn", "scipy", "rich", "click", "pyarrow")
_HIDE_PACKAGES = """
import runpy, sys
folder, hidden, *sys.argv[1:] = sys.argv[1:]
sys.modules.update(dict.fromkeys(hidden.split(",")))
sys.path.insert(0, folder)
runpy.run_path(folder + "/score.py", run_name="__main__")
"""


def run_script(
    folder: Path, *arguments: object, hidden: tuple[str, ...] = (*_OTHER_PACKAGES, "PIL")
) -> tuple[int, str, str]:
    """Return code, output and errors of score.py without the hidden packages."""
    words = [sys.executable, "-I", "-c", _HIDE_PACKAGES, folder, ",".join(hidden), *arguments]
    process = subprocess.run([*map(str, words)], capture_output=True, text=True)
    return process.returncode, process.stdout, process.stderr


def test_script_needs_torch_and_numpy_only(tmp_path: Path) -> None:
    run = train_run(tmp_path, "fedavg+dbe", table)
    folder = export_model(run, "y", out=tmp_path / "home")
    (tmp_path / "new.csv").write_text("job,age\na,10\nb,0\n")
    code, output, errors = run_script(folder, tmp_path / "new.csv")
    assert (code, errors) == (0, "")
    assert [line.split()[0] for line in output.splitlines()] == ["True", "False"]
    lines = (folder / "requirements.txt").read_text().splitlines()
    assert [line.partition("==")[0] for line in lines] == ["torch", "numpy"]
    assert lines[0] == f"torch=={torch.__version__.partition('+')[0]}"

    usage = "usage: python score.py FILE, as in: python score.py new.csv\n"
    assert run_script(folder) == (2, "", usage)
    assert run_script(folder, "a.csv", "b.csv") == (2, "", usage)
    assert run_script(folder, "--rows") == (2, "", usage)
    assert run_script(folder, "--help") == (0, usage, "")
    code, output, errors = run_script(folder, tmp_path / "none.csv")
    assert (code, output) == (1, "")
    assert errors == f"cannot read '{tmp_path / 'none.csv'}': No such file or directory\n"


def test_script_ends_if_its_output_is_closed(tmp_path: Path) -> None:
    folder = export_model(train_run(tmp_path, "fedavg", table), "y", out=tmp_path / "home")
    (tmp_path / "new.csv").write_text("job,age\n" + "a,10\n" * 20_000)
    command = [sys.executable, str(folder / "score.py"), str(tmp_path / "new.csv")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"True ")
        process.stdout.close()
        assert process.stderr.read() == b""


def test_script_scores_images_with_pillow_only(tmp_path: Path) -> None:
    run = train_run(tmp_path, "fedavg", images)
    folder = export_model(run, 0, out=tmp_path / "home")
    file = tmp_path / "new.png"
    Image.new("L", (8, 8), 60).save(file)
    code, output, errors = run_script(folder, file, hidden=_OTHER_PACKAGES)
    assert (code, errors, len(output.splitlines())) == (0, "", 1)
    assert run_script(folder, file) == (1, "", "images need Pillow; install it with: pip install pillow\n")
    assert "pillow==" in (folder / "requirements.txt").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age\n1\n", "new.csv: column 'job' is missing; the model takes age, job"),
        ("age,job\n1,never\n", "'job' is 'never' in line 2, which no training row had; known: a, b, c"),
        ("age,job\n,a\n", "'age' has no value in line 2; fill it in"),
        (None, "cannot read '.*new.csv': No such file"),
    ],
)
def test_invalid_rows_are_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    run = train_run(tmp_path, "fedavg", table)
    if text is not None:
        (tmp_path / "new.csv").write_text(text)
    with pytest.raises(InvalidInputError, match=message) as caught:
        predict(run, 0, tmp_path / "new.csv")
    assert "\n" not in str(caught.value)


def test_predictions_of_texts_equal_those_of_the_run(tmp_path: Path) -> None:
    """The training file as new rows: the client's test rows must be predicted as in the run."""
    run = train_run(tmp_path, "fedavg+dbe", texts)
    client_model, predictions = load_client_model(run, 2), predict(run, 2, tmp_path / "texts.csv")
    expected = {tuple(p) for p in np.round(client_model.logits.softmax(1).double().numpy(), 4).tolist()}
    scored = {tuple(np.round(row["probabilities"], 4).tolist()) for row in predictions["rows"]}
    assert expected <= scored


def test_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    run = train_run(tmp_path, "fedavg", images)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidInputError, match=r"'.*mine' has other files \('thesis.txt'\); choose an"):
        export_model(run, 0, out=tmp_path / "mine")
    export_model(run, 0, out=tmp_path / "home")
    assert export_model(run, 1, out=tmp_path / "home") == tmp_path / "home", "an older export is replaced"
    assert json.loads((tmp_path / "home" / "preprocessing.json").read_text())["client"] == 1


STRANGE = """
from torch import nn

class Half(nn.Module):
    def forward(self, z):
        return z / 2

def build(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), Half(), nn.Linear(12, classes))
"""


def test_export_of_custom_layers(tmp_path: Path) -> None:
    def make(folder: Path) -> dict[str, Any]:
        (folder / "strange.py").write_text(STRANGE)
        return images(folder) | {"model": f"{folder / 'strange.py'}:build"}

    folder = export_model(train_run(tmp_path, "fedavg", make), 0, out=tmp_path / "home", trust=True)
    assert {path.name for path in folder.iterdir()} == FILES
    assert 'torch.export.load(folder / "model.pt2").module()(x)' in (folder / "score.py").read_text()


def test_onnx_gives_the_logits_of_the_run(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = train_run(tmp_path, "fedavg+dbe", images)
    folder = export_model(run, 1, out=tmp_path / "home", onnx=True)
    client_model = load_client_model(run, 1)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    for rows in (1, 7):
        (logits,) = session.run(None, {"x": client_model.sample[:rows].numpy()})
        assert np.allclose(logits, client_model.logits[:rows], atol=1e-5)


def test_onnx_without_its_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_run(tmp_path, "fedavg", images)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'feddbe\[onnx\]'"):
        export_model(run, 1, out=tmp_path / "home", onnx=True)


def test_package_exposes_export_and_prediction() -> None:
    assert feddbe.export_model is export_model
    assert feddbe.predict is predict
