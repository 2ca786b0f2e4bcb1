"""How a newcomer comes in: by the method's own local training, or by its own translation p_i alone.

In a method with PRBM a client's part of the model is K numbers. The model stays as it was received, to the
bit, BatchNorm statistics included; L(p) is the mean cross-entropy of h(f(x) + p) over the client's data, in
evaluation mode:

    prbm      SGD on p alone, over the batches of --adapt-epochs
    newton    p = -(H + I / T)^-1 g at p = 0, one solve of K x K

`newton` has the gradient g of L and its Gauss-Newton matrix H, with J_j = dlogits_j / dp and s_j = softmax:

    g = mean_j J_j' (s_j - onehot y_j)          H = mean_j J_j' (diag s_j - s_j s_j') J_j

The minimum of L may lie at infinity (a client without a label) and H is singular, hence the ridge. T = rate x
steps is the time that `prbm` would have trained for: descent that is stopped at T is about a ridge of 1 / T.
T -> 0 is one step of gradient descent of length T, T -> infinity Newton's step. For a linear h, H is the
Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe.methods.base import Method
from feddbe.state import State, matches
from feddbe.training.plan import Losses, Samples, no_losses
from feddbe.training.task import Context
from feddbe.training.trainer import PREDICT_BATCH, Local


def adapt(way: str, method: Method, ctx: Context, local: Local, received: State, private: State) -> State:
    """What a newcomer predicts with after it came in this way."""
    if way == "full":
        return method.adapt(ctx, local, received, private)
    state = method.deployed(ctx, local, received, private)
    p = WAYS[way](method, local, state)
    local.extras["prbm"] = local.extras["prbm"]._replace(value=p)
    return state


def refuse(way: str, method: Method) -> str:
    """Why a newcomer to this method cannot come in this way."""
    if way != "full" and not matches("prbm", method.keeps):
        return "it has no p_i, as +prbm and +dbe have"
    return ""


class _Walk(NamedTuple):
    """SGD on p under way."""

    p: Tensor
    losses: Losses


def _trained(method: Method, local: Local, state: State) -> Tensor:
    start = _Walk(local.extras["prbm"].value, no_losses())
    with _fixed(method, local, state) as logits:
        return local.scan(_step, start, (logits, _rate(local))).p


def _step(now: _Walk, const: tuple[Logits, float], samples: Samples, key: int) -> _Walk:
    logits, rate = const
    p = now.p.clone().requires_grad_()
    loss = F.cross_entropy(logits(p, samples.x), samples.y)
    (grad,) = torch.autograd.grad(loss, [p])
    return _Walk(now.p - rate * grad, now.losses.add(loss, len(samples.y)))


def _newton(method: Method, local: Local, state: State) -> Tensor:
    start, time = local.extras["prbm"].value, _rate(local) * local.steps()
    if time == 0:
        return start
    dataset, size = local.task.dataset, start.numel()
    g, h = torch.zeros(size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    with _fixed(method, local, state) as logits:
        for rows in torch.split(local.index("train"), PREDICT_BATCH):
            x = local.task.model.layout(dataset.inputs(dataset.x[rows]), copy=False)
            each = start.expand(len(rows), *start.shape).clone().requires_grad_()  # a p for each sample
            out = logits(each, x)
            slopes = [
                torch.autograd.grad(out[:, c].sum(), each, retain_graph=True) for c in range(out.shape[1])
            ]
            jacobian, s = torch.stack([of for (of,) in slopes], 1).flatten(2), out.detach().softmax(1)
            g += torch.einsum("jck,jc->k", jacobian, s - F.one_hot(dataset.y[rows], s.shape[1])).double()
            mean = torch.einsum("jck,jc->jk", jacobian, s)
            rooted = (jacobian * s.sqrt()[:, :, None]).flatten(0, 1)
            h += (rooted.T @ rooted - mean.T @ mean).double()
    ridge = torch.eye(size, dtype=torch.float64) / time
    step: Tensor = torch.linalg.solve(h / local.samples + ridge, g / local.samples)
    return start - step.to(start.dtype).view_as(start)


WAYS: dict[str, Callable[[Method, Local, State], Tensor]] = {
    "prbm": _trained,
    "newton": _newton,
}
"""Besides `full`: (method, local, deployed state) -> p_i."""

Logits = Callable[[Tensor, Tensor], Tensor]
"""(p, x) -> logits."""


@contextmanager
def _fixed(method: Method, local: Local, state: State) -> Iterator[Logits]:
    """The deployed model as a function of p, in evaluation mode. The client's own p is put back after it."""
    model, own = local.task.model, local.extras["prbm"]
    work = {name: model.layout(t.detach()) for name, t in state.items()}

    def logits(p: Tensor, x: Tensor) -> Tensor:
        local.extras["prbm"] = own._replace(value=p)
        return method.logits(local, work, x)

    try:
        with model.bind(work, local.buffers(method.deployed_track)):
            yield logits
    finally:
        local.extras["prbm"] = own


def _rate(local: Local) -> float:
    """That of p."""
    own = local.extras["prbm"].lr
    return local.lr if own is None else own
