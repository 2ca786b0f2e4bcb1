"""Models from users' Python files: runs, identity and errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import feddbe
from feddbe.config.options import Config
from feddbe.data.user.arrays import load_object
from feddbe.errors import InvalidInputError
from feddbe.runs.experiment import Experiment, resolve
from tests.small_runs import are_identical, make_dataset, run_outcome

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(64, width), nn.Linear(width, width)
        self.layer3, self.last = nn.Linear(width, 9), nn.Linear(9, classes)

    def forward(self, x):
        x = torch.relu(self.layer1(x.flatten(1)))
        return self.last(torch.relu(self.layer3(x + self.layer2(x))))

def build(shape, classes):
    assert shape == (1, 8, 8)
    return Net(12, classes)
"""


def write_file(folder: Path, text: str = MODEL, name: str = "my_models.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def resolve_user_model(path: Path, function: str = "build", **options: Any) -> Experiment:
    settings = {"partition": "natural", "rounds": 2, "lr": 0.1, **options}
    return resolve("fedavg+dbe", Config(model=f"{path}:{function}", **settings), dataset=make_dataset())


def test_model_is_split_at_its_cut(tmp_path: Path) -> None:
    resolved = resolve_user_model(write_file(tmp_path), cut="layer3")
    assert resolved.task.model.feature_shape == (9,)
    assert resolved.config["model"] == f"{tmp_path}/my_models.py:build", "the configuration has its path"
    assert resolved.config["cut"] == "layer3"
    assert resolve_user_model(write_file(tmp_path)).task.model.head == ("last.weight", "last.bias")
    assert resolved.config["method_options"]["mr"]["kappa"] == 1, "the defaults for user models"


def test_initial_parameters_depend_on_the_seed(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    first, repeated, other = (resolve_user_model(path, seed=seed).task.model.parameters for seed in (0, 0, 1))
    assert are_identical(first, repeated)
    assert not torch.equal(first["layer1.weight"], other["layer1.weight"])


def test_hash_depends_on_content_not_on_path(tmp_path: Path) -> None:
    """A changed forward has the same layers and initial parameters, but another hash."""
    first = resolve_user_model(write_file(tmp_path)).config_hash
    assert resolve_user_model(write_file(tmp_path / "elsewhere", name="other.py")).config_hash == first
    edited = MODEL.replace("x + self.layer2(x)", "x * self.layer2(x)")
    assert resolve_user_model(write_file(tmp_path, edited)).config_hash != first
    two = MODEL + "\ndef other(shape, classes):\n    return build(shape, classes)\n"
    path = write_file(tmp_path, two)
    assert resolve_user_model(path, "other").config_hash != resolve_user_model(path).config_hash


def test_serial_pool_and_resumed_run_are_equal(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    serial = run_outcome(resolve_user_model(path), tmp_path / "serial")
    pool = run_outcome(resolve_user_model(path), tmp_path / "pool", "pool(workers=2)")
    run_outcome(resolve_user_model(path, rounds=1), tmp_path / "resumed")
    resumed = run_outcome(resolve_user_model(path), tmp_path / "resumed")
    assert are_identical(serial.server, pool.server)
    assert are_identical(serial.server, resumed.server)
    assert all(are_identical(serial.clients[c], resumed.clients[c]) for c in serial.clients)


def test_edited_model_cannot_resume_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": make_dataset(), "partition": "natural", "engine": "serial", "lr": 0.1}
    options |= {"out": str(tmp_path / "run")}
    spec = f"{write_file(tmp_path)}:build"
    feddbe.run("fedavg", model=spec, rounds=1, **options)
    moved = f"{shutil.copy(tmp_path / 'my_models.py', tmp_path / 'moved.py')}:build"
    assert len(feddbe.run("fedavg", model=moved, rounds=2, resume=True, **options)["rounds"]) == 3
    write_file(tmp_path, MODEL.replace("relu", "tanh"))
    with pytest.raises(InvalidInputError, match="another configuration"):
        feddbe.run("fedavg", model=spec, rounds=3, resume=True, **options)


def test_pair_with_import_from_the_same_folder(tmp_path: Path) -> None:
    write_file(tmp_path, "from torch import nn\nWIDTH = 5\n", "neighbour_of_own_model.py")
    text = """
from dataclasses import dataclass
import neighbour_of_own_model as other
from torch import nn

@dataclass
class Sizes:
    width: int = other.WIDTH

def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, Sizes().width)), nn.Linear(5, classes)
"""
    resolved = resolve_user_model(write_file(tmp_path, text))
    assert (resolved.config["cut"], resolved.task.model.feature_shape) == ("features", (5,))


def builder_returning(expression: str) -> str:
    return f"from torch import nn\ndef build(shape, classes):\n    return {expression}"


INVALID_MODELS = {
    (
        "import nowhere_to_be_found",
        "build",
    ): "FILE cannot be executed in line 1: ModuleNotFoundError: No module",
    ("x = (", "build"): "FILE cannot be executed in line 1: SyntaxError: '(' was never closed",
    (MODEL, "buidl"): "unknown function in FILE: 'buidl'; did you mean 'build'? allowed: Net, build",
    (MODEL, ""): "name its function too, as in FILE.py:FUNCTION; the file has: Net, build",
    (
        MODEL.replace("Net(12", "Net(1, 2"),
        "build",
    ): "build((1, 8, 8), 10) in FILE failed in line 17: TypeError: "
    "Net.__init__() takes 3 positional arguments",
    (builder_returning("{}[1]"), "build"): "build((1, 8, 8), 10) in FILE failed in line 3: KeyError: 1",
    ("def build():\n    pass", "build"): "build() in FILE returned NoneType; expected an nn.Module",
    (
        "def build(shape, classes, depth):\n    pass",
        "build",
    ): "in FILE: build(shape, classes, depth): a builder may have the parameters shape, "
    "classes and words; 'depth' needs a default",
    (
        builder_returning("nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(dim=1))"),
        "build",
    ): "the model ends in a softmax: it returns probabilities, but the loss expects logits",
    (
        builder_returning("7"),
        "build",
    ): "in FILE returned int; expected an nn.Module or a pair of them (features, classifier)",
    (
        builder_returning("nn.Sequential(nn.Flatten(), nn.Linear(64, 7))"),
        "build",
    ): "the model returns 7 logits, the data has 10 classes",
    (
        builder_returning("nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Unflatten(1, (5, 2)))"),
        "build",
    ): "the model returns an output of shape (1, 5, 2); expected (batch, classes)",
    (
        builder_returning("nn.Sequential(nn.Flatten(), nn.Linear(784, 10))"),
        "build",
    ): "the model does not take inputs of "
    "shape (1, 8, 8): Linear(in_features=784, out_features=10, bias=True) at '1' received (1, 64): mat1 ",
}


@pytest.mark.parametrize(
    ("source_and_function", "message"), INVALID_MODELS.items(), ids=range(len(INVALID_MODELS))
)
def test_invalid_model_raises_one_line_error(
    tmp_path: Path, source_and_function: tuple[str, str], message: str
) -> None:
    path = write_file(tmp_path, source_and_function[0])
    spec = f"{path}:{source_and_function[1]}" if source_and_function[1] else str(path)
    with pytest.raises(InvalidInputError) as caught:
        resolve("fedavg", Config(model=spec, partition="natural"), dataset=make_dataset())
    assert message.replace("FILE ", f"'{path}' ").replace("FILE:", f"'{path}':") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_raises_error(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"^cannot read the model's file '.*/no\.py': No such file or directory$"
    ):
        resolve_user_model(tmp_path / "no.py")


def test_output_that_is_not_a_tensor_raises_error(tmp_path: Path) -> None:
    text = MODEL.replace("return self.last(", "return x, self.last(")
    with pytest.raises(
        InvalidInputError, match=r"^the model returns a tuple; expected logits of shape \(batch, classes\)$"
    ):
        resolve_user_model(write_file(tmp_path, text))


def test_cut_of_the_example() -> None:
    """The other tests of examples run it."""
    resolved = resolve("fedavg+dbe", Config(model=f"{EXAMPLE}:build", cut="mix"))
    assert resolved.task.model.feature_shape == (1, 8, 8)


WORDS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, words, classes):
        super().__init__()
        self.vectors, self.head = nn.Embedding(words, 4), nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.vectors(x).mean(1))

def few():
    return Net(30, 2)

def all(classes, words):
    return Net(words, classes)
"""


def test_word_outside_of_the_embedding_raises_one_line_error(tmp_path: Path) -> None:
    path = write_file(tmp_path, WORDS)
    x = torch.arange(40).reshape(10, 4)
    data = load_object({"x": x, "y": [0, 1] * 5, "words": 40})
    options: dict[str, Any] = {"partition": "iid", "clients": 2}
    resolved = resolve("fedavg", Config(model=f"{path}:all", **options), dataset=data)
    assert resolved.task.model.parameters["vectors.weight"].shape == (40, 4)
    with pytest.raises(
        InvalidInputError, match=r"no vector for word index 39: Embedding\(30, 4\) .* 40 words"
    ) as e:
        resolve("fedavg", Config(model=f"{path}:few", **options), dataset=data)
    assert "\n" not in str(e.value)


def test_default_learning_rate_of_user_model_is_noted(tmp_path: Path) -> None:
    path = f"{write_file(tmp_path)}:build"
    without_lr = resolve("fedavg", Config(model=path, partition="natural"), dataset=make_dataset())
    assert "lr 0.01 is a guess for a user's model" in without_lr.notes[0]
    assert "feddbe tune" in without_lr.notes[0]
    with_lr = resolve("fedavg", Config(model=path, partition="natural", lr=0.01), dataset=make_dataset())
    assert not any("guess" in note for note in with_lr.notes)
