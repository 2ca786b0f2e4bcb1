"""Representations in the plane by scikit-learn's t-SNE (van der Maaten and Hinton 2008)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.points import Analysis, AnalysisResult, FigureKind, Points
from feddbe.seeds import make_rng

MIN_SAMPLES = 5
PCA_DIMENSIONS = 50
PERPLEXITY = 30


def tsne(points: Points, *, seed: int = 0, n: int = 2000) -> Points:
    """Return at most `n` of the samples, with their coordinates in the plane as `x`.

    The selected samples depend only on the seed and their number, so panels of several layers show the same
    ones. More than 50 dimensions are first reduced to 50 by PCA. The perplexity is 30, or a third of the
    number of neighbors if samples are few. The layout starts from the first two principal components. It is
    computed on one thread, because sums over threads change from run to run.

    Raises:
        InvalidInputError: There are fewer than five samples, or all representations are equal.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    size = min(n, len(points.x))
    if size < MIN_SAMPLES:
        raise InvalidInputError(f"t-SNE has too few samples: got {size}; expected {MIN_SAMPLES} or more")
    selected = points.select(np.sort(make_rng(seed, "tsne").permutation(len(points.x))[:n]))
    x = selected.x - selected.x.mean(axis=0)
    if not x.any():
        raise InvalidInputError(f"t-SNE cannot lay out {size} representations that are all equal")
    rng = make_rng(seed, "tsne layout")
    with threadpool_limits(1):
        if x.shape[1] > PCA_DIMENSIONS:
            x = PCA(min(PCA_DIMENSIONS, size), random_state=rng).fit_transform(x)
        perplexity = min(PERPLEXITY, (size - 1) / 3)
        init = "pca" if x.shape[1] > 1 else "random"
        coordinates = TSNE(perplexity=perplexity, init=init, random_state=rng).fit_transform(x)
    return selected._replace(x=coordinates.astype(np.float32))


def _compute(points: Points, classes: int, settings: Mapping[str, Any]) -> AnalysisResult:
    import torch

    embedded = tsne(points, **settings)
    return AnalysisResult(
        {}, state={key: torch.from_numpy(array) for key, array in embedded._asdict().items()}
    )


TSNE = Analysis(
    name="tsne",
    title="Representations in the plane (t-SNE)",
    description="Only the distances between near points have a meaning; the axes have no unit.",
    compute=_compute,
    settings={"seed": 0, "n": 2000},
    columns=(),
    figure=FigureKind.SCATTER,
)
