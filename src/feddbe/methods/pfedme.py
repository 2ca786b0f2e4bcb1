"""pFedMe.

Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
https://arxiv.org/abs/2006.08848
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from feddbe.config.parameters import parameter
from feddbe.methods.base import (
    DISCOURAGED_FOR_PERSONALIZED,
    FIXED_WITHOUT_OPTIMIZER,
    PERSONAL,
    UNSUPPORTED_WITHOUT_PLAIN_SGD,
    Method,
    Names,
    Upload,
    average,
    weights_parameter,
)
from feddbe.state import State, add_prefix, strip_prefix
from feddbe.training.backends import proximal_steps
from feddbe.training.fit_plan import Losses, Samples, no_losses
from feddbe.training.loss_terms import ProximalSteps
from feddbe.training.task import Context, Task
from feddbe.training.trainer import ClientTrainer


@dataclass(frozen=True)
class PFedMe(Method):
    """Personal model theta near the global w, K steps per batch toward the proximal point of w:

        theta <- theta - lr_p (g(theta) + lam (theta - w))    K times on the same batch
        w <- w - eta lam (w - theta)                           after each batch

    theta starts at the received w in each round. The server computes w <- (1 - beta) w + beta mean, by
    default with the plain mean, as in the paper (the published experiments weighted by samples). The client
    predicts with theta of its last round. The run's learning rate has no effect.

    Defaults lam = 15, K = 5, lr_p = 0.01, eta = 0.005, beta = 1: paper and code.

    Departures: from the authors' code, no hidden weight decay. From the published experiments: their default
    beta = 0 freezes the server, and they evaluated w_i instead of theta_i (`evaluate=w`).
    """

    name: ClassVar[str] = "pfedme"
    family: ClassVar[str] = "personalized"
    keeps: ClassVar[Names] = (PERSONAL,)
    secret: ClassVar[Names] = (PERSONAL,)  # with evaluate=w it is a copy of the upload, and not secret
    discouraged_addons = DISCOURAGED_FOR_PERSONALIZED
    unsupported_addons = UNSUPPORTED_WITHOUT_PLAIN_SGD
    fixed_options = FIXED_WITHOUT_OPTIMIZER

    lam: float = parameter(15.0, "weight of the proximal term |theta - w|^2 / 2", low=0, search="1 15 30")
    k: int = parameter(5, "K, inner steps per batch", low=1, search="1 5 7")
    lr_p: float = parameter(0.01, "inner learning rate", above=0, search="0.01 0.05 0.1")
    eta: float = parameter(0.005, "learning rate of w", above=0, search="0.005 0.01")
    beta: float = parameter(1.0, "share of the mean in the new global model", above=0, search="1 2")
    weights: str = weights_parameter("uniform")
    evaluate: str = parameter("theta", "parameters for predictions", choices=("theta", "w"))

    def ignored_options(self, task: Task) -> Mapping[str, str]:
        return {"lr": "its rates are lr_p and eta"}

    def client_init(self, ctx: Context) -> State:
        return add_prefix(PERSONAL, ctx.task.model.parameters)

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        start = _PFedMeState(received, received, trainer.buffers("shared"), no_losses())
        end = trainer.run_steps(_step, start, (ctx.task, self))
        trainer.set_buffers("shared", end.statistics)
        return end.w, add_prefix(PERSONAL, end.theta if self.evaluate == "theta" else end.w)

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        mean = average(uploads, self.weights)
        return {name: (1 - self.beta) * w + self.beta * mean[name] for name, w in server.items()}

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return theta_i."""
        return strip_prefix(private, PERSONAL)


class _PFedMeState(NamedTuple):
    """State of local training: personal and global parameters, BatchNorm statistics and losses."""

    theta: State
    w: State
    statistics: State
    losses: Losses


def _step(state: _PFedMeState, const: tuple[Task, PFedMe], samples: Samples, key: int) -> _PFedMeState:
    """Return the state after K proximal steps on one batch and one step of w."""
    task, method = const
    steps = ProximalSteps(method.k, method.lr_p, method.lam, state.w)
    theta, loss, statistics = proximal_steps(task, state.theta, state.statistics, samples, steps)
    w = {name: torch.lerp(p, theta[name], method.eta * method.lam) for name, p in state.w.items()}
    return _PFedMeState(theta, w, statistics, state.losses.add(loss, method.k * len(samples.y)))
