"""FedAvg (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from feddbe.methods.base import Method, Upload, average, averaging
from feddbe.state import State
from feddbe.training.task import Context
from feddbe.training.trainer import Local


@dataclass(frozen=True)
class FedAvg(Method):
    """Clients train the global model, the server averages: theta <- sum_{i in S} n_i/n_S theta_i.

    One client is centralised SGD, exactly. `weights=uniform` takes the plain mean; its paper and the
    published experiments weigh by samples, and so do all methods here that average, unless they say
    otherwise.

    Departures: from its paper, none; from the published experiments, sums run in client order (theirs in
    random order, so that the last bits differed from run to run).
    """

    name: ClassVar[str] = "fedavg"

    weights: str = averaging()

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        return local.fit(received).params, private

    def combine(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return average(uploads, self.weights)
