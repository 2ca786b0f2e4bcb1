"""MOON.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021, https://arxiv.org/abs/2103.16257
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe.config.parameters import parameter
from feddbe.methods.base import MODEL, Names
from feddbe.methods.fedavg import FedAvg
from feddbe.seeds import torch_seed, torch_seeded
from feddbe.state import State, add_prefix, strip_prefix
from feddbe.training.loss_terms import Term, TermContext
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer

PROJECTION = "projection/"
PREVIOUS = "previous/"
GLOBAL = "global/"


@dataclass(frozen=True)
class Moon(FedAvg):
    """FedAvg with a model-contrastive term.

    The representation z is attracted by the received global model's z_glob and repelled by z_prev of the
    client's previous local model (theta^0 at first), with s the cosine similarity:

        loss + mu * -log( e^{s(z, z_glob)/tau} / (e^{s(z, z_glob)/tau} + e^{s(z, z_prev)/tau}) )

    mu = 0 is FedAvg. Defaults mu = 1 and tau = 0.5: paper and code. `projection` > 0 contrasts the output of
    a shared two-layer head of that width on z (paper: 256). `contrast` selects f(x) or, with PRBM, f(x) + p_i
    for the trained model; the two other models always use f(x).

    The two other models are evaluated with fixed BatchNorm statistics: the global model with those it was
    received with, the previous model with those that its training left.

    Departures: from the paper, no projection head by default, as in the published experiments. From the
    published experiments: their global model was in training mode, so that every client changed its
    statistics.
    """

    name: ClassVar[str] = "moon"
    keeps: ClassVar[Names] = (PREVIOUS,)  # not secret: it is the last upload
    sends: ClassVar[Names] = (MODEL, PROJECTION)
    receives: ClassVar[Names] = (MODEL, PROJECTION)

    mu: float = parameter(1.0, "weight of the contrast", low=0, search="0.001 0.01 0.1 1 5 10")
    tau: float = parameter(0.5, "temperature", above=0, search="0.1 0.5 1")
    projection: int = parameter(
        0, "width of the projection head; 0: none", low=0, high=100_000, search="0 256"
    )
    contrast: str = parameter("z_g", "representation that is contrasted", choices=("z_g", "z"))

    def server_init(self, ctx: Context) -> State:
        return super().server_init(ctx) | self._init_projection(ctx)

    def client_init(self, ctx: Context) -> State:
        return add_prefix(PREVIOUS, ctx.task.model.parameters | self._init_projection(ctx))

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        received_buffers = {name: b.clone() for name, b in trainer.buffers("shared").items()}
        global_model = add_prefix(GLOBAL, received | received_buffers)
        others = private | add_prefix(PREVIOUS, trainer.buffers("previous")) | global_model
        term = Term(self._contrastive_loss, others, outputs_only=True)
        trained = trainer.fit(received, terms=[term]).params
        trainer.set_buffers("previous", trainer.buffers("shared"))
        return trained, add_prefix(PREVIOUS, trained)

    def _contrastive_loss(self, context: TermContext, state: State) -> tuple[Tensor, State]:
        z = _project(context.batch.z if self.contrast == "z" else context.batch.z_g, context.params)
        with torch.no_grad():
            others = [strip_prefix(context.const, prefix) for prefix in (GLOBAL, PREVIOUS)]
            contrasts = [
                _project(context.model.forward(other, context.batch.x).z_g, other) for other in others
            ]
        cosines = torch.stack([F.cosine_similarity(z, other, dim=1) for other in contrasts], 1)
        positive = torch.zeros(len(z), dtype=torch.long)  # index 0: the global model is the positive pair
        return self.mu * F.cross_entropy(cosines / self.tau, positive), state

    def _init_projection(self, ctx: Context) -> State:
        """Return the initial projection head, equal for all clients."""
        if not self.projection:
            return {}
        width = math.prod(ctx.task.model.feature_shape)
        with torch_seeded(torch_seed(ctx.task.seed, "projection")):
            layers = torch.nn.Sequential(
                torch.nn.Linear(width, width), torch.nn.Linear(width, self.projection)
            )
        return {PROJECTION + name: p.detach() for name, p in layers.named_parameters()}


def _project(z: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """Apply the projection head, if there is one."""
    z = z.flatten(1)
    if f"{PROJECTION}0.weight" not in params:
        return z
    hidden = F.relu(F.linear(z, params[f"{PROJECTION}0.weight"], params[f"{PROJECTION}0.bias"]))
    return F.linear(hidden, params[f"{PROJECTION}1.weight"], params[f"{PROJECTION}1.bias"])
