"""What one client can do with its data at one moment: fit a model to it, scan it, predict on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from feddbe import seeds
from feddbe.errors import BadInput
from feddbe.models.split_model import Forward
from feddbe.state import State
from feddbe.training import gradients
from feddbe.training.backends import trainer_of
from feddbe.training.compiled.backend import Predictor
from feddbe.training.plan import Batches, FitPlan, Losses, Samples, fold
from feddbe.training.task import Task
from feddbe.training.terms import CROSS_ENTROPY, Term

Carry = TypeVar("Carry")
Const = TypeVar("Const")
PREDICT_BATCH = 128
"""Fastest on CPUs: larger batches fall out of the cache, smaller ones waste time between kernels."""


class Extra(NamedTuple):
    """A private tensor trained beside the model's parameters, such as PRBM's vector."""

    value: Tensor
    lr: float | None = None
    """None: the learning rate of the fit."""


class Fit(NamedTuple):
    """What a fit leaves: the parameters, and the last carry of each of its own terms."""

    params: State
    carries: list[State]


class Local:
    """One client at one moment. Add-ons leave their parts here: `extras` and terms bound to a track."""

    def __init__(
        self, task: Task, round: int, client: int, buffers: Mapping[str, State] | None = None
    ) -> None:
        self.task, self.round, self.client = task, round, client
        self.extras: dict[str, Extra] = {}
        self.losses: dict[str, tuple[float, int]] = {}
        """Per track: sum of the first term over the samples trained on, and their number."""
        self.trainers: dict[str, str] = {}
        """Who did the training, and why none that is faster."""
        self._predictor: Predictor | None = None
        split = task.split
        self.rows = {"train": split.train[client], "test": split.test[client]}
        if split.validation:
            self.rows["validation"] = split.validation[client]
        self._terms: dict[str, list[Term]] = {}
        # copies: training writes into them
        self._buffers = {t: {n: b.clone() for n, b in state.items()} for t, state in (buffers or {}).items()}

    def stream(self, purpose: str) -> np.random.RandomState:
        """This client's own randomness in this round."""
        return seeds.stream(self.task.seed, purpose, self.round, self.client)

    @property
    def lr(self) -> float:
        """The learning rate of this round."""
        return self.task.training.rate(self.round)

    @property
    def samples(self) -> int:
        """n_i."""
        return len(self.rows["train"])

    def index(self, on: str) -> Tensor:
        """The client's `test`, `train` or other rows, to take them from the data."""
        return torch.from_numpy(self.rows[on]).to(self.task.device)

    def hold_out(self, share: float) -> None:
        """From now on train without the last `share` of the training data: at least one sample stays out, and
        one in. They are there as `held_out`."""
        rows = self.rows["train"]
        held = max(1, int(share * len(rows)))
        self.rows |= {"train": rows[:-held] if len(rows) > held else rows, "held_out": rows[-held:]}

    def steps(self, epochs: int | None = None) -> int:
        """Batches in a scan."""
        size = min(self.task.training.batch, self.samples)
        return (epochs or self.task.training.epochs) * (self.samples // size)

    def label_counts(self) -> Tensor:
        """n_c: training samples of each class."""
        rows = self.index("train")
        return torch.bincount(self.task.dataset.y[rows], minlength=self.task.dataset.classes)

    def attach(self, track: str, term: Term) -> None:
        """Add a term to every fit on this track."""
        self._terms.setdefault(track, []).append(term)

    def buffers(self, track: str) -> State:
        """The track's BatchNorm statistics; those of theta^0 until it was trained."""
        return self._buffers.setdefault(track, {n: b.clone() for n, b in self.task.model.buffers.items()})

    def set_buffers(self, track: str, statistics: State) -> None:
        """Leave copies of these BatchNorm statistics as those of the track."""
        self._buffers[track] = {n: b.clone() for n, b in statistics.items()}

    def trained_buffers(self) -> dict[str, State]:
        """The BatchNorm statistics of all tracks that were used."""
        return {track: state for track, state in self._buffers.items() if state}

    def scan(
        self,
        step: Callable[[Carry, Const, Samples, int], Carry],
        carry: Carry,
        const: Const,
        epochs: int | None = None,
        batches: int = 1,
    ) -> Carry:
        """Fold `step(carry, const, batch, key)` over this round's batches, `batches` of them at a time: for a
        method with steps of its own. `losses` of the carry become those of the shared track."""
        end = fold(step, carry, const, self.task.model, self._batches(epochs, batches))
        if losses := getattr(end, "losses", None):
            self._keep_losses("shared", losses)
        self.trainers |= gradients.trainer(self.task)
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
    ) -> Fit:
        """SGD from `params` on `loss` plus `terms` plus what add-ons attached to this track, unless `plain`.

        p <- p - lr (grad + correction), or a step of the run's optimiser, for the `trainable` names (default:
        all), less those whose module had requires_grad off, and for the extras. `params` are not changed; the
        new values of the extras stay in `extras`. `keep_statistics=False` leaves the track's BatchNorm
        statistics as they were.
        """
        model, rate = self.task.model, self.lr if lr is None else lr
        names = [name for name in (params if trainable is None else trainable) if name not in model.frozen]
        statistics = self.buffers(track)
        if statistics and min(self.samples, self.task.training.batch) == 1:
            raise BadInput(
                f"client {self.client} trains on one sample at a time, too few for BatchNorm; "
                "merge clients, or choose a larger batch"
            )
        plan = FitPlan(
            model,
            dict(params),
            {name: extra.value for name, extra in self.extras.items()},
            dict.fromkeys(names, rate) | {n: rate if e.lr is None else e.lr for n, e in self.extras.items()},
            loss,
            (*terms, *([] if plain else self._terms.get(track, []))),
            dict(correction or {}),
            statistics if keep_statistics else {name: b.clone() for name, b in statistics.items()},
            self._batches(epochs),
            self.task.training.optimiser,
        )
        chosen = trainer_of(plan, self.task.training.trainer)
        self.trainers[chosen.name] = chosen.why
        found = chosen.trainer.train(plan)
        self._keep_losses(track, found.losses)
        self.extras = {name: Extra(found.extras[name], extra.lr) for name, extra in self.extras.items()}
        return Fit(found.params, found.carries[1 : 1 + len(terms)])

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Forward:
        """The model's pass at `params`, translated by PRBM's vector if there is one."""
        if self._predictor is not None and params is self._predictor.params:
            return self._predictor(x)
        return self.task.model.forward(params, x, self.prbm)

    def at(self, params: Mapping[str, Tensor], x: Tensor, places: Iterable[str]) -> State:
        """What is at these places of the model in that pass."""
        return self.task.model.at(params, x, places, self.prbm)

    @property
    def prbm(self) -> Tensor | None:
        """PRBM's vector, if there is one."""
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
        """`function(params, x)` in evaluation mode, by default the logits, over the client's `test`, `train`
        or other rows; the labels."""
        model, dataset = self.task.model, self.task.dataset
        rows = self.index(on)
        if function is None and (predictor := gradients.predictor(self.task, params, self.prbm)):
            batches = (dataset.numbers(dataset.x.index_select(0, some)) for some in _some(rows))
            return _together([predictor.logits(x) for x in batches]), dataset.y.index_select(0, rows)
        # copies: a decoded state lies anywhere in memory, and the last bits of a product depend on where
        work = {name: model.layout(p.detach()) for name, p in params.items()}
        buffers = self.buffers(track)  # outside of inference_mode: a later fit writes into them
        self._predictor = gradients.predictor(self.task, work, self.prbm)
        asked = function or (lambda p, x: self.forward(p, x).logits)
        try:
            with torch.inference_mode(), model.bind(work, buffers):
                batches = (dataset.inputs(dataset.x[some]) for some in _some(rows))
                parts = [asked(work, model.layout(x, copy=False)) for x in batches]
        finally:
            self._predictor = None
        return _together(parts), dataset.y[rows]

    def _batches(self, epochs: int | None = None, batches: int = 1) -> Batches:
        training = self.task.training
        return Batches(
            self.task.dataset,
            self.rows["train"],
            batches * training.batch,
            epochs or training.epochs,
            self.task.seed,
            self.round,
            self.client,
        )

    def _keep_losses(self, track: str, losses: Losses) -> None:
        self.losses[track] = float(losses.total), losses.samples


def _some(rows: Tensor) -> Sequence[Tensor]:
    """Those of one pass."""
    return [rows] if len(rows) <= PREDICT_BATCH else torch.split(rows, PREDICT_BATCH)


def _together(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
