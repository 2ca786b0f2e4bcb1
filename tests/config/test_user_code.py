"""Users' files and the modules that they import from their folder: hashed, and executed as hashed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.config import user_code
from feddbe.config.user_code import UserObject
from feddbe.errors import InvalidInputError
from tests.small_runs import make_dataset

MODEL = """
from torch import nn
{imports}

def build(shape, classes):
    {inside}
    return nn.Sequential(nn.Flatten(), nn.Linear(64, {width}), nn.Linear({width}, classes))
"""


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def model_source(imports: str = "", inside: str = "pass", width: str = "helper.WIDTH") -> str:
    return MODEL.format(imports=imports, inside=inside, width=width)


def load_build(folder: Path) -> UserObject:
    """Return the function `build` in own.py."""
    return user_code.load_object("model", "function", f"{folder / 'own.py'}:build", callable)


def built_width(folder: Path) -> int:
    width: int = load_build(folder).value((1, 8, 8), 10)[1].out_features
    return width


FORMS = {
    "import": ({"own.py": model_source("import helper")}, "helper.py"),
    "from": ({"own.py": model_source("from helper import WIDTH", width="WIDTH")}, "helper.py"),
    "in a function": ({"own.py": model_source(inside="import helper")}, "helper.py"),
    "by name": (
        {"own.py": model_source("import importlib\nhelper = importlib.import_module('helper')")},
        "helper.py",
    ),
    "by a computed name": (
        {
            "own.py": model_source(
                "from importlib import import_module\nhelper = import_module('hel' + 'per')"
            )
        },
        "helper.py",
    ),
    "through another": (
        {"own.py": model_source("import other", width="other.helper.WIDTH"), "other.py": "import helper\n"},
        "helper.py",
    ),
    "package": (
        {"own.py": model_source("from parts import helper"), "parts/__init__.py": ""},
        "parts/helper.py",
    ),
    "relative": (
        {
            "own.py": model_source("import parts.front as helper"),
            "parts/__init__.py": "",
            "parts/front.py": "from .deep import WIDTH\n",
            "parts/deep/__init__.py": "from ..helper import WIDTH\n",
        },
        "parts/helper.py",
    ),
    "folder without __init__": ({"own.py": model_source("from parts import helper")}, "parts/helper.py"),
}


@pytest.mark.parametrize("form", FORMS)
def test_edited_module_changes_the_hash_and_is_executed(form: str, tmp_path: Path) -> None:
    """Edits keep the size and happen within a second, so that cached bytecode seems valid."""
    files, helper = FORMS[form]
    write_files(tmp_path, files | {helper: "WIDTH = 12\n"})
    before = load_build(tmp_path)
    assert built_width(tmp_path) == 12
    assert helper in before.source.modules
    write_files(tmp_path, {helper: "WIDTH = 34\n"})
    assert load_build(tmp_path).sha256 != before.sha256
    assert built_width(tmp_path) == 34
    write_files(tmp_path, {helper: "WIDTH = 12\n"})
    assert load_build(tmp_path).sha256 == before.sha256
    assert built_width(tmp_path) == 12


def test_modules_with_one_name_in_two_folders_are_separate(tmp_path: Path) -> None:
    for number in (3, 5):
        folder = tmp_path / str(number)
        write_files(
            folder, {"own.py": model_source(inside="import helper"), "helper.py": f"WIDTH = {number}\n"}
        )
    assert [built_width(tmp_path / name) for name in ("3", "5", "3")] == [3, 5, 3]


def test_module_imported_by_the_program_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "helper_of_the_program"
    text = model_source(f"import {name}", width=f"{name}.WIDTH")
    write_files(
        tmp_path, {"elsewhere/" + f"{name}.py": "WIDTH = 1\n", f"{name}.py": "WIDTH = 7\n", "own.py": text}
    )
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    imported = __import__(name)
    assert built_width(tmp_path) == 7
    assert sys.modules[name] is imported
    assert imported.WIDTH == 1


def test_installed_modules_are_not_in_the_hash(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {"own.py": model_source("import feddbe, json, torch", width="4"), "other.py": "import own\n"},
    )
    assert load_build(tmp_path).source.modules == {}


def test_hash_is_the_same_in_another_process(tmp_path: Path) -> None:
    """The other process has imported modules of the folder before."""
    write_files(
        tmp_path, {"own.py": model_source("import helper"), "helper.py": "WIDTH = 6\n", "other.py": ""}
    )
    expected = load_build(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import helper, other\n"
        "from feddbe.config import user_code\n"
        "print(user_code.load_object('model', 'function', sys.argv[1] + '/own.py:build', callable).sha256)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip() == expected.sha256


METHOD = """
from dataclasses import dataclass
from typing import ClassVar
import helper

@dataclass(frozen=True)
class Mine(helper.Base):
    name: ClassVar[str] = "mine"
"""
BASE = """
from dataclasses import dataclass
from feddbe import FedAvg

@dataclass(frozen=True)
class Base(FedAvg):
    def train(self, ctx, local, received, private):
        return local.fit(received).params, private
"""


def test_run_does_not_resume_with_an_edited_module(tmp_path: Path) -> None:
    write_files(tmp_path, {"own.py": METHOD, "helper.py": BASE})
    options: dict[str, Any] = {"data": make_dataset(), "partition": "natural", "model": "mlp", "lr": 0.1}
    options |= {"engine": "serial", "out": str(tmp_path / "run")}
    feddbe.run(f"{tmp_path / 'own.py'}:Mine", rounds=1, **options)
    assert feddbe.run(f"{tmp_path / 'own.py'}:Mine", rounds=2, resume=True, **options)["last"]["round"] == 2
    write_files(tmp_path, {"helper.py": BASE.replace("local.fit(received).params", "received")})
    with pytest.raises(
        InvalidInputError, match=r"another configuration \(helper\.py, which the method's file imports"
    ):
        feddbe.run(f"{tmp_path / 'own.py'}:Mine", rounds=3, resume=True, **options)
