"""Means, intervals and paired differences."""

from __future__ import annotations

from math import inf, sqrt

import pytest
from scipy.stats import t

from feddbe.results.statistics import (
    Interval,
    Repetition,
    mean_interval,
    paired_differences,
    repetition_interval,
)


def test_interval_of_three_values_is_students_t() -> None:
    interval = mean_interval([1.0, 2.0, 6.0])
    assert interval.mean == 3
    assert interval.half_width == pytest.approx(4.302652729911275 * sqrt(7) / sqrt(3))  # t_{0.975, 2}
    assert interval.n == 3


def test_single_value_has_infinite_interval() -> None:
    interval = mean_interval([5.0])
    assert interval == Interval(5, inf, 1)
    assert interval.format() == "5.00"


def test_differences_are_paired_by_trial() -> None:
    """The common spread cancels in the difference."""
    ours, theirs = {0: 11.0, 1: 21.1, 2: 31.0, 7: 0.0}, {2: 30.0, 1: 20.0, 0: 10.0, 9: 5.0}
    difference = paired_differences(ours, theirs)
    assert difference is not None
    assert difference.n == 3
    assert difference.mean == pytest.approx(3.1 / 3)
    assert difference.p_value < 0.01 < mean_interval([*ours.values()]).p_value
    assert paired_differences({0: 1.0}, {1: 1.0}) is None


def test_differences_are_formatted_with_sign() -> None:
    assert Interval(0.5, 1.0, 3).format(sign=True) == "+0.50 ± 1.00"


def test_interval_over_seeds_and_partitions_by_hand() -> None:
    """Means of seeds 1 and 5, of partitions 2 and 4: variances 8 / 2 and 2 / 2, Satterthwaite 25 / 17."""
    values = {Repetition(0, 0): 0.0, Repetition(0, 1): 2.0, Repetition(1, 0): 4.0, Repetition(1, 1): 6.0}
    interval = repetition_interval(values)
    assert (interval.mean, interval.n) == (3, 4)
    assert interval.degrees == pytest.approx(25 / 17)
    assert interval.half_width == pytest.approx(sqrt(4 + 1) * t.ppf(0.975, 25 / 17))
    assert interval.p_value == pytest.approx(2 * t.sf(3 / sqrt(5), 25 / 17))


@pytest.mark.parametrize(
    "trials", [[(0, 1), (1, 1), (2, 1)], [(0, 0), (0, 1), (0, 2)], [(0, 0), (1, 1), (2, 2)]]
)
def test_runs_with_nothing_in_common_that_varies_are_independent(trials: list[tuple[int, int]]) -> None:
    values = dict(zip((Repetition(*trial) for trial in trials), (1.0, 2.0, 6.0), strict=True))
    assert repetition_interval(values) == mean_interval([1.0, 2.0, 6.0])


def test_several_seeds_of_each_partition_count_once() -> None:
    """Nine seeds on three partitions that alone differ are as good as three partitions."""
    values = {Repetition(seed, seed % 3): float(seed % 3) for seed in range(9)}
    assert repetition_interval(values).half_width == pytest.approx(mean_interval([0.0, 1.0, 2.0]).half_width)
