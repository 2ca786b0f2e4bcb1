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

Departures from the paper: its client mean is taken "over their data" (`init_mean=exact`); the default is the
published code's running mean (`momentum`; at mu = 1 that of the last batch only). `start` takes the mean at
theta^0, before any training; with epsilon, delta and clip it is sent with a guarantee (`private_mean.py`).
The factor 1/2, the start of r at 0 and the missing bias correction are the code's; the paper is silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from feddbe.config.parameters import parameter
from feddbe.errors import BadInput
from feddbe.methods.base import AddOn, Method, Names, Upload
from feddbe.methods.dp_mean import Guarantee
from feddbe.state import State, weighted_mean
from feddbe.training.task import Context, Task
from feddbe.training.terms import MeanPull, Term
from feddbe.training.trainer import Extra, Local


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
    sends: ClassVar[Names] = ("mean",)
    receives: ClassVar[Names] = ("mean",)
    constant: ClassVar[Names] = ("mean",)
    prepares: ClassVar[bool] = True

    kappa: float = parameter(
        50.0, "weight of the regularization", low=0, search="0 0.001 0.01 0.1 1 5 10 20 50 100 200 500"
    )
    mu: float = parameter(
        1.0, "momentum of the client mean", low=0, high=1, search="0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1"
    )
    init_mean: str = parameter(
        "momentum",
        "client mean before round 1: running mean of training-time features, mean over the client's data "
        "after the epoch, running mean divided by its total weight, or mean over it at theta^0, no epoch",
        choices=("momentum", "exact", "debiased", "start"),
    )
    init_epochs: int = parameter(1, "epochs before round 1", low=1)
    init_clients: int | None = parameter(
        None, "clients that take part before round 1, drawn at random; none: all", low=1
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
    epsilon: float | None = parameter(
        None, "guarantee on the uploaded mean: its epsilon; none: no guarantee", above=0, high=1e6
    )
    delta: float | None = parameter(None, "guarantee: its delta", above=0, high=0.5)
    clip: float | None = parameter(
        None, "guarantee: L2 norm that each sample's representation is clipped to", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [name for name in Guarantee._fields if getattr(self, name) is None]
        if len(missing) in (1, 2):
            raise BadInput(f"mr: a guarantee needs epsilon, delta and clip; {missing[0]} is missing")
        if not missing and self.init_mean != "start":
            raise BadInput(
                f"mr init_mean = {self.init_mean}; a guarantee needs init_mean=start: of a model trained on "
                "the client's data, every sample is in every representation"
            )
        if not missing and (self.s or self.q):
            raise BadInput("mr: a guarantee has a noise of its own; leave out s and q")
        if self.init_mean == "start" and self.init_keep_model:
            raise BadInput("mr init_mean = start; init_keep_model=true needs the epoch that it leaves out")

    @property
    def preparing(self) -> int | None:
        return self.init_clients

    def refuse(self, method: Method) -> str:
        if self.init_keep_model and method.keeps_uploads:
            return "init_keep_model=true would do nothing, its server has no model"
        if self.init_clients is not None and method.prepares:
            return f"init_clients={self.init_clients} would do nothing, all clients prepare for it"
        return ""

    def attach(self, local: Local, tracks: Sequence[str], received: State, private: State) -> None:
        pull = MeanPull(self.mu, self.kappa * self._half, self.mr_bias_correct and self.mu > 0)
        carry = pull.start(local.task.model.feature_shape)
        for track in tracks:
            local.attach(track, Term(pull, {"mean": received["mean"]}, carry))

    def prepare(self, ctx: Context, local: Local, received: State) -> State:
        """One plain epoch from theta^0, and the mean representation it leaves; or that of theta^0 itself."""
        if self.init_mean == "start":
            return {"mean": self._noisy(local, self._over_data(local, received))}
        model = ctx.task.model
        watch = MeanPull(self.mu)
        seen = Term(watch, {}, watch.start(model.feature_shape))
        fit = local.fit(received, epochs=self.init_epochs, terms=[seen])
        if self.init_mean == "exact":
            mean = self._over_data(local, fit.params)
        else:
            carry = fit.carries[0]
            mean = watch.mean_of(carry) if self.init_mean == "debiased" else carry["r"]
        return {"mean": self._noisy(local, mean), **(fit.params if self.init_keep_model else {})}

    def prepared(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        """zbar = sum_i n_i/n r_i."""
        samples = [u.samples for u in uploads]
        weights = samples if self.mean_weights == "samples" else [1] * len(uploads)
        new = {**server, **weighted_mean([{"mean": u.state["mean"]} for u in uploads], weights)}
        if self.init_keep_model:
            names = [name for name in ctx.task.model.parameters if name in server]
            new |= weighted_mean([{name: u.state[name] for name in names} for u in uploads], samples)
        return new

    def remarks(self, task: Task) -> list[str]:
        guarantee = self._guarantee
        return [guarantee.stated(task.samples[: task.members])] if guarantee else []

    def _over_data(self, local: Local, params: State) -> Tensor:
        """The mean representation of the client's training data, of clipped ones for a guarantee."""
        model, guarantee = local.task.model, self._guarantee

        def total(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
            z = model.forward(p, x).z_g
            return (guarantee.clipped(z) if guarantee else z).sum(0, keepdim=True)

        sums, _ = local.predict(params, total, on="train")
        return sums.sum(0) / local.samples

    def _noisy(self, local: Local, mean: Tensor) -> Tensor:
        """What is sent of a mean: with a guarantee, with the paper's noise, or as it is."""
        sigma = self._guarantee.sigma(local.samples) if self._guarantee else self.s
        if not (sigma or self.q):
            return mean
        noise = torch.from_numpy(local.stream("noise").normal(0.0, sigma, mean.shape)).to(mean)
        return ((1 - self.q) * mean + noise).to(torch.get_default_dtype())

    @property
    def _guarantee(self) -> Guarantee | None:
        if self.epsilon is None or self.delta is None or self.clip is None:
            return None
        return Guarantee(self.epsilon, self.delta, self.clip)

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
