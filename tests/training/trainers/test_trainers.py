"""Who trains what, and that a run says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.errors import BadInput
from feddbe.methods import apple, perfedavg, pfedme
from feddbe.training import trainers
from tests.federation import experiment, outcome, same_bits, samples


def test_autograd_takes_every_plan_and_is_asked_last() -> None:
    assert list(trainers.every()) == ["compiled", "autograd"]
    ranks = [trainer.RANK for trainer in trainers.every().values()]
    assert ranks == sorted(ranks)


def test_a_new_trainer_is_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is found, asked by its rank, takes what it does not refuse, and the run records it."""
    (tmp_path / "doubtful.py").write_text(
        "from feddbe.training.trainers import autograd\n"
        "RANK = 5\n"
        "def refuses(plan): return 'too long' if plan.batches.epochs > 1 else ''\n"
        "def train(plan): return autograd.train(plan)\n"
    )
    monkeypatch.setattr(trainers, "__path__", [*trainers.__path__, str(tmp_path)])
    trainers.every.cache_clear()
    try:
        options = {"data": samples(), "partition": "natural", "model": "mlp", "rounds": 1, "engine": "serial"}
        one = feddbe.run("fedavg", out=str(tmp_path / "one"), **options)  # type: ignore[arg-type]
        two = feddbe.run("fedavg", out=str(tmp_path / "two"), epochs=2, **options)  # type: ignore[arg-type]
    finally:
        trainers.every.cache_clear()
        sys.modules.pop("feddbe.training.trainers.doubtful", None)
    assert (one["trainers"], two["trainers"]) == (["doubtful"], ["compiled"])


OPTIONS: dict[str, Any] = {"partition": "natural", "model": "cnn_small", "rounds": 1, "engine": "serial"}


def test_a_run_says_who_trained_and_why_nobody_who_is_faster(tmp_path: Path) -> None:
    def ran(method: str, trainer: str) -> tuple[list[str], list[str]]:
        found = feddbe.run(
            method, data=samples(), trainer=trainer, out=str(tmp_path / method / trainer), **OPTIONS
        )
        return found["trainers"], found["remarks"]

    assert ran("fedavg+dbe", "auto") == (["compiled"], [])
    assert ran("fedavg", "autograd") == (["autograd"], [])
    assert ran("perfedavg", "compiled") == (["compiled"], [])
    why = "autograd trains, not compiled: the method has a term of its own in the loss"
    assert ran("moon", "auto") == (["autograd"], [why])
    with pytest.raises(BadInput, match="trainer = compiled does not take this: the method has a term"):
        ran("moon", "compiled")


def test_a_run_that_goes_on_with_another_trainer_says_so(tmp_path: Path) -> None:
    options: dict[str, Any] = OPTIONS | {"data": samples(), "out": str(tmp_path)}
    feddbe.run("fedavg", **options)
    found = feddbe.run("fedavg", **options | {"rounds": 2, "resume": True, "trainer": "autograd"})
    assert found["trainers"] == ["autograd", "compiled"]
    assert found["remarks"] == ["carried on with trainer autograd, before with auto: the last bits differ"]


def test_the_same_bits_wherever_a_client_trains(tmp_path: Path) -> None:
    """Convolutions, DBE, an uneven last batch; each worker has memory of its own, at other places."""
    e = experiment("fedavg+dbe(mu=0.3)", model="cnn_small")
    one, two = (outcome(e, tmp_path / engine, engine) for engine in ("serial", "pool(workers=2)"))
    assert same_bits(one.server, two.server)
    assert all(same_bits(state, two.clients[client]) for client, state in one.clients.items())
    assert [entry["accuracy"] for entry in one.entries] == [entry["accuracy"] for entry in two.entries]


def test_steps_of_a_methods_own_close_over_nothing() -> None:
    for step in (perfedavg._step, perfedavg._once, pfedme._step, apple._step):
        assert step.__closure__ is None
