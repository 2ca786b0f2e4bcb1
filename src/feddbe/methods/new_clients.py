"""Adaptation of new clients: by the method's local training, or through the vector p_i alone.

With PRBM a client's part of the model is K numbers. The received model stays unchanged to the bit, including
BatchNorm statistics; L(p) is the mean cross-entropy of h(f(x) + p) over the client's data, in evaluation
mode:

    prbm      SGD on p alone, over the batches of --adapt-epochs
    newton    p = -(H + I / T)^-1 g at p = 0, one solve of K x K

`newton` uses the gradient g of L and its Gauss-Newton matrix H, with J_j = dlogits_j / dp and s_j = softmax:

    g = mean_j J_j' (s_j - onehot y_j)          H = mean_j J_j' (diag s_j - s_j s_j') J_j

The minimum of L may be at infinity (a client without a label) and H is singular, hence the ridge. T = rate x
steps is the time that `prbm` would train for: gradient descent stopped at T is approximately a ridge of 1 /
T. T -> 0 is one gradient step of length T, T -> infinity is Newton's step. For a linear h, H is the Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe.methods.base import Method
from feddbe.state import State, matches_pattern
from feddbe.training.fit_plan import Losses, Samples, no_losses
from feddbe.training.task import Context
from feddbe.training.trainer import PREDICT_BATCH, ClientTrainer


def adapt(
    adaptation: str, method: Method, ctx: Context, trainer: ClientTrainer, received: State, private: State
) -> State:
    """Return the parameters with which a new client predicts after its adaptation.

    Args:
        adaptation: `full` for the method's own adaptation, or a name in `ADAPTATIONS`.
        method: The method, with PRBM unless the adaptation is `full`.
        ctx: The task and the round.
        trainer: Trains on the client's data; its PRBM vector is replaced.
        received: The server's message.
        private: The client's initial private state.
    """
    if adaptation == "full":
        return method.adapt(ctx, trainer, received, private)
    state = method.inference_params(ctx, trainer, received, private)
    p = ADAPTATIONS[adaptation](method, trainer, state)
    trainer.extras["prbm"] = trainer.extras["prbm"]._replace(value=p)
    return state


def check_adaptation(adaptation: str, method: Method) -> str:
    """Return why a new client of this method cannot use the adaptation, or an empty text."""
    if adaptation != "full" and not matches_pattern("prbm", method.keeps):
        return "it has no p_i, as +prbm and +dbe have"
    return ""


class _SgdState(NamedTuple):
    """State of SGD on p: the vector and the losses."""

    p: Tensor
    losses: Losses


def _train_prbm(method: Method, trainer: ClientTrainer, state: State) -> Tensor:
    """Return p after SGD on p alone."""
    start = _SgdState(trainer.extras["prbm"].value, no_losses())
    with _bind_logits(method, trainer, state) as logits:
        return trainer.run_steps(_step, start, (logits, _prbm_lr(trainer))).p


def _step(state: _SgdState, const: tuple[Logits, float], samples: Samples, key: int) -> _SgdState:
    """Return the state after one SGD step on p."""
    logits, lr = const
    p = state.p.clone().requires_grad_()
    loss = F.cross_entropy(logits(p, samples.x), samples.y)
    (grad,) = torch.autograd.grad(loss, [p])
    return _SgdState(state.p - lr * grad, state.losses.add(loss, len(samples.y)))


def _newton_step(method: Method, trainer: ClientTrainer, state: State) -> Tensor:
    """Return p after one regularized Newton step."""
    start = trainer.extras["prbm"].value
    time = _prbm_lr(trainer) * trainer.count_steps()
    if time == 0:
        return start
    dataset, size = trainer.task.dataset, start.numel()
    g = torch.zeros(size, dtype=torch.float64)
    h = torch.zeros(size, size, dtype=torch.float64)
    with _bind_logits(method, trainer, state) as logits:
        for indices in torch.split(trainer.indices("train"), PREDICT_BATCH):
            x = trainer.task.model.to_memory_format(dataset.inputs(dataset.x[indices]), copy=False)
            p = start.expand(len(indices), *start.shape).clone().requires_grad_()  # one p per sample
            out = logits(p, x)
            gradients = [
                torch.autograd.grad(out[:, c].sum(), p, retain_graph=True)[0] for c in range(out.shape[1])
            ]
            jacobian = torch.stack(gradients, 1).flatten(2)
            s = out.detach().softmax(1)
            g += torch.einsum("jck,jc->k", jacobian, s - F.one_hot(dataset.y[indices], s.shape[1])).double()
            mean = torch.einsum("jck,jc->jk", jacobian, s)
            weighted = (jacobian * s.sqrt()[:, :, None]).flatten(0, 1)
            h += (weighted.T @ weighted - mean.T @ mean).double()
    ridge = torch.eye(size, dtype=torch.float64) / time
    step: Tensor = torch.linalg.solve(h / trainer.samples + ridge, g / trainer.samples)
    return start - step.to(start.dtype).view_as(start)


ADAPTATIONS: dict[str, Callable[[Method, ClientTrainer, State], Tensor]] = {
    "prbm": _train_prbm,
    "newton": _newton_step,
}
"""Adaptations other than `full`: (method, trainer, inference parameters) -> p_i."""

Logits = Callable[[Tensor, Tensor], Tensor]
"""(p, x) -> logits."""


@contextmanager
def _bind_logits(method: Method, trainer: ClientTrainer, state: State) -> Iterator[Logits]:
    """Yield the logits as a function of p, in evaluation mode; the client's p is restored at the end."""
    model, original = trainer.task.model, trainer.extras["prbm"]
    work = {name: model.to_memory_format(t.detach()) for name, t in state.items()}

    def logits(p: Tensor, x: Tensor) -> Tensor:
        trainer.extras["prbm"] = original._replace(value=p)
        return method.logits(trainer, work, x)

    try:
        with model.bind(work, trainer.buffers(method.inference_track)):
            yield logits
    finally:
        trainer.extras["prbm"] = original


def _prbm_lr(trainer: ClientTrainer) -> float:
    """Return the learning rate of p."""
    lr = trainer.extras["prbm"].lr
    return trainer.lr if lr is None else lr
