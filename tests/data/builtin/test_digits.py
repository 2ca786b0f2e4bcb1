"""Tests of the digits."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

from feddbe.data.builtin import digits


def test_digits_equal_those_of_scikit_learn() -> None:
    data = digits.load()
    assert (data.name, data.classes, len(data), data.client) == ("digits", 10, 1797, None)
    assert (data.x.shape, data.x.dtype) == ((1797, 1, 8, 8), torch.uint8)
    assert data.y.dtype == torch.int64
    pixels, labels = load_digits(return_X_y=True)
    assert torch.equal(data.x.reshape(1797, 64).double(), torch.from_numpy(pixels))
    assert data.y.tolist() == labels.tolist()


def test_inputs_are_normalized_as_published() -> None:
    """x / 16, then (x - 0.5) / 0.5: powers of two, so equal to the last bit."""
    data = digits.load()
    expected = (data.x.float() / 16 - 0.5) / 0.5
    assert torch.equal(data.inputs(data.x), expected)
    assert (float(expected.min()), float(expected.max())) == (-1, 1)
