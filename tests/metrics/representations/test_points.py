"""Points from any arrays, and errors for invalid ones."""

from __future__ import annotations

import numpy as np
import pytest

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.points import make_points


def test_images_are_flattened() -> None:
    points = make_points(np.arange(24).reshape(2, 3, 2, 2), [1, 0], [4, 5])
    assert points.x.shape == (2, 12)
    assert points.x.dtype == np.float32
    assert points.select([1]).y.tolist() == [0]
    assert points.select(points.client == 4).x.tolist() == [list(range(12))]


def test_default_is_a_single_client() -> None:
    assert make_points([[1.0], [2.0]], [0, 1]).client.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[1.0], [2.0]], [0], "lengths differ"),
        (np.zeros((0, 3)), [], "nothing to analyze"),
        ([[1.0], [np.nan]], [0, 1], "representation 1 "),
        ([[np.inf], [1.0]], [0, 1], "representation 0 "),
    ],
)
def test_invalid_points_are_one_line(x: object, y: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_points(x, y)
