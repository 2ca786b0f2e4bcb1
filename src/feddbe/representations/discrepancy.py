"""How far a client's representations lie from the other clients': what the bounds of DBE are about.

The bounds (Zhang et al. 2023, "Eliminating Domain Bias for Federated Learning in Representation Space") hold
between a client's domain D_i and the domain of all, D. Here D_i is held against the *others*: D contains D_i
as n_i/n of it, so a classifier could not tell the two apart however far D_i lies off, and every difference of
means would be 1 - n_i/n of the one measured here.

For client i, with x of its own and o of all others:

- `a_distance`: proxy A-distance 2 (1 - 2 err) (Ben-David et al. 2007). err is the balanced error, the mean of
  the error rates on both sides, of logistic regression (linear, L2, C = 1, both sides of the same weight) on
  stratified folds that it was not fitted to. 0: cannot be told apart, 2: told apart without error; a little
  below 0 is chance. `a_distance_std` is the standard deviation over folds.
- `mmd2`: the unbiased estimate of the squared maximum mean discrepancy (Gretton et al. 2012),
  E k(x, x') + E k(o, o') - 2 E k(x, o) over different samples, k(a, b) = exp(-|a - b|^2 / (2 sigma^2)), sigma
  the median distance of two samples of all clients: one kernel for all clients. It may be a little below 0.
- `mean_distance`: |mean x - mean o| / spread, spread^2 = sum_i sum_x |x - mean_i|^2 / (n - N): the pooled
  variance within clients, summed over dimensions. Without any difference between the distributions it is
  about `chance` = sqrt(1/n_i + 1/n_o), because means of samples differ.
- `fisher`: (mean x - mean o)^2 / (var x + var o) on the line through both means. `variance` and
  `variance_others`, var x and var o there, are what the paper's proof takes to be equal. Without any
  difference it is about `fisher_chance` = (spread chance)^2 / (var x + var o), which is much where there are
  more dimensions than samples.

None of them changes when one vector is added to all samples. So with the same client's PRBM on both sides the
discrepancy at z is that at z_g, the paper's corollary; with every client's own one it is another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from feddbe.errors import BadInput
from feddbe.representations import Points
from feddbe.seeds import stream

__all__ = ["Discrepancy", "discrepancy", "mean_distances"]

Floats = npt.NDArray[np.float64]
Numbers = dict[str, float]


@dataclass(frozen=True)
class Discrepancy:
    """Numbers of each client against the others; arrays in the order of `client`."""

    MEASURES: ClassVar = ("a_distance", "mmd2", "mean_distance", "fisher")

    client: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    a_distance: Floats
    a_distance_std: Floats
    mmd2: Floats
    mean_distance: Floats
    chance: Floats
    """What `mean_distance` would be about if there were no difference."""
    fisher: Floats
    """Infinite, like `mean_distance`, where means differ and nothing else does."""
    variance: Floats
    variance_others: Floats
    bandwidth: float
    """sigma of the kernel."""
    spread: float
    """The unit of `mean_distance`."""
    left_out: tuple[int, ...]
    """Clients with a single sample (or all but one): among the others, but with no numbers of their own."""

    @property
    def fisher_chance(self) -> Floats:
        """What `fisher` would be about if there were no difference."""
        both = self.variance + self.variance_others
        level = (self.spread * self.chance) ** 2
        return np.divide(level, both, where=both > 0, out=np.zeros_like(both))

    def overall(self) -> dict[str, float]:
        """The plain mean over clients of each measure."""
        return {name: float(getattr(self, name).mean()) for name in self.MEASURES}


def discrepancy(points: Points, *, seed: int = 0, folds: int = 5, most: int = 500) -> Discrepancy:
    """Of every client with at least two samples.

    A-distance and MMD are of at most `most` samples on either side, drawn without replacement; means and
    variances of all. A client with fewer samples than `folds` has as many folds as samples.
    """
    from threadpoolctl import threadpool_limits

    ids, counts = np.unique(points.client, return_counts=True)
    if len(ids) < 2:
        raise BadInput(f"discrepancy of {len(ids)} client: there must be another one to hold it against")
    if folds < 2 or most < 2:
        raise BadInput(f"discrepancy with folds = {folds}, most = {most}: both must be 2 or more")
    enough = (counts >= 2) & (len(points.client) - counts >= 2)
    if not enough.any():
        sizes = ", ".join(map(str, np.unique(counts)))
        raise BadInput(f"discrepancy of {len(ids)} clients of {sizes} samples: it takes two on either side")
    centre = points.x.mean(axis=0, dtype=np.float64)

    def rows(which: npt.NDArray[np.int64]) -> Floats:
        """Samples without what is common to all, which would cost digits; few at a time, for memory."""
        found: Floats = points.x[which] - centre
        return found

    def some(of: npt.NDArray[np.int64], n: int, random: np.random.RandomState) -> Floats:
        """At most n of these; which ones depends on how many there are, not on what is in them."""
        return rows(of[np.sort(random.permutation(len(of))[:n])])

    with threadpool_limits(1):  # the last bits of sums depend on the number of threads
        spread, of_means = _of_means(points, rows)
        sigma = _bandwidth(some(np.arange(len(points.x)), 2 * most, stream(seed, "bandwidth")))
        found: list[Numbers] = []
        for client, means in compress(zip(ids, of_means, strict=True), enough):
            random = stream(seed, "discrepancy", client=int(client))
            mine = points.client == client
            sides = (some(np.flatnonzero(side), most, random) for side in (mine, ~mine))
            few, others = _in_their_span(*sides)
            told, std = _a_distance(few, others, points.x.shape[1], folds, random)
            found.append(
                {"a_distance": told, "a_distance_std": std, "mmd2": _mmd2(few, others, sigma), **means}
            )
    return Discrepancy(
        client=ids[enough],
        samples=counts[enough],
        bandwidth=sigma,
        spread=spread,
        left_out=tuple(int(client) for client in ids[~enough]),
        **{name: np.array([numbers[name] for numbers in found]) for name in found[0]},
    )


def mean_distances(points: Points) -> dict[int, float]:
    """`mean_distance` of each client alone, which costs next to nothing; none if there is one client only."""
    from threadpoolctl import threadpool_limits

    ids, centre = np.unique(points.client), points.x.mean(axis=0, dtype=np.float64)
    if len(ids) < 2:
        return {}
    with threadpool_limits(1):
        _, found = _of_means(points, lambda which: points.x[which] - centre)
    return {int(client): numbers["mean_distance"] for client, numbers in zip(ids, found, strict=True)}


def _bandwidth(x: Floats) -> float:
    """The median distance of two samples; of those that differ, if most are the same."""
    from scipy.spatial.distance import pdist

    apart = pdist(x)
    apart = apart if np.median(apart) > 0 else apart[apart > 0]
    return float(np.median(apart)) if len(apart) else 1.0


def _in_their_span(x: Floats, o: Floats) -> tuple[Floats, Floats]:
    """Turned so that no more dimensions are left than there are samples: all distances stay as they are, and
    with them what MMD and a linear classifier come to."""
    both = np.concatenate([x, o])
    both = np.linalg.qr(both.T).R.T if both.shape[1] > len(both) else both
    return both[: len(x)], both[len(x) :]


def _a_distance(
    x: Floats, o: Floats, width: int, folds: int, random: np.random.RandomState
) -> tuple[float, float]:
    """Its mean and standard deviation over folds; `width`: dimensions that the representations have."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    both, side = np.concatenate([x, o]), np.repeat([0, 1], [len(x), len(o)])
    both = both - both.mean(axis=0)
    # One scale for all dimensions, so that C means the same everywhere and dead units are not blown up.
    both = both / (np.sqrt((both**2).sum() / (len(both) * width)) or 1.0)
    splitter = StratifiedKFold(min(folds, len(x), len(o)), shuffle=True, random_state=random)
    found = []
    for fitted, tested in splitter.split(both, side):
        model = LogisticRegression(class_weight="balanced", max_iter=10_000)
        wrong = model.fit(both[fitted], side[fitted]).predict(both[tested]) != side[tested]
        error = np.mean([wrong[side[tested] == which].mean() for which in (0, 1)])
        found.append(2 * (1 - 2 * float(error)))
    return float(np.mean(found)), float(np.std(found))


