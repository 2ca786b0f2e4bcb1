"""Discrepancy between a client's representations and those of the other clients, as in DBE's bounds.

The bounds (Zhang et al. 2023, "Eliminating Domain Bias for Federated Learning in Representation Space") hold
between a client's domain D_i and the domain of all, D. Here D_i is compared with the *others*. D contains D_i
with share n_i/n, so a classifier could not separate the two at any distance. Every difference of means would
be 1 - n_i/n of the one computed here.

For client i, with its samples x and the samples o of all others:

- `a_distance`: proxy A-distance 2 (1 - 2 err) (Ben-David et al. 2007). err is the balanced error, the mean of
  the error rates on both sides, of logistic regression (linear, L2, C = 1, balanced class weights) on
  held-out stratified folds. 0: inseparable, 2: separable without error; values slightly below 0 are chance.
  `a_distance_std` is the standard deviation over folds.
- `mmd2`: the unbiased estimate of the squared maximum mean discrepancy (Gretton et al. 2012),
  E k(x, x') + E k(o, o') - 2 E k(x, o) over different samples, k(a, b) = exp(-|a - b|^2 / (2 sigma^2)). sigma
  is the median distance of two samples of all clients: one kernel for all clients. Values may be slightly
  below 0.
- `mean_distance`: |mean x - mean o| / spread, spread^2 = sum_i sum_x |x - mean_i|^2 / (n - N): the pooled
  variance within clients, summed over dimensions. For equal distributions it is about
  `mean_distance_chance` = sqrt(1/n_i + 1/n_o), because means of samples differ.
- `fisher_f1`: F1, the maximum over single dimensions of (mean x - mean o)^2 / (var x + var o), which the
  paper's proof is about. `variance` and `variance_others` are var x and var o of that dimension. The proof
  assumes that each of them is the same with DBE as without, not that the two are equal: compare two runs.
  `fisher_f1_chance` is F1 of random samples against the rest, the mean of `draws` draws.
- `fisher_between_means`: the same ratio on the line through both means instead of a single dimension. For
  equal distributions it is about `fisher_between_means_chance` = (spread chance)^2 / (var x + var o), with
  the chance of `mean_distance`. It is large if there are more dimensions than samples.

None of them changes if one vector is added to all samples. With the same client's PRBM on both sides, the
discrepancy at z therefore equals that at z_g, the paper's second corollary. With each client's own PRBM it
differs.

The corollaries are about one f that D_i and D share. There are therefore two analyses, which differ in the
model that computes the points. In `discrepancy` of `feddbe analyze`, each client's own model represents its
samples: f_i on one side, other models on the other. In `discrepancy-shared`, the model of client i represents
the samples of all clients. If all clients have one f, as with FedAvg before local training, the two agree at
z_g.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.points import (
    Analysis,
    AnalysisColumn,
    AnalysisResult,
    AnalysisValues,
    FigureKind,
    Points,
)
from feddbe.seeds import make_rng

ClientValues = dict[str, float]


@dataclass(frozen=True)
class Discrepancy:
    """Values of each client against the others; arrays in the order of `client`."""

    METRICS: ClassVar = ("a_distance", "mmd2", "mean_distance", "fisher_f1", "fisher_between_means")

    client: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    a_distance: Floats
    a_distance_std: Floats
    mmd2: Floats
    mean_distance: Floats
    mean_distance_chance: Floats
    """Approximate `mean_distance` of equal distributions; the other `_chance` values are analogous."""
    fisher_f1: Floats
    """Infinite, like `mean_distance` and `fisher_between_means`, if means differ without any variance."""
    fisher_f1_chance: Floats
    variance: Floats
    variance_others: Floats
    fisher_between_means: Floats
    fisher_between_means_chance: Floats
    bandwidth: Floats
    """sigma of the kernel, equal for all clients of one set of points."""
    spread: Floats
    """Unit of `mean_distance`, equal for all clients of one set of points."""
    left_out: tuple[int, ...]
    """Clients with a single sample (or all but one): they are among the others, but have no values."""

    def mean_over_clients(self) -> dict[str, float]:
        """Return the plain mean over clients of each metric."""
        return {name: float(getattr(self, name).mean()) for name in self.METRICS}


def discrepancy(
    points: Points,
    *,
    clients: Sequence[int] | None = None,
    seed: int = 0,
    folds: int = 5,
    most: int = 500,
    draws: int = 20,
) -> Discrepancy:
    """Compare each client that has at least two samples with all others.

    A client with fewer samples than `folds` has as many folds as samples.

    Args:
        points: Representations of samples.
        clients: Clients whose values are computed; None: all.
        seed: Seed of the selection of samples and folds.
        folds: Folds of the classifier.
        most: Maximum number of samples on either side for A-distance and MMD, drawn without replacement.
        draws: Random draws over which `fisher_f1_chance` is averaged.

    Raises:
        InvalidInputError: No client can be compared, or an option is out of range.
    """
    from threadpoolctl import threadpool_limits

    if folds < 2 or most < 2 or draws < 1:
        raise InvalidInputError(
            f"discrepancy with folds = {folds}, most = {most}, draws = {draws}: "
            "folds and most must be 2 or more, draws 1 or more"
        )
    ids, counts = np.unique(points.client, return_counts=True)
    enough = enough_samples_mask(ids, counts)
    if clients is not None:
        enough &= np.isin(ids, clients)

    with threadpool_limits(1):  # the last bits of sums depend on the number of threads
        means = ClientMeans.from_points(points)

        def draw(indices: npt.NDArray[np.int64], limit: int, rng: np.random.RandomState) -> Floats:
            """Return at most `limit` of these samples; the choice depends on their number, not on values."""
            return means.center_samples(indices[np.sort(rng.permutation(len(indices))[:limit])])

        sigma = _median_distance(draw(np.arange(len(points.x)), 2 * most, make_rng(seed, "bandwidth")))
        clients_values: list[ClientValues] = []
        for index in np.flatnonzero(enough).tolist():
            rng = make_rng(seed, "discrepancy", client=int(ids[index]))
            is_client = points.client == ids[index]
            x = draw(np.flatnonzero(is_client), most, rng)
            o = draw(np.flatnonzero(~is_client), most, rng)
            x, o = _reduce_to_span(x, o)
            a_distance, a_distance_std = _proxy_a_distance(x, o, points.x.shape[1], folds, rng)
            values: ClientValues = {
                "a_distance": a_distance,
                "a_distance_std": a_distance_std,
                "mmd2": _mmd2(x, o, sigma),
                **_compare_means(means, index, seed, draws),
                "bandwidth": sigma,
                "spread": means.spread,
            }
            clients_values.append(values)
    return Discrepancy(
        client=ids[enough],
        samples=counts[enough],
        left_out=tuple(int(client) for client in ids[~enough]),
        **{name: np.array([values[name] for values in clients_values]) for name in clients_values[0]},
    )


def enough_samples_mask(ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return a mask of the clients for which both sides have at least two samples.

    Args:
        ids: Client numbers.
        counts: Number of samples of each client.

    Raises:
        InvalidInputError: There is a single client, or the mask is empty.
    """
    if len(ids) < 2:
        raise InvalidInputError(f"discrepancy needs two or more clients: got {len(ids)}")
    enough: npt.NDArray[np.bool_] = (counts >= 2) & (counts.sum() - counts >= 2)
    if not enough.any():
        sizes = ", ".join(map(str, np.unique(counts)))
        raise InvalidInputError(
            f"discrepancy has too few samples: got {len(ids)} clients of {sizes} samples; expected a client "
            "with two or more, and two or more of the others"
        )
    return enough


