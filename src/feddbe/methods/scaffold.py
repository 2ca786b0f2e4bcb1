"""SCAFFOLD.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020, https://arxiv.org/abs/1910.06378
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from feddbe.config.parameters import parameter
from feddbe.methods.base import (
    MODEL,
    Method,
    Names,
    Upload,
    average,
    weights_parameter,
)
from feddbe.state import State, add_prefix, drop_keys, strip_prefix
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer

CONTROL = "control/"


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates c (server) and c_i (client) that correct the drift of T local steps:

        y <- y - eta (g + c - c_i)                c_i+ = c_i - c + (x - y) / (T eta)      (option II)
        x <- x + eta_g mean_S (y_i - x)           c <- c + 1/N sum_S (c_i+ - c_i)

    Means over the cohort are plain, as in the paper and the published experiments; `weights=samples` weights
    the y_i, never the c_i. With identical clients and full batches it is FedAvg.

    Departures: none from the paper. From the published experiments: T counts all epochs (theirs counted one).
    """

    name: ClassVar[str] = "scaffold"
    keeps: ClassVar[Names] = (CONTROL,)  # not secret: c_i is the sum of the changes that were sent
    sends: ClassVar[Names] = (MODEL, CONTROL)
    receives: ClassVar[Names] = (MODEL, CONTROL)
    fixed_options = dict.fromkeys(
        ("optimizer", "momentum", "clip_norm"),
        "its control variates are mean gradients, and (x - y) / (T eta) equals them after plain SGD only",
    )

    eta_g: float = parameter(1.0, "server learning rate", above=0, search="0.5 1")
    weights: str = weights_parameter("uniform")

    def server_init(self, ctx: Context) -> State:
        return super().server_init(ctx) | self._zero_control(ctx)

    def client_init(self, ctx: Context) -> State:
        return self._zero_control(ctx)

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        x = drop_keys(received, [CONTROL])
        c = strip_prefix(received, CONTROL)
        c_i = strip_prefix(private, CONTROL)
        y = trainer.fit(x, correction={name: c[name] - c_i[name] for name in x}).params
        scale = 1 / (trainer.count_steps() * ctx.lr)
        delta = {name: (x[name] - y[name]) * scale - c[name] for name in x}  # c_i+ - c_i
        return y | add_prefix(CONTROL, delta), add_prefix(CONTROL, {n: c_i[n] + delta[n] for n in x})

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        delta = average(uploads, "uniform")
        y = delta if self.weights == "uniform" else average(uploads, self.weights)
        share = len(uploads) / ctx.task.members
        model = {name: x + self.eta_g * (y[name] - x) for name, x in drop_keys(server, [CONTROL]).items()}
        return model | {name: server[name] + share * delta[name] for name in add_prefix(CONTROL, model)}

    def _zero_control(self, ctx: Context) -> State:
        return add_prefix(CONTROL, {n: torch.zeros_like(p) for n, p in ctx.task.model.parameters.items()})
