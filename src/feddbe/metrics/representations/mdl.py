"""MDL: how many nats describe the labels, given the representations (Voita and Titov, EMNLP 2020).

A probe that has learned n samples needs L(n) nats for the label of the next; summed over n, that is the
length of a message with all labels. A representation from which labels are easy to learn makes it short.
L(n), the loss-data curve, is measured at a few sizes n_1 < ... < n_m = N as the validation loss of probes
trained on n_k samples, and

    MDL = sum_k (n_k - n_(k-1)) L(n_k),    n_0 = 0.

This is the way of the tool that the paper used (Whitney et al., 2020: github.com/willwhitney/reprieve): the
loss at the right end of each interval stands for the whole of it, so the sum is below the length of a real
message when the curve falls. Also from there: the last tenth validates; one mean and one standard deviation,
over all entries of all training samples, whiten; sizes are ceil(10 ... N) in equal ratios; probes are
networks with two hidden layers of 512, 4,000 steps of Adam at 1e-4 in batches of 256, five seeds; no early
stopping.

The tool trains in two ways that differ, and this takes from each what is well defined:
- A size's samples are the first n_k of an order of all training samples that belongs to the seed, as are the
  initial weights: a seed is one message from beginning to end, and has an MDL of its own. (Its JAX way too,
  but it draws the samples with replacement, so that the largest size has seen 63 % of them. Its PyTorch way
  draws them without, anew for each size.)
- Batches go round these samples in their order, as in the JAX way; with at most 256 samples a batch is all of
  them, as in the PyTorch way. (The JAX way then repeats them up to 256: nearly the same gradient for up to 25
  times the work.)
- Linear layers begin as PyTorch's do.

The paper leaves open how many samples it took, of which clients, and the round: compare MDLs of one N with
each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from threading import Event
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddbe import seeds
from feddbe.config.parameters import Parameters, parameter
from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.points import (
    Analysis,
    AnalysisColumn,
    AnalysisResult,
    FigureKind,
    Points,
    Readings,
)

SHUFFLE = 0
"""The samples that are kept are the first of np.random.RandomState(SHUFFLE).permutation(all): the same for
every method, round and place, which are to be compared, and whatever the seed of the probes."""
STEP_COST = 16
"""Samples whose work a step takes besides those of its batch (measured), to tell how much is done."""
SMALLEST = 10
"""The first size of the curve."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Settings(Parameters):
    """How much is trained. The defaults are the tool's, but for n, which it does not have."""

    name: ClassVar[str] = "mdl"

    n: int | None = parameter(1000, "samples kept, of all in random order; none keeps all", low=12)
    sizes: int = parameter(10, "points of the loss-data curve", low=2)
    seeds: int = parameter(5, "probes at each of them", low=2)
    steps: int = parameter(4000, "steps of each probe", low=1)
    batch: int = parameter(256, "samples of a step", low=1)
    lr: float = parameter(1e-4, "Adam's step size", above=0)
    hidden: int = parameter(512, "width of a probe's two hidden layers", low=1)
    seed: int = parameter(0, "of orders and initial weights", low=0)

    @property
    def quick(self) -> bool:
        """Whether less is trained than by default, so that the result should say so."""
        return self.sizes < FULL.sizes or self.seeds < FULL.seeds or self.steps < FULL.steps


FULL = Settings()
QUICK = Settings(sizes=5, seeds=2, steps=500)
"""To look whether something is there: about a fortieth of the work, and probes that have not learned all they
can."""


def description_length(sizes: Sequence[int], losses: Floats, eps: float = 0.0) -> Any:
    """sum_k (n_k - n_(k-1)) max(L(n_k) - eps, 0), n_0 = 0: MDL with eps = 0, else surplus description length.

    `losses` has a row per size; of columns, each has its own sum.
    """
    return np.diff(sizes, prepend=0) @ np.maximum(np.asarray(losses) - eps, 0)


def sample_complexity(sizes: Sequence[int], losses: Floats, eps: float) -> int | None:
    """The smallest n_k with L(n_k) <= eps; None if there is none."""
    return next((int(n) for n, loss in zip(sizes, losses, strict=True) if loss <= eps), None)


