"""FedBABU (Oh et al., ICLR 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from feddbe.local import Local
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.personal import NO_PRBM
from feddbe.state import State
from feddbe.task import Context

__all__ = ["FedBABU"]


@dataclass(frozen=True)
class FedBABU(FedAvg):
    """The body is trained and averaged, the head stays at theta^0 for all.

    Departures: from its paper, the fine-tuning at the end is not part of a round; from the published
    experiments, whose fine-tuning starts from each client's last local model instead of the global one.
    """

    name: ClassVar[str] = "fedbabu"
    family: ClassVar[str] = "personalized"
    refuses = NO_PRBM

    def server_init(self, ctx: Context) -> State:
        return {name: ctx.task.model.parameters[name] for name in ctx.task.model.body}

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        model = ctx.task.model
        new = local.fit(self._whole(ctx, received), trainable=model.body).params
        return {name: new[name] for name in model.body}, private

    def deployed(self, ctx: Context, local: Local, received: State, private: State) -> State:
        return self._whole(ctx, received)

    def _whole(self, ctx: Context, body: State) -> State:
        return {**ctx.task.model.parameters, **body}
