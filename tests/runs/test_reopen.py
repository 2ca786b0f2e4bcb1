"""Replay of a stored round: the same states and results, and an unchanged run."""

from __future__ import annotations

import sqlite3
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import feddbe
from feddbe.errors import InvalidInputError, StoreError
from feddbe.methods.registry import METHODS
from feddbe.runs.experiment import Experiment
from feddbe.runs.reopen import Checkpoint, load_experiment
from feddbe.runs.store import RUN_FILE, RunStore
from feddbe.simulation import engines
from feddbe.simulation.client import ClientResult
from feddbe.simulation.engines.registry import SerialEngine
from feddbe.simulation.loop import initial_server_state
from feddbe.state import decode
from tests.oracles import fedavg as oracle
from tests.small_runs import (
    COMBINATIONS,
    are_identical,
    client_values,
    experiment,
    make_dataset,
    run_outcome,
)


def run_at_checkpoint(
    e: Experiment,
    folder: Path,
    which: str,
    moments: tuple[str, ...],
    layers: tuple[str, ...],
    engine: str = "serial",
) -> tuple[int, list[ClientResult]]:
    """The entry, and what all clients see of all their test samples."""
    store, instance = RunStore.open(folder), engines.create_engine(engine, e.task, e.method)
    try:
        entry = Checkpoint(store, e, which)
        jobs = entry.client_tasks(moments, layers, dict.fromkeys(range(e.task.members)))
        return entry.round, entry.run_tasks(jobs, instance)
    finally:
        instance.close()
        store.close()


def accuracies(replies: list[ClientResult], moment: str) -> dict[int, float]:
    """By hand, from what was at the place `logits`."""
    accuracy_by_client = {}
    for reply in replies:
        hits = (reply.representations[f"{moment}/logits"].argmax(1) == reply.representations["y"]).sum()
        accuracy_by_client[reply.client] = float(Fraction(int(hits), len(reply.representations["y"])))
    return accuracy_by_client


def stored(folder: Path, entry: int, moment: str) -> dict[int, float | None]:
    store = RunStore.open(folder)
    accuracy_by_client = client_values(store, entry, "accuracy", moment)
    store.close()
    return accuracy_by_client


def everything(folder: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / RUN_FILE) as db:
        tables = ("SELECT * FROM states ORDER BY 1, 2", "SELECT * FROM rows", "SELECT * FROM meta")
        rows = [row for table in tables for row in db.execute(table)]
    db.close()
    return rows


@pytest.mark.parametrize("name", COMBINATIONS)
def test_replay_repeats_evaluation_and_training(name: str, tmp_path: Path) -> None:
    """Two rounds, looked at; then a third, whose clients start from there. Their accuracies are equal."""
    e = experiment(name)
    run_outcome(e, tmp_path)
    before = everything(tmp_path)
    moments = ("before", "after", *["adapted"] * bool(e.method.adapts))
    _, replies = run_at_checkpoint(e, tmp_path, "last", moments, ("logits",))
    assert everything(tmp_path) == before, "nothing of the run has changed"
    if e.method.base_name == "majority":
        assert [reply.representations for reply in replies] == [{}] * 3, "it has no model"
        return
    assert accuracies(replies, "before") == stored(tmp_path, 2, "before")
    if e.method.adapts:
        assert accuracies(replies, "adapted") == stored(tmp_path, 2, "adapted")
    run_outcome(experiment(name, rounds=3), tmp_path)
    assert accuracies(replies, "after") == stored(tmp_path, 2, "after")


STEPS: dict[str, Any] = {"lr": 1.0, "participation": 0.67, "rounds": 6}
"""Rates so high that the last round is not the best one."""