@dataclass(frozen=True)
class MDL:
    """A loss-data curve, and what follows from it."""

    sizes: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]
    """Validation loss in nats: a row per size, in it one of each seed."""
    validation: int
    """Samples that it was measured on."""
    classes: int
    """Outputs of a probe: guessing costs ln(classes) nats per sample."""
    settings: Settings

    @property
    def curve(self) -> Floats:
        """L(n_k), the mean over seeds."""
        mean: Floats = np.asarray(self.losses).mean(1)
        return mean

    @property
    def nats(self) -> float:
        """The MDL as the paper and its tool have it."""
        return float(description_length(self.sizes, self.curve))

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds of the MDL that each alone would give, in nats."""
        return float(np.std(description_length(self.sizes, np.asarray(self.losses)), ddof=1))

    @property
    def validation_loss(self) -> float:
        """L(N), of probes that learned all training samples, in nats."""
        return float(self.curve[-1])

    @property
    def quick(self) -> bool:
        return self.settings.quick

    def sdl(self, eps: float) -> float:
        """Surplus description length: nats beyond eps per sample. With more samples it would grow if L(N) >
        eps."""
        return float(description_length(self.sizes, self.curve, eps))

    def esc(self, eps: float) -> int | None:
        """eps-sample-complexity: the smallest size of the curve with a loss of at most eps; None if there is
        none."""
        return sample_complexity(self.sizes, self.curve, eps)


def training_sizes(training: int, count: int) -> list[int]:
    """`count` sizes from 10 to all training samples, in equal ratios, rounded up."""
    if training >= SMALLEST:
        spaced = np.ceil(np.logspace(math.log10(SMALLEST), math.log10(training), count))
        found: list[int] = np.minimum(spaced, training).astype(int).tolist()  # 10**log10(n) may exceed n
        if len(set(found)) == count:
            return found
    raise InvalidInputError(
        f"{training} training samples (nine tenths of those given) are too few for {count} different sizes "
        f"from {SMALLEST} on; give more samples or fewer sizes"
    )


def mdl(points: Points, *, classes: int | None = None, settings: Settings = FULL) -> MDL:
    """Minimum description length of the labels given the representations.

    `classes`: how many labels there could be, the outputs of a probe; without it, the labels among the
    samples kept. The result is the same bits on any number of torch threads, all of which are used, each for
    one size at a time.
    """
    kept = points.select(np.random.RandomState(SHUFFLE).permutation(len(points.y))[: settings.n])
    y, count = _labels(kept.y, classes)
    held = -(-len(y) // 10)
    training = len(y) - held
    sizes = training_sizes(training, settings.sizes)
    x = torch.from_numpy(_whitened(kept.x, training))
    labels = torch.from_numpy(y)
    hot = torch.nn.functional.one_hot(labels, count).to(x.dtype)
    widths = (x.shape[1], settings.hidden, settings.hidden, count)

    steps_done = dict.fromkeys(sizes, 0)

    def work(size: int, stop: Event) -> list[float]:
        orders = [_stream(settings, "order", s).permutation(training)[:size] for s in range(settings.seeds)]
        probes = train_probes(
            initial_probe(widths, [_stream(settings, "weights", s) for s in range(settings.seeds)]),
            x, hot, torch.from_numpy(np.stack(orders)),
            steps=settings.steps, batch=settings.batch, lr=settings.lr, stop=stop,
            on_step=lambda done: steps_done.update({size: done}),
        )  # fmt: skip
        return probes.nll(x[training:], labels[training:])

    def share() -> float:
        costs = {size: min(size, settings.batch) + STEP_COST for size in sizes}
        done = sum(costs[size] * steps for size, steps in steps_done.items())
        return done / (settings.steps * sum(costs.values()))

    losses = map_parallel(work, sizes[::-1], share)[::-1]
    if not np.isfinite(losses).all():
        raise InvalidInputError(f"mdl lr = {settings.lr:g}: a probe's loss is not finite; try a smaller one")
    return MDL(tuple(sizes), tuple(map(tuple, losses)), held, count, settings)


def _stream(settings: Settings, purpose: str, probe: int) -> np.random.RandomState:
    return seeds.make_rng(settings.seed, f"mdl {purpose}", client=probe)


def _labels(y: npt.NDArray[np.int64], classes: int | None) -> tuple[npt.NDArray[np.int64], int]:
    """Labels as 0, 1, ..., and how many there can be."""
    present, numbered = np.unique(y, return_inverse=True)
    if len(present) < 2:
        raise InvalidInputError(
            f"all {len(y)} samples have label {present[0]}, so there is nothing to learn; "
            "measure samples of more labels, such as those of all clients"
        )
    if classes is None:
        return numbered, len(present)
    if present[0] < 0 or present[-1] >= classes:
        wrong = present[0] if present[0] < 0 else present[-1]
        raise InvalidInputError(f"label {wrong} with classes = {classes}; allowed: 0 to {classes - 1}")
    return y, classes


def _whitened(x: npt.NDArray[np.float32], training: int) -> npt.NDArray[np.float32]:
    """(x - mean) / std, both of all entries of the training samples, which come first."""
    known = x[:training]
    if known.min() == known.max():
        raise InvalidInputError(
            f"every value of the representations is {known.min():g}, so no label can be told from them; "
            "measure at another place or round"
        )
    mean, std = known.mean(dtype=np.float64), known.std(dtype=np.float64)
    return np.asarray((x - mean) / std, dtype=np.float32)


Item = TypeVar("Item")
Answer = TypeVar("Answer")
TICK = 0.5
"""Seconds between two reports."""


def initial_probe(
    widths: Sequence[int], streams: Sequence[np.random.RandomState], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """W1, b1, W2, b2, ... of one probe per stream, as torch.nn.Linear begins: uniform in +-1/sqrt(inputs).

    Weights are (S, in, out), biases (S, 1, out).
    """
    found = []
    for inputs, outputs in pairwise(widths):
        most = 1 / math.sqrt(inputs)
        for rows in (inputs, 1):
            drawn = np.stack([stream.uniform(-most, most, (rows, outputs)) for stream in streams])
            found.append(torch.from_numpy(drawn).to(dtype))
    return found


class Probes:
    """S networks and what a step on batches of one size needs; `parameters` (see `initial`) change in
    place."""

    def __init__(self, parameters: Sequence[Tensor], batch: int, lr: float) -> None:
        self.layers = list(zip(parameters[::2], parameters[1::2], strict=True))
        self._outputs = [bias.new_empty(len(bias), batch, bias.shape[2]) for _, bias in self.layers]
        self._slopes = [torch.empty_like(output) for output in self._outputs[:-1]]
        for weights in parameters:
            weights.grad = torch.empty_like(weights)
        self._adam = torch.optim.Adam(parameters, lr=lr, fused=True)

    def step(self, x: Tensor, hot: Tensor) -> None:
        """One step of Adam on the mean negative log-likelihood of x (S, batch, K) and labels (S, batch, C),
        which are rows of the unit matrix."""
        outputs = self._forward(x, self._outputs)
        # d/dlogits of the mean over the batch of -log softmax(logits)[y] is (softmax(logits) - hot) / batch
        slope = torch.softmax(outputs[-1], -1, out=outputs[-1]).sub_(hot).div_(x.shape[1])
        for i, (weight, bias) in reversed(list(enumerate(self.layers))):
            below = outputs[i - 1] if i else x
            torch.bmm(below.mT, slope, out=weight.grad)
            torch.sum(slope, 1, keepdim=True, out=bias.grad)
            if i:
                slope = torch.bmm(slope, weight.mT, out=self._slopes[i - 1])
                # zero where the unit is off, as autograd has it for relu
                torch.ops.aten.threshold_backward.grad_input(slope, below, 0.0, grad_input=slope)
        self._adam.step()

    def nll(self, x: Tensor, y: Tensor) -> list[float]:
        """Each probe's mean negative log-likelihood, in nats, of the same samples x (n, K) with labels y
        (n)."""
        each = x.expand(len(self.layers[0][0]), *x.shape)
        outputs = [bias.new_empty(len(bias), len(x), bias.shape[2]) for _, bias in self.layers]
        logs = torch.log_softmax(self._forward(each, outputs)[-1].double(), -1)
        found: list[float] = (-logs[:, torch.arange(len(y)), y].mean(1)).tolist()
        return found

    def _forward(self, x: Tensor, outputs: list[Tensor]) -> list[Tensor]:
        for (weight, bias), output in zip(self.layers, outputs, strict=True):
            x = torch.baddbmm(bias, x, weight, out=output)
            if output is not outputs[-1]:
                output.relu_()
        return outputs


def train_probes(
    parameters: Sequence[Tensor],
    x: Tensor,
    hot: Tensor,
    orders: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float,
    stop: Event | None = None,
    on_step: Callable[[int], None] = lambda done: None,
) -> Probes:
    """Probe s learns the samples orders[s] of x (n, K) and hot (n, C), which it goes round in that order.

    A batch goes on where the last one ended and begins again at the end of the order, so that each has
    exactly `batch` samples and all samples come equally often. No more samples than a batch: all of them at
    each step. (`stop`: training ends early, because nobody wants the result any more; `on_step` gets
    the number of steps done.)
    """
    size = orders.shape[1]
    batch = min(batch, size)
    probes = Probes(parameters, batch, lr)
    ring = torch.cat([orders, orders[:, : batch - 1]], 1)
    xs, hots = (each.new_empty(len(orders), batch, each.shape[1]) for each in (x, hot))
    for t in range(steps):
        if stop is not None and stop.is_set():
            break
        if t == 0 or batch < size:
            start = t * batch % size
            rows = ring[:, start : start + batch].reshape(-1)
            torch.index_select(x, 0, rows, out=xs.view(-1, x.shape[1]))
            torch.index_select(hot, 0, rows, out=hots.view(-1, hot.shape[1]))
        probes.step(xs, hots)
        on_step(t + 1)
    return probes


@contextmanager
def single_threaded() -> Iterator[int]:
    """One torch thread in the block; gives the number that there was before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def map_parallel(
    work: Callable[[Item, Event], Answer], items: Sequence[Item], share: Callable[[], float] | None = None
) -> list[Answer]:
    """work(item, stop) of each item, on one torch thread each, as many at a time as torch has threads here.

    Work begins in the order of the items, so the longest should come first. `stop` is set when the answers
    are no longer wanted: after Ctrl-C, or an error in one of them. `share` returns how much of all is done,
    which is reported from this thread while others work.
    """
    stop = Event()
    with (
        single_threaded() as threads,
        ThreadPoolExecutor(threads, "probes", torch.set_num_threads, (1,)) as pool,
    ):
        futures = [pool.submit(work, item, stop) for item in items]
        try:
            while wait(futures, TICK, FIRST_EXCEPTION).not_done and not any(map(_has_failed, futures)):
                if share is not None:
                    report_progress(share())
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in futures]  # in order: an error is before what it cancelled


