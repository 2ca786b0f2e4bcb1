"""t-SNE: clusters stay together, equal seeds give equal bits, too few samples are rejected."""

from __future__ import annotations

import numpy as np
import pytest

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.points import Points, make_points
from feddbe.metrics.representations.tsne import tsne


def blobs(n: int, width: int) -> Points:
    """Return three clusters with their labels; clients alternate."""
    rng, label = np.random.RandomState(0), np.arange(n) % 3
    x = rng.standard_normal((n, width)) + 30 * np.eye(3, max(3, width))[label, :width]
    return make_points(x, label, np.arange(n) % 4)


@pytest.mark.parametrize("width", [3, 60])
def test_clusters_stay_together(width: int) -> None:
    """More than 50 dimensions are reduced by PCA."""
    embedded = tsne(blobs(90, width))
    assert embedded.x.shape == (90, 2)
    centres = np.stack([embedded.x[embedded.y == label].mean(axis=0) for label in range(3)])
    nearest = np.linalg.norm(embedded.x[:, None] - centres, axis=2).argmin(axis=1)
    assert nearest.tolist() == embedded.y.tolist()


def test_equal_seeds_give_equal_bits() -> None:
    points = blobs(60, 55)
    first, repeated, other = tsne(points), tsne(points), tsne(points, seed=1, n=50)
    assert first.x.tobytes() == repeated.x.tobytes()
    assert len(other.x) == 50
    line = blobs(30, 1)  # too few dimensions to start from two principal components
    assert tsne(line).x.tobytes() == tsne(line).x.tobytes()
    assert tsne(line).x.tobytes() != tsne(line, seed=1).x.tobytes()


def test_selected_samples_do_not_depend_on_their_values() -> None:
    points = blobs(60, 4)
    points = points._replace(y=np.arange(60))
    first, second = tsne(points, n=20), tsne(points._replace(x=points.x[:, ::-1] ** 2), n=20)
    assert first.y.tolist() == second.y.tolist() == sorted(first.y.tolist())
    assert (first.client == first.y % 4).all(), "labels and clients stay with their samples"
    assert tsne(points, n=20, seed=3).y.tolist() != first.y.tolist()


@pytest.mark.parametrize(("n", "width"), [(5, 2), (6, 300), (7, 1)])
def test_few_samples_have_finite_coordinates(n: int, width: int) -> None:
    embedded = tsne(make_points(np.random.RandomState(0).standard_normal((n, width)), [0] * n))
    assert embedded.x.shape == (n, 2)
    assert np.isfinite(embedded.x).all()


def test_invalid_input_is_one_line() -> None:
    with pytest.raises(InvalidInputError, match="t-SNE has too few samples: got 4; expected 5 or more"):
        tsne(blobs(4, 3))
    with pytest.raises(InvalidInputError, match="t-SNE has too few samples: got 3"):
        tsne(blobs(60, 3), n=3)
    with pytest.raises(InvalidInputError, match="all equal"):
        tsne(make_points(np.ones((9, 3)), [0] * 9))
