"""Discrepancy: analytic values of Gaussians, values of equal distributions, and the paper's corollary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.discrepancy import (
    Discrepancy,
    _proxy_a_distance,
    _reduce_to_span,
    discrepancy,
)
from feddbe.metrics.representations.points import Points, make_points
from feddbe.seeds import make_rng

ARRAYS = ("a_distance", "a_distance_std", *Discrepancy.METRICS[1:], "variance", "variance_others", "spread")


def gaussians(means: npt.ArrayLike, n: int, scale: npt.ArrayLike = 1.0) -> Points:
    """Return n samples of each client around its mean, with its standard deviation in every dimension."""
    centres = np.atleast_2d(np.asarray(means, float))
    scales = np.broadcast_to(np.asarray(scale, float), len(centres))
    rng = np.random.RandomState(0)
    x = np.concatenate(
        [m + s * rng.standard_normal((n, len(m))) for m, s in zip(centres, scales, strict=True)]
    )
    return make_points(x, np.zeros(len(x)), np.repeat(np.arange(len(centres)), n))


def test_two_gaussians_have_their_analytic_values() -> None:
    """N(0, I) and N((2, 0, 0), I). The best linear classifier errs with probability Phi(-1). spread^2 is the
    trace of I = 3; in the first dimension, which the line through the means is, both variances are 1, so that
    both ratios are 4 / 2.
    E exp(-|u|^2 / 2 s^2) for u ~ N(m, 2 I) is (s^2 / (s^2 + 2))^(3/2) exp(-|m|^2 / (2 (s^2 + 2)))."""
    result = discrepancy(gaussians([[0, 0, 0], [2, 0, 0]], 2000), most=2000)
    assert result.client.tolist() == [0, 1]
    assert result.samples.tolist() == [2000, 2000]
    assert result.a_distance == pytest.approx(np.full(2, 2 * (1 - 2 * norm.cdf(-1))), abs=0.05)
    assert result.spread == pytest.approx(np.full(2, math.sqrt(3)), rel=0.03)
    assert result.mean_distance == pytest.approx(np.full(2, 2 / math.sqrt(3)), rel=0.05)
    assert result.fisher_f1 == pytest.approx(np.full(2, 2.0), rel=0.1)
    assert result.fisher_between_means == pytest.approx(np.full(2, 2.0), rel=0.1)
    s2 = result.bandwidth[0] ** 2
    expected = 2 * (s2 / (s2 + 2)) ** 1.5 * (1 - math.exp(-4 / (2 * (s2 + 2))))
    assert result.mmd2 == pytest.approx(np.full(2, expected), rel=0.1)
    assert result.mean_over_clients() == {
        name: pytest.approx(getattr(result, name).mean()) for name in result.METRICS
    }


def test_mmd_and_bandwidth_by_hand() -> None:
    """x = 0, 2 and o = 4, 7: distances 2, 4, 7, 2, 5, 3, so sigma = 3.5."""
    result = discrepancy(make_points([[0.0], [2.0], [4.0], [7.0]], [0] * 4, [0, 0, 1, 1]))
    assert result.bandwidth == pytest.approx([3.5, 3.5])
    k = {d: math.exp(-(d**2) / (2 * 3.5**2)) for d in range(8)}
    assert result.mmd2 == pytest.approx(np.full(2, k[2] + k[3] - (k[4] + k[7] + k[2] + k[5]) / 2))


def test_client_with_one_sample_is_among_the_others_only() -> None:
    result = discrepancy(make_points([[0.0], [2.0], [4.0], [7.0]], [0] * 4, [5, 5, 1, 3]))
    assert result.left_out == (1, 3)
    assert result.client.tolist() == [5]
    assert result.mean_distance == pytest.approx([4.5 / math.sqrt(2)])


def test_means_and_variances_by_hand() -> None:
    """Client 0 at (0, 0), (2, 0), client 1 at (5, 1), (5, -1): means (1, 0) and (5, 0). Within: 2 + 2 over
    4 - 2, so the spread is sqrt 2; the line through the means is the first dimension: variances 2 and 0."""
    result = discrepancy(make_points([[0, 0], [2, 0], [5, 1], [5, -1]], [0] * 4, [0, 0, 1, 1]))
    assert result.mean_distance == pytest.approx(np.full(2, 4 / math.sqrt(2)))
    assert result.fisher_between_means == pytest.approx(np.full(2, 16 / 2))
    assert result.fisher_f1 == pytest.approx(np.full(2, 16 / 2))
    assert result.variance == pytest.approx([2, 0])
    assert result.variance_others == pytest.approx([0, 2])
    assert result.mean_distance_chance == pytest.approx(np.ones(2))


def test_fisher_f1_is_the_largest_ratio_of_a_single_dimension() -> None:
    """F1 of the paper's proof. Means (0, 0) and (3, 4); variances 2, 2 in the first dimension, 32, 0 in the
    second: 9 / 4 and 16 / 32. The line through the means is (3, 4) / 5."""
    result = discrepancy(make_points([[1, 4], [-1, -4], [4, 4], [2, 4]], [0] * 4, [0, 0, 1, 1]))
    assert result.fisher_f1 == pytest.approx(np.full(2, 9 / 4))
    assert result.variance == pytest.approx([2, 2]), "of the dimension with the largest ratio"
    projected = np.array([[19, -19], [28, 22]]) / 5
    expected = 25 / projected.var(axis=1, ddof=1).sum()
    assert result.fisher_between_means == pytest.approx(np.full(2, expected))
    assert expected < 1 < 9 / 4, "the two differ by more than a scale"


def test_fisher_f1_of_three_clients_agrees_with_numpy() -> None:
    """The others of a client are two clients: their variance includes that between their means."""
    points = gaussians(np.random.RandomState(3).standard_normal((3, 7)), 40, scale=[0.5, 1.0, 2.0])
    result = discrepancy(points)
    for client in range(3):
        x, o = (
            points.x[points.client == client].astype(float),
            points.x[points.client != client].astype(float),
        )
        ratios = (x.mean(0) - o.mean(0)) ** 2 / (x.var(0, ddof=1) + o.var(0, ddof=1))
        assert result.fisher_f1[client] == pytest.approx(ratios.max())
        assert result.variance_others[client] == pytest.approx(o.var(0, ddof=1)[ratios.argmax()])


def test_values_of_selected_clients_equal_those_among_all() -> None:
    points = gaussians([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], 30)
    everyone, selected = discrepancy(points), discrepancy(points, clients=[2])
    assert selected.client.tolist() == [2]
    for name in ARRAYS:
        assert getattr(selected, name).tolist() == [getattr(everyone, name)[2]], name


def test_equal_distributions_have_chance_values() -> None:
    result = discrepancy(gaussians(np.zeros((4, 10)), 300))
    assert abs(result.mean_over_clients()["a_distance"]) < 0.15
    assert np.abs(result.mmd2).max() < 0.005
    assert (result.mean_distance / result.mean_distance_chance).mean() == pytest.approx(1, abs=0.3)
    assert result.fisher_f1.max() < result.fisher_between_means.max() < 0.05
    assert 1 / 3 < (result.fisher_f1 / result.fisher_f1_chance).mean() < 3, "the largest of ten chance ratios"
    wide = discrepancy(gaussians(np.zeros((4, 500)), 50))
    assert wide.fisher_between_means.min() > 1, "with many dimensions samples always differ"
    assert wide.fisher_between_means == pytest.approx(wide.fisher_between_means_chance, rel=0.2)
    assert wide.fisher_f1.mean() == pytest.approx(wide.fisher_f1_chance.mean(), rel=0.3)
    assert np.abs(wide.mmd2).max() < 0.005


def test_both_sides_have_equal_weight() -> None:
    """40 samples at 0 against 2000 at 2: without balanced weights, the best classifier would be shifted by
    log(50) / 2 and miss most of the 40, which would be 2 (1 - Phi(0.96) - Phi(-2.96)) = 0.3."""
    points = gaussians([[0.0], [2.0]], 2000)
    result = discrepancy(points.select(np.r_[0:40, 2000:4000]), most=2000)
    assert result.a_distance == pytest.approx(np.full(2, 2 * (1 - 2 * norm.cdf(-1))), abs=0.35)


def test_separable_clients_have_maximal_a_distance() -> None:
    result = discrepancy(gaussians([[0, 0], [100, 0], [0, 100]], 20))
    assert result.a_distance == pytest.approx(np.full(3, 2.0))
    assert result.a_distance_std == pytest.approx(np.zeros(3))


def test_corollary_equal_prbm_on_both_sides_changes_nothing() -> None:
    """z = z_g + p_i on both sides changes nothing; each client's own p_i on its side does."""
    clients, width = 3, 8
    rng = np.random.RandomState(1)
    # quarters, so that sums are exact in float32
    z_g = gaussians(np.round(rng.standard_normal((clients, width)) * 4) / 4, 60)
    z_g = z_g._replace(x=(np.round(z_g.x * 4) / 4).astype(np.float32))
    prbm = (rng.randint(-40, 40, (clients, width)) / 4).astype(np.float32)
    before = discrepancy(z_g)
    for i in range(clients):
        after = discrepancy(z_g._replace(x=z_g.x + prbm[i]))
        for name in ARRAYS:
            assert getattr(after, name)[i] == pytest.approx(getattr(before, name)[i], rel=1e-9), name
        assert after.bandwidth == pytest.approx(before.bandwidth)
    personal = discrepancy(z_g._replace(x=z_g.x + prbm[z_g.client]))
    for name in Discrepancy.METRICS:
        assert (getattr(personal, name) > getattr(before, name)).all(), name