def mean_distances(points: Points) -> dict[int, float]:
    """Return `mean_distance` of each client, which is cheap to compute; empty for a single client."""
    from threadpoolctl import threadpool_limits

    if len(np.unique(points.client)) < 2:
        return {}
    with threadpool_limits(1):
        means = ClientMeans.from_points(points)
    return {client: means.mean_distance(index) for index, client in enumerate(means.ids.tolist())}


def _compare_means(means: ClientMeans, index: int, seed: int, draws: int) -> ClientValues:
    f1, variance, variance_others = means.fisher_f1(index)
    between, between_chance = means.fisher_between_means(index)
    return {
        "mean_distance": means.mean_distance(index),
        "mean_distance_chance": means.mean_distance_chance(index),
        "fisher_f1": f1,
        "fisher_f1_chance": means.fisher_f1_chance(index, seed, draws),
        "variance": variance,
        "variance_others": variance_others,
        "fisher_between_means": between,
        "fisher_between_means_chance": between_chance,
    }


def _median_distance(x: Floats) -> float:
    """Return the median distance of two samples; if it is 0, the median of the positive distances."""
    from scipy.spatial.distance import pdist

    distances = pdist(x)
    if np.median(distances) <= 0:
        distances = distances[distances > 0]
    return float(np.median(distances)) if len(distances) else 1.0


