"""Local training, prediction and sampling on one client's data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from feddbe import seeds
from feddbe.errors import InvalidInputError
from feddbe.models.split_model import Forward
from feddbe.state import State
from feddbe.training import backends
from feddbe.training.backends import Predictor, select_backend
from feddbe.training.fit_plan import Batches, FitPlan, Losses, Samples, iterate_batches
from feddbe.training.loss_terms import CROSS_ENTROPY, Term
from feddbe.training.task import Task

Carry = TypeVar("Carry")
Const = TypeVar("Const")
PREDICT_BATCH = 128
"""Samples per forward pass; fastest on CPUs: larger batches exceed the cache, smaller ones add overhead."""


class ExtraParameter(NamedTuple):
    """A private tensor trained together with the model's parameters, such as PRBM's vector."""

    value: Tensor
    lr: float | None = None
    """None: the learning rate of the fit."""


class TrainedModel(NamedTuple):
    """Result of a fit: the parameters, and the last carry of each term passed to it."""

    params: State
    carries: list[State]


class ClientTrainer:
    """One client in one round: trains, predicts and samples on its data.

    Add-ons register their parts here: `extras` and the terms attached to a track. A track is a model that is
    trained separately, such as `shared` and `personal`.
    """

    def __init__(
        self, task: Task, round_: int, client: int, buffers: Mapping[str, State] | None = None
    ) -> None:
        self.task = task
        self.round = round_
        self.client = client
        self.extras: dict[str, ExtraParameter] = {}
        self.losses: dict[str, tuple[float, int]] = {}
        """By track: sum of the loss over the samples trained on, and their number."""
        self.trainers: dict[str, str] = {}
        """Backends that trained, each with the reason why faster ones were rejected."""
        self._predictor: Predictor | None = None
        split = task.split
        self.rows = {"train": split.train[client], "test": split.test[client]}
        if split.validation:
            self.rows["validation"] = split.validation[client]
        self._terms: dict[str, list[Term]] = {}
        # Copies, because training updates them in place.
        self._buffers = {t: {n: b.clone() for n, b in state.items()} for t, state in (buffers or {}).items()}

    def rng(self, purpose: str) -> np.random.RandomState:
        """Return this client's random generator for this purpose in this round."""
        return seeds.make_rng(self.task.seed, purpose, self.round, self.client)

    @property
    def lr(self) -> float:
        """Learning rate of this round."""
        return self.task.training.rate(self.round)

    @property
    def samples(self) -> int:
        """n_i: number of training samples."""
        return len(self.rows["train"])

    def indices(self, on: str) -> Tensor:
        """Return the indices of the client's `test`, `train` or other samples."""
        return torch.from_numpy(self.rows[on]).to(self.task.device)

    def hold_out(self, share: float) -> None:
        """Exclude the last `share` of the training samples from training; they become `held_out`.

        At least one sample is excluded and at least one remains.
        """
        rows = self.rows["train"]
        count = max(1, int(share * len(rows)))
        self.rows |= {"train": rows[:-count] if len(rows) > count else rows, "held_out": rows[-count:]}

    def count_steps(self, epochs: int | None = None) -> int:
        """Return the number of batches of a fit."""
        size = min(self.task.training.batch_size, self.samples)
        return (epochs or self.task.training.local_epochs) * (self.samples // size)

    def label_counts(self) -> Tensor:
        """Return n_c: training samples of each class."""
        rows = self.indices("train")
        return torch.bincount(self.task.dataset.y[rows], minlength=self.task.dataset.classes)

    def attach(self, track: str, term: Term) -> None:
        """Add a term to every fit on this track."""
        self._terms.setdefault(track, []).append(term)

    def buffers(self, track: str) -> State:
        """Return the track's BatchNorm statistics; those of theta^0 before its first training."""
        return self._buffers.setdefault(track, {n: b.clone() for n, b in self.task.model.buffers.items()})

    def set_buffers(self, track: str, statistics: State) -> None:
        """Set the track's BatchNorm statistics to copies of these."""
        self._buffers[track] = {n: b.clone() for n, b in statistics.items()}

    def trained_buffers(self) -> dict[str, State]:
        """Return the BatchNorm statistics of all tracks that were used."""
        return {track: state for track, state in self._buffers.items() if state}

    def run_steps(
        self,
        step: Callable[[Carry, Const, Samples, int], Carry],
        carry: Carry,
        const: Const,
        epochs: int | None = None,
        batches: int = 1,
    ) -> Carry:
        """Apply `step(carry, const, batch, key)` to this round's batches and return the last carry.

        This serves methods whose local steps are not plain SGD. `losses` of the carry become those of the
        shared track.

        Args:
            step: A pure function that returns the next carry.
            carry: The first carry.
            const: Values that do not change.
            epochs: Number of epochs; None: those of the run.
            batches: Number of batches that are passed to a step together.
        """
        end = iterate_batches(step, carry, const, self.task.model, self._make_batches(epochs, batches))
        losses = getattr(end, "losses", None)
        if losses:
            self._record_losses("shared", losses)
        self.trainers |= backends.describe_backend(self.task)
        return end

    def fit(
        self,
        params: Mapping[str, Tensor],
        *,
        track: str = "shared",
        epochs: int | None = None,
        trainable: Sequence[str] | None = None,
        loss: Term = CROSS_ENTROPY,
        terms: Sequence[Term] = (),
        correction: Mapping[str, Tensor] | None = None,
        lr: float | None = None,
        keep_statistics: bool = True,
        plain: bool = False,
    ) -> TrainedModel:
        """Train from `params` on `loss` plus `terms` plus the terms that add-ons attached to the track.

        Each trained name is updated by p <- p - lr (grad + correction), or by the run's optimizer. Parameters
        whose module had requires_grad off stay fixed. `params` are not changed; the new values of the extras
        are in `extras`.

        Args:
            params: Initial parameters.
            track: Track whose terms and BatchNorm statistics are used.
            epochs: Number of epochs; None: those of the run.
            trainable: Names that are trained; None: all.
            loss: The first term, whose sum is recorded as the loss.
            terms: Further terms.
            correction: Constant added to the gradient, by name.
            lr: Learning rate; None: that of the round.
            keep_statistics: If False, the track's BatchNorm statistics stay unchanged.
            plain: If True, terms of add-ons are omitted.
        """
        model = self.task.model
        rate = self.lr if lr is None else lr
        candidates = params if trainable is None else trainable
        rates = {name: rate for name in candidates if name not in model.frozen}
        for name, extra in self.extras.items():
            rates[name] = rate if extra.lr is None else extra.lr
        addon_terms = [] if plain else self._terms.get(track, [])
        statistics = self.buffers(track)
        if statistics and min(self.samples, self.task.training.batch_size) == 1:
            raise InvalidInputError(
                f"{self.task.dataset.describe_client(self.client)} trains on one sample at a time, "
                "too few for BatchNorm; merge clients, or choose a larger batch size"
            )
        if not keep_statistics:
            statistics = {name: buffer.clone() for name, buffer in statistics.items()}
        plan = FitPlan(
            model=model,
            params=dict(params),
            extras={name: extra.value for name, extra in self.extras.items()},
            rates=rates,
            loss=loss,
            terms=(*terms, *addon_terms),
            correction=dict(correction or {}),
            statistics=statistics,
            batches=self._make_batches(epochs),
            optimizer=self.task.training.optimizer,
        )
        selection = select_backend(plan, self.task.training.trainer)
        self.trainers[selection.name] = selection.reason
        result = selection.backend.train(plan)
        self._record_losses(track, result.losses)
        self.extras = {
            name: ExtraParameter(result.extras[name], extra.lr) for name, extra in self.extras.items()
        }
        return TrainedModel(result.params, result.carries[1 : 1 + len(terms)])

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Forward:
        """Return the model's forward pass at `params`, with PRBM's vector if there is one."""
        if self._predictor is not None and params is self._predictor.params:
            return self._predictor(x)
        return self.task.model.forward(params, x, self.prbm)

    def activations(self, params: Mapping[str, Tensor], x: Tensor, layers: Iterable[str]) -> State:
        """Return the activations of these layers in the forward pass at `params`."""
        return self.task.model.activations(params, x, layers, self.prbm)

    @property
    def prbm(self) -> Tensor | None:
        """PRBM's vector, or None."""
        prbm = self.extras.get("prbm")
        return None if prbm is None else prbm.value

    def predict(
        self,
        params: Mapping[str, Tensor],
        function: Callable[[Mapping[str, Tensor], Tensor], Tensor] | None = None,
        *,
        on: str = "test",
        track: str = "shared",
    ) -> tuple[Tensor, Tensor]:
        """Return `function(params, x)` in evaluation mode, by default the logits, and the labels.

        Args:
            params: Parameters of the model.
            function: Function of the parameters and a batch of inputs.
            on: Samples to use: `test`, `train`, `validation` or `held_out`.
            track: Track whose BatchNorm statistics are used.
        """
        model, dataset = self.task.model, self.task.dataset
        rows = self.indices(on)
        if function is None and (predictor := backends.make_predictor(self.task, params, self.prbm)):
            batches = (
                dataset.kernel_inputs(dataset.x.index_select(0, chunk)) for chunk in _split_indices(rows)
            )
            return _concatenate([predictor.logits(x) for x in batches]), dataset.y.index_select(0, rows)
        # Copies: the alignment of a decoded state is arbitrary, and the last bits of a product depend on it.
        work = {name: model.to_memory_format(p.detach()) for name, p in params.items()}
        buffers = self.buffers(track)  # outside of inference_mode, because a later fit updates them
        self._predictor = backends.make_predictor(self.task, work, self.prbm)
        compute = function or (lambda p, x: self.forward(p, x).logits)
        try:
            with torch.inference_mode(), model.bind(work, buffers):
                batches = (dataset.inputs(dataset.x[chunk]) for chunk in _split_indices(rows))
                parts = [compute(work, model.to_memory_format(x, copy=False)) for x in batches]
        finally:
            self._predictor = None
        return _concatenate(parts), dataset.y[rows]

    def _make_batches(self, epochs: int | None = None, batches: int = 1) -> Batches:
        training = self.task.training
        return Batches(
            self.task.dataset,
            self.rows["train"],
            batches * training.batch_size,
            epochs or training.local_epochs,
            self.task.seed,
            self.round,
            self.client,
            training.is_shuffled,
        )

    def _record_losses(self, track: str, losses: Losses) -> None:
        self.losses[track] = float(losses.total), losses.samples


def _split_indices(rows: Tensor) -> Sequence[Tensor]:
    """Return the indices in chunks of one forward pass."""
    return [rows] if len(rows) <= PREDICT_BATCH else torch.split(rows, PREDICT_BATCH)


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
