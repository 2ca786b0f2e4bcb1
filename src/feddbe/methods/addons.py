"""The Domain Bias Eliminator: PRBM, MR, and DBE = both.

Zhang, Hua, Cao, Wang, Song, Xue, Ma and Guan, "Eliminating Domain Bias for Federated Learning in
Representation Space", NeurIPS 2023, https://arxiv.org/abs/2311.14975

PRBM, the personalized representation bias memory, is a private vector p_i, 0 at the start, trained by SGD
with the model and never sent:

    z = f(x) + p_i,   logits = h(z)

MR, mean regularization, uses the client's running mean r (0 at the start of each round) over its batches:

    r <- (1 - mu) stop(r) + mu mean_batch f(x)        loss += kappa/2 mean_k (r_k - zbar_k)^2

so a sample's feature receives the gradient kappa mu / (K B) (r - zbar). The global mean zbar is collected
once: before round 1 every client trains theta^0 for one plain epoch and uploads its mean; the models trained
there are discarded.

kappa = 0 or mu = 0 disables MR; prbm_lr = 0 disables PRBM. FT, fine-tuning after the last round, is not
part of DBE.

Departures from the paper: its client mean is "over their data" (`init_mean=exact`); the default is the
published code's running mean (`momentum`; at mu = 1 that of the last batch only). `start` is the mean at
theta^0, before any training; with epsilon, delta and clip it is sent with a privacy guarantee (`dp_mean.py`).
The factor 1/2, the start of r at 0 and the missing bias correction come from the published code; the paper
does not mention them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from feddbe.config.parameters import parameter
from feddbe.errors import InvalidInputError
from feddbe.methods.base import AddOn, Finetuning, Method, Names, Upload, undeclared_names
from feddbe.methods.dp_mean import PrivacyGuarantee
from feddbe.state import State, drop_keys, matches_pattern, weighted_mean
from feddbe.training.loss_terms import MeanRegularizer, Term
from feddbe.training.task import Context, Task
from feddbe.training.trainer import ClientTrainer, ExtraParameter


@dataclass(frozen=True)
class PRBM(AddOn):
    """Personalized representation bias memory: the private translation vector p_i."""

    name: ClassVar[str] = "prbm"
    keeps: ClassVar[Names] = ("prbm",)
    secret: ClassVar[Names] = ("prbm",)

    prbm_lr: float | None = parameter(None, "learning rate of p_i; none: the model's", low=0)

    def client_init(self, ctx: Context) -> State:
        return {"prbm": torch.zeros(ctx.task.model.feature_shape)}

    def attach(self, trainer: ClientTrainer, tracks: Sequence[str], received: State, private: State) -> None:
        trainer.extras["prbm"] = ExtraParameter(private["prbm"], self.prbm_lr)


@dataclass(frozen=True)
class MR(AddOn):
    """Mean regularization; `kappa` and `mu` have defaults per model and data set (`config/defaults.py`)."""

    name: ClassVar[str] = "mr"
    sends: ClassVar[Names] = ("mean",)
    receives: ClassVar[Names] = ("mean",)
    constant: ClassVar[Names] = ("mean",)
    has_setup: ClassVar[bool] = True

    kappa: float = parameter(
        50.0, "weight of the regularization", low=0, search="0 0.001 0.01 0.1 1 5 10 20 50 100 200 500"
    )
    mu: float = parameter(
        1.0, "momentum of the client mean", low=0, high=1, search="0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1"
    )
    init_mean: str = parameter(
        "momentum",
        "client mean before round 1: running mean of z_g during an epoch of training, mean over the client's "
        "data after it, running mean divided by its total weight, or mean at the initial model, untrained",
        choices=("momentum", "exact", "debiased", "start"),
    )
    init_epochs: int = parameter(1, "epochs before round 1", low=1)
    init_clients: int | None = parameter(
        None, "clients that take part before round 1, drawn at random; none: all", low=1
    )
    init_keep_model: bool = parameter(
        False, "average the models trained before round 1; otherwise they are discarded"
    )
    mean_weights: str = parameter("samples", "weights of the global mean", choices=("samples", "uniform"))
    mr_half: bool = parameter(True, "factor 1/2 in the loss")
    mr_bias_correct: bool = parameter(False, "divide the running mean by its total weight in training too")
    s: float = parameter(
        0.0, "standard deviation of the noise on the uploaded mean, (1 - q) r + N(0, s^2)", low=0
    )
    q: float = parameter(
        0.0, "share of the uploaded mean that is removed, (1 - q) r + N(0, s^2)", low=0, high=1
    )
    epsilon: float | None = parameter(
        None, "epsilon of the privacy guarantee on the uploaded mean; none: no guarantee", above=0, high=1e6
    )
    delta: float | None = parameter(None, "delta of the privacy guarantee", above=0, high=0.5)
    clip: float | None = parameter(
        None, "privacy guarantee: L2 norm to which each sample's representation is clipped", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [name for name in PrivacyGuarantee._fields if getattr(self, name) is None]
        if len(missing) in (1, 2):
            raise InvalidInputError(f"mr: a guarantee needs epsilon, delta and clip; {missing[0]} is missing")
        if not missing and self.init_mean != "start":
            raise InvalidInputError(
                f"mr init_mean = {self.init_mean}; a guarantee needs init_mean=start: if the model is "
                "trained on the client's data, every sample influences every representation"
            )
        if not missing and (self.s or self.q):
            raise InvalidInputError("mr: a guarantee has its own noise; omit s and q")
        if self.init_mean == "start" and self.init_keep_model:
            raise InvalidInputError(
                "mr init_mean = start; init_keep_model=true needs the training epoch that start omits"
            )

    @property
    def setup_clients(self) -> int | None:
        return self.init_clients

    def unsupported_reason(self, method: Method) -> str:
        if self.init_keep_model and method.keeps_uploads:
            return "init_keep_model=true would have no effect: its server has no model"
        if self.init_clients is not None and method.has_setup:
            return f"init_clients={self.init_clients} would have no effect: its setup needs all clients"
        return ""

    def attach(self, trainer: ClientTrainer, tracks: Sequence[str], received: State, private: State) -> None:
        should_correct = self.mr_bias_correct and self.mu > 0
        regularizer = MeanRegularizer(self.mu, self.kappa * self._loss_factor, should_correct)
        start = regularizer.init_carry(trainer.task.model.feature_shape)
        for track in tracks:
            trainer.attach(track, Term(regularizer, {"mean": received["mean"]}, start))

    def client_setup(self, ctx: Context, trainer: ClientTrainer, received: State) -> State:
        """Return the client's mean representation after one plain epoch from theta^0, or at theta^0."""
        if self.init_mean == "start":
            return {"mean": self._add_noise(trainer, self._mean_over_data(trainer, received))}
        model = ctx.task.model
        running_mean = MeanRegularizer(self.mu)
        term = Term(running_mean, {}, running_mean.init_carry(model.feature_shape))
        fit = trainer.fit(received, epochs=self.init_epochs, terms=[term])
        if self.init_mean == "exact":
            mean = self._mean_over_data(trainer, fit.params)
        else:
            last = fit.carries[0]
            mean = running_mean.mean_of(last) if self.init_mean == "debiased" else last["r"]
        message = {"mean": self._add_noise(trainer, mean)}
        if self.init_keep_model:
            message |= fit.params
        return message

    def server_setup(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        """Return the server state with zbar = sum_i n_i/n r_i."""
        samples = [u.samples for u in uploads]
        weights = samples if self.mean_weights == "samples" else [1] * len(uploads)
        new = {**server, **weighted_mean([{"mean": u.state["mean"]} for u in uploads], weights)}
        if self.init_keep_model:
            names = [name for name in ctx.task.model.parameters if name in server]
            new |= weighted_mean([{name: u.state[name] for name in names} for u in uploads], samples)
        return new

    def notes(self, task: Task) -> list[str]:
        guarantee = self._privacy_guarantee
        return [guarantee.describe(task.samples[: task.members])] if guarantee else []

    def _mean_over_data(self, trainer: ClientTrainer, params: State) -> Tensor:
        """Return the mean representation of the client's training data, clipped if there is a guarantee."""
        model, guarantee = trainer.task.model, self._privacy_guarantee

        def sum_batch(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
            z = model.forward(params, x).z_g
            if guarantee:
                z = guarantee.clip_norms(z)
            return z.sum(0, keepdim=True)

        sums, _ = trainer.predict(params, sum_batch, on="train")
        return sums.sum(0) / trainer.samples

    def _add_noise(self, trainer: ClientTrainer, mean: Tensor) -> Tensor:
        """Return the mean to send: with a guarantee's noise, with the paper's noise, or unchanged."""
        sigma = self._privacy_guarantee.sigma(trainer.samples) if self._privacy_guarantee else self.s
        if not (sigma or self.q):
            return mean
        noise = torch.from_numpy(trainer.rng("noise").normal(0.0, sigma, mean.shape)).to(mean)
        return ((1 - self.q) * mean + noise).to(torch.get_default_dtype())

    @property
    def _privacy_guarantee(self) -> PrivacyGuarantee | None:
        if self.epsilon is None or self.delta is None or self.clip is None:
            return None
        return PrivacyGuarantee(self.epsilon, self.delta, self.clip)

    @property
    def _loss_factor(self) -> float:
        return 0.5 if self.mr_half else 1.0


@dataclass(frozen=True)
class FT(AddOn):
    """Fine-tuning after the last round.

    Each client trains the final global model on its own data (`adapt_epochs`) by plain SGD, without the
    method's terms; the accuracy after it is recorded too. The rounds do not change. New clients adapt by the
    method's local training, as in the paper.
    """

    name: ClassVar[str] = "ft"
    adapts: ClassVar[Finetuning] = "last"


@dataclass(frozen=True)
class Composed(Method):
    """A method with add-ons.

    The inner method sees the model's parameters only: its proximal terms, control variates and uploads never
    touch an add-on's part. Add-ons act in the fits on the method's `addon_tracks`.
    """

    name: ClassVar[str] = "composed"

    inner: Method
    addons: tuple[AddOn, ...]

    def __post_init__(self) -> None:
        inner, parts = self.inner, (self.inner, *self.addons)
        declarations: dict[str, Any] = {
            "family": inner.family,
            "has_uniform_broadcast": inner.has_uniform_broadcast,
            "inference_track": inner.inference_track,
            "keeps_uploads": inner.keeps_uploads,
            "uses_sample_counts": inner.uses_sample_counts,
            "needs_all_clients": inner.needs_all_clients,
            "fixed_options": inner.fixed_options,
            "adapts": inner.adapts or next((addon.adapts for addon in self.addons if addon.adapts), ""),
        }
        for names in ("keeps", "secret", "sends", "receives", "constant"):
            declarations[names] = sum((getattr(part, names) for part in parts), ())
        for name, value in declarations.items():
            object.__setattr__(self, name, value)
        for addon in self.addons:
            if reason := addon.unsupported_reason(inner):
                raise InvalidInputError(f"{inner.name} does not support this +{addon.name}: {reason}")

    @property
    def base_name(self) -> str:
        return self.inner.base_name

    def ignored_options(self, task: Task) -> Mapping[str, str]:
        if any(addon.adapts for addon in self.addons):  # fine-tuning is training with these options
            return {}
        return self.inner.ignored_options(task)

    @property
    def has_setup(self) -> bool:
        return self.inner.has_setup or any(a.has_setup for a in self.addons)

    @property
    def setup_clients(self) -> int | None:
        addons = [addon for addon in self.addons if addon.has_setup]
        if self.inner.has_setup or not addons:
            return self.inner.setup_clients
        return addons[0].setup_clients

    def server_init(self, ctx: Context) -> State:
        return self.inner.server_init(ctx)

    def client_init(self, ctx: Context) -> State:
        private = self.inner.client_init(ctx)
        for addon in self.addons:
            private |= addon.client_init(ctx)
        return private

    def client_setup(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        upload, private = self.inner.client_setup(ctx, trainer, received, private)
        for addon in self.addons:
            upload = upload | addon.client_setup(ctx, trainer, received)
        # If an add-on sends the model, drop the parameters that the method itself may not send.
        dropped = set(undeclared_names(ctx.task.model.parameters, self.inner.sends, ctx.task.model))
        return {name: t for name, t in upload.items() if name not in dropped}, private

    def server_setup(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        server = self.inner.server_setup(ctx, server, uploads)
        for addon in self.addons:
            server = addon.server_setup(ctx, server, uploads)
        return server

    def broadcast(self, ctx: Context, server: State, client: int) -> State:
        addon_names = [name for a in self.addons for name in a.receives if name not in a.constant]
        addon_entries = {name: t for name, t in server.items() if matches_pattern(name, addon_names)}
        return self.inner.broadcast(ctx, self._inner_state(server), client) | addon_entries

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        self._attach(trainer, self.inner.addon_tracks, received, private)
        upload, new_private = self.inner.train(
            ctx, trainer, self._inner_state(received), self._inner_state(private)
        )
        return upload, new_private | {name: extra.value for name, extra in trainer.extras.items()}

    def aggregate(self, ctx: Context, server: State, uploads: Sequence[Upload]) -> State:
        inner_state = self._inner_state(server)
        addon_state = {name: t for name, t in server.items() if name not in inner_state}
        uploads = [u._replace(state=self._inner_state(u.state)) for u in uploads]
        return self.inner.aggregate(ctx, inner_state, uploads) | addon_state

    def inference_params(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> State:
        self._attach(trainer, self.inner.addon_tracks, received, private)
        return self.inner.inference_params(
            ctx, trainer, self._inner_state(received), self._inner_state(private)
        )

    def finetune(self, ctx: Context, trainer: ClientTrainer, received: State, private: State) -> State:
        self._attach(trainer, self.inner.addon_tracks, received, private)
        return self.inner.finetune(ctx, trainer, self._inner_state(received), self._inner_state(private))

    def adapt(self, ctx: Context, trainer: ClientTrainer, received: State, private: State) -> State:
        self._attach(trainer, self.inner.addon_tracks, received, private)
        return self.inner.adapt(ctx, trainer, self._inner_state(received), self._inner_state(private))

    def init_new_client(self, ctx: Context, received: State) -> State:
        private = self.inner.init_new_client(ctx, received)
        for addon in self.addons:
            private |= addon.client_init(ctx)
        return private

    def notes(self, task: Task) -> list[str]:
        return [*self.inner.notes(task), *(note for addon in self.addons for note in addon.notes(task))]

    @property
    def has_custom_logits(self) -> bool:
        return self.inner.has_custom_logits

    def logits(self, trainer: ClientTrainer, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.inner.logits(trainer, state, x)

    def _attach(self, trainer: ClientTrainer, tracks: Sequence[str], received: State, private: State) -> None:
        for addon in self.addons:
            addon.attach(trainer, tracks, received, private)

    def _inner_state(self, state: State) -> State:
        """Return the entries that belong to the inner method."""
        return drop_keys(state, self._addon_names)

    @cached_property
    def _addon_names(self) -> tuple[str, ...]:
        return tuple(name for addon in self.addons for name in (*addon.keeps, *addon.sends, *addon.receives))
