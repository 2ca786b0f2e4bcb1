"""Representations in the plane by t-SNE (van der Maaten and Hinton 2008), scikit-learn's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.points import Analysis, AnalysisResult, FigureKind, Points
from feddbe.seeds import make_rng

LEAST, DIMENSIONS, PERPLEXITY = 5, 50, 30


def tsne(points: Points, *, seed: int = 0, n: int = 2000) -> Points:
    """At most `n` of the samples, with their places in the plane for `x`.

    Which samples depends on the seed and on how many there are, so panels of one set of samples at several
    places of a model show the same ones. More than 50 dimensions are first reduced to 50 by PCA. The
    perplexity is 30, or a third of what few samples have for neighbours. The layout starts from the first two
    principal components and is computed on one thread, because sums over threads change from run to run.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if min(n, len(points.x)) < LEAST:
        raise InvalidInputError(f"t-SNE of {min(n, len(points.x))} samples: it takes {LEAST} or more")
    chosen = points.select(np.sort(make_rng(seed, "tsne").permutation(len(points.x))[:n]))
    x, size = chosen.x - chosen.x.mean(axis=0), len(chosen.x)
    if not x.any():
        raise InvalidInputError(
            f"t-SNE of {size} representations that are all the same: there is nothing to lay out"
        )
    random = make_rng(seed, "tsne layout")
    with threadpool_limits(1):
        if x.shape[1] > DIMENSIONS:
            x = PCA(min(DIMENSIONS, size), random_state=random).fit_transform(x)
        perplexity = min(PERPLEXITY, (size - 1) / 3)
        start = "pca" if x.shape[1] > 1 else "random"
        places = TSNE(perplexity=perplexity, init=start, random_state=random).fit_transform(x)
    return chosen._replace(x=places.astype(np.float32))


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
