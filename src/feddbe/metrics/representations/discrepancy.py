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
  about `mean_distance_chance` = sqrt(1/n_i + 1/n_o), because means of samples differ.
- `fisher_f1`: F1, the maximum over single dimensions of (mean x - mean o)^2 / (var x + var o), which the
  paper's proof is about. `variance` and `variance_others` are var x and var o of that dimension. The proof
  assumes that each of them is the same with DBE as without, not that the two are equal: compare two runs.
  `fisher_f1_chance` is F1 of random samples against the rest, the mean of `draws` draws.
- `fisher_between_means`: the same ratio on the line through both means instead of a single dimension. Without
  any difference it is about `fisher_between_means_chance` = (spread chance)^2 / (var x + var o), chance being
  that of `mean_distance`, which is much where there are more dimensions than samples.

None of them changes when one vector is added to all samples. So with the same client's PRBM on both sides the
discrepancy at z is that at z_g, the paper's second corollary; with every client's own one it is another.

The corollaries are about one f that D_i and D share. So there are two readings, by the model that made the
points. `discrepancy` of `feddbe measure`: each client's samples by its own model, f_i on one side and other
models on the other. `discrepancy-shared`: for each client i the samples of all clients by the model of i.
Where all clients have one f, as FedAvg's before local training, the two agree at z_g.
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
from feddbe.metrics.representations.points import Analysis, AnalysisColumn, AnalysisResult, FigureKind, Points
from feddbe.seeds import make_rng

Numbers = dict[str, float]


@dataclass(frozen=True)
class Discrepancy:
    """Numbers of each client against the others; arrays in the order of `client`."""

    METRICS: ClassVar = ("a_distance", "mmd2", "mean_distance", "fisher_f1", "fisher_between_means")

    client: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    a_distance: Floats
    a_distance_std: Floats
    mmd2: Floats
    mean_distance: Floats
    mean_distance_chance: Floats
    """About what `mean_distance` is if nothing differs; the same for the two below."""
    fisher_f1: Floats
    """Infinite, like `mean_distance` and `fisher_between_means`, where means differ and nothing else does."""
    fisher_f1_chance: Floats
    variance: Floats
    variance_others: Floats
    fisher_between_means: Floats
    fisher_between_means_chance: Floats
    bandwidth: Floats
    """sigma of the kernel; the same for all clients whose numbers are of one set of points."""
    spread: Floats
    """The unit of `mean_distance`; the same as above."""
    left_out: tuple[int, ...]
    """Clients with a single sample (or all but one): among the others, but with no numbers of their own."""

    def overall(self) -> dict[str, float]:
        """The plain mean over clients of each measure."""
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

    A-distance and MMD are of at most `most` samples on either side, drawn without replacement; means and
    variances of all. A client with fewer samples than `folds` has as many folds as samples.

    Args:
        clients: Compute the numbers of these clients only; None: of all.
        draws: Random draws over which `fisher_f1_chance` is averaged.

    Raises:
        BadInput: If no client can be compared, or an option is out of range.
    """
    from threadpoolctl import threadpool_limits

    if folds < 2 or most < 2 or draws < 1:
        raise InvalidInputError(
            f"discrepancy with folds = {folds}, most = {most}, draws = {draws}: "
            "folds and most must be 2 or more, draws 1 or more"
        )
    ids, counts = np.unique(points.client, return_counts=True)
    enough = has_enough_samples(ids, counts)
    if clients is not None:
        enough &= np.isin(ids, clients)

    with threadpool_limits(1):  # the last bits of sums depend on the number of threads
        means = ClientMeans.from_points(points)

        def draw(rows: npt.NDArray[np.int64], n: int, random: np.random.RandomState) -> Floats:
            """At most n of these; which ones depends on how many there are, not on what is in them."""
            return means.centred(rows[np.sort(random.permutation(len(rows))[:n])])

        sigma = _bandwidth(draw(np.arange(len(points.x)), 2 * most, make_rng(seed, "bandwidth")))
        numbers: list[Numbers] = []
        for index in np.flatnonzero(enough).tolist():
            random = make_rng(seed, "discrepancy", client=int(ids[index]))
            mine = points.client == ids[index]
            sides = (draw(np.flatnonzero(side), most, random) for side in (mine, ~mine))
            few, others = _in_their_span(*sides)
            a_distance, std = _a_distance(few, others, points.x.shape[1], folds, random)
            classified = {"a_distance": a_distance, "a_distance_std": std, "mmd2": _mmd2(few, others, sigma)}
            scale = {"bandwidth": sigma, "spread": means.spread}
            numbers.append(classified | _compare_means(means, index, seed, draws) | scale)
    return Discrepancy(
        client=ids[enough],
        samples=counts[enough],
        left_out=tuple(int(client) for client in ids[~enough]),
        **{name: np.array([read[name] for read in numbers]) for name in numbers[0]},
    )


def has_enough_samples(ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Tell for each client whether it and the others have two samples.

    Raises:
        BadInput: If that is true of no client, or there is one client only.
    """
    if len(ids) < 2:
        raise InvalidInputError(
            f"discrepancy of {len(ids)} client: there must be another one to hold it against"
        )
    enough: npt.NDArray[np.bool_] = (counts >= 2) & (counts.sum() - counts >= 2)
    if not enough.any():
        sizes = ", ".join(map(str, np.unique(counts)))
        raise InvalidInputError(
            f"discrepancy of {len(ids)} clients of {sizes} samples: it takes two on either side"
        )
    return enough


