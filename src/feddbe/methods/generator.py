"""FedGen's generator of representations: pure functions of named tensors, and its training by Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe.state import State, add_prefix, strip_prefix

__all__ = ["ADAM", "generate", "new_generator", "sameness", "train_generator"]

ADAM = "adam/"
"""Prefix of Adam's state in that of the generator."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def new_generator(noise: int, classes: int, hidden: int, shape: tuple[int, ...]) -> State:
    """A new generator: noise and label -> hidden, BatchNorm, ReLU -> a representation of this shape."""
    # no bias before BatchNorm: it would do nothing, but Adam would blow its rounding errors up to steps
    wide, norm = nn.Linear(noise + classes, hidden, bias=False), nn.BatchNorm1d(hidden)
    layers = nn.ModuleDict({"in": wide, "norm": norm, "out": nn.Linear(hidden, math.prod(shape))})
    return {n: t for n, t in layers.state_dict().items() if n != "norm.num_batches_tracked"}


def generate(
    generator: Mapping[str, Tensor],
    eps: Tensor,
    y: Tensor,
    shape: tuple[int, ...],
    *,
    training: bool = False,
) -> Tensor:
    """G(eps, y); in training the statistics of BatchNorm are those of this batch, and move."""
    g = generator
    label = F.one_hot(y, g["in.weight"].shape[1] - eps.shape[1])
    hidden = F.linear(torch.cat([eps, label], 1), g["in.weight"])
    mean, var = g["norm.running_mean"], g["norm.running_var"]
    hidden = F.batch_norm(hidden, mean, var, g["norm.weight"], g["norm.bias"], training)
    return F.linear(hidden.relu(), g["out.weight"], g["out.bias"]).reshape(-1, *shape)


def sameness(eps: Tensor, z: Tensor) -> Tensor:
    """e^{-mean |eps_j - eps_k|^2 |z_j - z_k|_1}, distances per coordinate: 1 if z does not depend on eps."""
    z = z.flatten(1)
    apart = torch.cdist(eps, eps) ** 2 / eps.shape[1] * torch.cdist(z, z, p=1) / z.shape[1]
    return (-apart.mean()).exp()


def train_generator(state: State, lr: float, steps: int, loss: Callable[[State], Tensor]) -> State:
    """The generator and Adam's state after so many steps on `loss(generator)`."""
    g = {name: t.clone() for name, t in state.items() if not name.startswith(ADAM)}
    learnt = {name: t.requires_grad_() for name, t in g.items() if "running" not in name}
    adam = torch.optim.Adam(learnt.values(), lr=lr)
    if before := strip_prefix(state, ADAM):
        for name, p in learnt.items():
            adam.state[p] = {moment: before[f"{moment}/{name}"].clone() for moment in _MOMENTS}
    for _ in range(steps):
        adam.zero_grad()
        loss(g).backward()  # type: ignore[no-untyped-call]
        adam.step()
    after = {f"{moment}/{name}": adam.state[p][moment] for name, p in learnt.items() for moment in _MOMENTS}
    return {name: t.detach() for name, t in g.items()} | add_prefix(ADAM, after)
