"""t-SNE: what is near stays near, the same seed gives the same bits, few samples are enough or refused."""

from __future__ import annotations

import numpy as np
import pytest

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.points import Points, make_points
from feddbe.metrics.representations.tsne import tsne


def blobs(n: int, width: int) -> Points:
    """Three clusters, label = cluster, clients in turn."""
    random, label = np.random.RandomState(0), np.arange(n) % 3
    x = random.standard_normal((n, width)) + 30 * np.eye(3, max(3, width))[label, :width]
    return make_points(x, label, np.arange(n) % 4)


@pytest.mark.parametrize("width", [3, 60])
def test_clusters_stay_together(width: int) -> None:
    """With more than 50 dimensions by way of PCA."""
    found = tsne(blobs(90, width))
    assert found.x.shape == (90, 2)
    centres = np.stack([found.x[found.y == label].mean(axis=0) for label in range(3)])
    nearest = np.linalg.norm(found.x[:, None] - centres, axis=2).argmin(axis=1)
    assert nearest.tolist() == found.y.tolist()


def test_the_same_seed_gives_the_same_bits() -> None:
    given = blobs(60, 55)
    one, again, other = tsne(given), tsne(given), tsne(given, seed=1, n=50)
    assert one.x.tobytes() == again.x.tobytes()
    assert len(other.x) == 50
    line = blobs(30, 1)  # too few dimensions to start from two principal components
    assert tsne(line).x.tobytes() == tsne(line).x.tobytes()
    assert tsne(line).x.tobytes() != tsne(line, seed=1).x.tobytes()


def test_which_samples_are_shown_does_not_depend_on_their_values() -> None:
    given = blobs(60, 4)
    given = given._replace(y=np.arange(60))
    one, two = tsne(given, n=20), tsne(given._replace(x=given.x[:, ::-1] ** 2), n=20)
    assert one.y.tolist() == two.y.tolist() == sorted(one.y.tolist())
    assert (one.client == one.y % 4).all(), "labels and clients stay with their samples"
    assert tsne(given, n=20, seed=3).y.tolist() != one.y.tolist()


@pytest.mark.parametrize(("n", "width"), [(5, 2), (6, 300), (7, 1)])
def test_few_samples(n: int, width: int) -> None:
    found = tsne(make_points(np.random.RandomState(0).standard_normal((n, width)), [0] * n))
    assert found.x.shape == (n, 2)
    assert np.isfinite(found.x).all()


def test_what_cannot_be_laid_out_is_one_line() -> None:
    with pytest.raises(InvalidInputError, match="t-SNE of 4 samples: it takes 5 or more"):
        tsne(blobs(4, 3))
    with pytest.raises(InvalidInputError, match="t-SNE of 3 samples"):
        tsne(blobs(60, 3), n=3)
    with pytest.raises(InvalidInputError, match="all the same"):
        tsne(make_points(np.ones((9, 3)), [0] * 9))
