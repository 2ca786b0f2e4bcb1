"""FedPer.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization Layers", 2019,
https://arxiv.org/abs/1912.00818
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from feddbe.methods.base import BODY, DISCOURAGED_FOR_PERSONALIZED, PERSONAL, Names
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State, add_prefix, strip_prefix
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer


@dataclass(frozen=True)
class FedPer(FedAvg):
    """Averaged body f and private head h, trained together.

    A cut after the last layer (no head) is FedAvg. With PRBM (`--force`) p_i is one more part of the private
    head.

    Departures: none from the paper, none from the published experiments.
    """

    name: ClassVar[str] = "fedper"
    family: ClassVar[str] = "personalized"
    keeps: ClassVar[Names] = (PERSONAL,)
    secret: ClassVar[Names] = (PERSONAL,)
    sends: ClassVar[Names] = (BODY,)
    receives: ClassVar[Names] = (BODY,)
    discouraged_addons = DISCOURAGED_FOR_PERSONALIZED

    def server_init(self, ctx: Context) -> State:
        return {name: ctx.task.model.parameters[name] for name in ctx.task.model.body}

    def client_init(self, ctx: Context) -> State:
        return {PERSONAL + name: ctx.task.model.parameters[name] for name in ctx.task.model.head}

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        model = ctx.task.model
        trained = self.update(trainer, received | strip_prefix(private, PERSONAL))
        body = {name: trained[name] for name in model.body}
        head = {name: trained[name] for name in model.head}
        return body, add_prefix(PERSONAL, head)

    def update(self, trainer: ClientTrainer, params: State) -> State:
        """Return body and head after one round of local training."""
        return trainer.fit(params).params

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return the new body with the client's head."""
        return received | strip_prefix(private, PERSONAL)
