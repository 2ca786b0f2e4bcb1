"""Predictions and exports use what the run stored, even if its training data or code changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddbe
from feddbe import cli
from feddbe.config.user_code import make_permission
from feddbe.errors import FeddbeError, InvalidInputError, StoreError
from feddbe.export import load_client_model, predict
from tests.export.test_client_model import train_run
from tests.runs.test_reopen_permissions import change

ROWS = [(k % 11, (7 * k) % 13, "abc"[k % 3], ("no", "yes")[(k % 11) > 5], "xyz"[k % 3]) for k in range(90)]
HEADER = "age,height,job,buys,client"


def table(folder: Path, header: str = HEADER, factor: int = 1, rename: dict[str, str] | None = None) -> None:
    text = [header, *(f"{age * factor},{height},{job},{y},{c}" for age, height, job, y, c in ROWS)]
    lines = "\n".join(text) + "\n"
    for old, new in (rename or {}).items():
        lines = lines.replace(old, new)
    (folder / "people.csv").write_text(lines)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    def make(folder: Path) -> dict[str, Any]:
        table(folder)
        return {"data": f"{folder / 'people.csv'}?label=buys", "model": "mlp"}

    (tmp_path / "new.csv").write_text("age,height,job\n10,3,a\n0,12,b\n5,5,c\n")
    return train_run(tmp_path, "fedavg+dbe", make)


EDITS: dict[str, dict[str, Any]] = {
    "header swapped": {"header": "height,age,job,buys,client"},
    "column doubled": {"factor": 2},
    "categories renamed": {"rename": {",a,": ",a2,", ",b,": ",b2,", ",c,": ",c2,"}},
    "labels renamed": {"rename": {"no": "nein", "yes": "oui"}},
}


@pytest.mark.parametrize("edit", EDITS)
def test_predict_uses_stored_preprocessing(
    edit: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = predict(run, "y", tmp_path / "new.csv")
    assert before["remark"] == ""
    table(tmp_path, **EDITS[edit])
    after = predict(run, "y", tmp_path / "new.csv")
    assert after == before | {"remark": after["remark"]}
    assert cli.main(f"predict {run} --client y --data {tmp_path / 'new.csv'}".split()) == 0
    assert "training data have changed since the run started" in capsys.readouterr().err


def test_clients_are_those_of_the_run(run: Path, tmp_path: Path) -> None:
    table(tmp_path, rename={",x\n": ",Metz\n", ",y\n": ",Paris\n", ",z\n": ",Ulm\n"})
    assert load_client_model(run, "y").description["client"] == 1
    with pytest.raises(InvalidInputError, match="unknown client 'Ulm'; the run has 3: x, y, z"):
        load_client_model(run, "Ulm")


def test_export_writes_stored_preprocessing(run: Path, tmp_path: Path) -> None:
    before = load_client_model(run, 1)
    table(tmp_path, **EDITS["header swapped"])
    after = load_client_model(run, 1)
    assert [column.name for column in after.preprocessing.columns] == ["age", "height", "job"]
    assert after.preprocessing == before.preprocessing


WRONG: list[Any] = [
    [], {}, "table", {"kind": 3}, {"columns": 3}, {"shape": [10**12]}, {"kind": "images"},
    {"vocabulary": ["a"]}, {"missing": 3}, {"scale": float("nan")}, {"more": 1},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_invalid_stored_preprocessing_is_one_line(wrong: Any, run: Path, tmp_path: Path) -> None:
    about = load_client_model(run, 1).preprocessing.to_json()
    change(run, preprocessing=about | wrong if isinstance(wrong, dict) and wrong else wrong)
    with pytest.raises(StoreError, match=r"is damaged \((its )?metadata: preprocessing"):
        predict(run, "y", tmp_path / "new.csv")


def test_invalid_stored_names_are_one_line(run: Path) -> None:
    change(run, label_names=["yes"])
    with pytest.raises(StoreError, match="label_names"):
        load_client_model(run, 1)
    change(run, label_names=["no", "yes"], client_names=[1, 2, 3])
    with pytest.raises(StoreError, match="client_names"):
        load_client_model(run, 1)


# --- the stored accuracy

MODEL = """
import json
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.last = nn.Linear(64, 12), nn.Linear(12, classes)

    def forward(self, x):
        factor = json.loads(Path(__file__).with_name("factor.json").read_text())
        return factor * self.last(self.first(x.flatten(1)).relu())

def build(classes):
    return Net(classes)
"""


def test_model_with_other_accuracy_is_rejected(tmp_path: Path) -> None:
    """Files that a model reads are not in its hash."""

    def make(folder: Path) -> dict[str, Any]:
        (folder / "net.py").write_text(MODEL)
        (folder / "factor.json").write_text("1")
        return {"data": "digits", "model": f"{folder / 'net.py'}:build", "clients": 3, "partition": "iid"}

    run = train_run(tmp_path, "fedavg", make, rounds=1)
    allowed = make_permission(trust=True)
    assert load_client_model(run, 1, allowed=allowed).description["accuracy"] > 0.5
    (tmp_path / "factor.json").write_text("-1")
    with pytest.raises(
        FeddbeError, match=r"client 1 has an accuracy of .* % on its test data now, and of .* % in the run"
    ):
        load_client_model(run, 1, allowed=allowed)


# --- new rows pass the checks of training rows


def test_new_arrays_must_be_finite(tmp_path: Path) -> None:
    def make(folder: Path) -> dict[str, Any]:
        x = np.random.RandomState(0).randn(60, 4).astype(np.float32)
        np.savez(folder / "a.npz", x=x, y=np.arange(60) % 2, client=np.arange(60) // 20)
        return {"data": str(folder / "a.npz"), "model": "mlp"}

    run = train_run(tmp_path, "fedavg", make, rounds=1)
    for value in (np.nan, np.inf, 1e300):
        np.savez(tmp_path / "new.npz", x=np.array([[0.0, 1, 2, 3], [0, value, 2, 3]]))
        with pytest.raises(
            InvalidInputError, match=r"has NaN or infinite values \(as float32\) in row 1; replace"
        ):
            predict(run, 0, tmp_path / "new.npz")
    assert feddbe.predict is predict
    assert json.dumps(predict(run, 0, tmp_path / "a.npz"))