def test_more_dimensions_than_samples() -> None:
    """The classifier in the span of the samples equals the one in all dimensions, which is fitted here."""
    wide = gaussians([[0.0] * 400, [0.12] * 400], 25)
    x, o = (wide.x[wide.client == side].astype(float) for side in (0, 1))
    both, side = np.concatenate([x, o]), np.repeat([0, 1], 25)
    both = (both - both.mean(axis=0)) / (both - both.mean(axis=0)).std()
    distances = []
    for train, test in StratifiedKFold(5, shuffle=True, random_state=make_rng(7, "any")).split(both, side):
        model = LogisticRegression(class_weight="balanced", tol=1e-8).fit(both[train], side[train])
        distances.append(4 * model.score(both[test], side[test]) - 2)  # folds of 5 + 5: balanced as they are
    expected = float(np.mean(distances)), float(np.std(distances))
    assert 0.3 < expected[0] < 1.9
    assert _proxy_a_distance(*_reduce_to_span(x, o), 400, 5, make_rng(7, "any")) == pytest.approx(expected)


def test_small_clients_and_limit_of_samples() -> None:
    """Two samples make two folds; a limit of samples does not change values that use all of them."""
    big = gaussians([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]], 200)
    small = big.select(np.r_[0:2, 200:600])
    result = discrepancy(small)
    assert result.samples.tolist() == [2, 200, 200]
    bounded, whole = discrepancy(big, most=50), discrepancy(big)
    assert bounded.fisher_f1.tolist() == whole.fisher_f1.tolist()
    assert bounded.mmd2 == pytest.approx(whole.mmd2, abs=0.1)
    assert bounded.mmd2.tolist() != whole.mmd2.tolist()


