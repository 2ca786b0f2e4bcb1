"""FedFomo.

Zhang, Sapra, Fidler, Yeung and Alvarez, "Personalized Federated Learning with First Order Model
Optimization", ICLR 2021, https://arxiv.org/abs/2012.08565
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from feddbe import seeds
from feddbe.config.parameters import parameter
from feddbe.methods.base import DISCOURAGED_FOR_PERSONALIZED, MODEL, Method, Names, Upload
from feddbe.state import State, add_prefix, strip_prefix, sum_by_name, weighted_mean
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer

OLD = "old/"
CURRENT = "current/"
OTHERS = "others/"
AFFINITY, UPLOADED = "fomo/affinity", "fomo/uploaded"


@dataclass(frozen=True)
class FedFomo(Method):
    """Mixtures of other clients' models instead of a global model.

    A client receives models of others and mixes those that have a lower loss than its previous mixture on
    data held out of its training, then trains from the mixture:

        w_j = (L(old) - L(theta_j)) / ||theta_j - old||      theta = sum_j [w_j]+ theta_j / sum_j [w_j]+

    over the received models and its own. Without any w_j > 0 it continues from its own model as last trained.
    L is the plain cross-entropy, and `old` the mixture before its last training (theta^0 at first). The
    server adds the w_j up, negative ones included. It sends each client m - 1 models: the one with the
    highest sum so far or, with a probability epsilon that decreases from round to round, a random one; ties
    are broken at random. +MR acts in the training, not in the w_j.

    Defaults m = 5 and epsilon = 0.3 decreasing by 0.05: paper and code.

    Departures: none from the paper; a client's own model is not sent to it. The authors' code divides a
    round's w_j by |sum_j w_j| before adding them, and without any w_j > 0 falls back to `old`. The published
    experiments added [w_j]+, never explored, broke ties by index and did not shuffle their batches.
    """

    name: ClassVar[str] = "fedfomo"
    family: ClassVar[str] = "personalized"
    keeps: ClassVar[Names] = (OLD, CURRENT)  # not secret: an upload, and a mixture of uploads
    sends: ClassVar[Names] = (MODEL, AFFINITY)
    receives: ClassVar[Names] = (OTHERS,)
    has_uniform_broadcast: ClassVar[bool] = False
    keeps_uploads: ClassVar[bool] = True
    discouraged_addons = DISCOURAGED_FOR_PERSONALIZED

    m: int = parameter(5, "candidate models of a client, including its own", low=1, search="5 10 20")
    epsilon: float = parameter(
        0.3, "probability of a model at random in round 1", low=0, high=1, search="0.3"
    )
    epsilon_decay: float = parameter(0.05, "decrease of epsilon per round", low=0, high=1, search="0.05")
    held_out: float = parameter(
        0.2, "share of the training data on which models are compared", above=0, high=0.9, search="0.2"
    )

    def server_init(self, ctx: Context) -> State:
        n = ctx.task.split.clients
        return {AFFINITY: torch.zeros(n, n), UPLOADED: torch.zeros(n)}

    def client_init(self, ctx: Context) -> State:
        return add_prefix(OLD, ctx.task.model.parameters) | add_prefix(CURRENT, ctx.task.model.parameters)

    def broadcast(self, ctx: Context, server: State, client: int) -> State:
        assert ctx.uploads is not None
        message: State = {}
        for other in self.select_models(ctx, server, client):
            model = {n: t for n, t in ctx.uploads(other).items() if n in ctx.task.model.parameters}
            message |= add_prefix(f"{OTHERS}{other}/", model)
        return message

    def select_models(self, ctx: Context, server: State, client: int) -> list[int]:
        """Return the clients whose models this client receives."""
        rng = seeds.make_rng(ctx.task.seed, "explore", ctx.round, client)
        candidates = [j for j in server[UPLOADED].nonzero().flatten().tolist() if j != client]
        shuffled: list[int] = rng.permutation(candidates).astype(int).tolist()
        by_affinity = sorted(shuffled, key=lambda j: -float(server[AFFINITY][client, j]))
        epsilon = self.epsilon - self.epsilon_decay * (ctx.round - 1)
        selected: list[int] = []
        for _ in range(min(self.m - 1, len(shuffled))):
            order = shuffled if rng.random_sample() < epsilon else by_affinity
            selected.append(next(j for j in order if j not in selected))
        return selected

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        trainer.hold_out(self.held_out)
        old, current = strip_prefix(private, OLD), strip_prefix(private, CURRENT)
        senders = {int(name.split("/")[1]) for name in received if name.startswith(OTHERS)}
        models = {j: strip_prefix(received, f"{OTHERS}{j}/") for j in sorted(senders)}
        models[trainer.client] = current

        weights = torch.zeros(ctx.task.split.clients)
        old_loss = _loss(trainer, old)
        for j, model in models.items():
            distance = _distance(model, old)
            if distance:
                weights[j] = (old_loss - _loss(trainer, model)) / distance

        mixture = current
        positive = weights.clamp(min=0)
        if positive.any():
            mixture = weighted_mean(list(models.values()), [float(positive[j]) for j in models])
        trained = trainer.fit(mixture).params
        return trained | {AFFINITY: weights}, add_prefix(OLD, mixture) | add_prefix(CURRENT, trained)

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        affinity, uploaded = server[AFFINITY].clone(), server[UPLOADED].clone()
        for upload in uploads:
            affinity[upload.client] += upload.state[AFFINITY]
            uploaded[upload.client] = 1
        return {AFFINITY: affinity, UPLOADED: uploaded}

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        """Return the model as last trained."""
        return strip_prefix(private, CURRENT)


def _loss(trainer: ClientTrainer, params: State) -> float:
    """Return the cross-entropy on the client's held-out data."""
    logits, y = trainer.predict(params, on="held_out")
    return float(F.cross_entropy(logits, y))


def _distance(a: State, b: State) -> float:
    """Return the Euclidean distance between two models."""
    return float(sum_by_name({n: F.mse_loss(a[n], b[n], reduction="sum") for n in b}).sqrt())
