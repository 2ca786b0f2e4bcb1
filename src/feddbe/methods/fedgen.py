"""FedGen.

Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
https://arxiv.org/abs/2105.10056
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe.config.parameters import parameter
from feddbe.methods.base import MODEL, Names, Upload
from feddbe.methods.fedavg import FedAvg
from feddbe.seeds import torch_seed, torch_seeded
from feddbe.state import State, add_prefix, drop_keys, strip_prefix
from feddbe.training.loss_terms import Term, TermContext
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer

ADAM = "adam/"
"""Prefix of Adam's state within the generator's."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def init_generator(noise: int, classes: int, hidden: int, shape: tuple[int, ...]) -> State:
    """Return a new generator: noise and label -> hidden, BatchNorm, ReLU -> a representation."""
    # No bias before BatchNorm: its gradient is a rounding error, which Adam would scale up to a full step.
    layers = nn.ModuleDict(
        {
            "in": nn.Linear(noise + classes, hidden, bias=False),
            "norm": nn.BatchNorm1d(hidden),
            "out": nn.Linear(hidden, math.prod(shape)),
        }
    )
    return {n: t for n, t in layers.state_dict().items() if n != "norm.num_batches_tracked"}


def generate(
    generator: Mapping[str, Tensor],
    eps: Tensor,
    y: Tensor,
    shape: tuple[int, ...],
    *,
    training: bool = False,
) -> Tensor:
    """Return G(eps, y); in training mode BatchNorm uses and updates the statistics of this batch."""
    g = generator
    label = F.one_hot(y, g["in.weight"].shape[1] - eps.shape[1])
    hidden = F.linear(torch.cat([eps, label], 1), g["in.weight"])
    mean, var = g["norm.running_mean"], g["norm.running_var"]
    hidden = F.batch_norm(hidden, mean, var, g["norm.weight"], g["norm.bias"], training)
    return F.linear(hidden.relu(), g["out.weight"], g["out.bias"]).reshape(-1, *shape)


def similarity(eps: Tensor, z: Tensor) -> Tensor:
    """Return e^{-mean |eps_j - eps_k|^2 |z_j - z_k|_1}, with distances per coordinate.

    It is 1 if z does not depend on eps.
    """
    z = z.flatten(1)
    distances = torch.cdist(eps, eps) ** 2 / eps.shape[1] * torch.cdist(z, z, p=1) / z.shape[1]
    return (-distances.mean()).exp()


def train_generator(state: State, lr: float, steps: int, loss: Callable[[State], Tensor]) -> State:
    """Return the generator and its Adam state after `steps` steps on `loss(generator)`."""
    g = {name: t.clone() for name, t in state.items() if not name.startswith(ADAM)}
    trainable = {name: t.requires_grad_() for name, t in g.items() if "running" not in name}
    adam = torch.optim.Adam(trainable.values(), lr=lr)
    adam_state = strip_prefix(state, ADAM)
    if adam_state:
        for name, p in trainable.items():
            adam.state[p] = {moment: adam_state[f"{moment}/{name}"].clone() for moment in _MOMENTS}
    for _ in range(steps):
        adam.zero_grad()
        loss(g).backward()  # type: ignore[no-untyped-call]
        adam.step()
    adam_state = {
        f"{moment}/{name}": adam.state[p][moment] for name, p in trainable.items() for moment in _MOMENTS
    }
    return {name: t.detach() for name, t in g.items()} | add_prefix(ADAM, adam_state)


GENERATOR = "generator/"
COUNTS = "labels/counts"
PRIOR = "labels/prior"


