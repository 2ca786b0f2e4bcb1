"""Ditto.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
https://arxiv.org/abs/2012.04221
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from feddbe.config.parameters import parameter
from feddbe.methods.base import (
    DISCOURAGED_FOR_PERSONALIZED,
    PERSONAL,
    UNSUPPORTED_WITH_TWO_MODELS,
    Names,
)
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State, add_prefix, strip_prefix
from feddbe.training.loss_terms import prox
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer


@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg for a global model w, and a personal model v close to it, with which the client predicts:

        v <- v - eta (grad f(v) + lam (v - w))

    v is trained first, from its last value (theta^0 at first). The shared track equals FedAvg bit for bit;
    lam = 0 is local training.

    Default lam = 1: the authors' Fashion-MNIST scripts. +MR acts on the global track (`mr_target=both`: also
    on v). The authors' code averages plainly; the published experiments and the default weight by samples.

    Departures: none from the paper. From the published experiments: their default lam = 0 is local training,
    and their list of accuracies mixes global and personal models.
    """

    name: ClassVar[str] = "ditto"
    family: ClassVar[str] = "personalized"
    keeps: ClassVar[Names] = (PERSONAL,)
    secret: ClassVar[Names] = (PERSONAL,)
    discouraged_addons = DISCOURAGED_FOR_PERSONALIZED
    unsupported_addons = UNSUPPORTED_WITH_TWO_MODELS
    inference_track: ClassVar[str] = "personal"

    lam: float = parameter(1.0, "weight of the proximal term |v - w|^2 / 2", low=0, search="0.1 1 2")
    personal_epochs: int | None = parameter(
        None, "epochs of the personal model; none: as many as a round has", low=1, search="1 2 5"
    )
    mr_target: str = parameter("global", "tracks on which MR acts", choices=("global", "both"))

    @property
    def addon_tracks(self) -> tuple[str, ...]:
        return ("shared",) if self.mr_target == "global" else ("shared", "personal")

    def client_init(self, ctx: Context) -> State:
        return add_prefix(PERSONAL, ctx.task.model.parameters)

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        v = trainer.fit(
            strip_prefix(private, PERSONAL),
            track="personal",
            epochs=self.personal_epochs,
            terms=[prox(self.lam, received)],
        ).params
        return trainer.fit(received).params, add_prefix(PERSONAL, v)

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return v_i."""
        return strip_prefix(private, PERSONAL)