def test_values_depend_on_the_seed_only() -> None:
    points = gaussians([[0.0, 0.0], [1.0, 0.0]], 80)
    first, repeated, other = discrepancy(points), discrepancy(points), discrepancy(points, seed=1)
    assert first.a_distance.tolist() == repeated.a_distance.tolist()
    assert first.a_distance_std.tolist() != other.a_distance_std.tolist()


def test_constant_representations_differ_by_their_means_only() -> None:
    """Rounded means do not count as a difference: a third of 0.1 + 0.1 + 0.1 is not 0.1."""
    same = discrepancy(make_points(np.full((9, 3), 0.1), [0] * 9, [0, 1, 1] * 3))
    assert [getattr(same, name).tolist() for name in Discrepancy.METRICS] == [[0, 0]] * 5
    separate = discrepancy(make_points([[0.1]] * 3 + [[0.7]] * 3, [0] * 6, [0, 0, 0, 1, 1, 1]))
    assert separate.mean_distance.tolist() == separate.fisher_f1.tolist() == [math.inf] * 2
    assert separate.fisher_between_means.tolist() == [math.inf] * 2
    assert separate.a_distance.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        ([0, 0, 0], {}, "discrepancy needs two or more clients: got 1"),
        ([0, 1, 2], {}, "got 3 clients of 1 samples; expected a client with two or more"),
        ([0, 0, 1], {}, "got 2 clients of 1, 2 samples; expected .* two or more of the others"),
        ([0, 0, 1], {"folds": 1}, "folds = 1"),
        ([0, 0, 1], {"most": 1}, "most = 1"),
    ],
)
def test_invalid_input_is_one_line(clients: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as error:
        discrepancy(make_points(np.arange(3.0)[:, None], [0, 0, 0], clients), **options)
    assert "\n" not in str(error.value)
