"""APFL.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020, https://arxiv.org/abs/2003.13461
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from feddbe.config.parameters import parameter
from feddbe.methods.base import (
    DISCOURAGED_FOR_PERSONALIZED,
    FIXED_WITHOUT_OPTIMIZER,
    PERSONAL,
    UNSUPPORTED_WITH_TWO_MODELS,
    Names,
)
from feddbe.methods.fedavg import FedAvg
from feddbe.seeds import torch_seeded
from feddbe.state import State, add_prefix, drop_keys, strip_prefix, sum_by_name
from feddbe.training.loss_terms import Term, TermContext
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer

ALPHA, STATISTICS = "alpha", "statistics/"


@dataclass(frozen=True)
class APFL(FedAvg):
    """FedAvg for w, and a personal v, trained on the same batches; the client predicts with their mixture m:

        m = alpha v + (1 - alpha) w          v <- v - eta alpha grad f(m)
        alpha <- alpha - eta <v - w, grad f(m)>, kept in [0, 1]

    with w and v as they were before this batch. v and alpha stay with the client; v starts at theta^0. The
    mixture has BatchNorm statistics that also stay with the client. Without adaptation, alpha = 0 is FedAvg
    and alpha = 1 is local training.

    Default alpha = 0.5: the authors' code. +MR acts on w. The paper averages plainly; the published
    experiments and the default weight by samples.

    Departures: from the authors' code, parameters are mixed instead of outputs, as in the paper, and alpha
    adapts with every batch. From the published experiments: they took v's gradient at v and overwrote v with
    the mixture.
    """

    name: ClassVar[str] = "apfl"
    family: ClassVar[str] = "personalized"
    keeps: ClassVar[Names] = (PERSONAL, ALPHA)
    secret: ClassVar[Names] = (PERSONAL, ALPHA)
    discouraged_addons = DISCOURAGED_FOR_PERSONALIZED
    unsupported_addons = UNSUPPORTED_WITH_TWO_MODELS
    fixed_options = FIXED_WITHOUT_OPTIMIZER
    inference_track: ClassVar[str] = "personal"

    alpha: float = parameter(
        0.5, "share of the personal model at the start", low=0, high=1, search="0.25 0.5 0.75"
    )
    adaptive: bool = parameter(True, "learn alpha")

    def client_init(self, ctx: Context) -> State:
        return add_prefix(PERSONAL, ctx.task.model.parameters) | {ALPHA: torch.tensor(self.alpha)}

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        const = {"lr": torch.tensor(ctx.lr)}
        start = private | add_prefix(STATISTICS, trainer.buffers("personal"))
        fit = trainer.fit(received, terms=[Term(self._update_personal, const, start, outputs_only=True)])
        end = fit.carries[0]
        trainer.set_buffers("personal", strip_prefix(end, STATISTICS))
        return fit.params, drop_keys(end, [STATISTICS])

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return the mixture of v_i and the new w."""
        return _mix(private, received)

    def _update_personal(self, context: TermContext, state: State) -> tuple[None, State]:
        """Return v and alpha after this batch; the loss of w does not change."""
        lr, alpha = context.const["lr"], state[ALPHA]
        v = strip_prefix(state, PERSONAL)
        w = {name: context.params[name].detach() for name in v}
        with torch_seeded(context.key):  # dropout in this pass must not change that of w
            grads, _, statistics = context.differentiate(
                context.model,
                _mix(state, w),
                strip_prefix(state, STATISTICS),
                context.batch.x,
                context.batch.y,
            )
        new_v = {name: torch.addcmul(p, grads[name], -lr * alpha) for name, p in v.items()}
        if self.adaptive:
            slope = sum_by_name({n: torch.dot((v[n] - w[n]).flatten(), grads[n].flatten()) for n in v})
            alpha = (alpha - lr * slope).clamp(0, 1)
        return None, add_prefix(PERSONAL, new_v) | add_prefix(STATISTICS, statistics) | {ALPHA: alpha}


def _mix(private: State, w: Mapping[str, Tensor]) -> State:
    """Return alpha v + (1 - alpha) w."""
    alpha = private[ALPHA]
    return {name: torch.lerp(w[name], v, alpha) for name, v in strip_prefix(private, PERSONAL).items()}
