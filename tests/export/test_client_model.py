"""A client's model equals the evaluated one: by the run's file, by hand, by accuracy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import feddbe
from feddbe.config.user_code import make_permission
from feddbe.errors import InvalidInputError, StoreError
from feddbe.export import load_client_model
from feddbe.runs.store import RunStore
from feddbe.state import State, decode, strip_prefix

RNG = np.random.RandomState(0)
CLIENT = 1
OWN_RUN = make_permission(trust=True)


def images(folder: Path) -> dict[str, Any]:
    y = RNG.randint(0, 3, 90)
    x = (RNG.rand(90, 8, 8) * 100 + 50 * y[:, None, None]).astype(np.uint8)
    np.savez(folder / "images.npz", x=x, y=y, client=np.arange(90) % 3)
    return {"data": str(folder / "images.npz"), "model": "cnn_small"}


def table(folder: Path) -> dict[str, Any]:
    rows = [
        f"{k % 11},{'abc'[k % 3]},{(k % 11) > 5},{'xyz'[k % 3]}"
        for k in np.random.RandomState(2).permutation(90)
    ]
    (folder / "table.csv").write_text("\n".join(["age,job,y,client", *rows]) + "\n")
    return {"data": str(folder / "table.csv"), "model": "mlp"}


def texts(folder: Path) -> dict[str, Any]:
    words = [f"{'good' if k % 2 else 'bad'} word{k % 7} word{k % 5}" for k in range(90)]
    rows = [f"{text},{k % 2},{k % 3}" for k, text in enumerate(words)]
    (folder / "texts.csv").write_text("\n".join(["text,y,client", *rows]) + "\n")
    return {"data": str(folder / "texts.csv"), "model": "fasttext"}


USER_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.wide, self.norm, self.mix = nn.Linear(64, 12), nn.LayerNorm(12), nn.Linear(12, 12)
        self.shift = nn.Parameter(torch.ones(12))
        self.last = nn.Linear(12, classes)

    def forward(self, x):
        z = torch.relu(self.wide(x.flatten(1)))
        return self.last(self.norm(z + self.mix(z)) * self.shift)
"""


def custom_model(folder: Path) -> dict[str, Any]:
    (folder / "own.py").write_text(USER_MODEL)
    return images(folder) | {"model": f"{folder / 'own.py'}:Net"}


MODELS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "cnn_small": images, "mlp": table, "fasttext": texts, "own": custom_model,
}  # fmt: skip
METHODS = [
    "fedavg+dbe", "ditto", "fedrep", "fedrod", "apfl", "perfedavg", "fedbabu", "fedavg+ft", "local", "pfedme",
    "fedfomo", "apple", "scaffold+prbm",
]  # fmt: skip


def train_run(folder: Path, method: str, make: Callable[[Path], dict[str, Any]], **options: Any) -> Path:
    settings = {"rounds": 2, "lr": 0.1, "engine": "serial", "trainer": "autograd", **make(folder), **options}
    feddbe.run(method, out=str(folder / "run"), **settings)
    return folder / "run"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS[:5])
@pytest.mark.parametrize("which_round", ["best", "last"])
def test_accuracy_of_main_methods_is_the_stored_one(
    tmp_path: Path, method: str, model: str, which_round: str
) -> None:
    """`load_client_model` compares logits itself; here the accuracy must equal the stored one."""
    check_model(train_run(tmp_path, method, MODELS[model]), which_round)


@pytest.mark.parametrize("method", METHODS[5:])
def test_accuracy_of_other_methods_is_the_stored_one(tmp_path: Path, method: str) -> None:
    check_model(train_run(tmp_path, method, table), "last")


def check_model(run: Path, which_round: str) -> None:
    client_model = load_client_model(run, CLIENT, which_round, allowed=OWN_RUN)
    store = RunStore.open(run)
    rows = {
        row.moment: row.value
        for row in store.records(client_model.description["round"])
        if row.client == CLIENT and row.name == "accuracy"
    }
    store.close()
    assert client_model.description["accuracy"] == pytest.approx(
        rows.get("adapted", rows["before"]), abs=1e-6
    )
    with torch.inference_mode():
        assert torch.allclose(client_model.module(client_model.sample), client_model.logits, atol=1e-5)


# --- by hand, from the states in the run's file


def mlp(p: State, x: Tensor, shift: Tensor | None = None) -> Tensor:
    z = torch.relu(x @ p["fc1.1.weight"].T + p["fc1.1.bias"])
    z = z if shift is None else z + shift
    return z @ p["fc.weight"].T + p["fc.bias"]


def dbe(server: State, private: State, x: Tensor) -> Tensor:
    assert private["prbm"].abs().sum() > 0
    return mlp(server, x, private["prbm"])


def ditto(server: State, private: State, x: Tensor) -> Tensor:
    return mlp(strip_prefix(private, "personal/"), x)


def fedrep(server: State, private: State, x: Tensor) -> Tensor:
    assert "fc.weight" not in server
    return mlp(server | strip_prefix(private, "personal/"), x)


def fedrod(server: State, private: State, x: Tensor) -> Tensor:
    head = strip_prefix(private, "personal/")
    z = torch.relu(x @ server["fc1.1.weight"].T + server["fc1.1.bias"])
    return mlp(server, x) + z @ head["fc.weight"].T + head["fc.bias"]