@dataclass(frozen=True)
class FedGen(FedAvg):
    """FedAvg with a generator G(eps, y) of representations, which the server trains and clients learn from:

        client    CE(h(f(x)), y) + a_t CE(h(G(eps, y')), y') + b_t KL(stop h(G(eps', y)) || h(f(x)))
        server    min_G CE(sum_i w_iy h_i(G(eps, y)), y) + diversity e^{-mean |eps_j - eps_k|^2 |z_j - z_k|_1}

    y' is drawn from all clients' labels, a_t = alpha decay^(t-1), b_t = beta decay^(t-1). In round 1 the
    generator is untrained, and the client terms are omitted. h_i are the heads of this round's clients, w_iy
    their shares of the samples with label y; clients send their label counts once, before round 1. alpha =
    beta = 0 is FedAvg.

    Defaults: the authors' code, except alpha = beta = 1. The code has 10 at a learning rate of 0.01; the two
    multiply, and on digits at 0.1 a weight of 10 diverges in round 3. `lite` is the published experiments'
    version: no KL, no decay, no diversity, and shares of all samples instead of those of a label. With
    `level=z` generated features enter h unchanged; with `level=z_g` a client's PRBM vector is added first.
    The server does not know PRBM.

    Departures: from the authors' code, the cross-entropy of the mixed logits as in the paper (the code mixes
    losses), a generator batch of 128 (there the clients' 32), no weight decay, and no decay of the
    generator's learning rate (there 0.98 per round, in the published experiments 0.99). From the published
    experiments: no untrained generator in round 1, and clients use the generator's BatchNorm statistics
    without changing them.
    """

    name: ClassVar[str] = "fedgen"
    sends: ClassVar[Names] = (MODEL, COUNTS)
    receives: ClassVar[Names] = (MODEL, GENERATOR, PRIOR)
    constant: ClassVar[Names] = (PRIOR,)

    alpha: float = parameter(1.0, "weight of generated samples", low=0, search="0.1 1 10")
    beta: float = parameter(1.0, "weight of generated targets", low=0, search="0.1 1 10")
    decay: float = parameter(0.98, "factor of alpha and beta per round", above=0, high=1, search="0.98 1")
    diversity: float = parameter(1.0, "weight of the diversity loss", low=0, search="0 1")
    steps: int = parameter(50, "steps of the generator per round", low=1, search="50 1000")
    gen_batch: int = parameter(128, "batch size of the generator", low=2, high=1_000_000, search="32 128")
    gen_lr: float = parameter(3e-4, "Adam's rate for the generator", above=0, search="0.0001 0.0003 0.005")
    noise: int = parameter(32, "dimension of the noise", low=1, high=100_000, search="32 512")
    hidden: int = parameter(256, "hidden units of the generator", low=1, high=100_000, search="256 512")
    lite: bool = parameter(False, "version of the published experiments")
    level: str = parameter("z", "generated representation", choices=("z", "z_g"))

    @property
    def has_setup(self) -> bool:
        return True

    def server_init(self, ctx: Context) -> State:
        shape, classes = ctx.task.model.feature_shape, ctx.task.dataset.classes
        with torch_seeded(torch_seed(ctx.task.seed, "generator")):
            generator = init_generator(self.noise, classes, self.hidden, shape)
        return super().server_init(ctx) | add_prefix(GENERATOR, generator)

    def client_setup(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return {COUNTS: trainer.label_counts().float()}, private

    def server_setup(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        counts = torch.zeros(ctx.task.split.clients, ctx.task.dataset.classes)
        for upload in uploads:
            counts[upload.client] = upload.state[COUNTS]
        return {**server, COUNTS: counts, PRIOR: counts.sum(0) / counts.sum()}

    def broadcast(self, ctx: Context, server: State, client: int) -> State:
        return drop_keys(server, [GENERATOR + ADAM, COUNTS, PRIOR])

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        model = drop_keys(received, [GENERATOR, PRIOR])
        if ctx.round == 1:
            return trainer.fit(model).params, private
        weight = torch.tensor(1.0 if self.lite else self.decay ** (ctx.round - 1))
        const = {n: t for n, t in received.items() if n not in model} | {"decay": weight}
        term = Term(self._generator_loss, const, outputs_only=True)
        return trainer.fit(model, terms=[term]).params, private

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return {
            **server,
            **super().aggregate(ctx, server, uploads),
            **self._train_generator(ctx, server, uploads),
        }

    def _generator_loss(self, context: TermContext, state: State) -> tuple[Tensor, State]:
        """Return the two client terms; `lite` omits the second."""
        n = len(context.batch.y)
        with torch_seeded(context.key):
            labels = torch.multinomial(context.const[PRIOR], n, replacement=True)
            terms = 1 if self.lite else 2
            noise = [torch.rand(n, self.noise) for _ in range(terms)]
        shift = (context.batch.z - context.batch.z_g)[0] if self.level == "z_g" else 0.0
        head = {name: context.params[name] for name in context.model.head}

        def classify_generated(y: Tensor, eps: Tensor) -> Tensor:
            z = generate(strip_prefix(context.const, GENERATOR), eps, y, context.model.feature_shape)
            return context.model.classify(head, z + shift)

        decay = context.const["decay"]
        loss = self.alpha * decay * F.cross_entropy(classify_generated(labels, noise[0]), labels)
        if not self.lite:
            target = F.softmax(classify_generated(context.batch.y, noise[1]).detach(), 1)
            distillation = F.kl_div(F.log_softmax(context.batch.logits, 1), target, reduction="batchmean")
            loss = loss + self.beta * decay * distillation
        return loss, state

    def _train_generator(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        """Return the generator after this round, including its Adam state."""
        model = ctx.task.model
        counts = server[COUNTS][[u.client for u in uploads]]
        labels = counts.sum(0).nonzero().flatten()
        if not len(labels):  # none of these clients took part in the setup
            return {}
        shares = counts / counts.sum(0).clamp(min=1)
        if self.lite:
            shares = (counts.sum(1, keepdim=True) / counts.sum()).expand_as(counts)
        rng = torch.Generator().manual_seed(torch_seed(ctx.task.seed, "generator", ctx.round))
        heads = [{n: u.state[n] for n in model.head} for u in uploads]

        def loss(generator: State) -> Tensor:
            y = labels[torch.randint(len(labels), (self.gen_batch,), generator=rng)]
            eps = torch.rand(self.gen_batch, self.noise, generator=rng)
            z = generate(generator, eps, y, model.feature_shape, training=True)
            logits = [share[y, None] * model.classify(h, z) for share, h in zip(shares, heads, strict=True)]
            teacher_loss = F.cross_entropy(torch.stack(logits).sum(0), y)
            if self.lite:
                return teacher_loss
            return teacher_loss + self.diversity * similarity(eps, z)

        generator = train_generator(strip_prefix(server, GENERATOR), self.gen_lr, self.steps, loss)
        return add_prefix(GENERATOR, generator)
