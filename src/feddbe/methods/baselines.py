"""Baselines: local training without exchange, and the majority class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from feddbe.methods.base import PERSONAL, Facts, Method, Names, Upload
from feddbe.state import State, add_prefix, strip_prefix
from feddbe.training.task import Context, Task
from feddbe.training.trainer import Local

_ALONE = dict.fromkeys(("prbm", "mr", "ft"), "there is no exchange that it could improve")


@dataclass(frozen=True)
class LocalOnly(Method):
    """Local training from theta^0; nothing is sent."""

    name: ClassVar[str] = "local"
    family: ClassVar[str] = "floor"
    facts: ClassVar[Facts] = Facts("0", "0", keeps="1", evaluated="the client's own model")
    keeps: ClassVar[Names] = (PERSONAL,)
    secret: ClassVar[Names] = (PERSONAL,)
    sends: ClassVar[Names] = ()
    receives: ClassVar[Names] = ()
    cannot = _ALONE
    deployed_track: ClassVar[str] = "personal"

    def server_init(self, ctx: Context) -> State:
        return {}

    def client_init(self, ctx: Context) -> State:
        return add_prefix(PERSONAL, ctx.task.model.parameters)

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        return {}, add_prefix(PERSONAL, local.fit(strip_prefix(private, PERSONAL), track="personal").params)

    def combine(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return server

    def deployed(self, ctx: Context, local: Local, received: State, private: State) -> State:
        return strip_prefix(private, PERSONAL)


@dataclass(frozen=True)
class Majority(Method):
    """Prediction of each client's most frequent training label: the lower bound of every table."""

    name: ClassVar[str] = "majority"
    family: ClassVar[str] = "floor"
    facts: ClassVar[Facts] = Facts("0", "0", evaluated="each client's most frequent label")
    sends: ClassVar[Names] = ()
    receives: ClassVar[Names] = ()
    cannot = _ALONE

    def server_init(self, ctx: Context) -> State:
        return {}

    def unused(self, task: Task) -> Mapping[str, str]:
        return dict.fromkeys(("lr", "batch", "epochs"), "it trains nothing")

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        return {}, private

    def combine(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return server

    def deployed(self, ctx: Context, local: Local, received: State, private: State) -> State:
        return {"counts": local.label_counts().float()}

    def logits(self, local: Local, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return state["counts"].expand(len(x), -1)
