"""Linear probe: compared with scikit-learn's ridge at any K and n, and on clear and noisy labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeClassifier

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.linear_probe import RIDGE, linear_probe
from feddbe.metrics.representations.points import Points, make_points
from feddbe.seeds import make_rng


def clusters(n: int, k: int, separation: float) -> Points:
    rng = np.random.RandomState(0)
    y = rng.randint(0, 5, n)
    return make_points(2 + separation * rng.randn(5, k)[y] + rng.randn(n, k), y + 3)


@pytest.mark.parametrize(("n", "k"), [(300, 20), (120, 60), (100, 400)])
def test_accuracy_equals_scikit_learn(n: int, k: int) -> None:
    """More samples than features, as many, fewer; the penalty is n times ours in its units."""
    points = clusters(n, k, 2 / np.sqrt(k))
    order = make_rng(4, "linear probe").permutation(n)
    train, test = points.select(order[: n // 2]), points.select(order[n // 2 :])
    x = train.x.astype(np.float64)
    alpha = RIDGE * len(x) * x.var(axis=0).mean()
    expected = RidgeClassifier(alpha=alpha).fit(x, train.y).score(test.x.astype(np.float64), test.y)
    assert 0.3 < expected < 1
    assert linear_probe(points, 4) == expected


def test_clear_labels_are_learned_and_noise_is_not() -> None:
    """With five labels, a fifth of 2,000 is correct by chance, up to 5 standard deviations of 0.009."""
    assert linear_probe(clusters(1000, 512, 1.0)) == 1
    assert linear_probe(clusters(4000, 64, 0.0)) == pytest.approx(0.2, abs=0.045)


def test_scale_does_not_matter_and_constant_features_are_harmless() -> None:
    points = clusters(200, 30, 0.3)
    padded = np.hstack([points.x * 1024, np.full((200, 1), 7.0)])
    # a constant feature more makes the mean variance, and so the penalty, 30/31 of what it was
    assert linear_probe(make_points(points.x * 1024, points.y)) == linear_probe(points)
    assert linear_probe(make_points(padded, points.y)) == pytest.approx(linear_probe(points), abs=0.03)


def test_constant_representations_predict_the_most_frequent_label() -> None:
    y = np.array([1] * 70 + [0] * 30)
    order = make_rng(0, "linear probe").permutation(100)
    assert linear_probe(make_points(np.ones((100, 3)), y)) == (y[order[50:]] == 1).mean()


def test_same_bits_on_any_number_of_threads() -> None:
    points, before, accuracies = clusters(400, 300, 0.1), torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            accuracies.add(linear_probe(points, 1))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(accuracies) == 1
    assert len({linear_probe(points, seed) for seed in range(8)}) > 1


@pytest.mark.parametrize("n", [1, 2, 10])
def test_single_label_is_one_line(n: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{n} samples are too few for a linear probe"):
        linear_probe(make_points(np.random.RandomState(0).randn(n, 2), np.zeros(n)))
