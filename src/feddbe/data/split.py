"""A split: which rows of the data each client trains on, and which it is tested on; as a file, too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from feddbe.errors import BadInput


@dataclass(frozen=True, eq=False)
class Split:
    """Each client's samples as rows of the data set; client k is entry k."""

    train: Ragged
    test: Ragged
    parts: Ragged | None = None
    """What a client held before its 75/25 split, in the partition's order; unknown for a loaded file."""
    validation: Ragged = field(default_factory=lambda: Ragged.of(()))
    """What is held out of the training data to choose a round or a setting by; often nothing."""

    @classmethod
    def of(cls, train: Iterable[Indices], test: Iterable[Indices]) -> Split:
        """From the rows of each client."""
        return cls(Ragged.of(train), Ragged.of(test))

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.train)

    def held_out(self, share: float) -> Split:
        """The last `share` of every client's training data becomes validation data; one sample stays."""
        sizes = self.train.sizes
        held = np.where(sizes > 1, np.maximum(1, (share * sizes).astype(np.int64)), 0)
        train, validation = self.train.cut(sizes - held)
        return replace(self, train=train, validation=validation)

    def index_sha256(self) -> dict[str, str | None]:
        """Fingerprints to compare with published ones: little-endian int64, clients one after the other."""
        return {
            "parts": None if self.parts is None else _sha256(self.parts),
            "train": _sha256(self.train),
            "test": _sha256(self.test),
        }

    def save(self, path: Path) -> None:
        """Write all clients' train_k and test_k to an npz file of exactly this name, whole or not at all."""
        arrays: dict[str, Any] = {f"train_{k}": rows for k, rows in enumerate(self.train)}
        arrays |= {f"test_{k}": rows for k, rows in enumerate(self.test)}
        if not path.name:
            raise BadInput(f"cannot write the split to '{path}'; name a file, as in split.npz")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            try:
                with temporary.open("wb") as file:  # an open file: given a name, numpy would append .npz
                    np.savez(file, **arrays)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(f"cannot write the split to {path}: {error.strerror or error}") from None


def _sha256(rows: Ragged) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows.flat, "<i8").data).hexdigest()


def load_split(path: Path, n: int) -> Split:
    """A split of a data set of `n` samples, as `Split.save` or anyone's `numpy.savez` wrote it."""
    from feddbe.data.user.arrays import open_npz

    with open_npz(path) as arrays:
        found = {name: np.asarray(arrays[name]) for name in arrays}
    clients = sum(name.startswith("train_") for name in found)
    names = [f"{part}_{k}" for k in range(max(clients, 1)) for part in ("train", "test")]
    for name in names:
        if name not in found:
            raise BadInput(
                f"{path} has no array '{name}'; it needs train_0, test_0, train_1, test_1, ... without a gap"
            )
    for name in found:
        if name not in names:
            raise BadInput(
                f"{path} has an array '{name}' that is no client's; allowed: train_K with test_K, K from 0 on"
            )
    rows = {name: _checked(found[name], f"'{name}' in {path}", n) for name in names}
    tested = any(rows[f"test_{k}"].size for k in range(clients))
    for name in names:
        if not rows[name].size and not (tested and name.startswith("test_")):
            raise BadInput(
                f"'{name}' in {path} is empty; every client needs at least one sample to train, and some "
                "client one to test"
            )
    _check_once(rows, path, n)
    return Split.of(*([rows[f"{part}_{k}"] for k in range(clients)] for part in ("train", "test")))


def _checked(rows: npt.NDArray[Any], what: str, n: int) -> Indices:
    if rows.dtype.kind not in "iu" or rows.ndim != 1:
        raise BadInput(
            f"{what} is {rows.dtype} of shape {rows.shape}; it must be a plain list of row numbers (int64)"
        )
    outside = rows[(rows < 0) | (rows >= n)]
    if outside.size:
        raise BadInput(f"{what} has index {outside[0]}; the data set has {n} samples, allowed: 0..{n - 1}")
    return rows.astype(np.int64)


def _check_once(rows: dict[str, Indices], path: Path, n: int) -> None:
    counts = np.bincount(np.concatenate(list(rows.values())), minlength=n)
    twice = np.flatnonzero(counts > 1)
    if twice.size:
        where = [name for name, r in rows.items() for _ in range(int((r == twice[0]).sum()))]
        raise BadInput(
            f"{path} uses index {twice[0]} twice ('{where[0]}' and '{where[1]}'); "
            "every sample belongs to one client, to train or to test"
        )


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
