"""Points: from any arrays, or one line that says what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.points import make_points


def test_images_become_rows() -> None:
    found = make_points(np.arange(24).reshape(2, 3, 2, 2), [1, 0], [4, 5])
    assert found.x.shape == (2, 12)
    assert found.x.dtype == np.float32
    assert found.select([1]).y.tolist() == [0]
    assert found.select(found.client == 4).x.tolist() == [list(range(12))]


def test_without_clients_all_are_of_one() -> None:
    assert make_points([[1.0], [2.0]], [0, 1]).client.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        ([[1.0], [2.0]], [0], "one of each"),
        (np.zeros((0, 3)), [], "nothing to measure"),
        ([[1.0], [np.nan]], [0, 1], "representation 1 "),
        ([[np.inf], [1.0]], [0, 1], "representation 0 "),
    ],
)
def test_wrong_points_are_one_line(x: object, y: object, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        make_points(x, y)
