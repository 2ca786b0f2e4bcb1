"""A model from the user's Python file: what is run, what makes it the same run again, and what goes wrong."""

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
from tests.federation import are_identical, make_dataset, run_outcome

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


def write(folder: Path, text: str = MODEL, name: str = "my_models.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def own(path: Path, function: str = "build", **options: Any) -> Experiment:
    chosen = {"partition": "natural", "rounds": 2, "lr": 0.1, **options}
    return resolve("fedavg+dbe", Config(model=f"{path}:{function}", **chosen), dataset=make_dataset())


def test_the_model_at_its_cut(tmp_path: Path) -> None:
    made = own(write(tmp_path), cut="layer3")
    assert made.task.model.feature_shape == (9,)
    assert made.config["model"] == f"{tmp_path}/my_models.py:build", "the record says where it came from"
    assert made.config["cut"] == "layer3"
    assert own(write(tmp_path)).task.model.head == ("last.weight", "last.bias")
    assert made.config["method_options"]["mr"]["kappa"] == 1, "the defaults for own models"


def test_the_start_follows_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path)
    one, again, other = (own(path, seed=seed).task.model.parameters for seed in (0, 0, 1))
    assert are_identical(one, again)
    assert not torch.equal(one["layer1.weight"], other["layer1.weight"])


def test_the_hash_follows_the_content_not_the_place(tmp_path: Path) -> None:
    """A forward that computes something else has the same layers and the same start."""
    first = own(write(tmp_path)).config_hash
    assert own(write(tmp_path / "elsewhere", name="other.py")).config_hash == first
    edited = MODEL.replace("x + self.layer2(x)", "x * self.layer2(x)")
    assert own(write(tmp_path, edited)).config_hash != first
    two = MODEL + "\ndef other(shape, classes):\n    return build(shape, classes)\n"
    path = write(tmp_path, two)
    assert own(path, "other").config_hash != own(path).config_hash


def test_serial_pool_and_resume_agree(tmp_path: Path) -> None:
    path = write(tmp_path)
    serial = run_outcome(own(path), tmp_path / "serial")
    pool = run_outcome(own(path), tmp_path / "pool", "pool(workers=2)")
    run_outcome(own(path, rounds=1), tmp_path / "resumed")
    resumed = run_outcome(own(path), tmp_path / "resumed")
    assert are_identical(serial.server, pool.server)
    assert are_identical(serial.server, resumed.server)
    assert all(are_identical(serial.clients[c], resumed.clients[c]) for c in serial.clients)


def test_an_edited_model_does_not_continue_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": make_dataset(), "partition": "natural", "engine": "serial", "lr": 0.1}
    options |= {"out": str(tmp_path / "run")}
    spec = f"{write(tmp_path)}:build"
    feddbe.run("fedavg", model=spec, rounds=1, **options)
    moved = f"{shutil.copy(tmp_path / 'my_models.py', tmp_path / 'moved.py')}:build"
    assert len(feddbe.run("fedavg", model=moved, rounds=2, resume=True, **options)["rounds"]) == 3
    write(tmp_path, MODEL.replace("relu", "tanh"))
    with pytest.raises(InvalidInputError, match="another configuration"):
        feddbe.run("fedavg", model=spec, rounds=3, resume=True, **options)


def test_a_pair_and_a_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "from torch import nn\nWIDTH = 5\n", "neighbour_of_own_model.py")
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
    made = own(write(tmp_path, text))
    assert (made.config["cut"], made.task.model.feature_shape) == ("features", (5,))


def returns(what: str) -> str:
    return f"from torch import nn\ndef build(shape, classes):\n    return {what}"


