"""scikit-learn's digits: 1,797 images of 8x8 that need no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from feddbe.data.dataset import Dataset


def find(data_dir: Path | None) -> str:
    """Return a description: the digits are part of scikit-learn."""
    return "in scikit-learn"


def load(data_dir: Path | None = None) -> Dataset:
    """Return the digits in scikit-learn's order; pixels are 0..16, and are scaled to [-1, 1]."""
    from sklearn.datasets import load_digits  # here: its import is slow

    digits = load_digits()
    return Dataset(
        name="digits",
        x=torch.from_numpy(digits.images.astype(np.uint8)[:, np.newaxis]),
        y=torch.from_numpy(digits.target.astype(np.int64)),
        classes=10,
        scale=2 / 16,
        shift=-1.0,
    )
