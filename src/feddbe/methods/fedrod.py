"""FedRoD.

Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022,
https://arxiv.org/abs/2107.00778
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe.methods.base import DISCOURAGED_FOR_PERSONALIZED, PERSONAL, Names
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State, add_prefix, drop_keys, strip_prefix
from feddbe.training.loss_terms import Term, TermContext
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """Two predictors on one body.

    The generic head h is trained with the balanced softmax and averaged with f. A private head h_p is added
    to it; it reads z and h(z) without changing them:

        CE(h(z) + log n_c, y)    trains f, h          CE(stop h(z) + h_p(stop z), y)    trains h_p

    with n_c the client's number of samples of each class. The prediction is h(z) + h_p(z). With equal n_c the
    first loss is the plain cross-entropy. h_p starts as a copy of h. +MR belongs to the first loss.

    Departures: from the paper, the linear variant only (no hypernetwork). From the published experiments: n_c
    is counted on all training samples (theirs missed a dropped batch, which could result in log 0).
    """

    name: ClassVar[str] = "fedrod"
    family: ClassVar[str] = "personalized"
    keeps: ClassVar[Names] = (PERSONAL,)
    secret: ClassVar[Names] = (PERSONAL,)
    discouraged_addons = DISCOURAGED_FOR_PERSONALIZED
    unsupported_addons: ClassVar[Mapping[str, str]] = {
        "ft": "plain SGD would train one of its two heads only"
    }

    def client_init(self, ctx: Context) -> State:
        return {PERSONAL + name: ctx.task.model.parameters[name] for name in ctx.task.model.head}

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        # A class without samples gets the log of a tiny number, because log 0 has no finite loss.
        prior = trainer.label_counts().double().clamp(min=1e-8).log().to(torch.get_default_dtype())
        trained = trainer.fit(
            received | private,
            loss=Term(_balanced_loss, {"prior": prior}, outputs_only=True),
            terms=[Term(_personal_loss, outputs_only=True)],
        ).params
        return drop_keys(trained, [PERSONAL]), add_prefix(PERSONAL, strip_prefix(trained, PERSONAL))

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return the global model with the client's head h_p."""
        return received | private

    def logits(self, trainer: ClientTrainer, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        out = trainer.forward(state, x)
        return out.logits + trainer.task.model.classify(strip_prefix(state, PERSONAL), out.z)


def _balanced_loss(context: TermContext, state: State) -> tuple[Tensor, State]:
    """Return the balanced softmax loss of the generic head."""
    return F.cross_entropy(context.batch.logits + context.const["prior"], context.batch.y), state


def _personal_loss(context: TermContext, state: State) -> tuple[Tensor, State]:
    """Return the loss of the private head; no gradient reaches the body or the generic head."""
    personal = context.model.classify(strip_prefix(context.params, PERSONAL), context.batch.z.detach())
    return F.cross_entropy(context.batch.logits.detach() + personal, context.batch.y), state
