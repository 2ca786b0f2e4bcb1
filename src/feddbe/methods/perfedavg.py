"""Per-FedAvg (Fallah et al., NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from feddbe.config.parameters import parameter
from feddbe.methods.base import NO_MR, NO_PRBM, OWN_STEPS, TUNES, Facts
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State
from feddbe.training.gradients import gradient
from feddbe.training.plan import Losses, Samples, no_losses
from feddbe.training.task import Context, Task
from feddbe.training.trainer import Local


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """A global model from which one step adapts to a client. Per 2B samples D1, D2 (3B with D3):

        first-order     w' = w - alpha g(w; D1)       w <- w - beta g(w'; D2)
        Hessian-free    w <- w - beta (u - alpha d),  u = g(w'; D2),
                        d = (g(w + delta u; D3) - g(w - delta u; D3)) / (2 delta)

    At each evaluation a client adapts the global model by one step alpha on one batch, and that is what
    counts; newcomers fine-tune it by plain SGD, with the run's learning rate. alpha = 0 is FedAvg on every
    second batch. Averaging: its paper plainly, the published experiments and the default by samples.

    Default alpha = 0.01: from the range of its paper; beta is the learning rate.

    Departures: from its paper, none; from the published experiments, alpha is not the learning rate (on
    digits, at 0.1, the network dies), one pass over the data per epoch (theirs two), and a client with fewer
    than 2B samples divides what it has (theirs did not train).
    """

    name: ClassVar[str] = "perfedavg"
    family: ClassVar[str] = "personalized"
    facts: ClassVar[Facts] = Facts(evaluated="the global model after one step")
    adapts: ClassVar[str] = "each"
    refuses = NO_PRBM
    cannot = NO_MR | TUNES
    keeps_to = OWN_STEPS

    alpha: float = parameter(0.01, "step of the adaptation", low=0, search="0.005 0.01 0.03")
    beta: float | None = parameter(None, "step of the global model; none: lr", above=0, search="0.001 0.003")
    hessian: str = parameter(
        "first-order", "second derivatives: left out, or Hessian-free", choices=("first-order", "free")
    )
    delta: float = parameter(1e-3, "width of the Hessian-free difference", above=0, search="0.001")

    def unused(self, task: Task) -> Mapping[str, str]:
        return {} if self.beta is None or task.newcomers else {"lr": "its rates are alpha and beta"}

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        parts = 2 if self.hessian == "first-order" else 3
        beta = ctx.lr if self.beta is None else self.beta
        const = _Steps(ctx.task, self.alpha, beta, self.delta, parts)
        end = local.scan(_step, _Walk(received, local.buffers("shared"), no_losses()), const, batches=parts)
        local.set_buffers("shared", end.statistics)
        return end.w, private

    def adapt(self, ctx: Context, local: Local, received: State, private: State) -> State:
        return super().tune(ctx, local, received, private)

    def tune(self, ctx: Context, local: Local, received: State, private: State) -> State:
        const = _Steps(ctx.task, self.alpha, 0.0, 0.0, 1)
        end = local.scan(_once, _Walk(received, local.buffers("shared"), no_losses()), const, epochs=1)
        local.set_buffers("shared", end.statistics)
        return end.w


class _Walk(NamedTuple):
    w: State
    statistics: State
    losses: Losses


class _Steps(NamedTuple):
    task: Task
    alpha: float
    beta: float
    delta: float
    parts: int


def _step(now: _Walk, const: _Steps, samples: Samples, key: int) -> _Walk:
    first, second, *third = _cut(samples, const.parts)
    g, now = _gradient(now, const, now.w, first)
    u, now = _gradient(now, const, _moved(now.w, g, -const.alpha), second)
    if third:
        ahead, now = _gradient(now, const, _moved(now.w, u, const.delta), third[0])
        behind, now = _gradient(now, const, _moved(now.w, u, -const.delta), third[0])
        u = {n: u[n] - const.alpha * (ahead[n] - behind[n]) / (2 * const.delta) for n in u}
    return now._replace(w=_moved(now.w, u, -const.beta))


def _once(now: _Walk, const: _Steps, samples: Samples, key: int) -> _Walk:
    """One step of the adaptation, on the first batch."""
    if now.losses.samples:
        return now
    g, now = _gradient(now, const, now.w, samples)
    return now._replace(w=_moved(now.w, g, -const.alpha))


def _gradient(now: _Walk, const: _Steps, w: State, samples: Samples) -> tuple[State, _Walk]:
    g = gradient(const.task, w, now.statistics, samples)
    return g.of, _Walk(now.w, g.statistics, now.losses.add(g.loss, len(samples.y)))


def _moved(w: State, direction: State, by: float) -> State:
    return {name: p + by * direction[name] for name, p in w.items()}


def _cut(samples: Samples, parts: int) -> list[Samples]:
    """Equal consecutive parts; with fewer samples than parts, each is the whole."""
    size = len(samples.y) // parts
    if not size:
        return [samples] * parts
    return [
        Samples(samples.x[at : at + size], samples.y[at : at + size]) for at in range(0, parts * size, size)
    ]
