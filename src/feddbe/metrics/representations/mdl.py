"""MDL: the nats that describe the labels, given the representations (Voita and Titov, EMNLP 2020).

A probe that has learned n samples needs L(n) nats for the label of the next one. The sum over n is the length
of a message with all labels. It is short if labels are easy to learn from the representation. L(n), the
loss-data curve, is measured at a few sizes n_1 < ... < n_m = N as the validation loss of probes trained on
n_k samples, and

    MDL = sum_k (n_k - n_(k-1)) L(n_k),    n_0 = 0.

This is the definition of the paper's tool (Whitney et al., 2020: github.com/willwhitney/reprieve). The loss
at the right end of each interval stands for the whole interval, so the sum is below the length of a real
message if the curve falls. Also from the tool: the last tenth validates; one mean and one standard deviation,
over all entries of all training samples, whiten; sizes are ceil(10 ... N) in equal ratios; probes are
networks with two hidden layers of 512, 4,000 steps of Adam at 1e-4 in batches of 256, five seeds; no early
stopping.

The tool has two implementations that differ. This one takes from each what is well defined:
- The samples of a size are the first n_k of a permutation of all training samples. The permutation and the
  initial weights belong to the seed, so a seed is one message and has its own MDL. (The tool's JAX version
  draws the samples with replacement, so the largest size uses 63 % of them. Its PyTorch version draws them
  without replacement, separately for each size.)
- Batches cycle through these samples in order, as in the JAX version. With at most 256 samples a batch is all
  of them, as in the PyTorch version. (The JAX version repeats them up to 256: nearly the same gradient for up
  to 25 times the work.)
- Linear layers are initialized as in PyTorch.

The paper does not state the number of samples, their clients, or the round: compare only MDLs of equal N.
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
    AnalysisValues,
    FigureKind,
    Points,
)

SHUFFLE = 0
"""Seed of the permutation whose first samples are used: the same ones for every method, round, layer and seed
of the probes, because these are compared."""
STEP_COST = 16
"""Fixed cost of a step in units of samples (measured), for the reported progress."""
MIN_SIZE = 10
"""First size of the curve."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Settings(Parameters):
    """Amount of training. The defaults are the tool's, except n, which it does not have."""

    name: ClassVar[str] = "mdl"

    n: int | None = parameter(1000, "samples used, in random order; none uses all", low=12)
    sizes: int = parameter(10, "points of the loss-data curve", low=2)
    seeds: int = parameter(5, "probes at each size", low=2)
    steps: int = parameter(4000, "steps of each probe", low=1)
    batch: int = parameter(256, "samples of a step", low=1)
    lr: float = parameter(1e-4, "Adam's step size", above=0)
    hidden: int = parameter(512, "width of a probe's two hidden layers", low=1)
    seed: int = parameter(0, "seed of permutations and initial weights", low=0)

    @property
    def is_quick(self) -> bool:
        """True if less is trained than by default; results are then marked."""
        return self.sizes < FULL.sizes or self.seeds < FULL.seeds or self.steps < FULL.steps


FULL = Settings()
QUICK = Settings(sizes=5, seeds=2, steps=500)
"""For a first look: about a fortieth of the work, with probes that are not fully trained."""


def description_length(sizes: Sequence[int], losses: Floats, eps: float = 0.0) -> Any:
    """Return sum_k (n_k - n_(k-1)) max(L(n_k) - eps, 0), n_0 = 0, for each column of `losses`.

    With eps = 0 it is the MDL, otherwise the surplus description length. `losses` has a row per size.
    """
    return np.diff(sizes, prepend=0) @ np.maximum(np.asarray(losses) - eps, 0)


def sample_complexity(sizes: Sequence[int], losses: Floats, eps: float) -> int | None:
    """Return the smallest n_k with L(n_k) <= eps, or None."""
    return next((int(n) for n, loss in zip(sizes, losses, strict=True) if loss <= eps), None)


