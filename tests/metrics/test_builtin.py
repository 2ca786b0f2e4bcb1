"""Aggregates over clients, AUC and majority accuracy, against values computed by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import f1_score, recall_score, roc_auc_score
from torch import Tensor

from feddbe.data.dataset import Dataset
from feddbe.data.split import Split
from feddbe.metrics.builtin import (
    CALIBRATION_BINS,
    accuracy,
    auc,
    balanced_accuracy,
    ece,
    loss,
    macro_f1,
    majority_accuracy,
)
from feddbe.metrics.client_values import Aggregates, aggregate_clients

# --- over clients


def aggregate(samples: list[int], correct: list[int]) -> Aggregates | None:
    """Return the aggregates of clients with these numbers of correct predictions."""
    return aggregate_clients([(Fraction(c, max(n, 1)), n) for n, c in zip(samples, correct, strict=True)])


def test_aggregates_by_hand() -> None:
    """Accuracies 1/2, 3/4, 1, 0: weighted (1 + 3 + 10 + 0) / (2 + 4 + 10 + 4) = 14/20; mean 9/16;
    worst tenth the lowest ceil(4/10) = 1; variance (1 + 9 + 49 + 81) / 256 / 4 = 140/1024 = 35/256."""
    aggregates = aggregate([2, 4, 10, 4], [1, 3, 10, 0])
    assert aggregates is not None
    assert aggregates["weighted"] == pytest.approx(14 / 20)
    assert aggregates["mean"] == pytest.approx(9 / 16)
    assert aggregates["worst_tenth"] == 0
    assert aggregates["std"] == pytest.approx(math.sqrt(35 / 256))


@pytest.mark.parametrize(
    ("clients", "worst"), [(1, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (21, 1.0), (30, 1.0), (31, 1.5)]
)
def test_worst_tenth_is_rounded_up(clients: int, worst: float) -> None:
    """Client k has k of 100 right: the lowest m = ceil(N / 10) have (m - 1) / 2 percent on average."""
    order = np.random.RandomState(0).permutation(clients).tolist()
    aggregates = aggregate([100] * clients, order)
    assert aggregates is not None
    assert aggregates["worst_tenth"] == pytest.approx(worst / 100)


def test_worst_tenth_is_not_weighted_by_samples() -> None:
    """11 clients, so the lowest 2: (0/100 + 1/2) / 2 = 1/4, where weighted it would be 1/102."""
    aggregates = aggregate([100, 2, *[5] * 9], [0, 1, *[5] * 9])
    assert aggregates is not None
    assert aggregates["worst_tenth"] == pytest.approx(1 / 4)


def test_clients_without_test_samples_do_not_count() -> None:
    assert aggregate([4, 0, 2], [1, 0, 2]) == aggregate([4, 2], [1, 2])
    assert aggregate([0, 0], [0, 0]) is None
    assert aggregate([], []) is None


def test_statistics_of_one_client_are_its_accuracy() -> None:
    assert aggregate([8], [6]) == {"weighted": 0.75, "mean": 0.75, "worst_tenth": 0.75, "std": 0.0}


# --- one client


def approx(*value: float) -> Any:
    """Return an approximation of a value and its weight."""
    return pytest.approx(value, abs=1e-12, rel=1e-6)


def sklearn_auc(logits: Tensor, y: Tensor) -> float:
    one_hot = np.eye(logits.shape[1])[y.numpy()]
    return float(roc_auc_score(one_hot, logits.double().softmax(1).numpy(), average="micro"))


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(2, 6), st.sampled_from([0, 1, 3]))
def test_auc_is_scikit_learns_micro_average(seed: int, n: int, classes: int, kinds: int) -> None:
    """With few kinds of logits most scores are tied; with one kind all of them."""
    rng = np.random.RandomState(seed)
    scores = rng.randint(0, kinds, (n, classes)) if kinds else rng.randn(n, classes)
    logits, y = torch.tensor(scores, dtype=torch.float32), torch.tensor(rng.randint(0, classes, n))
    assert auc(logits, y) == approx(sklearn_auc(logits, y), n)


def test_auc_by_hand() -> None:
    """Two samples with probabilities (.5, .3, .2), labels 0 and 1: true .5 and .3, false .3 .2 .5 .2.

    .5 beats three and ties one, .3 beats two and ties one: (3.5 + 2.5) / (2 4).
    """
    logits = torch.tensor([[0.5, 0.3, 0.2]] * 2).log()
    assert auc(logits, torch.tensor([0, 1])) == approx(6 / 8, 2)


def test_auc_of_nan_is_nan() -> None:
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 0.0]])
    result = auc(logits, torch.tensor([0, 1]))
    assert result is not None
    assert math.isnan(result[0])


def test_auc_ranks_probabilities_not_logits() -> None:
    """Adding 10 to one sample's logits changes no probability, though it would change their ranks."""
    logits, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    shifted = logits + torch.tensor([[0.0], [10.0]])
    assert auc(shifted, y) == auc(logits, y) == (1.0, 2)


