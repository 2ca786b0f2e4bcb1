"""`check` reports each violation of the contract."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from feddbe import testing
from feddbe.config.parameters import parameter
from feddbe.errors import InvalidInputError
from feddbe.methods.base import Method, Names, Upload
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.registry import METHODS
from feddbe.state import State
from feddbe.testing import check
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer

_memory: dict[int, int] = {}


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What a test makes known is forgotten again."""
    before = set(METHODS)
    yield
    for name in set(METHODS) - before:
        del METHODS[name]


def scaled(up: State, factor: float) -> State:
    return {name: value * factor for name, value in up.items()}


@dataclass(frozen=True)
class Remembers(FedAvg):
    """Counts a client's rounds in the process, which a killed one forgets."""

    name: ClassVar[str] = "remembers"

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        key = os.getpid() if ctx.round == 1 else 0
        _memory.setdefault(key, ctx.round)
        return scaled(trainer.fit(received).params, 1 + 0.01 * (os.getpid() in _memory)), private


@dataclass(frozen=True)
class Random(FedAvg):
    """Draws from torch's own stream."""

    name: ClassVar[str] = "random"

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return scaled(trainer.fit(received).params, 1 + 0.01 * float(torch.rand(()))), private


@dataclass(frozen=True)
class Boasts(FedAvg):
    """Says that it keeps something."""

    name: ClassVar[str] = "boasts"
    keeps: ClassVar[Names] = ("own/",)


@dataclass(frozen=True)
class Divides(FedAvg):
    """By the number of other clients that take part."""

    name: ClassVar[str] = "divides"

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        mean = super().aggregate(ctx, server, uploads)
        return {name: value + 0 / torch.tensor(len(uploads) - 1.0) for name, value in mean.items()}


@dataclass(frozen=True)
class Unfit(FedAvg):
    """By the number of other clients, in the last round."""

    name: ClassVar[str] = "unfit"

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        mean, others = super().aggregate(ctx, server, uploads), torch.tensor(ctx.task.split.clients - 1.0)
        return {name: value + 0 / others for name, value in mean.items()} if ctx.round == 2 else mean


@dataclass(frozen=True)
class Dead(FedAvg):
    """Has an option that does nothing, and one that acts beside another."""

    name: ClassVar[str] = "dead"

    on: bool = parameter(False, "whether factor counts")
    factor: float = parameter(1.01, "of what is sent", above=1, high=1.05)

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return scaled(trainer.fit(received).params, self.factor if self.on else 1.0), private


@dataclass(frozen=True)
class OnlyDense(FedAvg):
    """Loses the convolutions."""

    name: ClassVar[str] = "onlydense"

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        mean = super().aggregate(ctx, server, uploads)
        return {name: value for name, value in mean.items() if not name.startswith("conv")}


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Random, r"random: on pool\(workers=2\) the server's state \('.*'\) differs from serial; .*"),
        (Boasts, "boasts: it declares that it keeps 'own/', but does not"),
        (
            Divides,
            r"divides: training diverged: loss = nan at client \d in round 2; .* \(after: same bits on .*",
        ),
        (Unfit, r"unfit: '.*' is not finite, with clients of \(40,\) samples"),
        (
            Dead,
            "dead: factor = 1.02 changes nothing against 1.01 in 2 rounds; if it acts only with other .*",
        ),
    ],
)
def test_violation_is_a_one_line_error(method: type[Method], words: str) -> None:
    options = {"values": {"factor": [1.02]}} if method is Dead else {}
    with pytest.raises(AssertionError, match=f"^{words}$"):
        check(method, addons=[], **options)  # type: ignore[arg-type]


@pytest.mark.skipif(not testing.CAN_KILL, reason="forks")
def test_state_in_memory_does_not_survive_a_kill(tmp_path: Path) -> None:
    METHODS["remembers"] = Remembers
    with pytest.raises(AssertionError, match=r"^remembers: killed and resumed, the server's state "):
        testing.check_kill("remembers", tmp_path)


def test_passed_checks_are_listed() -> None:
    passed = check(Dead(on=True), engines=[], addons=["mr"], values={"factor": [1.02]})
    assert passed[1].startswith("dead(on=true)+mr: when resumed after each round, ")
    acting = "weights (samples, uniform), on (true, false), factor (1.01, 1.02)"
    assert passed[2] == f"dead(on=true): options that act: {acting}"
    assert len(passed) == 3


def test_check_rejects_wrong_arguments_in_one_line() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^'fedavgg' is not the name of a method; as in fedavg or my_method"
    ):
        check("fedavgg")
    with pytest.raises(InvalidInputError, match=r"^dead has no option 'of'; it has: weights, on, factor$"):
        check(Dead, engines=[], addons=[], prerequisites={"of": {}})
    with pytest.raises(InvalidInputError, match=r"^'7' is not a method; expected a name, or an instance"):
        check(7)  # type: ignore[arg-type]


def test_model_and_data_of_the_user() -> None:
    """Labels are sorted, there are fewer samples than the checks use, and a bias starts at zero like p_i."""
    rng = np.random.RandomState(0)
    x = rng.randn(90, 6).astype(np.float32)
    y = np.sort(rng.randint(0, 2, 90))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    passed = check(FedAvg, model=model, data=(x, y), engines=[], addons=["dbe"])
    assert [line.split(": ")[0] for line in passed] == ["fedavg", "fedavg+dbe", "fedavg"]


def test_violation_that_only_another_model_shows() -> None:
    """The default perceptron has no layer of this name."""
    check(OnlyDense, engines=[], addons=[])
    with pytest.raises(AssertionError, match=r"^onlydense: .*aggregate loses part of the server's state"):
        check(OnlyDense, model="cnn_small", engines=[], addons=[])