@pytest.mark.parametrize("name", COMBINATIONS)
def test_best_round_has_the_states_of_its_evaluation(name: str, tmp_path: Path) -> None:
    """They are those of a run that ended there."""
    chosen = STEPS | ({"participation": 1.0} if METHODS[name.split("+")[0]].needs_all_clients else {})
    e = experiment(name, **chosen)
    run_outcome(e, tmp_path / "whole")
    store = RunStore.open(tmp_path / "whole")
    entry = Checkpoint(store, e, "best")
    run_outcome(experiment(name, **chosen | {"rounds": entry.round}), tmp_path / "best")
    ended = RunStore.open(tmp_path / "best")
    assert are_identical(store.server_state("best"), ended.server_state())
    for client in range(3):
        was, is_ = entry.read(client), ended.read(client)
        assert (was is None) == (is_ is None)
        if was is not None and is_ is not None:
            assert are_identical(decode(was), decode(is_))
        if e.method.keeps_uploads and (entry.round or e.method.has_setup):
            assert are_identical(entry.upload(client), ended.upload(client))
    kinds = {kind for kind, *_ in everything(tmp_path / "whole") if isinstance(kind, str)}
    assert not kinds & {"Private", "Upload"}, "nothing is left aside"
    store.close()
    ended.close()
    if e.method.base_name != "majority":
        round, replies = run_at_checkpoint(e, tmp_path / "whole", "best", ("before", "after"), ("logits",))
        assert accuracies(replies, "before") == stored(tmp_path / "whole", round, "before")
        after = stored(tmp_path / "whole", round, "after")
        repeated = accuracies(replies, "after")
        assert {client: repeated[client] for client in after} == after


def test_pool_and_serial_give_the_same_representations(tmp_path: Path) -> None:
    """Also large representations, which go as shared memory; and the rows that were asked for."""
    e = experiment("fedavg+dbe", make_dataset((600, 300, 200)), rounds=1)
    run_outcome(e, tmp_path)
    layers = ("fc1.0", "fc1", "z_g", "z", "logits")
    _, serial = run_at_checkpoint(e, tmp_path, "last", ("before", "after"), layers)
    _, pool = run_at_checkpoint(e, tmp_path, "last", ("before", "after"), layers, "pool(workers=2)")
    assert [
        are_identical(a.representations, b.representations) for a, b in zip(serial, pool, strict=True)
    ] == [True] * 3
    representations = serial[0].representations
    assert representations.keys() == {
        "y",
        *(f"{moment}/{layer}" for moment in ("before", "after") for layer in layers),
    }
    assert representations["before/fc1.0"].shape == (len(e.task.split.test[0]), 64)
    assert torch.equal(representations["before/fc1"], representations["before/z_g"])
    assert not torch.equal(representations["before/z"], representations["before/z_g"])
    store, engine = RunStore.open(tmp_path), SerialEngine(e.task, e.method)
    entry = Checkpoint(store, e, "last")
    (selected,) = entry.run_tasks(entry.client_tasks(["before"], ["z"], {0: [2, 5]}), engine)
    assert torch.equal(selected.representations["before/z"], representations["before/z"][[2, 5]])
    assert torch.equal(selected.representations["y"], representations["y"][[2, 5]])
    store.close()


def test_representations_match_a_plain_loop(tmp_path: Path) -> None:
    """FedAvg+DBE: one client's f after local training, and its p_i, by torch's own SGD."""
    e = experiment("fedavg+dbe(kappa=3,mu=0.5)", rounds=2)
    ran = run_outcome(e, tmp_path)
    _, replies = run_at_checkpoint(e, tmp_path, "last", ("after",), ("fc1.1", "z_g", "z", "logits"))
    client, data = 1, e.task.dataset
    p = ran.clients[client]["prbm"].clone()
    x, y = data.inputs(data.x), data.y
    module = oracle.local_dbe(
        deepcopy(e.task.model.module), {n: ran.server[n] for n in e.task.model.parameters}, x, y,
        e.task.split.train[client], p, ran.server["mean"], kappa=3, mu=0.5, lr=0.1, round=3, client=client,
    )  # fmt: skip
    test = torch.from_numpy(e.task.split.test[client])
    with torch.no_grad():
        flat, linear, relu, last = (
            layer for layer in module.modules() if not isinstance(layer, nn.Sequential)
        )
        hidden = linear(flat(x[test]))
        z_g = relu(hidden)
        expected = {"fc1.1": hidden, "z_g": z_g, "z": z_g + p, "logits": last(z_g + p)}
    for layer, tensor in expected.items():
        assert torch.allclose(replies[client].representations[f"after/{layer}"], tensor, atol=1e-5), layer
    assert (p - ran.clients[client]["prbm"]).abs().max() > 1e-3, "it was trained"


