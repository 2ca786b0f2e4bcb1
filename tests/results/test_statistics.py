"""Means, intervals and paired differences."""

from __future__ import annotations

from math import inf, sqrt

import pytest

from feddbe.results.statistics import Interval, mean_interval, paired_differences


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
