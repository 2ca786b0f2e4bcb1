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
  `variance_others`, var x and var o there, are what the paper's proof takes to be equal.

None of them changes when one vector is added to all samples. So with the same client's PRBM on both sides the
discrepancy at z is that at z_g, the paper's corollary; with every client's own one it is another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from feddbe.errors import BadInput
from feddbe.representations import Points
from feddbe.seeds import stream

__all__ = ["Discrepancy", "discrepancy", "mean_distances"]

Floats = npt.NDArray[np.float64]


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
    x = points.x.astype(np.float64)
    x -= x.mean(axis=0)  # so that no digits are lost to a common vector
    spread, kept = _spread(x, points.client), ids[enough]
    found: list[dict[str, float]] = []
    with threadpool_limits(1):  # the last bits of sums depend on the number of threads
        sigma = _bandwidth(x, seed, most)
        for client in kept:
            mine = points.client == client
            random = stream(seed, "discrepancy", client=int(client))
            few, others = (_some(side, most, random) for side in (x[mine], x[~mine]))
            told, std = _a_distance(few, others, folds, random)
            numbers = {"a_distance": told, "a_distance_std": std, "mmd2": _mmd2(few, others, sigma)}
            found.append(numbers | _of_means(x[mine], x[~mine], spread))
    return Discrepancy(
        client=kept,
        samples=counts[enough],
        bandwidth=sigma,
        spread=spread,
        left_out=tuple(int(client) for client in ids[~enough]),
        **{name: np.array([numbers[name] for numbers in found]) for name in found[0]},
    )


def mean_distances(points: Points) -> dict[int, float]:
    """`mean_distance` of each client alone, which costs next to nothing; none if there is one client only, or
    as many as samples."""
    ids = np.unique(points.client)
    if len(ids) < 2 or len(ids) == len(points.x):
        return {}
    x = points.x.astype(np.float64)
    x -= x.mean(axis=0)
    spread, found = _spread(x, points.client), {}
    for client in ids:
        mine = points.client == client
        difference = x[mine].mean(axis=0) - x[~mine].mean(axis=0)
        found[int(client)] = _ratio(float(np.linalg.norm(difference)), spread)
    return found


def _some(x: Floats, most: int, random: np.random.RandomState) -> Floats:
    """At most so many rows; which ones depends on how many there are, not on what is in them."""
    return x[np.sort(random.permutation(len(x))[:most])]


def _spread(x: Floats, client: npt.NDArray[np.int64]) -> float:
    """Root of the pooled variance within clients, summed over dimensions."""
    ids = np.unique(client)
    within = sum(float(((x[client == i] - x[client == i].mean(axis=0)) ** 2).sum()) for i in ids)
    return float(np.sqrt(within / (len(x) - len(ids))))


def _bandwidth(x: Floats, seed: int, most: int) -> float:
    """The median distance of two samples; of those that differ, if most are the same."""
    from scipy.spatial.distance import pdist

    apart = pdist(_some(x, 2 * most, stream(seed, "bandwidth")))
    apart = apart if np.median(apart) > 0 else apart[apart > 0]
    return float(np.median(apart)) if len(apart) else 1.0


def _a_distance(x: Floats, o: Floats, folds: int, random: np.random.RandomState) -> tuple[float, float]:
    """Its mean and standard deviation over folds."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    both, side = np.concatenate([x, o]), np.repeat([0, 1], [len(x), len(o)])
    both = both - both.mean(axis=0)
    # One scale for all dimensions, so that C means the same everywhere and dead units are not blown up.
    both = both / (both.std() or 1.0)
    if both.shape[1] > len(both):  # turned into the samples' own span: the same classifier in fewer numbers
        both = np.linalg.qr(both.T).R.T
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


def _of_means(x: Floats, o: Floats, spread: float) -> dict[str, float]:
    difference = x.mean(axis=0) - o.mean(axis=0)
    length = float(np.linalg.norm(difference))
    along = difference / length if length else np.full_like(difference, len(difference) ** -0.5)
    variance, others = (float(np.var(side @ along, ddof=1)) for side in (x, o))
    return {
        "mean_distance": _ratio(length, spread),
        "chance": float(np.sqrt(1 / len(x) + 1 / len(o))),
        "fisher": _ratio(length**2, variance + others),
        "variance": variance,
        "variance_others": others,
    }


def _ratio(a: float, b: float) -> float:
    """a / b, where nothing over nothing is nothing: representations that are all the same do not differ."""
    return a / b if b else (np.inf if a else 0.0)
