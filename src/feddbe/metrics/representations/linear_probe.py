"""Accuracy of a linear classifier of the representations: cheap enough for every round."""

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
"""Weight of the penalty, in units of the mean variance of a feature: enough for features that are half noise,
and not so much that clean ones lose by it."""


def linear_probe(points: Points, seed: int = 0) -> float:
    """Share of one random half of the samples whose label a ridge regression on the other half tells right.

    With centred features X (n, K), rows of the unit matrix for labels Y, and s^2 the mean variance of a
    feature,

        W = argmin |X W - Y|^2 / n + RIDGE s^2 |W|^2,

    in closed form, so nothing has to converge; the largest of x W is the label. In units of s^2 the penalty
    is the same for features of any scale. Without it, K near n would be the worst case: the default of 1,000
    samples of 512 features has 500 to learn from. Where K > n, the solution is found as X^T a from n
    equations instead of K.
    """
    order = seeds.make_rng(seed, "linear probe").permutation(len(points.y))
    train, test = points.select(order[: len(order) // 2]), points.select(order[len(order) // 2 :])
    present, numbered = np.unique(train.y, return_inverse=True)
    if len(present) < 2:
        raise InvalidInputError(
            f"{len(points.y)} samples, of which the half to learn from has {len(present)} of the 2 labels "
            "that a linear probe needs at least; measure more samples, such as those of all clients"
        )
    with single_threaded():
        mean = torch.from_numpy(train.x).double().mean(0)
        x, x_test = (torch.from_numpy(half.x).double() - mean for half in (train, test))
        y = torch.eye(len(present), dtype=x.dtype)[torch.from_numpy(numbered)]
        guessed = _scores(x, y - y.mean(0), x_test) + y.mean(0)
    return float((present[guessed.argmax(1).numpy()] == test.y).mean())


def _scores(x: torch.Tensor, y: torch.Tensor, x_test: torch.Tensor) -> torch.Tensor:
    """x_test W."""
    n, k = x.shape
    dual = k > n
    gram = x @ x.T if dual else x.T @ x
    penalty = RIDGE * n * x.square().mean()
    if penalty == 0:  # all features are constant
        return x_test.new_zeros(len(x_test), y.shape[1])
    factor = torch.linalg.cholesky(gram.diagonal_scatter(gram.diagonal() + penalty))
    if dual:
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
    per_client=True,
)