@dataclass(frozen=True)
class MDL:
    """A loss-data curve and the values derived from it."""

    sizes: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]
    """Validation losses in nats: a row per size, a column per seed."""
    validation: int
    """Number of validation samples."""
    classes: int
    """Outputs of a probe; guessing costs ln(classes) nats per sample."""
    settings: Settings

    @property
    def curve(self) -> Floats:
        """Mean of L(n_k) over seeds."""
        mean: Floats = np.asarray(self.losses).mean(1)
        return mean

    @property
    def nats(self) -> float:
        """MDL as defined by the paper and its tool."""
        return float(description_length(self.sizes, self.curve))

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds of the MDL of a single seed, in nats."""
        return float(np.std(description_length(self.sizes, np.asarray(self.losses)), ddof=1))

    @property
    def validation_loss(self) -> float:
        """L(N), the loss of probes trained on all training samples, in nats."""
        return float(self.curve[-1])

    @property
    def is_quick(self) -> bool:
        return self.settings.is_quick

    def sdl(self, eps: float) -> float:
        """Return the surplus description length: nats beyond eps per sample.

        If L(N) > eps, it grows with the number of samples.
        """
        return float(description_length(self.sizes, self.curve, eps))

    def esc(self, eps: float) -> int | None:
        """Return the eps-sample-complexity: the smallest size with a loss of at most eps, or None."""
        return sample_complexity(self.sizes, self.curve, eps)


def training_sizes(training: int, count: int) -> list[int]:
    """Return `count` sizes from 10 to all training samples, in equal ratios, rounded up."""
    if training >= MIN_SIZE:
        spaced_sizes = np.ceil(np.logspace(math.log10(MIN_SIZE), math.log10(training), count))
        sizes: list[int] = (
            np.minimum(spaced_sizes, training).astype(int).tolist()
        )  # 10**log10(n) may exceed n
        if len(set(sizes)) == count:
            return sizes
    raise InvalidInputError(
        f"{training} training samples (nine tenths of all) are too few for {count} different sizes "
        f"from {MIN_SIZE} on; use more samples or fewer sizes"
    )


def mdl(points: Points, *, classes: int | None = None, settings: Settings = FULL) -> MDL:
    """Return the minimum description length of the labels given the representations.

    All torch threads are used, each for one size at a time. The bits of the result do not depend on their
    number.

    Args:
        points: Representations of samples.
        classes: Number of possible labels, the outputs of a probe; None: the number of labels in the samples.
        settings: Amount of training.

    Raises:
        InvalidInputError: There are too few samples or labels, or a loss is not finite.
    """
    samples = points.select(np.random.RandomState(SHUFFLE).permutation(len(points.y))[: settings.n])
    y, outputs = _number_labels(samples.y, classes)
    validation = -(-len(y) // 10)
    training = len(y) - validation
    sizes = training_sizes(training, settings.sizes)
    x = torch.from_numpy(_whiten(samples.x, training))
    labels = torch.from_numpy(y)
    one_hot = torch.nn.functional.one_hot(labels, outputs).to(x.dtype)
    widths = (x.shape[1], settings.hidden, settings.hidden, outputs)

    steps_done = dict.fromkeys(sizes, 0)

    def train_size(size: int, stop: Event) -> list[float]:
        orders = [
            _make_rng(settings, "order", seed).permutation(training)[:size] for seed in range(settings.seeds)
        ]
        probes = train_probes(
            init_probes(widths, [_make_rng(settings, "weights", seed) for seed in range(settings.seeds)]),
            x, one_hot, torch.from_numpy(np.stack(orders)),
            steps=settings.steps, batch=settings.batch, lr=settings.lr, stop=stop,
            on_step=lambda finished_steps: steps_done.update({size: finished_steps}),
        )  # fmt: skip
        return probes.nll(x[training:], labels[training:])

    def fraction_done() -> float:
        costs = {size: min(size, settings.batch) + STEP_COST for size in sizes}
        finished_cost = sum(costs[size] * steps for size, steps in steps_done.items())
        return finished_cost / (settings.steps * sum(costs.values()))

    losses = map_parallel(train_size, sizes[::-1], fraction_done)[::-1]
    if not np.isfinite(losses).all():
        raise InvalidInputError(f"mdl lr = {settings.lr:g}: a probe's loss is not finite; use a smaller lr")
    return MDL(tuple(sizes), tuple(map(tuple, losses)), validation, outputs, settings)


def _make_rng(settings: Settings, purpose: str, probe: int) -> np.random.RandomState:
    return seeds.make_rng(settings.seed, f"mdl {purpose}", client=probe)


def _number_labels(y: npt.NDArray[np.int64], classes: int | None) -> tuple[npt.NDArray[np.int64], int]:
    """Return labels as 0, 1, ..., and their possible number."""
    present, numbered = np.unique(y, return_inverse=True)
    if len(present) < 2:
        raise InvalidInputError(
            f"all {len(y)} samples have label {present[0]}, so there is nothing to learn; "
            "use samples of more labels, such as those of all clients"
        )
    if classes is None:
        return numbered, len(present)
    if present[0] < 0 or present[-1] >= classes:
        wrong = present[0] if present[0] < 0 else present[-1]
        raise InvalidInputError(f"label {wrong} with classes = {classes}; allowed: 0 to {classes - 1}")
    return y, classes


def _whiten(x: npt.NDArray[np.float32], training: int) -> npt.NDArray[np.float32]:
    """Return (x - mean) / std, both over all entries of the training samples, which come first."""
    train = x[:training]
    if train.min() == train.max():
        raise InvalidInputError(
            f"all values of the representations are {train.min():g}, so labels cannot be learned from them; "
            "analyze another layer or round"
        )
    mean, std = train.mean(dtype=np.float64), train.std(dtype=np.float64)
    return np.asarray((x - mean) / std, dtype=np.float32)


Item = TypeVar("Item")
Result = TypeVar("Result")
REPORT_SECONDS = 0.5
"""Seconds between two reports of progress."""


def init_probes(
    widths: Sequence[int], rngs: Sequence[np.random.RandomState], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return W1, b1, W2, b2, ... of one probe per generator, initialized as torch.nn.Linear.

    They are uniform in +-1/sqrt(inputs). Weights are (S, in, out), biases (S, 1, out).
    """
    parameters = []
    for inputs, outputs in pairwise(widths):
        bound = 1 / math.sqrt(inputs)
        for rows in (inputs, 1):
            values = np.stack([rng.uniform(-bound, bound, (rows, outputs)) for rng in rngs])
            parameters.append(torch.from_numpy(values).to(dtype))
    return parameters


