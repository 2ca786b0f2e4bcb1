"""A data set as the federation sees it: one array, one label column, and how a batch becomes numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddbe.config.parameters import Parameters
from feddbe.data.preprocessing import Preprocessing

if TYPE_CHECKING:
    from feddbe.data.split import Split


@dataclass(frozen=True)
class Dataset:
    """Samples in the smallest type that holds them; `inputs` turns a slice of `x` into what a model takes."""

    name: str
    x: Tensor
    """(n, ...) uint8 images, int32 tokens or float32 numbers, the publisher's train set first, then the test
    set; a table's columns are float64 with nan for what is missing until they are `fitted`."""
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
    label_names: tuple[str, ...] = ()
    """The classes in their order; none: their numbers are their names."""
    client_names: tuple[str, ...] = ()
    """The clients of the `client` column in their order; none: they have numbers only."""
    looks: tuple[str, ...] = ()
    """What was done to the images of each client (`--shift`), in words."""
    preprocessing: Preprocessing | None = None
    """What became of raw rows, if more than `about` can tell from the arrays."""
    known_sha256: Mapping[str, str] = field(default_factory=dict)
    """Of fields whose bytes were hashed when their cache was made: no need to read them all at each start."""

    def __len__(self) -> int:
        return len(self.y)

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for each class."""
        return self.label_names or tuple(map(str, range(self.classes)))

    @property
    def about(self) -> Preprocessing:
        """What a raw row of this data goes through before a model sees it."""
        if self.preprocessing is not None:
            return self.preprocessing
        pixels = self.x.dtype == torch.uint8
        kind = "images" if pixels and self.x.dim() == 4 and self.x.shape[1] in (1, 3) else "arrays"
        shape = tuple(self.x.shape[1:])
        return Preprocessing(kind, shape, words=self.tokens, scale=self.scale, shift=self.shift)

    def fitted(self, rows: npt.NDArray[np.int64]) -> Dataset:
        """With the columns of a table standardised by these rows, the training rows; other data as it is."""
        if self.preprocessing is None or self.preprocessing.fitted:
            return self
        raw = self.x.numpy()
        about = self.preprocessing.fit(raw[rows])
        return replace(self, x=torch.from_numpy(about.scaled(raw)), preprocessing=about)

    def inputs(self, x: Tensor) -> Tensor:
        """A batch of `x` as float32, normalised; tokens as int64."""
        if self.tokens:
            return x.long()
        if x.dtype != torch.uint8:
            return x
        return x.to(torch.float32).mul_(self.scale).add_(self.shift)

    def numbers(self, x: Tensor) -> Tensor:
        """The same for the compiled trainer, which takes tokens as they are."""
        return x if self.tokens else self.inputs(x)

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
