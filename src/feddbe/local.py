"""What one client can do with its data at one moment: scan it, fit a model to it, predict on it.

There is one loop over batches, `scan`; no method has its own. That is what lets many clients be stacked into
one tensor program without touching a method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe import seeds
from feddbe.compiled import compiled
from feddbe.errors import BadInput, Diverged
from feddbe.models.split import Forward
from feddbe.state import State
from feddbe.task import Task
from feddbe.terms import CROSS_ENTROPY, At, Batch, Term

__all__ = ["Extra", "Fit", "Local", "Samples"]

Carry = TypeVar("Carry")
Const = TypeVar("Const")
PREDICT_BATCH = 128
"""Fastest on CPUs: larger batches fall out of the cache, smaller ones waste time between kernels."""


class Samples(NamedTuple):
    """A batch as it comes from the data."""

    x: Tensor
    y: Tensor


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
        self.carries: dict[str, list[State]] = {}
        """Per track: the last carries of the terms that add-ons attached."""
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
    def samples(self) -> int:
        """n_i."""
        return len(self.rows["train"])

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
        rows = torch.from_numpy(self.rows["train"])
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
        step: Callable[[Carry, Const, Any, int], Carry],
        carry: Carry,
        const: Const,
        epochs: int | None = None,
        batches: int = 1,
        divide: Callable[[Tensor, Tensor, int], Iterator[Any]] | None = None,
    ) -> Carry:
        """Fold `step(carry, const, batch, key)` over this round's batches, `batches` of them at a time.

        A batch is `Samples`, or what `divide(x, y, size)` makes of an epoch's data in its order. Each scan
        sees the same batches in the same order, and torch's own generator (dropout) in the same state,
        whatever was scanned before it.
        """
        seed = seeds.torch_seed(self.task.seed, "torch", self.round, self.client)
        with seeds.torch_seeded(seed):
            chosen = self._batches(epochs or self.task.training.epochs, batches, divide or self._samples)
            for key, batch in enumerate(chosen, start=seed % 2**62):
                carry = step(carry, const, batch, key)
        return carry

    def gradient(
        self, params: Mapping[str, Tensor], samples: Samples, *, track: str = "shared"
    ) -> tuple[State, float]:
        """The gradient of the cross-entropy at `params`, and its value: for steps of a method's own."""
        work = {name: p.detach().requires_grad_() for name, p in params.items()}
        with self.task.model.bind(work, self.buffers(track), training=True):
            loss = F.cross_entropy(self.forward(work, samples.x).logits, samples.y)
            grads = torch.autograd.grad(loss, list(work.values()))
        if not math.isfinite(value := loss.item()):
            raise Diverged(self.client, self.round, "loss", value)
        total, seen = self.losses.get(track, (0.0, 0))
        self.losses[track] = (total + value * len(samples.y), seen + len(samples.y))
        frozen = self.task.model.frozen
        dense = {n: g.to_dense() for n, g in zip(work, grads, strict=True)}
        return {n: torch.zeros_like(g) if n in frozen else g for n, g in dense.items()}, value

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

        p <- p - lr (grad + correction), for the `trainable` names (default: all), less those whose module had
        requires_grad off, and for the extras. `params` are
        not changed; the new values of the extras stay in `extras`. `keep_statistics=False` leaves the track's
        BatchNorm statistics as they were.
        """
        model, rate = self.task.model, self.task.training.lr if lr is None else lr
        work = {name: model.layout(p.detach()) for name, p in params.items()}
        extras = {name: extra.value.detach().clone() for name, extra in self.extras.items()}
        names = [name for name in (work if trainable is None else trainable) if name not in model.frozen]
        leaves = [*(work[name] for name in names), *extras.values()]
        rates = [rate] * len(names) + [rate if e.lr is None else e.lr for e in self.extras.values()]
        corrections = [(correction or {}).get(name) for name in (*names, *extras)]
        for leaf in leaves:
            leaf.requires_grad_()
        values_of = [leaf.detach() for leaf in leaves]  # the same memory, unseen by autograd
        attached = [] if plain else self._terms.get(track, [])
        every = [loss, *terms, *attached]
        total, seen = 0.0, 0

        def by_autograd(
            carries: list[State], const: list[State], samples: Samples, key: int
        ) -> tuple[float, list[State]]:
            out = model.forward(work, samples.x, extras.get("prbm"))
            batch = Batch(*samples, *out)
            parts = [
                term.apply(At(model, work, c, batch, key), carry)
                for term, c, carry in zip(every, const, carries, strict=True)
            ]
            values = [value for value, _ in parts if value is not None]
            loss_ = sum(values[1:], values[0])
            grads = torch.autograd.grad(loss_, leaves, allow_unused=True) if leaves else ()
            for p, grad, shift, eta in zip(values_of, grads, corrections, rates, strict=True):
                if grad is not None:
                    p.add_(grad, alpha=-eta)  # of a sparse gradient only its rows
                if shift is not None:
                    p.add_(shift, alpha=-eta)
            return values[0].item(), [carry for _, carry in parts]

        of = dict(zip((*names, *extras), rates, strict=True))
        machine = None if correction else compiled(model, work, extras, of, every)
        once = machine or by_autograd

        def step(carries: list[State], const: list[State], batch: Any, key: int) -> list[State]:
            nonlocal total, seen
            value, carries = once(carries, const, batch, key)
            if not math.isfinite(value):
                raise Diverged(self.client, self.round, "loss", value)
            total, seen = total + value * len(batch[1]), seen + len(batch[1])
            return carries

        buffers = self.buffers(track)
        if buffers and min(self.samples, self.task.training.batch) == 1:
            raise BadInput(
                f"client {self.client} trains on one sample at a time, too few for BatchNorm; "
                "merge clients, or choose a larger batch"
            )
        if not keep_statistics:
            buffers = {name: b.clone() for name, b in buffers.items()}
        start, const = [term.carry for term in every], [term.const for term in every]
        with model.bind(work, buffers, training=True):
            carries = self.scan(step, start, const, epochs, divide=machine.batches if machine else None)
        self.losses[track] = (total, seen)
        self.carries[track] = carries[1 + len(terms) :]
        new = {name: p.detach().contiguous() for name, p in work.items()}
        for name, p in (new | extras).items():
            if p.numel() and not torch.stack(torch.aminmax(p.detach())).isfinite().all():  # one pass, no copy
                raise Diverged(self.client, self.round, f"update of {name}", p.detach().abs().max().item())
        self.extras = {name: Extra(extras[name].detach(), extra.lr) for name, extra in self.extras.items()}
        return Fit(new, carries[1 : 1 + len(terms)])

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Forward:
        """The model's pass at `params`, translated by PRBM's vector if there is one."""
        prbm = self.extras.get("prbm")
        return self.task.model.forward(params, x, None if prbm is None else prbm.value)

    def predict(
        self,
        params: Mapping[str, Tensor],
        function: Callable[[Mapping[str, Tensor], Tensor], Tensor],
        *,
        on: str = "test",
        track: str = "shared",
    ) -> tuple[Tensor, Tensor]:
        """`function(params, x)` in evaluation mode over the client's `test`, `train` or other rows; the
        labels."""
        model, dataset = self.task.model, self.task.dataset
        rows = torch.from_numpy(self.rows[on])
        # copies: a decoded state lies anywhere in memory, and the last bits of a product depend on where
        work = {name: model.layout(p.detach()) for name, p in params.items()}
        buffers = self.buffers(track)  # outside of inference_mode: a later fit writes into them
        with torch.inference_mode(), model.bind(work, buffers):
            parts = [
                function(work, model.layout(dataset.inputs(dataset.x[some]), copy=False))
                for some in torch.split(rows, PREDICT_BATCH)
            ]
        return torch.cat(parts), dataset.y[rows]

    def _batches(
        self, epochs: int, batches: int, divide: Callable[[Tensor, Tensor, int], Iterator[Any]]
    ) -> Iterator[Any]:
        """Batches of this round: consecutive slices of a fresh permutation per epoch, gathered once."""
        dataset, rng = self.task.dataset, self.stream("batches")
        size = batches * self.task.training.batch
        rows = self.rows["train"]
        size = min(size, len(rows))  # fewer samples than a batch: one short batch
        for _ in range(epochs):
            order = torch.from_numpy(rows[rng.permutation(len(rows))][: len(rows) // size * size])
            yield from divide(dataset.x[order], dataset.y[order], size)

    def _samples(self, x: Tensor, y: Tensor, size: int) -> Iterator[Samples]:
        for some, labels in zip(torch.split(x, size), torch.split(y, size), strict=True):
            yield Samples(self.task.model.layout(self.task.dataset.inputs(some), copy=False), labels)