def mean_distances(points: Points) -> dict[int, float]:
    """`mean_distance` of each client alone, which costs next to nothing; none if there is one client only."""
    from threadpoolctl import threadpool_limits

    if len(np.unique(points.client)) < 2:
        return {}
    with threadpool_limits(1):
        means = ClientMeans.from_points(points)
    return {client: means.mean_distance(index) for index, client in enumerate(means.ids.tolist())}


def _compare_means(means: ClientMeans, index: int, seed: int, draws: int) -> Numbers:
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


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ClientMeans:
    """Mean of each client and of all samples that are not its own; arrays in the order of `ids`."""

    points: Points
    ids: npt.NDArray[np.int64]
    blocks: list[npt.NDArray[np.int64]]
    """Indices of each client's samples."""
    counts: npt.NDArray[np.int64]
    centre: Floats
    """Mean of all samples, which is subtracted everywhere because it would cost digits."""
    means: Floats
    others: Floats
    spread: float
    """Standard deviation within clients, of all dimensions together."""
    rounding: float
    """Differences up to this are the rounding of a mean."""

    @classmethod
    def from_points(cls, points: Points) -> ClientMeans:
        ids, owner, counts = np.unique(points.client, return_inverse=True, return_counts=True)
        blocks = [np.flatnonzero(owner == index) for index in range(len(ids))]
        centre = points.x.mean(axis=0, dtype=np.float64)
        means = np.stack([(points.x[block] - centre).mean(axis=0) for block in blocks])
        n = len(points.x)
        others = (counts @ means - counts[:, None] * means) / (n - counts)[:, None]
        within = sum(
            float(((points.x[block] - centre - mean) ** 2).sum())
            for block, mean in zip(blocks, means, strict=True)
        )
        spread = float(np.sqrt(within / max(1, n - len(ids))))
        rounding = 1e-12 * float(np.abs(points.x).max())
        return cls(points, ids, blocks, counts, centre, means, others, spread, rounding)

    def centred(self, rows: npt.NDArray[np.int64]) -> Floats:
        """Return these samples less the mean of all; few at a time, for memory."""
        samples: Floats = self.points.x[rows] - self.centre
        return samples

    def mean_distance(self, index: int) -> float:
        """Return |mean x - mean o| / spread of the client at `index`."""
        return _ratio(self._length(index), self.spread, self.rounding)

    def mean_distance_chance(self, index: int) -> float:
        """Return about what `mean_distance` is if nothing differs."""
        count = self.counts[index]
        return float(np.sqrt(1 / count + 1 / (len(self.points.x) - count)))

    def fisher_between_means(self, index: int) -> tuple[float, float]:
        """Return Fisher's ratio on the line through both means, and about what it is if nothing differs."""
        difference = self.means[index] - self.others[index]
        length = float(np.linalg.norm(difference))
        line = difference / length if length > 0 else difference
        offsets = [self.centred(block) @ line for block in self.blocks]
        apart = np.concatenate([offset for other, offset in enumerate(offsets) if other != index])
        variance = sum(float(side.var(ddof=min(1, len(side) - 1))) for side in (offsets[index], apart))
        chance = (self.spread * self.mean_distance_chance(index)) ** 2
        ratio = _ratio(self._length(index) ** 2, variance, self.rounding**2)
        return ratio, chance / variance if variance > 0 else 0.0

    def fisher_f1(self, index: int) -> tuple[float, float, float]:
        """Return F1, the largest Fisher's ratio of a single dimension, and the two variances there."""
        others = np.arange(len(self.ids)) != index
        between = self.counts[others] @ (self.means[others] - self.others[index]) ** 2
        count = int(self.counts[index])
        variance = self._within[index] / max(1, count - 1)
        apart = (self._within[others].sum(axis=0) + between) / max(1, len(self.points.x) - count - 1)
        ratios = self._dimension_ratios(self.means[index] - self.others[index], variance + apart)
        largest = int(ratios.argmax())
        return float(ratios[largest]), float(variance[largest]), float(apart[largest])

    def fisher_f1_chance(self, index: int, seed: int, draws: int) -> float:
        """Return the mean F1 of as many samples, drawn `draws` times from those of all, against the rest.

        The largest of many ratios is above 0 even if nothing differs, the more so the fewer the samples.
        """
        random = make_rng(seed, "chance of F1", client=int(self.ids[index]))
        n, count = len(self.points.x), int(self.counts[index])
        total = self._within.sum(axis=0) + self.counts @ self.means**2
        values = []
        for _ in range(draws):
            drawn = self.centred(np.sort(random.permutation(n)[:count]))
            mean = drawn.mean(axis=0)
            rest = -mean * count / (n - count)
            within = ((drawn - mean) ** 2).sum(axis=0)
            outside = np.maximum(total - within - count * mean**2 - (n - count) * rest**2, 0.0)
            variance = within / max(1, count - 1) + outside / max(1, n - count - 1)
            values.append(float(self._dimension_ratios(mean - rest, variance).max()))
        return float(np.mean(values))

    @cached_property
    def _within(self) -> Floats:
        """(clients, dimensions) sums of squares about each client's own mean."""
        pairs = zip(self.blocks, self.means, strict=True)
        return np.stack([((self.centred(block) - mean) ** 2).sum(axis=0) for block, mean in pairs])

    def _length(self, index: int) -> float:
        """Return the distance of both means, 0 if it is mere rounding."""
        length = float(np.linalg.norm(self.means[index] - self.others[index]))
        return length if length > self.rounding else 0.0

    def _dimension_ratios(self, difference: Floats, variance: Floats) -> Floats:
        """Return difference^2 / variance of each dimension, as `_ratio` does."""
        squared = np.where(np.abs(difference) > self.rounding, difference**2, 0.0)
        constant = np.where(squared > 0, np.inf, 0.0)
        return np.divide(squared, variance, out=constant, where=variance > self.rounding**2)


