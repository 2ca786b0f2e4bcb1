"""Metrics of clients: pure functions, registered by name and selected by `--metrics`.

A new metric is a function with `@metric` in this file. Its parameters name its inputs, which determine its
moment:

- evaluation of a client's samples: `logits`, labels `y`, representations `z_g` = f(x) and `z` = z_g + p_i;
  `global_logits` and `global_y` of the client's model on the test data of all clients. All except `logits`
  and `y` are computed only if a metric needs them;
- local training: `loss_sum` over the `samples` trained on, `seconds`, `bytes_up`, `bytes_down`.

It returns (value, weight), where the weight is that of the client in the mean over clients, or None if it is
not defined. It is never called without samples.

A *pooled* metric has the single input `points`: z_g of test samples of all evaluated clients, at most
`POOLED_SAMPLES` of each, the same in every round. It returns values by client, or one for `ALL`. Clients send
representations to the server for it, which no method does: it is for simulations.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe.errors import InvalidInputError, unknown_name
from feddbe.metrics.client_values import ALL, MetricValues, Value
from feddbe.metrics.representations.discrepancy import mean_distances
from feddbe.metrics.representations.linear_probe import linear_probe
from feddbe.metrics.representations.points import Points

if TYPE_CHECKING:
    from feddbe.data.dataset import Dataset
    from feddbe.data.split import Split


MetricFunction = Callable[..., Any]
"""Returns a `Value` or None; a pooled metric returns a `Value` for each client, or for `ALL`."""
EVALUATION_INPUTS = {"logits", "y", "z", "z_g", "global_logits", "global_y"}
TRAINING_INPUTS = {"loss_sum", "samples", "seconds", "bytes_up", "bytes_down"}
POOLED_INPUTS = {"points"}
CALIBRATION_BINS = 15
"""Number of bins of the calibration error."""
POOLED_SAMPLES = 100
"""Maximum number of test samples per client whose representations are sent for pooled metrics."""


@dataclass(frozen=True)
class RegisteredMetric:
    """A metric function, and its presentation."""

    function: MetricFunction
    inputs: frozenset[str]
    label: str
    unit: str


_METRICS: dict[str, RegisteredMetric] = {}


@overload
def metric(function: MetricFunction) -> MetricFunction: ...
@overload
def metric(*, label: str, unit: str = "") -> Callable[[MetricFunction], MetricFunction]: ...
def metric(function: MetricFunction | None = None, *, label: str = "", unit: str = "") -> Any:
    """Register a metric under the function's name, and return the function.

    Args:
        function: The metric, if the decorator is used without arguments.
        label: The quantity in tables and figures, as in `client drift`; by default the function's name.
        unit: Its unit. Values of a metric in `%` are fractions.

    Raises:
        TypeError: The function has parameters that are not inputs of one moment.
    """
    if function is None:
        return partial(metric, label=label, unit=unit)
    name, inputs = function.__name__, frozenset(inspect.signature(function).parameters)
    if not any(inputs <= allowed for allowed in (EVALUATION_INPUTS, TRAINING_INPUTS, POOLED_INPUTS)):
        raise TypeError(
            f"metric {name} has unsupported parameters: got {sorted(inputs)}; expected a subset of "
            f"{sorted(EVALUATION_INPUTS)}, {sorted(TRAINING_INPUTS)} or {sorted(POOLED_INPUTS)}"
        )
    _METRICS[name] = RegisteredMetric(function, inputs, label or name, unit)
    return function


def describe_metric(name: str) -> tuple[str, str]:
    """Return the label and the unit of a metric; a stored run may have one that is not registered."""
    if name not in _METRICS:
        return name, ""
    return _METRICS[name].label, _METRICS[name].unit


def parse_metrics(spec: str, always: Iterable[str] = ("accuracy",)) -> tuple[str, ...]:
    """Return the names in a list such as `auc,loss`, after those that are `always` computed.

    Accuracy is among the latter, because it selects the best round.
    """
    names = [name.strip() for name in spec.split(",") if name.strip()]
    for name in names:
        if name not in _METRICS:
            raise unknown_name("metric", name, _METRICS)
    return tuple(dict.fromkeys([*always, *names]))


def required_inputs(names: Iterable[str]) -> set[str]:
    """Return the inputs that these metrics need."""
    return {parameter for name in names for parameter in _METRICS[name].inputs}


def compute_metrics(names: Iterable[str], inputs: Mapping[str, Any]) -> MetricValues:
    """Return the values of the metrics whose inputs are available; undefined values are skipped."""
    values: MetricValues = {}
    for name in names:
        metric_ = _METRICS[name]
        if not metric_.inputs <= inputs.keys():
            continue
        value = metric_.function(**{key: inputs[key] for key in metric_.inputs})
        if value is not None:
            values[name] = value
    return values


def compute_pooled(names: Iterable[str], points: Points) -> dict[int, MetricValues]:
    """Return the values of pooled metrics by client, including `ALL`.

    A metric that is not defined for these points (too few samples, a single label) is skipped.
    """
    values: dict[int, MetricValues] = {}
    for name in names:
        metric_ = _METRICS[name]
        if metric_.inputs != POOLED_INPUTS:
            continue
        with suppress(InvalidInputError):
            for client, value in metric_.function(points).items():
                values.setdefault(client, {})[name] = value
    return values


@metric(label="accuracy", unit="%")
def accuracy(logits: Tensor, y: Tensor) -> Value:
    """Return the share of correct predictions, as an exact fraction: the mean over clients is exact, too."""
    return Fraction(int((logits.argmax(1) == y).sum()), len(y)), len(y)


def majority_accuracy(dataset: Dataset, split: Split, members: int | None = None) -> float:
    """Return the weighted accuracy if each client always predicts its most frequent training label.

    Args:
        dataset: The data.
        split: Training and test samples of each client.
        members: Number of clients to count, from the first on; new clients are not counted.
    """
    y, classes = dataset.y.numpy(), dataset.classes
    train, test = split.train[:members], split.test[:members]
    if dataset.remote:
        return sum(dataset.remote.majority_hits[:members]) / max(1, len(test.flat))
    chunk = max(1, 2**20 // classes)  # clients at a time, which limits the memory of their label counts
    starts = range(0, max(1, len(train)), chunk)
    labels = [train[start : start + chunk].histogram(y, classes).argmax(1) for start in starts]
    correct = y[test.flat] == np.concatenate(labels)[test.owners]
    return int(correct.sum()) / len(correct) if len(correct) else 0.0


@metric(label="AUC")
def auc(logits: Tensor, y: Tensor) -> Value | None:
    """Return the area under the ROC curve over all (sample, class) pairs; None with a single class.

    It is the micro-average over one-hot labels and softmax: the probability that a true pair outranks a false
    one. It is computed from the rank sum of the true pairs, with mid-ranks for ties (Mann-Whitney), so only
    true pairs need a rank.
    """
    positives, negatives = len(y), logits.numel() - len(y)
    if not negatives:
        return None
    scores = F.softmax(logits.double(), 1)
    ordered = np.sort(scores.reshape(-1).numpy())
    true_scores = scores.gather(1, y[:, None]).reshape(-1).numpy()
    lower = np.searchsorted(ordered, true_scores, "left")
    upper = np.searchsorted(ordered, true_scores, "right")
    if np.isnan(ordered[-1]):  # the position of nan is not a rank
        return math.nan, positives
    ranks = float((lower + upper + 1).sum()) / 2
    return (ranks - positives * (positives + 1) / 2) / (positives * negatives), positives


@metric(label="macro F1", unit="%")
def macro_f1(logits: Tensor, y: Tensor) -> Value:
    """Return the plain mean of F1 = 2 TP / (2 TP + FP + FN) over all classes that occur.

    A class occurs if it is the label or the prediction of a sample, as in scikit-learn's `f1_score`.
    """
    labels, predictions, correct = _class_counts(logits, y)
    occurs = labels + predictions > 0
    return float((2 * correct[occurs] / (labels + predictions)[occurs]).mean()), len(y)


@metric(label="balanced accuracy", unit="%")
def balanced_accuracy(logits: Tensor, y: Tensor) -> Value:
    """Return the plain mean of the recalls of the client's labels."""
    labels, _, correct = _class_counts(logits, y)
    occurs = labels > 0
    return float((correct[occurs] / labels[occurs]).mean()), len(y)