def _reduce_to_span(x: Floats, o: Floats) -> tuple[Floats, Floats]:
    """Rotate samples so that they have no more dimensions than samples; all distances stay the same.

    MMD and the linear classifier depend on distances only.
    """
    both = np.concatenate([x, o])
    if both.shape[1] > len(both):
        both = np.linalg.qr(both.T).R.T
    return both[: len(x)], both[len(x) :]


def _proxy_a_distance(
    x: Floats, o: Floats, width: int, folds: int, rng: np.random.RandomState
) -> tuple[float, float]:
    """Return the mean and standard deviation over folds; `width`: dimensions of the representations."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    both, side = np.concatenate([x, o]), np.repeat([0, 1], [len(x), len(o)])
    both = both - both.mean(axis=0)
    # One scale for all dimensions: C has the same meaning everywhere, and dead units are not amplified.
    both = both / (np.sqrt((both**2).sum() / (len(both) * width)) or 1.0)
    splitter = StratifiedKFold(min(folds, len(x), len(o)), shuffle=True, random_state=rng)
    distances = []
    for train, test in splitter.split(both, side):
        model = LogisticRegression(class_weight="balanced", max_iter=10_000)
        wrong = model.fit(both[train], side[train]).predict(both[test]) != side[test]
        error = np.mean([wrong[side[test] == label].mean() for label in (0, 1)])
        distances.append(2 * (1 - 2 * float(error)))
    return float(np.mean(distances)), float(np.std(distances))


def _mmd2(x: Floats, o: Floats, sigma: float) -> float:
    from scipy.spatial.distance import cdist, pdist

    def kernel(squared: Floats) -> float:
        return float(np.exp(-squared / (2 * sigma**2)).mean())

    within = kernel(pdist(x, "sqeuclidean")) + kernel(pdist(o, "sqeuclidean"))
    return within - 2 * kernel(cdist(x, o, "sqeuclidean"))


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ClientMeans:
    """Mean of each client and of all other samples; arrays in the order of `ids`."""

    points: Points
    ids: npt.NDArray[np.int64]
    blocks: list[npt.NDArray[np.int64]]
    """Indices of each client's samples."""
    counts: npt.NDArray[np.int64]
    center: Floats
    """Mean of all samples, subtracted everywhere for numerical precision."""
    means: Floats
    others: Floats
    spread: float
    """Standard deviation within clients, over all dimensions together."""
    rounding: float
    """Differences up to this are rounding errors of a mean."""

    @classmethod
    def from_points(cls, points: Points) -> ClientMeans:
        ids, owner, counts = np.unique(points.client, return_inverse=True, return_counts=True)
        blocks = [np.flatnonzero(owner == index) for index in range(len(ids))]
        center = points.x.mean(axis=0, dtype=np.float64)
        means = np.stack([(points.x[block] - center).mean(axis=0) for block in blocks])
        n = len(points.x)
        others = (counts @ means - counts[:, None] * means) / (n - counts)[:, None]
        within = sum(
            float(((points.x[block] - center - mean) ** 2).sum())
            for block, mean in zip(blocks, means, strict=True)
        )
        spread = float(np.sqrt(within / max(1, n - len(ids))))
        rounding = 1e-12 * float(np.abs(points.x).max())
        return cls(points, ids, blocks, counts, center, means, others, spread, rounding)

    def center_samples(self, indices: npt.NDArray[np.int64]) -> Floats:
        """Return these samples minus the mean of all; calls with few samples limit the memory."""
        samples: Floats = self.points.x[indices] - self.center
        return samples

    def mean_distance(self, index: int) -> float:
        """Return |mean x - mean o| / spread of the client at `index`."""
        return _divide(self._distance_of_means(index), self.spread, self.rounding)

    def mean_distance_chance(self, index: int) -> float:
        """Return the approximate `mean_distance` of equal distributions."""
        count = self.counts[index]
        return float(np.sqrt(1 / count + 1 / (len(self.points.x) - count)))

    def fisher_between_means(self, index: int) -> tuple[float, float]:
        """Return Fisher's ratio on the line through both means, and its approximate value by chance."""
        difference = self.means[index] - self.others[index]
        length = float(np.linalg.norm(difference))
        line = difference / length if length > 0 else difference
        projections = [self.center_samples(block) @ line for block in self.blocks]
        x = projections[index]
        o = np.concatenate([projection for other, projection in enumerate(projections) if other != index])
        variance = sum(float(side.var(ddof=min(1, len(side) - 1))) for side in (x, o))
        chance = (self.spread * self.mean_distance_chance(index)) ** 2
        ratio = _divide(self._distance_of_means(index) ** 2, variance, self.rounding**2)
        return ratio, chance / variance if variance > 0 else 0.0

    def fisher_f1(self, index: int) -> tuple[float, float, float]:
        """Return F1, the largest Fisher's ratio of a single dimension, and the two variances there."""
        others = np.arange(len(self.ids)) != index
        between = self.counts[others] @ (self.means[others] - self.others[index]) ** 2
        count = int(self.counts[index])
        variance = self._within[index] / max(1, count - 1)
        squares_others = self._within[others].sum(axis=0) + between
        variance_others = squares_others / max(1, len(self.points.x) - count - 1)
        ratios = self._dimension_ratios(self.means[index] - self.others[index], variance + variance_others)
        largest = int(ratios.argmax())
        return float(ratios[largest]), float(variance[largest]), float(variance_others[largest])

    def fisher_f1_chance(self, index: int, seed: int, draws: int) -> float:
        """Return the mean F1 of `draws` random subsets of the client's size against the rest.

        The largest of many ratios is above 0 even for equal distributions, most of all with few samples.
        """
        rng = make_rng(seed, "chance of F1", client=int(self.ids[index]))
        n, count = len(self.points.x), int(self.counts[index])
        total = self._within.sum(axis=0) + self.counts @ self.means**2
        values = []
        for _ in range(draws):
            drawn = self.center_samples(np.sort(rng.permutation(n)[:count]))
            mean = drawn.mean(axis=0)
            rest = -mean * count / (n - count)
            within = ((drawn - mean) ** 2).sum(axis=0)
            outside = np.maximum(total - within - count * mean**2 - (n - count) * rest**2, 0.0)
            variance = within / max(1, count - 1) + outside / max(1, n - count - 1)
            values.append(float(self._dimension_ratios(mean - rest, variance).max()))
        return float(np.mean(values))

    @cached_property
    def _within(self) -> Floats:
        """Sums of squares about each client's mean, of shape (clients, dimensions)."""
        pairs = zip(self.blocks, self.means, strict=True)
        return np.stack([((self.center_samples(block) - mean) ** 2).sum(axis=0) for block, mean in pairs])

    def _distance_of_means(self, index: int) -> float:
        """Return the distance of both means, 0 if it is a rounding error."""
        length = float(np.linalg.norm(self.means[index] - self.others[index]))
        return length if length > self.rounding else 0.0

    def _dimension_ratios(self, difference: Floats, variance: Floats) -> Floats:
        """Return difference^2 / variance of each dimension, with 0 / 0 = 0 as in `_divide`."""
        squared = np.where(np.abs(difference) > self.rounding, difference**2, 0.0)
        constant = np.where(squared > 0, np.inf, 0.0)
        return np.divide(squared, variance, out=constant, where=variance > self.rounding**2)


