"""The Domain Bias Eliminator (Zhang et al., NeurIPS 2023): PRBM, MR, and DBE = both.

PRBM, the personalized representation bias memory: a private vector p_i, 0 at the start, trained by SGD with
the model and never sent:

    z = f(x) + p_i,   logits = h(z)

MR, mean regularization: with the client's running mean r (0 at the start of each round) over its batches,

    r <- (1 - mu) stop(r) + mu mean_batch f(x)        loss += kappa/2 mean_k (r_k - zbar_k)^2

so a sample's feature receives the gradient kappa mu / (K B) (r - zbar). The global mean zbar is collected
once: before round 1 every client trains theta^0 for one plain epoch and uploads its mean; the models trained
there are discarded.

kappa = 0 or mu = 0 is no MR; PRBM with prbm_lr = 0 is no PRBM. FT, the fine-tuned ceiling, is no part of DBE.

The paper chooses kappa such that MR's loss has the magnitude of the task loss; `kappa=auto` does so by
itself. With L_i a client's mean task loss over a round's batches, m_i that of 1/2 mean_k (r_k - zbar_k)^2,
and L and m their averages over the cohort with weights n_i,

    kappa_1 = min(1, L_0 / m_0)          kappa_{t+1} = min(3 kappa_t, sqrt(kappa_t L_t / m_t), K / eta)

until round AUTO_ROUNDS, and constant from then on; m_0 is of the means sent in the preparation, and beyond K
/ eta a step of SGD on MR alone would carry a bias before the cut past its goal. It comes from below and
slowly, because both ways to be quick fail: a model that has learnt nothing yet has an m of nearly 0 (a weight
of 30,000 on HAR), and the more MR weighs, the smaller m, so that kappa = L / m runs away. L_i and m_i are two
numbers in the client's ordinary message of those rounds, kappa one in the server's.

Departures from the paper: its client mean is taken "over their data" (`init_mean=exact`); the default is the
published code's running mean (`momentum`; at mu = 1 that of the last batch only). The factor 1/2, the start
of r at 0 and the missing bias correction are the code's; the paper is silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe.methods.base import Method, Names, Parameters, Upload, parameter
from feddbe.state import State, weighted_mean
from feddbe.training.local import Extra, Local
from feddbe.training.task import Context
from feddbe.training.terms import MeanPull, Term

__all__ = ["AUTO_ROUNDS", "FT", "MR", "PRBM", "AddOn"]

AUTO_ROUNDS = 5
KAPPA, TASK, SIZE = "mr/kappa", "mr/task", "mr/size"


@dataclass(frozen=True)
class AddOn(Parameters):
    """A part that goes on a method without the method knowing."""

    keeps: ClassVar[Names] = ()
    secret: ClassVar[Names] = ()
    sends: ClassVar[Names] = ()
    """Beside the method's message; of the model's parameters, those go that the method sends."""
    receives: ClassVar[Names] = ()
    constant: ClassVar[Names] = ()
    prepares: ClassVar[bool] = False
    adapts: ClassVar[str] = ""

    @property
    def preparing(self) -> int | None:
        """How many clients prepare for it; None: all."""
        return None

    def refuse(self, method: Method) -> str:
        """Why one of its options cannot be on this method."""
        return ""

    def client_init(self, ctx: Context) -> State:
        return {}

    def attach(self, local: Local, tracks: Sequence[str], received: State, private: State) -> None:
        """Put this add-on's terms on these tracks, and its extra trainables on the model."""

    def prepare(self, ctx: Context, local: Local, received: State) -> State:
        return {}

    def prepared(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        return server

    def upload(self, local: Local) -> State:
        """What goes up with the method's message after a round's training."""
        return {}

    def combine(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        """Its server entries after a round."""
        return {}

    def found(self, server: State) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class PRBM(AddOn):
    """The private translation vector p_i."""

    name: ClassVar[str] = "prbm"
    keeps: ClassVar[Names] = ("prbm",)
    secret: ClassVar[Names] = ("prbm",)

    prbm_lr: float | None = parameter(None, "learning rate of p_i; none: that of the model", low=0)

    def client_init(self, ctx: Context) -> State:
        return {"prbm": torch.zeros(ctx.task.model.feature_shape)}

    def attach(self, local: Local, tracks: Sequence[str], received: State, private: State) -> None:
        local.extras["prbm"] = Extra(private["prbm"], self.prbm_lr)


@dataclass(frozen=True)
class MR(AddOn):
    """Mean regularization; `kappa` and `mu` have defaults per model and data set (`options/defaults.py`)."""

    name: ClassVar[str] = "mr"
    sends: ClassVar[Names] = ("mean", TASK, SIZE)
    receives: ClassVar[Names] = ("mean", KAPPA)
    constant: ClassVar[Names] = ("mean",)
    prepares: ClassVar[bool] = True

    kappa: float | str = parameter(
        50.0,
        "weight of the regularization; auto: of the magnitude of the task loss",
        low=0,
        words=("auto",),
        search="0.1 1 5 10 20 50 100 auto",
    )
    mu: float = parameter(1.0, "momentum of the client mean", low=0, high=1)
    init_mean: str = parameter(
        "momentum",
        "client mean before round 1: running mean of training-time features, mean over the client's data "
        "after the epoch, or running mean divided by its total weight",
        choices=("momentum", "exact", "debiased"),
    )
    init_epochs: int = parameter(1, "epochs before round 1", low=1)
    init_clients: int | None = parameter(
        None, "clients that take part before round 1, drawn at random; none: all", low=1, late=True
    )
    init_keep_model: bool = parameter(
        False, "average the models trained before round 1 instead of discarding"
    )
    mean_weights: str = parameter("samples", "weights of the global mean", choices=("samples", "uniform"))
    mr_half: bool = parameter(True, "the factor 1/2 in the loss")
    mr_bias_correct: bool = parameter(False, "divide the running mean by its total weight in training too")
    s: float = parameter(
        0.0, "noise on the uploaded mean, (1 - q) r + N(0, s^2): its standard deviation", low=0
    )
    q: float = parameter(0.0, "noise on the uploaded mean: how much of it is taken away", low=0, high=1)

    @property
    def preparing(self) -> int | None:
        return self.init_clients

    def refuse(self, method: Method) -> str:
        if self.init_keep_model and method.keeps_uploads:
            return "init_keep_model=true would do nothing, its server has no model"
        return ""

    def attach(self, local: Local, tracks: Sequence[str], received: State, private: State) -> None:
        kappa = float(received[KAPPA]) if isinstance(self.kappa, str) else self.kappa
        pull = MeanPull(self.mu, kappa * self._half, self.mr_bias_correct and self.mu > 0)
        carry = pull.start(local.task.model.feature_shape, measured=self._measures(local.round))
        for track in tracks:
            local.attach(track, Term(pull, {"mean": received["mean"]}, carry))

    def prepare(self, ctx: Context, local: Local, received: State) -> State:
        """One plain epoch from theta^0, and the mean representation it leaves."""
        model = ctx.task.model
        watch = MeanPull(self.mu)
        seen = Term(watch, {}, watch.start(model.feature_shape))
        fit = local.fit(received, epochs=self.init_epochs, terms=[seen])
        if self.init_mean == "exact":
            sums, _ = local.predict(
                fit.params, lambda p, x: model.forward(p, x).z_g.sum(0, keepdim=True), on="train"
            )
            mean = sums.sum(0) / local.samples
        else:
            carry = fit.carries[0]
            mean = watch.mean_of(carry) if self.init_mean == "debiased" else carry["r"]
        if self.s or self.q:
            noise = local.stream("noise").normal(0.0, self.s, mean.shape)
            mean = (1 - self.q) * mean + torch.from_numpy(noise).to(mean.dtype)
        message = {"mean": mean, **(fit.params if self.init_keep_model else {})}
        return message | ({TASK: _mean_loss(local)} if self.kappa == "auto" else {})

    def prepared(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        """zbar = sum_i n_i/n r_i."""
        samples = [u.samples for u in uploads]
        weights = samples if self.mean_weights == "samples" else [1] * len(uploads)
        new = {**server, **weighted_mean([{"mean": u.state["mean"]} for u in uploads], weights)}
        if self.init_keep_model:
            names = [name for name in ctx.task.model.parameters if name in server]
            new |= weighted_mean([{name: u.state[name] for name in names} for u in uploads], samples)
        if self.kappa == "auto":
            apart = [self._half * F.mse_loss(u.state["mean"], new["mean"]) for u in uploads]
            new[KAPPA] = _ratio(uploads, apart).clamp(max=1)
        return new

    def upload(self, local: Local) -> State:
        if not self._measures(local.round):
            return {}
        sums = local.carries["shared"][0]
        return {TASK: _mean_loss(local), SIZE: 2 * self._half * sums["size"] / sums["batches"]}

    def combine(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        if self.kappa != "auto":
            return {}
        kappa = server[KAPPA]
        if self._measures(ctx.round):
            even = kappa * _ratio(uploads, [u.state[SIZE] for u in uploads])
            limit = server["mean"].numel() / ctx.task.training.lr
            kappa = torch.minimum(3 * kappa, even.sqrt()).clamp(max=limit)
        return {KAPPA: kappa}

    def found(self, server: State) -> dict[str, float]:
        return {"mr kappa": float(server[KAPPA])} if KAPPA in server else {}

    def _measures(self, round: int) -> bool:
        return self.kappa == "auto" and round <= AUTO_ROUNDS

    @property
    def _half(self) -> float:
        return 0.5 if self.mr_half else 1.0


@dataclass(frozen=True)
class FT(AddOn):
    """Fine-tuning: at the end each client trains the final global model on its own data (`adapt_epochs`) by
    plain SGD, without the method's own terms, and its accuracy then is recorded too. The rounds stay as they
    are; newcomers adapt by the method's own local training, as the paper has it."""

    name: ClassVar[str] = "ft"
    adapts: ClassVar[str] = "last"


def _mean_loss(local: Local) -> Tensor:
    """L_i."""
    total, samples = local.losses["shared"]
    return torch.tensor(total / samples)


def _ratio(uploads: Sequence[Upload], sizes: Sequence[Tensor]) -> Tensor:
    """sum_i n_i L_i / sum_i n_i m_i; a size of 0 has no finite ratio."""
    task = sum(u.samples * float(u.state[TASK]) for u in uploads)
    size = sum(u.samples * float(m) for u, m in zip(uploads, sizes, strict=True))
    return torch.tensor(task / max(size, 1e-12))
