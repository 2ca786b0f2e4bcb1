"""What several values of one number say: their mean, how sure it is, and whether two methods differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import inf, sqrt
from statistics import mean, stdev
from typing import NamedTuple, TypeVar

__all__ = ["Interval", "interval", "paired"]

Trial = TypeVar("Trial")


class Interval(NamedTuple):
    """A mean and half the width of its 95 % interval, which one value alone leaves infinite."""

    mean: float
    half: float
    n: int

    @property
    def p_value(self) -> float:
        """Of a difference: two-sided, by Student's t, that it is 0; 1 if it has no spread to be judged by."""
        from scipy.special import stdtr

        if self.n < 2 or not self.half:
            return 1.0
        t = self.mean / (self.half / _t(self.n - 1))
        return float(2 * stdtr(self.n - 1, -abs(t)))

    def shown(self, digits: int = 2, *, sign: bool = False) -> str:
        """As it stands in tables: `97.59 ± 1.96`, and of one value only that."""
        text = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return f"{text} ± {self.half:.{digits}f}" if self.n > 1 else text


def interval(values: Sequence[float]) -> Interval:
    """Of independent repetitions, by Student's t: mean ± t_{0.975, n-1} s / sqrt(n)."""
    n = len(values)
    if n < 2:
        return Interval(mean(values), inf, n)
    return Interval(mean(values), _t(n - 1) * stdev(values) / sqrt(n), n)


@cache
def _t(freedom: int) -> float:
    """t_{0.975} with so many degrees of freedom; a curve asks for the same one at every round."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def paired(ours: Mapping[Trial, float], theirs: Mapping[Trial, float]) -> Interval | None:
    """The difference ours - theirs over the trials (equal split and seed) that both have; None: over none."""
    common = [trial for trial in ours if trial in theirs]
    return interval([ours[trial] - theirs[trial] for trial in common]) if common else None