def _mmd2(x: Floats, o: Floats, sigma: float) -> float:
    from scipy.spatial.distance import cdist, pdist

    def kernel(squared: Floats) -> float:
        return float(np.exp(-squared / (2 * sigma**2)).mean())

    within = kernel(pdist(x, "sqeuclidean")) + kernel(pdist(o, "sqeuclidean"))
    return within - 2 * kernel(cdist(x, o, "sqeuclidean"))


def _of_means(points: Points, rows: Callable[[npt.NDArray[np.int64]], Floats]) -> tuple[float, list[Numbers]]:
    """The spread, and each client's numbers that come from means and variances, of all samples."""
    ids, whose, counts = np.unique(points.client, return_inverse=True, return_counts=True)
    blocks, n = [np.flatnonzero(whose == i) for i in range(len(ids))], len(whose)
    means = np.stack([rows(block).mean(axis=0) for block in blocks])
    others = (counts @ means - counts[:, None] * means) / (n - counts)[:, None]
    within = sum(float(((rows(block) - mean) ** 2).sum()) for block, mean in zip(blocks, means, strict=True))
    lengths = np.linalg.norm(means - others, axis=1)
    along = np.divide(means - others, lengths[:, None], where=lengths[:, None] > 0, out=np.zeros_like(means))
    places = np.empty((n, len(ids)))  # of each sample on each client's line
    for block in blocks:
        places[block] = rows(block) @ along.T
    least = 1e-12 * float(np.abs(points.x).max())  # below, it is the rounding of a mean
    spread, found = float(np.sqrt(within / max(1, n - len(ids)))), []
    for i, length in enumerate(np.where(lengths > least, lengths, 0.0)):
        sides = places[whose == i, i], places[whose != i, i]
        var, var_others = (float(side.var(ddof=min(1, len(side) - 1))) for side in sides)
        found.append(
            {
                "mean_distance": _ratio(length, spread, least),
                "chance": float(np.sqrt(1 / counts[i] + 1 / (n - counts[i]))),
                "fisher": _ratio(length**2, var + var_others, least**2),
                "variance": var,
                "variance_others": var_others,
            }
        )
    return spread, found


def _ratio(a: float, b: float, least: float) -> float:
    """a / b, where nothing over nothing is nothing: representations that are all the same do not differ."""
    return float(a / b) if b > least else (np.inf if a else 0.0)
