"""FedBABU.

Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022,
https://arxiv.org/abs/2106.06042
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from feddbe.methods.base import (
    BODY,
    DISCOURAGED_FOR_PERSONALIZED,
    UNSUPPORTED_WITH_FINETUNING,
    Finetuning,
    Names,
)
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer


@dataclass(frozen=True)
class FedBABU(FedAvg):
    """Averaged body; the head stays at theta^0 for all clients.

    After the last round each client fine-tunes both parts from the final global body (`adapt_epochs`),
    without MR.

    Departures: from the paper, 10 epochs of fine-tuning without momentum (its code: 5 with momentum). From
    the published experiments: their fine-tuning starts from each client's last local model, not from the
    global one.
    """

    name: ClassVar[str] = "fedbabu"
    family: ClassVar[str] = "personalized"
    sends: ClassVar[Names] = (BODY,)
    receives: ClassVar[Names] = (BODY,)
    adapts: ClassVar[Finetuning] = "last"
    discouraged_addons = DISCOURAGED_FOR_PERSONALIZED
    unsupported_addons = UNSUPPORTED_WITH_FINETUNING

    def server_init(self, ctx: Context) -> State:
        return {name: ctx.task.model.parameters[name] for name in ctx.task.model.body}

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        model = ctx.task.model
        trained = trainer.fit(self._full_model(ctx, received), trainable=model.body).params
        return {name: trained[name] for name in model.body}, private

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return the new body with the first head."""
        return self._full_model(ctx, received)

    def adapt(self, ctx: Context, trainer: ClientTrainer, received: State, private: State) -> State:
        return self.finetune(ctx, trainer, received, private)

    def _full_model(self, ctx: Context, body: State) -> State:
        """Return the full model: the head of theta^0 and this body."""
        return {**ctx.task.model.parameters, **body}