WRONG = {
    (
        "import nowhere_to_be_found",
        "build",
    ): "FILE cannot be executed in line 1: ModuleNotFoundError: No module",
    ("x = (", "build"): "FILE cannot be executed in line 1: SyntaxError: '(' was never closed",
    (MODEL, "buidl"): "unknown function in FILE: 'buidl'; did you mean 'build'? allowed: Net, build",
    (MODEL, ""): "name its function too, as in FILE.py:FUNCTION; it has: Net, build",
    (
        MODEL.replace("Net(12", "Net(1, 2"),
        "build",
    ): "build((1, 8, 8), 10) in FILE failed in line 17: TypeError: "
    "Net.__init__() takes 3 positional arguments",
    (returns("{}[1]"), "build"): "build((1, 8, 8), 10) in FILE failed in line 3: KeyError: 1",
    ("def build():\n    pass", "build"): "build() in FILE returned NoneType; expected an nn.Module",
    (
        "def build(shape, classes, depth):\n    pass",
        "build",
    ): "in FILE: build(shape, classes, depth): a builder may have the parameters shape, "
    "classes and words; 'depth' needs a default",
    (
        returns("nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(dim=1))"),
        "build",
    ): "the model ends in a softmax: it returns probabilities, but the loss expects logits",
    (
        returns("7"),
        "build",
    ): "in FILE returned int; expected an nn.Module or a pair of them (features, classifier)",
    (
        returns("nn.Sequential(nn.Flatten(), nn.Linear(64, 7))"),
        "build",
    ): "the model returns 7 logits, the data has 10 classes",
    (
        returns("nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Unflatten(1, (5, 2)))"),
        "build",
    ): "the model returns an output of shape (1, 5, 2); expected (batch, classes)",
    (
        returns("nn.Sequential(nn.Flatten(), nn.Linear(784, 10))"),
        "build",
    ): "the model does not take inputs of "
    "shape (1, 8, 8): Linear(in_features=784, out_features=10, bias=True) at '1' received (1, 64): mat1 ",
}


@pytest.mark.parametrize(("given", "message"), WRONG.items(), ids=range(len(WRONG)))
def test_what_goes_wrong_is_one_line(tmp_path: Path, given: tuple[str, str], message: str) -> None:
    path = write(tmp_path, given[0])
    spec = f"{path}:{given[1]}" if given[1] else str(path)
    with pytest.raises(InvalidInputError) as caught:
        resolve("fedavg", Config(model=spec, partition="natural"), dataset=make_dataset())
    assert message.replace("FILE ", f"'{path}' ").replace("FILE:", f"'{path}':") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"^cannot read the model's file '.*/no\.py': No such file or directory$"
    ):
        own(tmp_path / "no.py")


def test_a_module_that_does_not_give_a_tensor(tmp_path: Path) -> None:
    text = MODEL.replace("return self.last(", "return x, self.last(")
    with pytest.raises(
        InvalidInputError, match=r"^the model returns a tuple; expected logits of shape \(batch, classes\)$"
    ):
        own(write(tmp_path, text))


def test_the_cut_of_the_example() -> None:
    """That it runs is tested with the other examples."""
    made = resolve("fedavg+dbe", Config(model=f"{EXAMPLE}:build", cut="mix"))
    assert made.task.model.feature_shape == (1, 8, 8)


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


def test_a_word_outside_of_the_embedding_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, WORDS)
    x = torch.arange(40).reshape(10, 4)
    data = load_object({"x": x, "y": [0, 1] * 5, "words": 40})
    options: dict[str, Any] = {"partition": "iid", "clients": 2}
    made = resolve("fedavg", Config(model=f"{path}:all", **options), dataset=data)
    assert made.task.model.parameters["vectors.weight"].shape == (40, 4)
    with pytest.raises(
        InvalidInputError, match=r"no vector for word index 39: Embedding\(30, 4\) .* 40 words"
    ) as e:
        resolve("fedavg", Config(model=f"{path}:few", **options), dataset=data)
    assert "\n" not in str(e.value)


def test_the_learning_rate_of_an_own_model_is_said_to_be_a_guess(tmp_path: Path) -> None:
    path = f"{write(tmp_path)}:build"
    silent = resolve("fedavg", Config(model=path, partition="natural"), dataset=make_dataset())
    assert "lr 0.01 is a guess for a user's model" in silent.notes[0]
    assert "feddbe tune" in silent.notes[0]
    given = resolve("fedavg", Config(model=path, partition="natural", lr=0.01), dataset=make_dataset())
    assert not any("guess" in remark for remark in given.notes)
