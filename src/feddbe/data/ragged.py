"""Many short lists of rows as one array: a million clients are two arrays, not a million objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
import numpy.typing as npt

__all__ = ["Indices", "Ragged"]

Indices = npt.NDArray[np.int64]


class Ragged(Sequence[Indices]):
    """`self[k]` is client k's part of `flat`, a view: to look at it touches nothing that forked processes
    would have to copy, as the counts of references in objects of Python's are."""

    def __init__(self, flat: Indices, sizes: Indices) -> None:
        self.flat = flat
        self._ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @classmethod
    def of(cls, parts: Iterable[Indices]) -> Ragged:
        """A copy of these."""
        parts = list(parts)
        flat = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False)
        return cls(flat, np.fromiter(map(len, parts), np.int64, len(parts)))

    @classmethod
    def by_value(cls, values: Indices) -> Ragged:
        """The places of each value that there is, values and places in order."""
        _, sizes = np.unique(values, return_counts=True)
        return cls(np.argsort(values, kind="stable"), sizes)

    @property
    def sizes(self) -> Indices:
        """Rows of each client."""
        return np.diff(self._ends)

    @property
    def owners(self) -> Indices:
        """The client of each entry of `flat`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def counts(self, values: Indices, kinds: int) -> Indices:
        """(clients x kinds) how often a client's rows have each of the values 0..kinds-1."""
        found = np.bincount(self.owners * kinds + values[self.flat], minlength=len(self) * kinds)
        return found.reshape(len(self), kinds)

    def cut(self, at: Indices) -> tuple[Ragged, Ragged]:
        """The first `at[k]` of each client k, and what is left."""
        sizes = self.sizes
        place = np.arange(len(self.flat)) - np.repeat(self._ends[:-1], sizes)
        first = place < np.repeat(at, sizes)
        return Ragged(self.flat[first], at), Ragged(self.flat[~first], sizes - at)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, key: int) -> Indices: ...

    @overload
    def __getitem__(self, key: slice) -> Ragged: ...

    def __getitem__(self, key: int | slice) -> Indices | Ragged:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return Ragged.of(self[k] for k in range(start, stop, step))
            stop = max(start, stop)
            return Ragged(self.flat[self._ends[start] : self._ends[stop]], self.sizes[start:stop])
        k = range(len(self))[key]  # negative ones, and IndexError
        return self.flat[self._ends[k] : self._ends[k + 1]]

    def __iter__(self) -> Iterator[Indices]:
        ends = self._ends.tolist()
        return (self.flat[a:b] for a, b in pairwise(ends))
