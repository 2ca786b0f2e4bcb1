"""A split: which rows of the data each client trains on, and which it is tested on; as a file, too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddbe.data.ragged import Indices, Ragged
from feddbe.errors import BadInput

__all__ = ["Indices", "Split", "load_split"]


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
    from feddbe.data.own.arrays import open_npz

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