# Runs that cannot be looked at


def on(folder: Path, **options: Any) -> RunStore:
    feddbe.run("ditto", out=str(folder), partition="iid", clients=3, model="mlp", engine="serial", **options)
    return RunStore.open(folder)


def test_missing_best_states_are_reported(tmp_path: Path) -> None:
    e = experiment("ditto", **STEPS)
    run_outcome(e, tmp_path)
    db = sqlite3.connect(tmp_path / RUN_FILE)
    db.execute("DELETE FROM states WHERE kind = 'PRIVATE'")
    db.execute("DELETE FROM meta WHERE key = 'keeps_best'")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match=r"did not retain the clients' states of the best round; .*last$"):
        run_at_checkpoint(e, tmp_path, "best", ("before",), ("z",))
    assert run_at_checkpoint(e, tmp_path, "last", ("before",), ("z",))[0] == STEPS["rounds"]


def test_experiment_is_rebuilt_from_the_store(tmp_path: Path) -> None:
    store = on(tmp_path, rounds=1, lr=0.07, local_epochs=2)
    experiment = load_experiment(store)
    assert experiment.config_hash == store.meta("config_hash")
    assert (experiment.task.training.lr, experiment.task.training.local_epochs) == (0.07, 2)
    with store.transaction(1):
        store.set_meta("config", store.meta("config") | {"local_epochs": 3})
    with pytest.raises(
        InvalidInputError,
        match=r"differs on this machine \(its data, its model or its method differ\); copy the files",
    ):
        load_experiment(store)
    store.close()


def test_python_objects_must_be_passed_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10))
    options: dict[str, Any] = {"rounds": 1, "engine": "serial", "partition": "natural"}
    feddbe.run("fedavg", data=make_dataset(), model=model, out=str(tmp_path), **options)
    store = RunStore.open(tmp_path)
    with pytest.raises(
        InvalidInputError, match=r"the model of '.*' was a Python object; pass it again: model="
    ):
        load_experiment(store)
    with pytest.raises(InvalidInputError, match=r"the run in '.*' cannot be rebuilt: .*tiny"):
        load_experiment(store, model=model)
    assert load_experiment(store, dataset=make_dataset(), model=model).config_hash == store.meta(
        "config_hash"
    )
    with pytest.raises(InvalidInputError, match="differs on this machine"):
        load_experiment(store, dataset=make_dataset((60, 44, 20)), model=model)
    store.close()


def test_unknown_round_and_moment_are_rejected(tmp_path: Path) -> None:
    e = experiment("fedavg")
    store = RunStore.create(tmp_path, {"config_hash": e.config_hash}, initial_server_state(e))
    with pytest.raises(InvalidInputError, match="has no finished round yet"):
        Checkpoint(store, e, "last")
    store.close()
    run_outcome(e, tmp_path)
    store = RunStore.open(tmp_path)
    with pytest.raises(InvalidInputError, match=r"^unknown round 'first'; allowed: best, last$"):
        Checkpoint(store, e, "first")
    with pytest.raises(
        InvalidInputError, match=r"^unknown moment of fedavg 'adapted'; .*allowed: after, before$"
    ):
        Checkpoint(store, e, "last").client_tasks(["adapted"], ["z"], {0: None})
    store.close()
