"""Accuracy of a linear classifier of the representations, cheap enough for every round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from feddbe import seeds
from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.mdl import single_threaded
from feddbe.metrics.representations.points import Analysis, AnalysisColumn, AnalysisResult, FigureKind, Points

RIDGE = 0.3
"""Weight of the penalty, in units of the mean variance of a feature. It is enough for features that are half
noise, and does not harm clean ones."""


def linear_probe(points: Points, seed: int = 0) -> float:
    """Return the accuracy of a ridge regression, fitted on a random half of the samples, on the other half.

    With centered features X (n, K), one-hot labels Y, and s^2 the mean variance of a feature,

        W = argmin |X W - Y|^2 / n + RIDGE s^2 |W|^2,

    in closed form, so nothing has to converge. The largest entry of x W is the label. In units of s^2 the
    penalty is the same for features of any scale. Without it, K near n would be the worst case: the default
    of 1,000 samples of 512 features has 500 to learn from. If K > n, the solution is X^T a, from n equations
    instead of K.

    Raises:
        InvalidInputError: The training half has fewer than two labels.
    """
    order = seeds.make_rng(seed, "linear probe").permutation(len(points.y))
    train, test = points.select(order[: len(order) // 2]), points.select(order[len(order) // 2 :])
    labels, indices = np.unique(train.y, return_inverse=True)
    if len(labels) < 2:
        raise InvalidInputError(
            f"{len(points.y)} samples are too few for a linear probe: the training half has {len(labels)} "
            "labels; expected 2 or more. Use more samples, such as those of all clients"
        )
    with single_threaded():
        mean = torch.from_numpy(train.x).double().mean(0)
        x, x_test = (torch.from_numpy(half.x).double() - mean for half in (train, test))
        y = torch.eye(len(labels), dtype=x.dtype)[torch.from_numpy(indices)]
        scores = _fit_and_score(x, y - y.mean(0), x_test) + y.mean(0)
    return float((labels[scores.argmax(1).numpy()] == test.y).mean())


def _fit_and_score(x: torch.Tensor, y: torch.Tensor, x_test: torch.Tensor) -> torch.Tensor:
    """Return x_test W."""
    n, k = x.shape
    is_dual = k > n
    gram = x @ x.T if is_dual else x.T @ x
    penalty = RIDGE * n * x.square().mean()
    if penalty == 0:  # all features are constant
        return x_test.new_zeros(len(x_test), y.shape[1])
    factor = torch.linalg.cholesky(gram.diagonal_scatter(gram.diagonal() + penalty))
    if is_dual:
        return x_test @ (x.T @ torch.cholesky_solve(y, factor))
    return x_test @ torch.cholesky_solve(x.T @ y, factor)


def _compute(points: Points, classes: int, settings: Mapping[str, Any]) -> AnalysisResult:
    return AnalysisResult({"": linear_probe(points, **settings)})


LINEAR_PROBE = Analysis(
    name="probe",
    title="Linear probe by layer",
    description="Accuracy of a linear classifier of the representations.",
    compute=_compute,
    settings={"seed": 0},
    columns=(AnalysisColumn("value", "linear probe accuracy", "%", digits=2),),
    figure=FigureKind.BARS,
    supports_per_client=True,
    on=("all", "own"),
)