def _class_counts(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of labels, predictions and correct predictions of each class."""
    classes = logits.shape[1]
    predicted = logits.argmax(1)
    counts = [torch.bincount(part, minlength=classes) for part in (y, predicted, y[predicted == y])]
    labels, predictions, correct = (count.double() for count in counts)
    return labels, predictions, correct


@metric(label="calibration error", unit="%")
def ece(logits: Tensor, y: Tensor) -> Value:
    """Return the expected calibration error (Guo et al. 2017).

    The confidence is the largest softmax value. With S_b the samples whose confidence is in
    ((b - 1) / 15, b / 15], the error is sum_b |S_b| / n |accuracy(S_b) - mean confidence(S_b)|.
    """
    confidence, predicted = F.softmax(logits.double(), 1).max(1)
    edges = torch.linspace(0, 1, CALIBRATION_BINS + 1, dtype=torch.float64)[1:-1]
    bins = torch.bucketize(confidence, edges)
    excess = (predicted == y).double() - confidence
    sums = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add(0, bins, excess)
    return float(sums.abs().sum()) / len(y), len(y)


@metric(label="global accuracy", unit="%")
def global_accuracy(global_logits: Tensor, global_y: Tensor, y: Tensor) -> Value:
    """Return the accuracy of the client's model on the test data of all clients."""
    correct = int((global_logits.argmax(1) == global_y).sum())
    return Fraction(correct, len(global_y)), len(y)


@metric
def loss(logits: Tensor, y: Tensor) -> Value:
    """Return the mean cross-entropy."""
    return float(F.cross_entropy(logits, y)), len(y)


@metric(label="client drift", unit="standard deviations")
def drift(points: Points) -> dict[int, Value]:
    """Return the distance of each client's mean z_g from that of the others, weighted by samples.

    The unit is the spread within clients (`representations/discrepancy.py`).
    """
    clients, counts = np.unique(points.client, return_counts=True)
    samples = dict(zip(clients.tolist(), counts.tolist(), strict=True))
    return {client: (value, samples[client]) for client, value in mean_distances(points).items()}


@metric(label="linear probe accuracy", unit="%")
def probe(points: Points) -> dict[int, Value]:
    """Return the accuracy of a linear probe on the pooled z_g (`representations/linear_probe.py`)."""
    return {ALL: (linear_probe(points), len(points.y))}