def apfl(server: State, private: State, x: Tensor) -> Tensor:
    v, a = strip_prefix(private, "personal/"), private["alpha"]
    return mlp({name: a * v[name] + (1 - a) * server[name] for name in v}, x)


@pytest.mark.parametrize(
    ("method", "by_hand"),
    [("fedavg+dbe", dbe), ("ditto", ditto), ("fedrep", fedrep), ("fedrod", fedrod), ("apfl", apfl)],
)
def test_logits_by_hand(
    tmp_path: Path, method: str, by_hand: Callable[[State, State, Tensor], Tensor]
) -> None:
    run = train_run(tmp_path, method, table)
    client_model = load_client_model(run, CLIENT, "last")
    store = RunStore.open(run)
    kept = store.state("private", CLIENT)
    assert kept is not None
    expected = by_hand(store.server_state("last"), decode(kept), client_model.sample)
    store.close()
    with torch.inference_mode():
        assert torch.allclose(client_model.module(client_model.sample), expected, atol=1e-5)


def test_batch_norm_statistics_are_those_of_the_client(tmp_path: Path) -> None:
    text = USER_MODEL.replace("LayerNorm(12)", "BatchNorm1d(12)")

    def with_norm(folder: Path) -> dict[str, Any]:
        options = custom_model(folder)
        (folder / "own.py").write_text(text)
        return options

    run = train_run(tmp_path, "fedavg", with_norm)
    check_model(run, "last")
    first, second = (
        load_client_model(run, client, "last", allowed=OWN_RUN).module.state_dict() for client in (0, 1)
    )
    name = next(key for key in first if key.endswith("running_mean"))
    assert not torch.equal(first[name], second[name])


# --- selection of clients, and models that cannot be loaded


def test_client_by_name_or_number(tmp_path: Path) -> None:
    run = train_run(tmp_path, "fedavg+dbe", table)
    assert (
        load_client_model(run, "y").description["client"]
        == load_client_model(run, 1).description["client"]
        == load_client_model(run, "1").description["client"]
        == 1
    )
    with pytest.raises(InvalidInputError, match="unknown client 'Ulm'; the run has 3: x, y, z"):
        load_client_model(run, "Ulm")
    with pytest.raises(InvalidInputError, match=r"client = 3; the run trained 3 clients, allowed: 0\.\.2"):
        load_client_model(run, 3)
    with pytest.raises(InvalidInputError, match=r"unknown client '99.* \.\.\. 9.*9'; the run has 3: x, y, z"):
        load_client_model(run, "9" * 5000)
    with pytest.raises(InvalidInputError, match="unknown round 'first'"):
        load_client_model(run, 0, "first")


def test_name_that_is_a_number_is_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    options = table(folder)
    text = Path(options["data"]).read_text()
    Path(options["data"]).write_text(text.replace(",x", ",10").replace(",y\n", ",11\n").replace(",z", ",1"))
    run = train_run(tmp_path, "fedavg", lambda _: options)
    assert load_client_model(run, "1").description["client"] == 0
    assert load_client_model(run, "11").description["client"] == 2


def test_majority_has_no_model(tmp_path: Path) -> None:
    run = train_run(tmp_path, "majority", table)
    with pytest.raises(InvalidInputError, match="majority has no model to export"):
        load_client_model(run, 0)


def test_new_clients_have_no_model(tmp_path: Path) -> None:
    run = train_run(tmp_path, "fedavg", table, new_clients=1)
    with pytest.raises(InvalidInputError, match=r"client = z; the run trained 2 clients, allowed: 0\.\.1"):
        load_client_model(run, "z")


def test_objects_must_be_passed_again(tmp_path: Path) -> None:
    x, y = RNG.randn(40, 5).astype(np.float32), np.array(["no", "yes"] * 20)
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    objects: dict[str, Any] = {"data": (x, y), "model": net}
    options: dict[str, Any] = {"rounds": 1, "lr": 0.1, "clients": 2, "partition": "iid", "engine": "serial"}
    feddbe.run("fedavg+dbe", out=str(tmp_path / "run"), **objects, **options)
    assert load_client_model(tmp_path / "run", 0, **objects).description["labels"] == ["no", "yes"]
    with pytest.raises(InvalidInputError, match="was a Python object; pass it again"):
        load_client_model(tmp_path / "run", 0)


def test_best_round_without_keep_best_is_rejected(tmp_path: Path) -> None:
    """A large learning rate makes an earlier round the best."""
    options: dict[str, Any] = {"rounds": 3, "lr": 3.0, "clients": 3, "validation": 0.0}
    for keep in (True, False):
        folder = tmp_path / str(keep)
        folder.mkdir()
        run = train_run(folder, "fedavg+dbe", table, keep_best=keep, **options)
        store = RunStore.open(run)
        best, last = store.round_of("best"), store.last_round()
        store.close()
        assert best is not None
        assert best < last, "otherwise the test checks nothing"
        load_client_model(run, 0, "last")
        if keep:
            check_model(run, "best")
        else:
            with pytest.raises(StoreError, match="begun with --no-keep-best"):
                load_client_model(run, 0, "best")
