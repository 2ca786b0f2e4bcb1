"""Who trains what, and that a run says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import feddbe
from feddbe.methods import apple, perfedavg, pfedme
from feddbe.training import trainers
from tests.federation import samples


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


def test_steps_of_a_methods_own_close_over_nothing() -> None:
    for step in (perfedavg._step, perfedavg._once, pfedme._step, apple._step):
        assert step.__closure__ is None
