"""FedProx (Li et al., MLSys 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from feddbe.config.parameters import parameter
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State
from feddbe.training.task import Context
from feddbe.training.terms import prox
from feddbe.training.trainer import Local


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term: local loss + mu/2 |theta - theta_global|^2. mu = 0 is FedAvg.

    Default mu = 0.001: the smallest of its paper's grid, and the published experiments' example command.
    Averaging: its paper plainly, the published experiments and the default by samples.

    Departures: from its paper, none (its systems heterogeneity, partial work, is not simulated); from the
    published experiments, whose code's own default mu = 0 is a silent FedAvg.
    """

    name: ClassVar[str] = "fedprox"

    mu: float = parameter(0.001, "weight of the proximal term", low=0, search="0.001 0.01 0.1 1")

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        return local.fit(received, terms=[prox(self.mu, received)]).params, private
