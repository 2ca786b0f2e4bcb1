"""Per-FedAvg.

Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, https://arxiv.org/abs/2002.07948
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from feddbe.config.parameters import parameter
from feddbe.methods.base import (
    DISCOURAGED_FOR_PERSONALIZED,
    FIXED_WITHOUT_OPTIMIZER,
    UNSUPPORTED_WITH_FINETUNING,
    UNSUPPORTED_WITHOUT_PLAIN_SGD,
    Finetuning,
)
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State
from feddbe.training.backends import compute_gradient
from feddbe.training.fit_plan import Losses, Samples, no_losses
from feddbe.training.task import Context, Task
from feddbe.training.trainer import ClientTrainer


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """Global model that one step adapts to a client. For 2B samples D1, D2 (3B with D3):

        first-order     w' = w - alpha g(w; D1)       w <- w - beta g(w'; D2)
        Hessian-free    w <- w - beta (u - alpha d),  u = g(w'; D2),
                        d = (g(w + delta u; D3) - g(w - delta u; D3)) / (2 delta)

    At each evaluation a client adapts the global model by one step alpha on one batch; that accuracy counts.
    New clients fine-tune it by plain SGD with the run's learning rate. alpha = 0 is FedAvg on every second
    batch. The paper averages plainly; the published experiments and the default weight by samples.

    Default alpha = 0.01: from the paper's range; beta is the learning rate.

    Departures: none from the paper. From the published experiments: alpha is not the learning rate (on
    digits, at 0.1, the network stops learning), one pass over the data per epoch (theirs two), and a client
    with fewer than 2B samples divides its samples (theirs did not train).
    """

    name: ClassVar[str] = "perfedavg"
    family: ClassVar[str] = "personalized"
    adapts: ClassVar[Finetuning] = "each"
    discouraged_addons = DISCOURAGED_FOR_PERSONALIZED
    unsupported_addons = UNSUPPORTED_WITHOUT_PLAIN_SGD | UNSUPPORTED_WITH_FINETUNING
    fixed_options = FIXED_WITHOUT_OPTIMIZER

    alpha: float = parameter(0.01, "step of the adaptation", low=0, search="0.005 0.01 0.03")
    beta: float | None = parameter(None, "step of the global model; none: lr", above=0, search="0.001 0.003")
    hessian: str = parameter(
        "first-order", "second derivatives: left out, or Hessian-free", choices=("first-order", "free")
    )
    delta: float = parameter(1e-3, "width of the Hessian-free difference", above=0, search="0.001")

    def ignored_options(self, task: Task) -> Mapping[str, str]:
        if self.beta is None or task.new_clients:
            return {}
        return {"lr": "its rates are alpha and beta"}

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        parts = 2 if self.hessian == "first-order" else 3
        beta = ctx.lr if self.beta is None else self.beta
        const = _StepSettings(ctx.task, self.alpha, beta, self.delta, parts)
        start = _MetaState(received, trainer.buffers("shared"), no_losses())
        end = trainer.run_steps(_meta_step, start, const, batches=parts)
        trainer.set_buffers("shared", end.statistics)
        return end.w, private

    def adapt(self, ctx: Context, trainer: ClientTrainer, received: State, private: State) -> State:
        return super().finetune(ctx, trainer, received, private)

    def finetune(self, ctx: Context, trainer: ClientTrainer, received: State, private: State) -> State:
        const = _StepSettings(ctx.task, self.alpha, 0.0, 0.0, 1)
        start = _MetaState(received, trainer.buffers("shared"), no_losses())
        end = trainer.run_steps(_adapt_once, start, const, epochs=1)
        trainer.set_buffers("shared", end.statistics)
        return end.w


class _MetaState(NamedTuple):
    """State of local training: the parameters, BatchNorm statistics and losses."""

    w: State
    statistics: State
    losses: Losses


class _StepSettings(NamedTuple):
    """Constants of local training; `parts` is the number of parts of a batch."""

    task: Task
    alpha: float
    beta: float
    delta: float
    parts: int


def _meta_step(state: _MetaState, const: _StepSettings, samples: Samples, key: int) -> _MetaState:
    first, second, *third = _split_batch(samples, const.parts)
    g, state = _gradient(state, const, state.w, first)
    u, state = _gradient(state, const, _add_scaled(state.w, g, -const.alpha), second)
    if third:
        ahead, state = _gradient(state, const, _add_scaled(state.w, u, const.delta), third[0])
        behind, state = _gradient(state, const, _add_scaled(state.w, u, -const.delta), third[0])
        u = {n: u[n] - const.alpha * (ahead[n] - behind[n]) / (2 * const.delta) for n in u}
    return state._replace(w=_add_scaled(state.w, u, -const.beta))


def _adapt_once(state: _MetaState, const: _StepSettings, samples: Samples, key: int) -> _MetaState:
    """Return the state after one adaptation step, taken on the first batch only."""
    if state.losses.samples:
        return state
    g, state = _gradient(state, const, state.w, samples)
    return state._replace(w=_add_scaled(state.w, g, -const.alpha))


def _gradient(
    state: _MetaState, const: _StepSettings, w: State, samples: Samples
) -> tuple[State, _MetaState]:
    """Return the gradient at `w`, and the state with its statistics and loss."""
    g = compute_gradient(const.task, w, state.statistics, samples)
    return g.gradients, _MetaState(state.w, g.statistics, state.losses.add(g.loss, len(samples.y)))


def _add_scaled(w: State, direction: State, scale: float) -> State:
    """Return w + scale * direction."""
    return {name: p + scale * direction[name] for name, p in w.items()}


def _split_batch(samples: Samples, parts: int) -> list[Samples]:
    """Return equal consecutive parts of a batch.

    With fewer samples than parts, each part is the whole batch.
    """
    size = len(samples.y) // parts
    if not size:
        return [samples] * parts
    return [
        Samples(samples.x[start : start + size], samples.y[start : start + size])
        for start in range(0, parts * size, size)
    ]
