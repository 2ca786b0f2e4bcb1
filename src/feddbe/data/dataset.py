"""A data set as the federation sees it: one array, one label column, and how a batch becomes numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddbe.options import Parameters

if TYPE_CHECKING:
    from feddbe.data.split import Split

__all__ = ["Arrangement", "Dataset"]


@dataclass(frozen=True)
class Dataset:
    """Samples in the smallest type that holds them; `inputs` turns a slice of `x` into what a model takes."""

    name: str
    x: Tensor
    """(n, ...) uint8 images, int32 tokens or float32 numbers, the publisher's train set first, then the test
    set."""
    y: Tensor
    """(n,) int64 labels in 0..classes-1."""
    classes: int
    scale: float = 1.0
    shift: float = 0.0
    """uint8 images: inputs = x * scale + shift."""
    client: npt.NDArray[np.int64] | None = None
    """(n,) the natural client of each sample, if there is one."""
    split: Split | None = None
    """Who holds which rows, if the data came divided."""
    tokens: int = 0
    """Size of the vocabulary if `x` holds the numbers of words; 0: it does not."""
    note: str = ""
    """What a reader of results must know of this data, such as that it is a subset."""
    known_sha256: Mapping[str, str] = field(default_factory=dict)
    """Of fields whose bytes were hashed when their cache was made: no need to read them all at each start."""

    def __len__(self) -> int:
        return len(self.y)

    def inputs(self, x: Tensor) -> Tensor:
        """A batch of `x` as float32, normalised; tokens as int64."""
        if self.tokens:
            return x.long()
        if x.dtype != torch.uint8:
            return x
        return x.to(torch.float32).mul_(self.scale).add_(self.shift)

    def sha256(self) -> str:
        """Fingerprint of the content: a run's hash follows the data, not the file's path."""
        about = f"{self.x.dtype}{tuple(self.x.shape)}{self.classes} {self.scale} {self.shift}"
        about += f" {self.tokens} tokens" if self.tokens else ""
        arrays = {"x": self.x.numpy(), "y": self.y.numpy(), "client": self.client}
        hashes = [
            self.known_sha256.get(name) or hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()
            for name, values in arrays.items()
            if values is not None
        ]
        return hashlib.sha256(" ".join([about, *hashes]).encode()).hexdigest()


@dataclass(frozen=True)
class Arrangement(Parameters):
    """What can be chosen of a data set that is known by name; of most, nothing."""

    def arrange(self, dataset: Dataset) -> Dataset:
        return dataset