class Probes:
    """S networks with the buffers of a step on batches of one size.

    The `parameters` (see `init_probes`) change in place.
    """

    def __init__(self, parameters: Sequence[Tensor], batch: int, lr: float) -> None:
        self.layers = list(zip(parameters[::2], parameters[1::2], strict=True))
        self._outputs = [bias.new_empty(len(bias), batch, bias.shape[2]) for _, bias in self.layers]
        self._gradients = [torch.empty_like(output) for output in self._outputs[:-1]]
        for weights in parameters:
            weights.grad = torch.empty_like(weights)
        self._adam = torch.optim.Adam(parameters, lr=lr, fused=True)

    def step(self, x: Tensor, one_hot: Tensor) -> None:
        """Make one step of Adam on the mean negative log-likelihood.

        Args:
            x: Samples (S, batch, K).
            one_hot: Labels (S, batch, C).
        """
        outputs = self._forward(x, self._outputs)
        # d/dlogits of the batch's mean of -log softmax(logits)[y] is (softmax(logits) - one_hot) / batch
        gradient = torch.softmax(outputs[-1], -1, out=outputs[-1]).sub_(one_hot).div_(x.shape[1])
        for i, (weight, bias) in reversed(list(enumerate(self.layers))):
            inputs = outputs[i - 1] if i else x
            torch.bmm(inputs.mT, gradient, out=weight.grad)
            torch.sum(gradient, 1, keepdim=True, out=bias.grad)
            if i:
                gradient = torch.bmm(gradient, weight.mT, out=self._gradients[i - 1])
                # zero where the unit is off, as autograd's relu
                torch.ops.aten.threshold_backward.grad_input(gradient, inputs, 0.0, grad_input=gradient)
        self._adam.step()

    def nll(self, x: Tensor, y: Tensor) -> list[float]:
        """Return each probe's mean negative log-likelihood in nats, for samples x (n, K) and labels y (n)."""
        expanded = x.expand(len(self.layers[0][0]), *x.shape)
        outputs = [bias.new_empty(len(bias), len(x), bias.shape[2]) for _, bias in self.layers]
        log_probabilities = torch.log_softmax(self._forward(expanded, outputs)[-1].double(), -1)
        losses: list[float] = (-log_probabilities[:, torch.arange(len(y)), y].mean(1)).tolist()
        return losses

    def _forward(self, x: Tensor, outputs: list[Tensor]) -> list[Tensor]:
        for (weight, bias), output in zip(self.layers, outputs, strict=True):
            x = torch.baddbmm(bias, x, weight, out=output)
            if output is not outputs[-1]:
                output.relu_()
        return outputs


