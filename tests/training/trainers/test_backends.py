"""Who trains what, and that a run says so."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import feddbe
from feddbe.errors import InvalidInputError
from feddbe.methods import apple, perfedavg, pfedme
from feddbe.methods.base import Method
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State
from feddbe.training import backends
from feddbe.training.task import Context
from feddbe.training.terms import Term, TermContext
from feddbe.training.trainer import ClientTrainer
from tests.federation import are_identical, experiment, make_dataset, run_outcome


def test_autograd_takes_every_plan_and_is_asked_last() -> None:
    assert list(backends.all_backends()) == ["compiled", "autograd"]
    ranks = [trainer.PRIORITY for trainer in backends.all_backends().values()]
    assert ranks == sorted(ranks)


def test_a_new_trainer_is_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is found, asked by its rank, takes what it does not refuse, and the run records it."""
    (tmp_path / "doubtful.py").write_text(
        "from feddbe.training import autograd\n"
        "from feddbe.training.autograd import gradient, packages, predictor, proximal_steps\n"
        "from feddbe.training.autograd import unsupported_pass_reason, warm_up_kernels\n"
        "PRIORITY = 5\n"
        "def unsupported_reason(plan): return 'too long' if plan.batches.epochs > 1 else ''\n"
        "def train(plan): return autograd.train(plan)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(backends.MODULES, "doubtful", "doubtful")
    backends.all_backends.cache_clear()
    try:
        options = {
            "data": make_dataset(),
            "partition": "natural",
            "model": "mlp",
            "rounds": 1,
            "engine": "serial",
        }
        one = feddbe.run("fedavg", out=str(tmp_path / "one"), **options)  # type: ignore[arg-type]
        two = feddbe.run("fedavg", out=str(tmp_path / "two"), local_epochs=2, **options)  # type: ignore[arg-type]
    finally:
        backends.all_backends.cache_clear()
        sys.modules.pop("doubtful", None)
    assert (one["trainers"], two["trainers"]) == (["doubtful"], ["compiled"])


OPTIONS: dict[str, Any] = {"partition": "natural", "model": "cnn_small", "rounds": 1, "engine": "serial"}


@dataclass(frozen=True)
class Steep(FedAvg):
    """FedAvg on flat ground: the norm of the gradient of the logits by the features is a term."""

    name: ClassVar[str] = "steep"

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return trainer.fit(received, terms=[Term(_steepness)]).params, private


def _steepness(context: TermContext, carry: State) -> tuple[Tensor, State]:
    (slope,) = torch.autograd.grad(context.batch.logits.sum(), context.batch.z_g, create_graph=True)
    return 0.01 * slope.square().sum(), carry


def test_a_run_says_who_trained_and_why_nobody_who_is_faster(tmp_path: Path) -> None:
    def ran(method: str | Method, trainer: str) -> tuple[list[str], list[str]]:
        out = tmp_path / str(method if isinstance(method, str) else method.name) / trainer
        found = feddbe.run(method, data=make_dataset(), trainer=trainer, out=str(out), **OPTIONS)
        return found["trainers"], found["remarks"]

    assert ran("fedavg+dbe", "auto") == (["compiled"], [])
    assert ran("fedavg", "autograd") == (["autograd"], [])
    assert ran("perfedavg", "compiled") == (["compiled"], [])
    assert ran("moon", "auto") == (["compiled"], [])
    reason = "the method has its own loss or term without `outputs_only`"
    assert ran(Steep(), "auto") == (["autograd"], [f"autograd trains, not compiled: {reason}"])
    with pytest.raises(InvalidInputError, match=f"trainer = compiled does not support this: {reason}"):
        ran(Steep(), "compiled")


def test_a_run_that_goes_on_with_another_trainer_says_so(tmp_path: Path) -> None:
    options: dict[str, Any] = OPTIONS | {"data": make_dataset(), "out": str(tmp_path)}
    feddbe.run("fedavg", **options)
    found = feddbe.run("fedavg", **options | {"rounds": 2, "resume": True, "trainer": "autograd"})
    assert found["trainers"] == ["autograd", "compiled"]
    assert found["remarks"] == ["resumed with trainer autograd, before with auto: the last bits differ"]


def test_the_same_bits_wherever_a_client_trains(tmp_path: Path) -> None:
    """Convolutions, DBE, an uneven last batch; each worker has memory of its own, at other places."""
    e = experiment("fedavg+dbe(mu=0.3)", model="cnn_small")
    one, two = (run_outcome(e, tmp_path / engine, engine) for engine in ("serial", "pool(workers=2)"))
    assert are_identical(one.server, two.server)
    assert all(are_identical(state, two.clients[client]) for client, state in one.clients.items())
    assert [entry["accuracy"] for entry in one.rounds] == [entry["accuracy"] for entry in two.rounds]


def test_steps_of_a_methods_own_close_over_nothing() -> None:
    for step in (perfedavg._meta_step, perfedavg._adapt_once, pfedme._step, apple._step):
        assert step.__closure__ is None
