"""Methods that leak on purpose: the checks of private data must detect them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from feddbe.errors import FeddbeError
from feddbe.methods.addons import MR, PRBM, Composed
from feddbe.methods.base import BODY, HEAD, MODEL, PERSONAL, Method, undeclared_names
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.fedper import FedPer
from feddbe.state import State, add_prefix, strip_prefix
from feddbe.testing import find_leaks
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import MessageRecorder, experiment, run_recorded

HIDDEN = "mean"
"""A name that +mr may send."""


@dataclasses.dataclass(frozen=True)
class SendsRenamedVector(Composed):
    """Add-on that sends PRBM's vector under a name that it may send."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        upload, new_private = super().train(ctx, trainer, received, private)
        return {**upload, HIDDEN: new_private["prbm"].repeat(2)}, new_private


@dataclasses.dataclass(frozen=True)
class SendsVector(Composed):
    """Add-on that sends PRBM's vector under its name."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        upload, new_private = super().train(ctx, trainer, received, private)
        return {**upload, "prbm": new_private["prbm"]}, new_private


@dataclasses.dataclass(frozen=True)
class SendsHead(FedPer):
    """FedPer that sends the personal head with the body."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        upload, new_private = super().train(ctx, trainer, received, private)
        return upload | strip_prefix(new_private, PERSONAL), new_private


@dataclasses.dataclass(frozen=True)
class SendsInSetup(FedAvg):
    """FedAvg that sends label counts in the setup."""

    has_setup = True

    def client_setup(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return {"labels": trainer.label_counts()}, private


@dataclasses.dataclass(frozen=True)
class KeepsReceived(FedAvg):
    """FedAvg whose clients keep the received model."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return super().train(ctx, trainer, received, private)[0], add_prefix("seen/", received)


@dataclasses.dataclass(frozen=True)
class BroadcastsHead(FedPer):
    """FedPer whose server sends a head."""

    def broadcast(self, ctx: Context, server: State, client: int) -> State:
        return ctx.task.model.parameters


def test_secret_value_under_another_name_is_detected(tmp_path: Path) -> None:
    e = dataclasses.replace(experiment("fedavg+dbe"), method=SendsRenamedVector(FedAvg(), (PRBM(), MR())))
    recorder = MessageRecorder(e)
    run_recorded(e, tmp_path, recorder)
    assert any(
        leak.startswith("prbm") and leak.endswith(HIDDEN) for leak in find_leaks(recorder, e.method.secret)
    )


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (SendsVector(FedAvg(), (PRBM(), MR())), "fedavg would send 'prbm'"),
        (SendsHead(), "fedper would send 'fc.weight'"),
        (SendsInSetup(), "fedavg would send 'labels'"),
        (KeepsReceived(), "fedavg would keep 'seen/"),
        (BroadcastsHead(), "fedper would receive 'fc.weight'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_undeclared_name_is_an_error(method: Method, message: str, tmp_path: Path) -> None:
    e = dataclasses.replace(
        experiment(f"{method.base_name}{'+dbe' * (method.name == 'composed')}"), method=method
    )
    recorder = MessageRecorder(e)
    with pytest.raises(FeddbeError, match=message):
        run_recorded(e, tmp_path, recorder)
    assert not any(word in name for word in ("prbm", "labels") for m in recorder.messages for name in m)


def test_secret_takes_precedence_over_sends(tmp_path: Path) -> None:
    class ContradictoryMethod(SendsHead):
        secret = ("fc.weight",)
        sends = (MODEL,)

    e = dataclasses.replace(experiment("fedper"), method=ContradictoryMethod())
    with pytest.raises(FeddbeError, match=r"would send 'fc.weight'"):
        run_recorded(e, tmp_path, MessageRecorder(e))


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ((), ["fc1.1.weight", "fc.weight", "mean", "mr/size"]),
        ((MODEL,), ["mean", "mr/size"]),
        ((BODY, "mr/"), ["fc.weight", "mean"]),
        ((HEAD, "mean"), ["fc1.1.weight", "mr/size"]),
        (("mr", "mean/", "fc"), ["fc1.1.weight", "fc.weight", "mean", "mr/size"]),
    ],
)
def test_undeclared_names_are_those_that_no_entry_covers(
    allowed: tuple[str, ...], expected: list[str]
) -> None:
    """An entry is a name, a prefix with a final slash, or a part of the model."""
    names = ["fc1.1.weight", "fc.weight", "mean", "mr/size"]
    assert undeclared_names(names, allowed, experiment("fedavg").task.model) == expected