def train_probes(
    parameters: Sequence[Tensor],
    x: Tensor,
    one_hot: Tensor,
    orders: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float,
    stop: Event | None = None,
    on_step: Callable[[int], None] = lambda done: None,
) -> Probes:
    """Train probe s on the samples orders[s] of x (n, K) and one_hot (n, C), and return the probes.

    Batches cycle through the samples in this order, also across its end. Each batch has exactly `batch`
    samples and all samples occur equally often. With at most `batch` samples, each step uses all of them.

    Args:
        parameters: Initial parameters, which change in place.
        x: All samples.
        one_hot: Their labels.
        orders: Indices of each probe's samples.
        steps: Number of steps.
        batch: Samples per step.
        lr: Learning rate of Adam.
        stop: Training ends early when it is set.
        on_step: Called with the number of completed steps.
    """
    size = orders.shape[1]
    batch = min(batch, size)
    probes = Probes(parameters, batch, lr)
    cycle = torch.cat([orders, orders[:, : batch - 1]], 1)
    batch_x = x.new_empty(len(orders), batch, x.shape[1])
    batch_one_hot = one_hot.new_empty(len(orders), batch, one_hot.shape[1])
    for step in range(steps):
        if stop is not None and stop.is_set():
            break
        if step == 0 or batch < size:
            start = step * batch % size
            indices = cycle[:, start : start + batch].reshape(-1)
            torch.index_select(x, 0, indices, out=batch_x.view(-1, x.shape[1]))
            torch.index_select(one_hot, 0, indices, out=batch_one_hot.view(-1, one_hot.shape[1]))
        probes.step(batch_x, batch_one_hot)
        on_step(step + 1)
    return probes


@contextmanager
def single_threaded() -> Iterator[int]:
    """Use one torch thread in the block, and yield the previous number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def map_parallel(
    work: Callable[[Item, Event], Result],
    items: Sequence[Item],
    fraction_done: Callable[[], float] | None = None,
) -> list[Result]:
    """Return work(item, stop) of each item, computed in threads with one torch thread each.

    Args:
        work: Function of an item and an event, which is set after Ctrl-C or an error in another item.
        items: Items in the order in which they start; the longest should come first.
        fraction_done: Returns the completed fraction of all work, which this thread reports meanwhile.
    """
    stop = Event()
    with (
        single_threaded() as threads,
        ThreadPoolExecutor(threads, "probes", torch.set_num_threads, (1,)) as pool,
    ):
        futures = [pool.submit(work, item, stop) for item in items]
        try:
            while wait(futures, REPORT_SECONDS, FIRST_EXCEPTION).not_done and not any(
                map(_has_failed, futures)
            ):
                if fraction_done is not None:
                    report_progress(fraction_done())
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in futures]  # in order: an error precedes what it cancelled


def _has_failed(future: Future[Result]) -> bool:
    return future.done() and future.exception() is not None


Listener = Callable[[float], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def report_progress_to(listener: Listener) -> Iterator[None]:
    """Call `listener` with the progress that is reported in the block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report_progress(fraction: float) -> None:
    """Pass the completed fraction of the analysis (0 to 1) to the listener, if there is one."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(fraction)


def split_progress(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items; progress that is reported during an item is scaled to its part of the whole."""

    def report_part(fraction: float) -> None:
        if listener is not None:
            listener((index + fraction) / len(items))

    listener = _LISTENER.get()
    for index, item in enumerate(items):  # noqa: B007  (report_part reads it)
        with report_progress_to(report_part):
            yield item


EPSILONS = (1.0, 0.5, 0.1)
"""Nats per sample at which surplus description length and sample complexity are stored."""


def _compute(points: Points, classes: int, settings: Mapping[str, Any]) -> AnalysisResult:
    result = mdl(points, classes=classes, settings=Settings(**settings))
    values: AnalysisValues = {
        "": result.nats, "bits": result.bits, "std": result.spread, "validation_loss": result.validation_loss,
    }  # fmt: skip
    for size, losses in zip(result.sizes, result.losses, strict=True):
        values[f"loss:{size}"] = float(np.mean(losses))
        values[f"loss_std:{size}"] = float(np.std(losses, ddof=1))
    for eps in EPSILONS:
        values |= {f"sdl:{eps:g}": result.sdl(eps), f"esc:{eps:g}": result.esc(eps)}
    return AnalysisResult(values)


def _use_all_samples(settings: Settings) -> dict[str, Any]:
    """Return settings that use all samples, because the analysis of a run has already selected them."""
    return dataclasses.asdict(dataclasses.replace(settings, n=None))


DESCRIPTION_LENGTH = Analysis(
    name="mdl",
    title="Minimum description length by layer",
    description="Minimum description length of the labels in nats, given the representations "
    "(± standard deviation): lower is better.",
    compute=_compute,
    settings=_use_all_samples(FULL),
    quick_settings=_use_all_samples(QUICK),
    columns=(AnalysisColumn("value", "minimum description length", "nats", digits=0, spread="std"),),
    figure=FigureKind.BARS,
    supports_per_client=True,
    on=("all", "own"),
)
