"""APPLE (Luo and Wu, IJCAI 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from feddbe.config.parameters import parameter
from feddbe.methods.base import NO_MR, NO_PRBM, OWN_STEPS, Facts, Method, Names, Upload
from feddbe.seeds import torch_seed
from feddbe.state import State, add_prefix, strip_prefix, sum_by_name
from feddbe.training.gradients import gradient
from feddbe.training.plan import Losses, Samples, no_losses
from feddbe.training.task import Context, Task
from feddbe.training.trainer import Local

CORE, RELATIONS = "core/", "relations/p"


class _Mixing(NamedTuple):
    cores: State
    """Every parameter of all clients' cores, stacked."""
    p: Tensor
    statistics: State
    losses: Losses


class _Steps(NamedTuple):
    task: Task
    own: int
    p0: Tensor
    eta1: float
    eta2: float
    pull: float


@dataclass(frozen=True)
class APPLE(Method):
    """Each client has a core model c_i, which it sends, and private weights p_i, with which it mixes all
    cores into its own model. It trains p_i and its own core through the mixture:

        w = sum_j p_ij c_j          g = grad f(w)
        c_i <- c_i - eta1 p_ii g    p_ij <- p_ij - eta2 (<g, c_j> + lambda mu (p_ij - p0_j))

    p_i starts at p0_j = n_j/n, the cores each at an initialisation of its own; lambda falls from 1 along half
    a cosine to 0 at round `rounds_l`. The others' cores are those of the last round. p_i = e_i with eta2 = 0
    is local training.

    Defaults mu = 0.1, eta2 = 0.001: its code; eta1 = N lr: the published experiments'. At p_ii = 1/N a step
    of the core moves the mixture by eta1/N^2 only, and with eta1 = lr digits get no further than 45 %.

    Departures: from its paper, none: the pull is the gradient of its lambda mu/2 |p_i - p0|^2. From its code,
    which has no 1/2 there (its mu is twice this one) and whose default lambda falls exponentially, to 0.001
    at `rounds_l` (the cosine is its other choice); no momentum (its 0.9 makes up for some of that), and
    `rounds_l` is a number of rounds (its tenth of all would change what a run was when it is extended); a
    client's own core is sent to it with the others. From the published experiments, which never learnt p_i
    (eta2 = 0), let clients see cores of the same round, and replaced the cores by the mixtures.
    """

    name: ClassVar[str] = "apple"
    family: ClassVar[str] = "personalized"
    facts: ClassVar[Facts] = Facts("N", keeps="N numbers", evaluated="the mixture of the new cores")
    keeps: ClassVar[Names] = (RELATIONS,)
    secret: ClassVar[Names] = (RELATIONS,)
    receives: ClassVar[Names] = (CORE,)
    keeps_uploads: ClassVar[bool] = True
    needs_all: ClassVar[str] = "every model is a mixture of the cores of all clients"
    refuses = NO_PRBM
    cannot = NO_MR
    keeps_to = OWN_STEPS

    mu: float = parameter(0.1, "pull of p_i to the sample shares", low=0, search="0.01 0.1 1")
    eta1: float | None = parameter(None, "learning rate of the core; none: N lr", above=0, search="0.01")
    eta2: float = parameter(0.001, "learning rate of p_i", low=0, search="0.001 0.01")
    rounds_l: int = parameter(10, "rounds until the pull is gone", low=1, search_rule="10 % of the rounds")

    def unused(self, task: Task) -> Mapping[str, str]:
        return {} if self.eta1 is None else {"lr": "its rates are eta1 and eta2"}

    @property
    def prepares(self) -> bool:
        return True

    def server_init(self, ctx: Context) -> State:
        return {}

    def client_init(self, ctx: Context) -> State:
        return {RELATIONS: _shares(ctx)}

    def prepare(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        return ctx.task.model.fresh(torch_seed(ctx.task.seed, "core", 0, local.client)), private

    def down(self, ctx: Context, server: State, client: int) -> State:
        assert ctx.uploads is not None
        message: State = {}
        for other in range(ctx.task.split.clients):
            message |= add_prefix(f"{CORE}{other}/", ctx.uploads(other))
        return message

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        own, p0 = local.client, _shares(ctx)
        eta1 = ctx.task.split.clients * ctx.lr if self.eta1 is None else self.eta1
        past = (ctx.round - 1) / self.rounds_l
        pull = self.mu * (math.cos(math.pi * past) + 1) / 2 if past < 1 else 0.0

        const = _Steps(ctx.task, own, p0, eta1, self.eta2, pull)
        cores = _stacked(ctx, received)
        start = _Mixing(cores, private[RELATIONS], local.buffers("shared"), no_losses())
        end = local.scan(_step, start, const)
        local.set_buffers("shared", end.statistics)
        return {name: c[own].clone() for name, c in end.cores.items()}, {RELATIONS: end.p}

    def combine(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return server

    def deployed(self, ctx: Context, local: Local, received: State, private: State) -> State:
        # after training `received` also has the client's new core, under the plain names
        new = {n: t for n, t in received.items() if not n.startswith(CORE)}
        received = received | add_prefix(f"{CORE}{local.client}/", new)
        return _mixture(_stacked(ctx, received), private[RELATIONS])


def _shares(ctx: Context) -> Tensor:
    samples = torch.tensor(ctx.task.samples, dtype=torch.get_default_dtype())
    return samples / samples.sum()


def _stacked(ctx: Context, received: State) -> State:
    cores = [strip_prefix(received, f"{CORE}{j}/") for j in range(ctx.task.split.clients)]
    return {name: torch.stack([core[name] for core in cores]) for name in cores[0]}


def _mixture(cores: State, p: Tensor) -> State:
    return {name: torch.tensordot(p, c, 1) for name, c in cores.items()}


def _step(now: _Mixing, const: _Steps, samples: Samples, key: int) -> _Mixing:
    cores, p, own = now.cores, now.p, const.own
    g = gradient(const.task, _mixture(cores, p), now.statistics, samples)
    slopes = sum_by_name({n: torch.tensordot(c, g.of[n], g.of[n].dim()) for n, c in cores.items()})
    for name, c in cores.items():  # in place: this stack of all cores is the scan's own, and large
        c[own] -= const.eta1 * p[own] * g.of[name]
    p = p - const.eta2 * (slopes + const.pull * (p - const.p0))
    return _Mixing(cores, p, g.statistics, now.losses.add(g.loss, len(samples.y)))
