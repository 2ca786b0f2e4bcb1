"""Your own method, without changing feddbe: a class in a file.

    feddbe methods examples/own_method.py:Trimmed
    feddbe run examples/own_method.py:Trimmed --rounds 20
    feddbe run "examples/own_method.py:Trimmed(trim=0.2)+dbe(kappa=5)" --rounds 20

docs/writing_a_method.md explains how to write a method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

import feddbe.testing
from feddbe.config.parameters import parameter
from feddbe.methods.base import Method, Upload
from feddbe.state import State
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer


@dataclass(frozen=True)
class Trimmed(Method):
    """FedAvg with a trimmed mean (Yin et al., ICML 2018).

    For each weight, the server discards the largest and smallest values of clients, and takes the plain mean
    of the rest. trim = 0 is the plain mean.
    """

    name: ClassVar[str] = "trimmed"

    trim: float = parameter(0.1, "share of clients discarded at each end, at least one", low=0, high=0.49)

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return trainer.fit(received).params, private

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        discarded = 0
        if self.trim:
            discarded = min(max(1, int(self.trim * len(uploads))), (len(uploads) - 1) // 2)
        mean = {}
        for name in uploads[0].state:
            ordered = torch.stack([upload.state[name] for upload in uploads]).sort(dim=0).values
            mean[name] = ordered[discarded : len(uploads) - discarded].mean(dim=0)
        return mean


if __name__ == "__main__":
    print(*feddbe.testing.check(Trimmed, addons=[], values={"trim": [0.0]}), sep="\n")
    run = feddbe.run(Trimmed(trim=0.2), clients=5, rounds=2)
    assert run["last"] is not None
    print("accuracy", run["last"]["accuracy"])
