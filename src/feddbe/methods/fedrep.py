"""FedRep.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021, https://arxiv.org/abs/2102.07078
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from feddbe.config.parameters import parameter
from feddbe.methods.fedper import FedPer
from feddbe.state import State
from feddbe.training.trainer import ClientTrainer


@dataclass(frozen=True)
class FedRep(FedPer):
    """FedPer in two phases: first the head with the body frozen, then the body with the head frozen.

    Default: 10 head epochs, and as many body epochs as a round has (1), which is the paper's CIFAR-10
    setting. +MR acts in the body phase only; PRBM (`--force`) is trained in both. The paper averages plainly;
    the published experiments and the default weight by samples.

    Departures: from the paper, plain SGD without momentum, and BatchNorm statistics do not change in the head
    phase (in public code they do). The published experiments ran one head epoch (`head_epochs=1`).
    """

    name: ClassVar[str] = "fedrep"

    head_epochs: int = parameter(10, "epochs of the head", low=1, search="1 5 10")

    def update(self, trainer: ClientTrainer, params: State) -> State:
        model = trainer.task.model
        params = trainer.fit(
            params, epochs=self.head_epochs, trainable=model.head, keep_statistics=False, plain=True
        ).params
        return trainer.fit(params, trainable=model.body).params