def test_accuracy_and_loss_by_hand() -> None:
    """Logits (0, ln 3) give 1/4 and 3/4: labels 1, 1, 0 have two correct and loss (2 ln(4/3) + ln 4) / 3."""
    logits, y = torch.tensor([[0.0, math.log(3)]] * 3), torch.tensor([1, 1, 0])
    assert accuracy(logits, y) == (Fraction(2, 3), 3)
    assert loss(logits, y) == approx((2 * math.log(4 / 3) + math.log(4)) / 3, 3)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 6), st.integers(1, 6))
def test_f1_and_balanced_accuracy_are_scikit_learns(seed: int, n: int, classes: int, present: int) -> None:
    """A client often has only some of the classes, and predicts others."""
    rng = np.random.RandomState(seed)
    logits = torch.tensor(rng.randn(n, classes))
    y = rng.randint(0, min(present, classes), n)
    predicted = logits.argmax(1).numpy()
    assert macro_f1(logits, torch.tensor(y)) == approx(f1_score(y, predicted, average="macro"), n)
    recall = recall_score(y, predicted, average="macro", labels=np.unique(y))  # balanced_accuracy_score warns
    assert balanced_accuracy(logits, torch.tensor(y)) == approx(recall, n)


@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.integers(1, 6), st.sampled_from([0.1, 1.0, 30.0]))
def test_calibration_error_has_scikit_learns_bins(seed: int, n: int, classes: int, scale: float) -> None:
    """With scale 30 most confidences are 1, the upper edge of the last bin."""
    rng = np.random.RandomState(seed)
    logits, y = torch.tensor(scale * rng.randn(n, classes)), torch.tensor(rng.randint(0, classes, n))
    confidence, predicted = logits.softmax(1).max(1)
    correct = (predicted == y).numpy()
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
    sizes = np.bincount(np.searchsorted(edges[1:-1], confidence.numpy()), minlength=CALIBRATION_BINS)
    if correct.all() or not correct.any():  # all bins deviate in the same direction; scikit-learn needs both
        assert ece(logits, y) == approx(abs(float(correct.mean()) - float(confidence.mean())), n)
        return
    accuracies, confidences = calibration_curve(correct, confidence.numpy(), n_bins=CALIBRATION_BINS)
    expected = float((sizes[sizes > 0] * np.abs(accuracies - confidences)).sum() / n)
    assert ece(logits, y) == approx(expected, n)


def test_calibration_error_by_hand() -> None:
    """Confidence 3/4 for four samples of which two are correct: |1/2 - 3/4|. With confidence 1 and both
    correct the second bin adds nothing: 4/6 times 1/4."""
    logits = torch.tensor([[0.0, math.log(3)]] * 4 + [[0.0, 1000.0]] * 2)
    assert ece(logits[:4], torch.tensor([1, 1, 0, 0])) == approx(1 / 4, 4)
    assert ece(logits, torch.tensor([1, 1, 0, 0, 1, 1])) == approx(1 / 6, 6)


def test_auc_of_a_single_class_is_undefined() -> None:
    assert auc(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)) is None


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), min_size=1, max_size=30))
def test_weighted_accuracy_is_all_correct_over_all_samples(clients: list[tuple[int, float]]) -> None:
    """It is exact to the last bit, which (hits / n) n / n would not be."""
    sizes = [n for n, _ in clients]
    hits = [int(share * n) for n, share in clients]
    aggregates = aggregate(sizes, hits)
    assert aggregates is not None
    assert aggregates["weighted"] == sum(hits) / sum(sizes)


# --- majority accuracy


def _federation(y: list[int], train: list[list[int]], test: list[list[int]]) -> tuple[Dataset, Split]:
    rows = [tuple(np.array(part, dtype=np.int64) for part in parts) for parts in (train, test)]
    return Dataset("toy", torch.zeros(len(y), 1), torch.tensor(y), 3), Split.from_arrays(rows[0], rows[1])


def test_majority_accuracy_by_hand() -> None:
    """Client 0 trains on 2 2 0 and predicts 2: two of its test labels 2 1 2 are correct. Client 1 trains on
    0 1 (a tie, the smaller label) and predicts 0, which is wrong for 1: 2 of 4; unweighted it is 1/3."""
    accuracy_ = majority_accuracy(
        *_federation([2, 2, 0, 2, 1, 2, 0, 1, 1], [[0, 1, 2], [6, 7]], [[3, 4, 5], [8]])
    )
    assert accuracy_ == pytest.approx(2 / 4)


def test_majority_accuracy_uses_training_labels() -> None:
    assert majority_accuracy(*_federation([0, 1, 1], [[0]], [[1, 2]])) == 0
    assert majority_accuracy(*_federation([1, 1, 1], [[0]], [[1, 2]])) == 1


def test_majority_accuracy_without_test_samples() -> None:
    assert majority_accuracy(*_federation([0, 1], [[0], [1]], [[], []])) == 0
    assert majority_accuracy(*_federation([0, 1, 1], [[0], [1]], [[], [2]])) == 1