def _ratio(a: float, b: float, rounding: float) -> float:
    """Return a / b, where 0 / 0 is 0: representations that are all equal do not differ."""
    return a / b if b > rounding else (np.inf if a else 0.0)


_OF_CLIENTS = tuple(field.name for field in dataclasses.fields(Discrepancy)[1:-1])
"""The fields of a discrepancy that have a number of each client."""


def _compute(points: Points, classes: int, settings: Mapping[str, Any]) -> AnalysisResult:
    result = discrepancy(points, **settings)
    clients = {
        int(client): {name: float(getattr(result, name)[index]) for name in _OF_CLIENTS}
        for index, client in enumerate(result.client)
    }
    return AnalysisResult(
        {**result.overall()}, {client: {**readings} for client, readings in clients.items()}
    )


DISCREPANCY = Analysis(
    name="discrepancy",
    title="Discrepancy between clients, each through its own model",
    description="Between each client and the others, mean over clients: lower is closer. Each client's own "
    "model represents its samples, so the models of the two sides differ.",
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
)
SHARED_DISCREPANCY = dataclasses.replace(
    DISCREPANCY,
    name="discrepancy-shared",
    title="Discrepancy between clients, both through the model of one",
    description="Between each client and the others, mean over clients: lower is closer. The client's model "
    "represents both sides, as in the paper's corollaries.",
    shared=True,
)
