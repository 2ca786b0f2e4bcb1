"""FedProx.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks", MLSys
2020, https://arxiv.org/abs/1812.06127
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from feddbe.config.parameters import parameter
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State
from feddbe.training.loss_terms import prox
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term: local loss + mu/2 |theta - theta_global|^2. mu = 0 is FedAvg.

    Default mu = 0.001: the smallest value of the paper's grid and the published experiments' example command.
    The paper averages plainly; the published experiments and the default weight by samples.

    Departures: none from the paper, except that partial work (its systems heterogeneity) is not simulated.
    From the published experiments: their code's own default mu = 0 is plain FedAvg.
    """

    name: ClassVar[str] = "fedprox"

    mu: float = parameter(0.001, "weight of the proximal term", low=0, search="0.001 0.01 0.1 1")

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return trainer.fit(received, terms=[prox(self.mu, received)]).params, private
