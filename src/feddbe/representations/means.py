"""Means and variances of each client's representations, against those of all other clients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from feddbe.representations import Points
from feddbe.seeds import stream

__all__ = ["ClientMeans", "Floats"]

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
    def of(cls, points: Points) -> ClientMeans:
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
        random = stream(seed, "chance of F1", client=int(self.ids[index]))
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
