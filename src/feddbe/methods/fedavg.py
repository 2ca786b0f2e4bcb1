"""FedAvg.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from feddbe.methods.base import Method, Upload, average, weights_parameter
from feddbe.state import State
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer


@dataclass(frozen=True)
class FedAvg(Method):
    """Average of locally trained models: theta <- sum_{i in S} n_i/n_S theta_i.

    With one client this is exactly centralized SGD. `weights=uniform` is the plain mean. The paper and the
    published experiments weight by samples, as does every averaging method here unless stated otherwise.

    Departures: none from the paper. From the published experiments: sums run in client order (theirs in
    random order, so the last bits differed from run to run).
    """

    name: ClassVar[str] = "fedavg"

    weights: str = weights_parameter()

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return trainer.fit(received).params, private

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return average(uploads, self.weights)