def _divide(a: float, b: float, rounding: float) -> float:
    """Return a / b, with 0 / 0 = 0, because equal representations do not differ."""
    if b > rounding:
        return a / b
    return np.inf if a else 0.0


_CLIENT_FIELDS = tuple(field.name for field in dataclasses.fields(Discrepancy)[1:-1])
"""Fields of a discrepancy that have a value for each client."""


def _compute(points: Points, classes: int, settings: Mapping[str, Any]) -> AnalysisResult:
    result = discrepancy(points, **settings)
    clients: dict[int, AnalysisValues] = {}
    for index, client in enumerate(result.client):
        clients[int(client)] = {name: float(getattr(result, name)[index]) for name in _CLIENT_FIELDS}
    return AnalysisResult({**result.mean_over_clients()}, clients)


DISCREPANCY = Analysis(
    name="discrepancy",
    title="Discrepancy between clients",
    description="Between each client and the others, mean over clients: lower is closer.",
    compute=_compute,
    settings={"seed": 0, "folds": 5, "most": 500, "draws": 20},
    columns=(
        AnalysisColumn("a_distance", "proxy A-distance", spread="a_distance_std"),
        AnalysisColumn("mmd2", "squared MMD"),
        AnalysisColumn(
            "mean_distance", "distance of means", "standard deviations", expected="mean_distance_chance"
        ),
        AnalysisColumn("fisher_f1", "Fisher's F1", expected="fisher_f1_chance"),
        AnalysisColumn(
            "fisher_between_means", "Fisher ratio of means", expected="fisher_between_means_chance"
        ),
    ),
    figure=FigureKind.DOTS,
    on=("own", "all"),
    compares_clients=True,
)