def _has_failed(future: Future[Answer]) -> bool:
    return future.done() and future.exception() is not None


Work = TypeVar("Work")
Listener = Callable[[float], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def report_progress_to(listener: Listener) -> Iterator[None]:
    """Hand what is reported in the block to `listener`."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report_progress(share: float) -> None:
    """Tell the listener, if there is one, which share of the measurement is done (0 to 1)."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(share)


def split_progress(items: Sequence[Work]) -> Iterator[Work]:
    """Yield the items; what is reported during each is a part of the whole."""

    def report_part(share: float) -> None:
        if whole is not None:
            whole((index + share) / len(items))

    whole = _LISTENER.get()
    for index, item in enumerate(items):  # noqa: B007  (report_part reads it)
        with report_progress_to(report_part):
            yield item


EPSILONS = (1.0, 0.5, 0.1)
"""Nats per sample at which surplus description length and sample complexity are stored."""


def _compute(points: Points, classes: int, settings: Mapping[str, Any]) -> AnalysisResult:
    result = mdl(points, classes=classes, settings=Settings(**settings))
    readings: Readings = {
        "": result.nats, "bits": result.bits, "std": result.spread, "validation_loss": result.validation_loss,
    }  # fmt: skip
    for size, losses in zip(result.sizes, result.losses, strict=True):
        readings[f"loss:{size}"] = float(np.mean(losses))
        readings[f"loss_std:{size}"] = float(np.std(losses, ddof=1))
    for eps in EPSILONS:
        readings |= {f"sdl:{eps:g}": result.sdl(eps), f"esc:{eps:g}": result.esc(eps)}
    return AnalysisResult(readings)


def _keep_all(settings: Settings) -> dict[str, Any]:
    """Return settings that keep all samples: the analysis of a run has selected them before."""
    return dataclasses.asdict(dataclasses.replace(settings, n=None))


DESCRIPTION_LENGTH = Analysis(
    name="mdl",
    title="Minimum description length by layer",
    description="Minimum description length of the labels in nats, given the representations "
    "(± standard deviation over seeds): lower is better.",
    compute=_compute,
    settings=_keep_all(FULL),
    quick=_keep_all(QUICK),
    columns=(AnalysisColumn("value", "minimum description length", "nats", digits=0, spread="std"),),
    figure=FigureKind.BARS,
    per_client=True,
)
