"""Selection of the training backend, and its record in a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import feddbe
from feddbe.config.options import TrainerChoice
from feddbe.errors import InvalidInputError
from feddbe.methods import apple, perfedavg, pfedme
from feddbe.methods.base import Method
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State
from feddbe.training import backends
from feddbe.training.loss_terms import Term, TermContext
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import are_identical, experiment, make_dataset, run_outcome


def test_backends_are_in_order_of_priority() -> None:
    assert list(backends.all_backends()) == ["compiled", "autograd"]
    priorities = [module.PRIORITY for module in backends.all_backends().values()]
    assert priorities == sorted(priorities)


def test_registered_backend_is_selected_by_priority(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It trains the plans that it supports, and the run records it."""
    (tmp_path / "one_epoch.py").write_text(
        "from feddbe.training import autograd\n"
        "from feddbe.training.autograd import compute_gradient, list_packages, make_predictor\n"
        "from feddbe.training.autograd import proximal_steps, unsupported_pass_reason, warm_up_kernels\n"
        "PRIORITY = 5\n"
        "def unsupported_reason(plan): return 'several epochs' if plan.batches.epochs > 1 else ''\n"
        "def train(plan): return autograd.train(plan)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(backends.MODULES, "one_epoch", "one_epoch")
    backends.all_backends.cache_clear()
    try:
        options: dict[str, Any] = {
            "data": make_dataset(),
            "partition": "natural",
            "model": "mlp",
            "rounds": 1,
            "engine": "serial",
        }
        supported = feddbe.run("fedavg", out=str(tmp_path / "supported"), **options)
        unsupported = feddbe.run("fedavg", out=str(tmp_path / "unsupported"), local_epochs=2, **options)
    finally:
        backends.all_backends.cache_clear()
        sys.modules.pop("one_epoch", None)
    assert supported["trainers"] == ["one_epoch"]
    assert unsupported["trainers"] == ["compiled"]


OPTIONS: dict[str, Any] = {"partition": "natural", "model": "cnn_small", "rounds": 1, "engine": "serial"}


@dataclass(frozen=True)
class GradientPenalty(FedAvg):
    """FedAvg with the squared gradient of the logits with respect to the features as a term."""

    name: ClassVar[str] = "gradient_penalty"

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return trainer.fit(received, terms=[Term(_gradient_penalty)]).params, private


def _gradient_penalty(context: TermContext, carry: State) -> tuple[Tensor, State]:
    (grad,) = torch.autograd.grad(context.batch.logits.sum(), context.batch.z_g, create_graph=True)
    return 0.01 * grad.square().sum(), carry


def test_run_records_its_trainer_and_why_a_faster_one_was_rejected(tmp_path: Path) -> None:
    def run_and_read_trainers(method: str | Method, trainer: TrainerChoice) -> tuple[list[str], list[str]]:
        name = method if isinstance(method, str) else method.name
        out = tmp_path / name / trainer
        document = feddbe.run(method, data=make_dataset(), trainer=trainer, out=str(out), **OPTIONS)
        return document["trainers"], document["remarks"]

    assert run_and_read_trainers("fedavg+dbe", "auto") == (["compiled"], [])
    assert run_and_read_trainers("fedavg", "autograd") == (["autograd"], [])
    assert run_and_read_trainers("perfedavg", "compiled") == (["compiled"], [])
    assert run_and_read_trainers("moon", "auto") == (["compiled"], [])
    reason = "the method has its own loss or term without `outputs_only`"
    assert run_and_read_trainers(GradientPenalty(), "auto") == (
        ["autograd"],
        [f"autograd trains, not compiled: {reason}"],
    )
    with pytest.raises(InvalidInputError, match=f"trainer = compiled does not support this: {reason}"):
        run_and_read_trainers(GradientPenalty(), "compiled")


def test_resume_with_another_trainer_is_recorded(tmp_path: Path) -> None:
    options: dict[str, Any] = OPTIONS | {"data": make_dataset(), "out": str(tmp_path)}
    feddbe.run("fedavg", **options)
    document = feddbe.run("fedavg", **options | {"rounds": 2, "resume": True, "trainer": "autograd"})
    assert document["trainers"] == ["autograd", "compiled"]
    assert document["remarks"] == ["resumed with trainer autograd, before with auto: the last bits differ"]


def test_compiled_training_is_bit_identical_in_workers(tmp_path: Path) -> None:
    """Convolutions, DBE and an incomplete last batch; each worker has its own memory."""
    e = experiment("fedavg+dbe(mu=0.3)", model="cnn_small")
    serial = run_outcome(e, tmp_path / "serial")
    pool = run_outcome(e, tmp_path / "pool", "pool(workers=2)")
    assert are_identical(serial.server, pool.server)
    assert all(are_identical(state, pool.clients[client]) for client, state in serial.clients.items())
    assert [result["accuracy"] for result in serial.rounds] == [result["accuracy"] for result in pool.rounds]


def test_step_functions_of_methods_have_no_closure() -> None:
    for step in (perfedavg._meta_step, perfedavg._adapt_once, pfedme._step, apple._step):
        assert step.__closure__ is None
