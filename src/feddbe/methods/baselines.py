"""Baselines: local training without exchange, and the majority class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from feddbe.methods.base import PERSONAL, Method, Names, Upload
from feddbe.state import State, add_prefix, strip_prefix
from feddbe.training.task import Context, Task
from feddbe.training.trainer import ClientTrainer

_UNSUPPORTED_WITHOUT_EXCHANGE = dict.fromkeys(("prbm", "mr", "ft"), "without an exchange it has no effect")


@dataclass(frozen=True)
class LocalOnly(Method):
    """Local training from theta^0; nothing is sent."""

    name: ClassVar[str] = "local"
    family: ClassVar[str] = "baseline"
    keeps: ClassVar[Names] = (PERSONAL,)
    secret: ClassVar[Names] = (PERSONAL,)
    sends: ClassVar[Names] = ()
    receives: ClassVar[Names] = ()
    unsupported_addons = _UNSUPPORTED_WITHOUT_EXCHANGE
    inference_track: ClassVar[str] = "personal"

    def server_init(self, ctx: Context) -> State:
        return {}

    def client_init(self, ctx: Context) -> State:
        return add_prefix(PERSONAL, ctx.task.model.parameters)

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        trained = trainer.fit(strip_prefix(private, PERSONAL), track="personal").params
        return {}, add_prefix(PERSONAL, trained)

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return server

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return the client's own model."""
        return strip_prefix(private, PERSONAL)


@dataclass(frozen=True)
class Majority(Method):
    """Prediction of each client's most frequent training label: the baseline accuracy of every table."""

    name: ClassVar[str] = "majority"
    family: ClassVar[str] = "baseline"
    sends: ClassVar[Names] = ()
    receives: ClassVar[Names] = ()
    unsupported_addons = _UNSUPPORTED_WITHOUT_EXCHANGE

    def server_init(self, ctx: Context) -> State:
        return {}

    def ignored_options(self, task: Task) -> Mapping[str, str]:
        return dict.fromkeys(("lr", "batch_size", "local_epochs"), "it does not train")

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return {}, private

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return server

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return the counts of the client's training labels."""
        return {"counts": trainer.label_counts().float()}

    def logits(self, trainer: ClientTrainer, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return state["counts"].expand(len(x), -1)
