"""What clients measure: small pure functions, registered by name and chosen by `--metrics`.

A new one is a function under `@measure` in this file. It is given what its parameters name, and by that its
moment is chosen:

- a pass over one client's rows: `logits`, labels `y`, representations `z_g` = f(x) and `z` = z_g + p_i (these
  two are computed only if somebody asks);
- its local training: `loss_sum` over the `samples` trained on, `seconds`, `bytes_up`, `bytes_down`.

It returns (value, weight), the weight being what the client counts for in the mean over clients, or None
where it is not defined. It is never asked about no rows at all.

A *pooled* measure asks for `points` alone: z_g of test samples of all clients that were evaluated, at most
`POOLED_ROWS` of each, the same ones in every round. It returns the numbers of clients, or of `ALL` together.
For it clients send representations to the server, which no method does: it is for simulations.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from feddbe.errors import InvalidInputError, unknown_name
from feddbe.metrics.records import ALL, Numbers, Value
from feddbe.metrics.representations.discrepancy import mean_distances
from feddbe.metrics.representations.linear_probe import linear_probe
from feddbe.metrics.representations.points import Points

if TYPE_CHECKING:
    from feddbe.data.dataset import Dataset
    from feddbe.data.split import Split


Function = Callable[..., Any]
"""Gives a `Value` or None; a pooled one, a `Value` for each client, or for `ALL`."""
PASS = {"logits", "y", "z", "z_g"}
TRAINING = {"loss_sum", "samples", "seconds", "bytes_up", "bytes_down"}
POOLED = {"points"}
POOLED_SAMPLES = 100
"""Test samples of a client whose representations it sends for pooled measures."""
_METRICS: dict[str, tuple[Function, frozenset[str]]] = {}
_DESCRIPTIONS: dict[str, tuple[str, str]] = {}


@overload
def metric(function: Function) -> Function: ...
@overload
def metric(*, label: str, unit: str = "") -> Callable[[Function], Function]: ...
def metric(function: Function | None = None, *, label: str = "", unit: str = "") -> Any:
    """Register a measure under the function's name.

    Args:
        function: The measure, if the decorator is used without arguments.
        label: The quantity in tables and figures, as in `client drift`; by default the function's name.
        unit: Its unit. Values of a measure in `%` are fractions of one.
    """
    if function is None:
        return partial(metric, label=label, unit=unit)
    asks = frozenset(inspect.signature(function).parameters)
    if not any(asks <= given for given in (PASS, TRAINING, POOLED)):
        raise TypeError(
            f"measure {function.__name__} asks for {sorted(asks)}; there are {PASS}, {TRAINING} or {POOLED}"
        )
    _METRICS[function.__name__] = function, asks
    _DESCRIPTIONS[function.__name__] = label or function.__name__, unit
    return function


def describe_metric(name: str) -> tuple[str, str]:
    """Return the label and the unit of a metric; a run may have one that is no longer registered."""
    return _DESCRIPTIONS.get(name, (name, ""))


def registered_metrics() -> Mapping[str, tuple[Function, frozenset[str]]]:
    """All measures by name, each with what it asks for."""
    return _METRICS


def parse_metrics(spec: str, always: Iterable[str] = ("accuracy",)) -> tuple[str, ...]:
    """The names in `auc,loss`, after those that are measured `always`: accuracy chooses the best round."""
    names = [name.strip() for name in spec.split(",") if name.strip()]
    for name in names:
        if name not in registered_metrics():
            raise unknown_name("measure", name, registered_metrics())
    return tuple(dict.fromkeys([*always, *names]))


def required_inputs(names: Iterable[str]) -> set[str]:
    """What these measures ask for."""
    return {parameter for name in names for parameter in registered_metrics()[name][1]}


def compute(names: Iterable[str], given: Mapping[str, Any]) -> Numbers:
    """Those of the measures that ask for nothing but what is given; what is not defined is left out."""
    found: Numbers = {}
    for name in names:
        function, asks = registered_metrics()[name]
        if asks <= given.keys() and (value := function(**{key: given[key] for key in asks})) is not None:
            found[name] = value
    return found


def compute_pooled(names: Iterable[str], points: Points) -> dict[int, Numbers]:
    """The pooled ones of the measures, by client, `ALL` among them; what cannot be said of these points (too
    few, of one label) is left out."""
    found: dict[int, Numbers] = {}
    for name in names:
        function, asks = registered_metrics()[name]
        values: Mapping[int, Value] = {}
        with suppress(InvalidInputError):
            values = function(points) if asks == POOLED else {}
        for client, value in values.items():
            found.setdefault(client, {})[name] = value
    return found


@metric(label="accuracy", unit="%")
def accuracy(logits: Tensor, y: Tensor) -> Value:
    """Share of the labels that are hit; a fraction, so that over clients it is all hits over all samples."""
    return Fraction(int((logits.argmax(1) == y).sum()), len(y)), len(y)


def majority_accuracy(dataset: Dataset, split: Split, members: int | None = None) -> float:
    """Weighted accuracy if each client always predicts its own most frequent training label; of the first
    `members` clients only, as the accuracy of a run with newcomers."""
    y, classes = dataset.y.numpy(), dataset.classes
    train, test = split.train[:members], split.test[:members]
    some = max(1, 2**20 // classes)  # clients at a time, for whose counts there is room
    labels = [train[k : k + some].histogram(y, classes).argmax(1) for k in range(0, max(1, len(train)), some)]
    correct = y[test.flat] == np.concatenate(labels)[test.owners]
    return int(correct.sum()) / len(correct) if len(correct) else 0.0


@metric(label="AUC")
def auc(logits: Tensor, y: Tensor) -> Value | None:
    """Area under the ROC curve over all (sample, class) pairs, the micro-average over one-hot labels and
    softmax: how often a true pair outranks a false one. With one class there are no false pairs.

    From the rank sum of the true pairs, ties at their middle rank (Mann-Whitney): only true pairs need a
    rank, which is where they would be put in among all.
    """
    positives, negatives = len(y), logits.numel() - len(y)
    if not negatives:
        return None
    scores = F.softmax(logits.double(), 1)
    every, true = np.sort(scores.reshape(-1).numpy()), scores.gather(1, y[:, None]).reshape(-1).numpy()
    below, upto = (np.searchsorted(every, true, side) for side in ("left", "right"))
    if np.isnan(every[-1]):  # where nan would be put in is no rank
        return math.nan, positives
    ranks = float((below + upto + 1).sum()) / 2
    return (ranks - positives * (positives + 1) / 2) / (positives * negatives), positives


@metric
def loss(logits: Tensor, y: Tensor) -> Value:
    """Mean cross-entropy."""
    return float(F.cross_entropy(logits, y)), len(y)


@metric(label="client drift", unit="standard deviations")
def drift(points: Points) -> dict[int, Value]:
    """Of each client, the distance of its mean z_g from that of the others, in units of the spread within
    clients (`representations/discrepancy.py`); it counts for as many samples as were looked at."""
    counts = dict(zip(*(a.tolist() for a in np.unique(points.client, return_counts=True)), strict=True))
    return {client: (value, counts[client]) for client, value in mean_distances(points).items()}


@metric(label="linear probe accuracy", unit="%")
def probe(points: Points) -> dict[int, Value]:
    """Accuracy of a linear probe on the pooled z_g (`representations/linear_probe.py`), of all together."""
    return {ALL: (linear_probe(points), len(points.y))}
