"""MOON (Li et al., CVPR 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe.config.parameters import parameter
from feddbe.methods.base import MODEL, Facts, Names
from feddbe.methods.fedavg import FedAvg
from feddbe.seeds import torch_seed, torch_seeded
from feddbe.state import State, add_prefix, strip_prefix
from feddbe.training.task import Context
from feddbe.training.terms import At, Term
from feddbe.training.trainer import Local

PROJECTION, PREVIOUS, GLOBAL = "projection/", "previous/", "global/"


@dataclass(frozen=True)
class Moon(FedAvg):
    """FedAvg with a contrast of representations: near the received global model's (z_glob), far from the
    client's own model of last time (z_prev, theta^0 at first), s being the cosine:

        loss + mu * -log( e^{s(z, z_glob)/tau} / (e^{s(z, z_glob)/tau} + e^{s(z, z_prev)/tau}) )

    mu = 0 is FedAvg. Defaults mu = 1, tau = 0.5: its paper and code. `projection` > 0 contrasts the output of
    a shared two-layer head of that width on z (its paper: 256). `contrast` chooses f(x) or, with PRBM,
    f(x) + p_i for the model that is trained; the other two are always f(x).

    The two other models are evaluated, each with BatchNorm statistics of its own, which stay as they are: the
    global one's those with which it came, the previous one's those that its training left.

    Departures: from its paper, no projection head by default (as the published experiments ran it); from
    those, whose global model was in training mode and had its statistics moved by every client.
    """

    name: ClassVar[str] = "moon"
    facts: ClassVar[Facts] = Facts(keeps="1")
    keeps: ClassVar[Names] = (PREVIOUS,)  # no secret: it is what was sent last
    sends: ClassVar[Names] = (MODEL, PROJECTION)
    receives: ClassVar[Names] = (MODEL, PROJECTION)

    mu: float = parameter(1.0, "weight of the contrast", low=0, search="0.001 0.01 0.1 1 5 10")
    tau: float = parameter(0.5, "temperature", above=0, search="0.1 0.5 1")
    projection: int = parameter(
        0, "width of the projection head; 0: none", low=0, high=100_000, search="0 256"
    )
    contrast: str = parameter("z_g", "representation that is contrasted", choices=("z_g", "z"))

    def server_init(self, ctx: Context) -> State:
        return super().server_init(ctx) | self._head(ctx)

    def client_init(self, ctx: Context) -> State:
        return add_prefix(PREVIOUS, ctx.task.model.parameters | self._head(ctx))

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        came = {name: b.clone() for name, b in local.buffers("shared").items()}
        others = (
            private | add_prefix(PREVIOUS, local.buffers("previous")) | add_prefix(GLOBAL, received | came)
        )
        new = local.fit(received, terms=[Term(self._contrast, others, at_end=True)]).params
        local.set_buffers("previous", local.buffers("shared"))
        return new, add_prefix(PREVIOUS, new)

    def _contrast(self, at: At, carry: State) -> tuple[Tensor, State]:
        z = _project(at.batch.z if self.contrast == "z" else at.batch.z_g, at.params)
        with torch.no_grad():
            others = [strip_prefix(at.const, prefix) for prefix in (GLOBAL, PREVIOUS)]
            contrasts = [_project(at.model.forward(other, at.batch.x).z_g, other) for other in others]
        cosines = torch.stack([F.cosine_similarity(z, other, dim=1) for other in contrasts], 1)
        nearest = torch.zeros(len(z), dtype=torch.long)  # the global model's is the one to be near to
        return self.mu * F.cross_entropy(cosines / self.tau, nearest), carry

    def _head(self, ctx: Context) -> State:
        """The projection head's start, the same for all."""
        if not self.projection:
            return {}
        width = math.prod(ctx.task.model.feature_shape)
        with torch_seeded(torch_seed(ctx.task.seed, "projection")):
            layers = torch.nn.Linear(width, width), torch.nn.Linear(width, self.projection)
        return {
            f"{PROJECTION}{i}.{n}": p.detach() for i, m in enumerate(layers) for n, p in m.named_parameters()
        }


def _project(z: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    z = z.flatten(1)
    if f"{PROJECTION}0.weight" not in params:
        return z
    hidden = F.relu(F.linear(z, params[f"{PROJECTION}0.weight"], params[f"{PROJECTION}0.bias"]))
    return F.linear(hidden, params[f"{PROJECTION}1.weight"], params[f"{PROJECTION}1.bias"])
