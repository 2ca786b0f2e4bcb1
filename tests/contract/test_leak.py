"""The privacy test must be able to fail: methods that leak on purpose."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from feddbe.methods.addons import MR, PRBM, Composed
from feddbe.methods.base import BODY, HEAD, MODEL, PERSONAL, Method, undeclared_names
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.fedper import FedPer
from feddbe.state import State, add_prefix, strip_prefix
from feddbe.testing.contract import find_leaks
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.federation import MessageRecorder, experiment, run_recorded

HIDDEN = "mean"
"""A name that +mr may send."""


@dataclasses.dataclass(frozen=True)
class Renames(Composed):
    """Sends PRBM's vector inside an entry with a name that it may send."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        up, new = super().train(ctx, trainer, received, private)
        return {**up, HIDDEN: new["prbm"].repeat(2)}, new


@dataclasses.dataclass(frozen=True)
class Named(Composed):
    """Sends it under its own name."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        up, new = super().train(ctx, trainer, received, private)
        return {**up, "prbm": new["prbm"]}, new


@dataclasses.dataclass(frozen=True)
class Head(FedPer):
    """Sends its head with the body."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        up, new = super().train(ctx, trainer, received, private)
        return up | strip_prefix(new, PERSONAL), new


@dataclasses.dataclass(frozen=True)
class Early(FedAvg):
    """Sends something in the preparation."""

    has_setup = True

    def client_setup(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return {"labels": trainer.label_counts()}, private


@dataclasses.dataclass(frozen=True)
class Hoards(FedAvg):
    """Keeps what it received."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return super().train(ctx, trainer, received, private)[0], add_prefix("seen/", received)


@dataclasses.dataclass(frozen=True)
class Tells(FedPer):
    """Its server sends a head to all."""

    def broadcast(self, ctx: Context, server: State, client: int) -> State:
        return ctx.task.model.parameters


def test_a_secret_value_under_another_name_is_found(tmp_path: Path) -> None:
    e = dataclasses.replace(experiment("fedavg+dbe"), method=Renames(FedAvg(), (PRBM(), MR())))
    recorder = MessageRecorder(e)
    run_recorded(e, tmp_path, recorder)
    assert any(
        leak.startswith("prbm") and leak.endswith(HIDDEN) for leak in find_leaks(recorder, e.method.secret)
    )


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Named(FedAvg(), (PRBM(), MR())), "fedavg would send 'prbm'"),
        (Head(), "fedper would send 'fc.weight'"),
        (Early(), "fedavg would send 'labels'"),
        (Hoards(), "fedavg would keep 'seen/"),
        (Tells(), "fedper would receive 'fc.weight'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_what_is_not_declared_stops_the_client(method: Method, words: str, tmp_path: Path) -> None:
    e = dataclasses.replace(
        experiment(f"{method.base_name}{'+dbe' * (method.name == 'composed')}"), method=method
    )
    recorder = MessageRecorder(e)
    with pytest.raises(AssertionError, match=words):
        run_recorded(e, tmp_path, recorder)
    assert not any(word in name for word in ("prbm", "labels") for m in recorder.messages for name in m)


def test_a_secret_cannot_be_declared_as_sent(tmp_path: Path) -> None:
    """Of two declarations that disagree the stricter one holds."""

    class Lax(Head):
        secret = ("fc.weight",)
        sends = (MODEL,)

    e = dataclasses.replace(experiment("fedper"), method=Lax())
    with pytest.raises(AssertionError, match=r"would send 'fc.weight'"):
        run_recorded(e, tmp_path, MessageRecorder(e))


@pytest.mark.parametrize(
    ("allowed", "wanted"),
    [
        ((), ["fc1.1.weight", "fc.weight", "mean", "mr/size"]),
        ((MODEL,), ["mean", "mr/size"]),
        ((BODY, "mr/"), ["fc.weight", "mean"]),
        ((HEAD, "mean"), ["fc1.1.weight", "mr/size"]),
        (("mr", "mean/", "fc"), ["fc1.1.weight", "fc.weight", "mean", "mr/size"]),
    ],
)
def test_the_grammar(allowed: tuple[str, ...], wanted: list[str]) -> None:
    """Itself, what begins with it if it ends with a slash, or a part of the model."""
    names = ["fc1.1.weight", "fc.weight", "mean", "mr/size"]
    assert undeclared_names(names, allowed, experiment("fedavg").task.model) == wanted
