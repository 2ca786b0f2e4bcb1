"""The linear probe: by scikit-learn's ridge, at any K and n, and on what it should find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeClassifier

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.linear_probe import RIDGE, linear_probe
from feddbe.metrics.representations.points import Points, make_points
from feddbe.seeds import make_rng


def clusters(n: int, k: int, apart: float) -> Points:
    rng = np.random.RandomState(0)
    y = rng.randint(0, 5, n)
    return make_points(2 + apart * rng.randn(5, k)[y] + rng.randn(n, k), y + 3)


@pytest.mark.parametrize(("n", "k"), [(300, 20), (120, 60), (100, 400)])
def test_as_many_right_as_scikit_learn_has(n: int, k: int) -> None:
    """More samples than features, as many, fewer: the same penalty in its units (n times) and the same
    answers."""
    given = clusters(n, k, 2 / np.sqrt(k))
    order = make_rng(4, "linear probe").permutation(n)
    train, test = given.select(order[: n // 2]), given.select(order[n // 2 :])
    x = train.x.astype(np.float64)
    alpha = RIDGE * len(x) * x.var(axis=0).mean()
    theirs = RidgeClassifier(alpha=alpha).fit(x, train.y).score(test.x.astype(np.float64), test.y)
    assert 0.3 < theirs < 1
    assert linear_probe(given, 4) == theirs


def test_clear_labels_are_told_and_noise_is_not() -> None:
    """Five labels: noise is right in a fifth of 2,000, up to 5 standard deviations of 0.009."""
    assert linear_probe(clusters(1000, 512, 1.0)) == 1
    assert linear_probe(clusters(4000, 64, 0.0)) == pytest.approx(0.2, abs=0.045)


def test_scale_does_not_matter_and_constant_features_are_harmless() -> None:
    given = clusters(200, 30, 0.3)
    padded = np.hstack([given.x * 1024, np.full((200, 1), 7.0)])
    # a constant feature more makes the mean variance, and so the penalty, 30/31 of what it was
    assert linear_probe(make_points(given.x * 1024, given.y)) == linear_probe(given)
    assert linear_probe(make_points(padded, given.y)) == pytest.approx(linear_probe(given), abs=0.03)


def test_of_constant_representations_the_commonest_label_is_all_that_can_be_told() -> None:
    y = np.array([1] * 70 + [0] * 30)
    order = make_rng(0, "linear probe").permutation(100)
    assert linear_probe(make_points(np.ones((100, 3)), y)) == (y[order[50:]] == 1).mean()


def test_same_bits_on_any_number_of_threads() -> None:
    given, before, found = clusters(400, 300, 0.1), torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(linear_probe(given, 1))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert len({linear_probe(given, seed) for seed in range(8)}) > 1


@pytest.mark.parametrize("n", [1, 2, 10])
def test_one_label_is_one_line(n: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{n} samples, .* linear probe needs"):
        linear_probe(make_points(np.random.RandomState(0).randn(n, 2), np.zeros(n)))
