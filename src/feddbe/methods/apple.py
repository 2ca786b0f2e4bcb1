"""APPLE.

Luo and Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022,
https://arxiv.org/abs/2110.08394
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from feddbe.config.parameters import parameter
from feddbe.methods.base import (
    DISCOURAGED_FOR_PERSONALIZED,
    FIXED_WITHOUT_OPTIMIZER,
    UNSUPPORTED_WITHOUT_PLAIN_SGD,
    Method,
    Names,
    Upload,
)
from feddbe.seeds import torch_seed
from feddbe.state import State, add_prefix, drop_keys, strip_prefix, sum_by_name
from feddbe.training.backends import compute_gradient
from feddbe.training.fit_plan import Losses, Samples, no_losses
from feddbe.training.task import Context, Task
from feddbe.training.trainer import ClientTrainer

CORE, RELATIONS = "core/", "relations/p"


class _MixingState(NamedTuple):
    """State of local training: the cores, the weights of the mixture, BatchNorm statistics and losses."""

    cores: State
    """Every parameter of all clients' cores, stacked."""
    p: Tensor
    statistics: State
    losses: Losses


class _StepSettings(NamedTuple):
    """Constants of local training; `penalty` is lambda mu."""

    task: Task
    client: int
    p0: Tensor
    eta1: float
    eta2: float
    penalty: float


@dataclass(frozen=True)
class APPLE(Method):
    """Personal models as learned mixtures of all clients' core models.

    Each client has a core model c_i, which it sends, and private weights p_i, with which it mixes all cores
    into its model. It trains p_i and its core through the mixture:

        w = sum_j p_ij c_j          g = grad f(w)
        c_i <- c_i - eta1 p_ii g    p_ij <- p_ij - eta2 (<g, c_j> + lambda mu (p_ij - p0_j))

    p_i starts at p0_j = n_j/n and each core at its own initialization; lambda decreases from 1 to 0 along
    half a cosine until round `rounds_l`. The other clients' cores are those of the last round. p_i = e_i with
    eta2 = 0 is local training.

    Defaults mu = 0.1 and eta2 = 0.001: the authors' code; eta1 = N lr: the published experiments. At p_ii =
    1/N a step of the core changes the mixture by eta1/N^2 only; with eta1 = lr, digits do not exceed 45 %.

    Departures: none from the paper; the last term is the gradient of lambda mu/2 |p_i - p0|^2. The authors'
    code has no 1/2 there (its mu is twice this one), its default lambda decays exponentially to 0.001 at
    `rounds_l` (the cosine is its other choice), and it uses momentum 0.9. `rounds_l` is a number of rounds
    here (there a tenth of all, which would change a run when it is extended). A client's own core is sent to
    it with the others. The published experiments never learned p_i (eta2 = 0), let clients see cores of the
    same round, and replaced the cores by the mixtures.
    """

    name: ClassVar[str] = "apple"
    family: ClassVar[str] = "personalized"
    keeps: ClassVar[Names] = (RELATIONS,)
    secret: ClassVar[Names] = (RELATIONS,)
    receives: ClassVar[Names] = (CORE,)
    keeps_uploads: ClassVar[bool] = True
    uses_sample_counts: ClassVar[bool] = True
    needs_all_clients: ClassVar[str] = "every model is a mixture of the cores of all clients"
    discouraged_addons = DISCOURAGED_FOR_PERSONALIZED
    unsupported_addons = UNSUPPORTED_WITHOUT_PLAIN_SGD
    fixed_options = FIXED_WITHOUT_OPTIMIZER

    mu: float = parameter(0.1, "weight of the penalty on p_i - p0", low=0, search="0.01 0.1 1")
    eta1: float | None = parameter(None, "learning rate of the core; none: N lr", above=0, search="0.01")
    eta2: float = parameter(0.001, "learning rate of p_i", low=0, search="0.001 0.01")
    rounds_l: int = parameter(10, "rounds until the penalty is 0", low=1, search_rule="10 % of the rounds")

    def ignored_options(self, task: Task) -> Mapping[str, str]:
        return {} if self.eta1 is None else {"lr": "its rates are eta1 and eta2"}

    @property
    def has_setup(self) -> bool:
        return True

    def server_init(self, ctx: Context) -> State:
        return {}

    def client_init(self, ctx: Context) -> State:
        return {RELATIONS: _sample_shares(ctx)}

    def client_setup(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return ctx.task.model.reinitialized(torch_seed(ctx.task.seed, "core", 0, trainer.client)), private

    def broadcast(self, ctx: Context, server: State, client: int) -> State:
        assert ctx.uploads is not None
        message: State = {}
        for other in range(ctx.task.split.clients):
            message |= add_prefix(f"{CORE}{other}/", ctx.uploads(other))
        return message

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        client = trainer.client
        eta1 = ctx.task.split.clients * ctx.lr if self.eta1 is None else self.eta1
        progress = (ctx.round - 1) / self.rounds_l
        penalty = self.mu * (math.cos(math.pi * progress) + 1) / 2 if progress < 1 else 0.0

        const = _StepSettings(ctx.task, client, _sample_shares(ctx), eta1, self.eta2, penalty)
        cores = _stack_cores(ctx, received)
        start = _MixingState(cores, private[RELATIONS], trainer.buffers("shared"), no_losses())
        end = trainer.run_steps(_step, start, const)
        trainer.set_buffers("shared", end.statistics)
        return {name: c[client].clone() for name, c in end.cores.items()}, {RELATIONS: end.p}

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return server

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return the mixture of the new cores."""
        # After training, `received` also has the client's new core, without a prefix.
        new_core = drop_keys(received, [CORE])
        received = received | add_prefix(f"{CORE}{trainer.client}/", new_core)
        return _mix(_stack_cores(ctx, received), private[RELATIONS])


def _sample_shares(ctx: Context) -> Tensor:
    """Return the clients' shares of all training samples, p0."""
    samples = torch.tensor(ctx.task.samples, dtype=torch.get_default_dtype())
    return samples / samples.sum()


def _stack_cores(ctx: Context, received: State) -> State:
    """Return each parameter of all received cores, stacked over clients."""
    cores = [strip_prefix(received, f"{CORE}{j}/") for j in range(ctx.task.split.clients)]
    return {name: torch.stack([core[name] for core in cores]) for name in cores[0]}


def _mix(cores: State, p: Tensor) -> State:
    """Return sum_j p_j c_j."""
    return {name: torch.tensordot(p, c, 1) for name, c in cores.items()}


def _step(state: _MixingState, const: _StepSettings, samples: Samples, key: int) -> _MixingState:
    """Return cores and weights after one batch."""
    cores = state.cores
    p = state.p
    client = const.client
    g = compute_gradient(const.task, _mix(cores, p), state.statistics, samples)
    p_gradients = sum_by_name(
        {n: torch.tensordot(c, g.gradients[n], g.gradients[n].dim()) for n, c in cores.items()}
    )
    for name, c in cores.items():  # in place: the stack of all cores is large, and only this training uses it
        c[client] -= const.eta1 * p[client] * g.gradients[name]
    p = p - const.eta2 * (p_gradients + const.penalty * (p - const.p0))
    return _MixingState(cores, p, g.statistics, state.losses.add(g.loss, len(samples.y)))
