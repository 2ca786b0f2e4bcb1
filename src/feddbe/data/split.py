"""Which rows of the data each client trains on and is tested on: a `Split`, from a partition or a file.

The partitions are the published ones, bit by bit, with the 75/25 split of every client. All randomness of one
split is a single numpy `RandomState` stream: first the partition, then the split of clients 0..N-1 in order.
Changing the order of draws changes every published number.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from feddbe.errors import InvalidInputError, unknown_name


@dataclass(frozen=True, eq=False)
class Split:
    """Each client's samples as rows of the data set; client k is entry k."""

    train: RaggedArray
    test: RaggedArray
    parts: RaggedArray | None = None
    """What a client held before its 75/25 split, in the partition's order; unknown for a loaded file."""
    validation: RaggedArray = field(default_factory=lambda: RaggedArray.from_lists(()))
    """What is held out of the training data to choose a round or a setting by; often nothing."""

    @classmethod
    def from_arrays(cls, train: Iterable[Indices], test: Iterable[Indices]) -> Split:
        """From the rows of each client."""
        return cls(RaggedArray.from_lists(train), RaggedArray.from_lists(test))

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.train)

    def with_validation(self, share: float) -> Split:
        """The last `share` of every client's training data becomes validation data; one sample stays."""
        sizes = self.train.sizes
        held = np.where(sizes > 1, np.maximum(1, (share * sizes).astype(np.int64)), 0)
        train, validation = self.train.truncated(sizes - held)
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
            raise InvalidInputError(f"cannot write the split to '{path}'; name a file, as in split.npz")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            try:
                with temporary.open("wb") as file:  # an open file: given a name, numpy would append .npz
                    np.savez(file, **arrays)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise InvalidInputError(f"cannot write the split to {path}: {error.strerror or error}") from None


def _sha256(rows: RaggedArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows.flat, "<i8").data).hexdigest()


def load_split(path: Path, n: int) -> Split:
    """A split of a data set of `n` samples, as `Split.save` or anyone's `numpy.savez` wrote it."""
    from feddbe.data.user.arrays import read_npz

    found, _ = read_npz(path)
    clients = sum(name.startswith("train_") for name in found)
    names = [f"{part}_{k}" for k in range(max(clients, 1)) for part in ("train", "test")]
    for name in names:
        if name not in found:
            raise InvalidInputError(
                f"{path} has no array '{name}'; it needs train_0, test_0, train_1, test_1, ... without a gap"
            )
    for name in found:
        if name not in names:
            raise InvalidInputError(
                f"{path} has an array '{name}' that is no client's; allowed: train_K with test_K, K from 0 on"
            )
    rows = {name: _checked(found[name], f"'{name}' in {path}", n) for name in names}
    tested = any(rows[f"test_{k}"].size for k in range(clients))
    for name in names:
        if not rows[name].size and not (tested and name.startswith("test_")):
            raise InvalidInputError(
                f"'{name}' in {path} is empty; every client needs at least one sample to train, and some "
                "client one to test"
            )
    _check_once(rows, path, n)
    return Split.from_arrays(*([rows[f"{part}_{k}"] for k in range(clients)] for part in ("train", "test")))


def _checked(rows: npt.NDArray[Any], what: str, n: int) -> Indices:
    if rows.dtype.kind not in "iu" or rows.ndim != 1:
        raise InvalidInputError(
            f"{what} is {rows.dtype} of shape {rows.shape}; it must be a plain list of row numbers (int64)"
        )
    outside = rows[(rows < 0) | (rows >= n)]
    if outside.size:
        raise InvalidInputError(
            f"{what} has index {outside[0]}; the data set has {n} samples, allowed: 0..{n - 1}"
        )
    return rows.astype(np.int64)


def _check_once(rows: dict[str, Indices], path: Path, n: int) -> None:
    counts = np.bincount(np.concatenate(list(rows.values())), minlength=n)
    twice = np.flatnonzero(counts > 1)
    if twice.size:
        where = [name for name, r in rows.items() for _ in range(int((r == twice[0]).sum()))]
        raise InvalidInputError(
            f"{path} uses index {twice[0]} twice ('{where[0]}' and '{where[1]}'); "
            "every sample belongs to one client, to train or to test"
        )


Indices = npt.NDArray[np.int64]


class RaggedArray(Sequence[Indices]):
    """`self[k]` is client k's part of `flat`, a view: to look at it touches nothing that forked processes
    would have to copy, as the counts of references in objects of Python's are."""

    def __init__(self, flat: Indices, sizes: Indices) -> None:
        self.flat = flat
        self._ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @classmethod
    def from_lists(cls, parts: Iterable[Indices]) -> RaggedArray:
        """A copy of these."""
        parts = list(parts)
        flat = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False)
        return cls(flat, np.fromiter(map(len, parts), np.int64, len(parts)))

    @classmethod
    def group_by_value(cls, values: Indices) -> RaggedArray:
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

    def truncated(self, at: Indices) -> tuple[RaggedArray, RaggedArray]:
        """The first `at[k]` of each client k, and what is left."""
        sizes = self.sizes
        place = np.arange(len(self.flat)) - np.repeat(self._ends[:-1], sizes)
        first = place < np.repeat(at, sizes)
        return RaggedArray(self.flat[first], at), RaggedArray(self.flat[~first], sizes - at)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, key: int) -> Indices: ...

    @overload
    def __getitem__(self, key: slice) -> RaggedArray: ...

    def __getitem__(self, key: int | slice) -> Indices | RaggedArray:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return RaggedArray.from_lists(self[k] for k in range(start, stop, step))
            stop = max(start, stop)
            return RaggedArray(self.flat[self._ends[start] : self._ends[stop]], self.sizes[start:stop])
        k = range(len(self))[key]  # negative ones, and IndexError
        return self.flat[self._ends[k] : self._ends[k + 1]]

    def __iter__(self) -> Iterator[Indices]:
        ends = self._ends.tolist()
        return (self.flat[a:b] for a, b in pairwise(ends))


# --- partitions

_KINDS = ("dirichlet:BETA", "iid", "natural", "pathological:C")
_TRIES = 10_000
_LEAST = 2  # one sample to train and one to test


def partition(
    y: Indices, spec: str, clients: int | None, seed: int = 1, client: Indices | None = None
) -> Split:
    """Divide samples with labels `y` among clients and split each client's 75/25.

    `spec` is `iid`, `dirichlet:BETA` (label skew), `pathological:C` (C labels per client) or `natural`
    (by the `client` column, which then also gives the number of clients). Seed 1 is the published one.
    """
    kind, colon, value = spec.partition(":")
    if kind not in [allowed.partition(":")[0] for allowed in _KINDS]:
        raise unknown_name("partition", kind, _KINDS)
    if kind in ("iid", "natural") and colon:
        raise InvalidInputError(f"partition '{spec}': '{kind}' takes no value; write '{kind}'")
    if not 0 <= seed < 2**32:
        raise InvalidInputError(f"partition seed {seed} is out of range; allowed: 0..{2**32 - 1}")
    rng = np.random.RandomState(seed)

    if kind == "natural":
        parts = _natural(client, clients)
        remedy = "leave that client's rows out of the data, or use another partition"
    else:
        number = _checked_clients(clients, len(y))
        remedy = "use fewer clients or another partition seed"
        if kind == "iid":
            parts = RaggedArray.from_lists(np.array_split(rng.permutation(len(y)), number))
        elif kind == "dirichlet":
            parts = _dirichlet(y, _beta(spec, value), number, rng)
        else:
            parts = _pathological(y, _labels(spec, value), number, rng)
    for k in np.flatnonzero(parts.sizes < _LEAST)[:1]:
        raise InvalidInputError(
            f"partition '{spec}' leaves client {k} with {len(parts[k])} of {len(y)} samples; every client "
            f"needs at least {_LEAST}, one to train and one to test: {remedy}"
        )
    return _split_clients(parts, rng)


def _split_clients(parts: RaggedArray, rng: np.random.RandomState) -> Split:
    sizes = parts.sizes
    shuffled = RaggedArray(parts.flat.copy(), sizes)
    for rows in shuffled:
        rng.shuffle(rows)
    test, train = shuffled.truncated(sizes - sizes * 3 // 4)
    return Split(train, test, parts)


def _checked_clients(clients: int | None, n: int) -> int:
    if clients is None:
        raise InvalidInputError(
            "the number of clients is missing; only the partition 'natural' has one of its own"
        )
    if clients < 1:
        raise InvalidInputError(f"clients = {clients}; allowed: 1 or more")
    if clients * _LEAST > n:
        raise InvalidInputError(
            f"clients = {clients} is too many for {n} samples; every client needs at least {_LEAST}, "
            f"one to train and one to test: allowed 1..{n // _LEAST}"
        )
    return clients


def _beta(spec: str, value: str) -> float:
    try:
        beta = float(value)
    except ValueError:
        beta = float("nan")
    if not (isfinite(beta) and beta > 0):
        raise InvalidInputError(
            f"partition '{spec}': beta is '{value}'; it must be a number above 0, e.g. 'dirichlet:0.1'"
        )
    return beta


def _labels(spec: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise InvalidInputError(
            f"partition '{spec}': labels per client is '{value}'; it must be a whole number from 1 on, "
            "e.g. 'pathological:2'"
        )
    return int(value)


def _least(n: int, clients: int) -> int:
    """The published minimum: enough for a test batch of 10, but no more than half an equal share."""
    return int(min(10 / 0.25, n / clients / 2))


def _natural(client: Indices | None, clients: int | None) -> RaggedArray:
    if client is None:
        raise InvalidInputError(
            "partition 'natural' needs data with a client column, which this data set lacks; "
            "use iid, dirichlet:BETA or pathological:C"
        )
    parts = RaggedArray.group_by_value(client)
    if clients is not None and clients != len(parts):
        raise InvalidInputError(
            f"clients = {clients}, but the data's client column has {len(parts)}; "
            f"leave the number out, give {len(parts)}, or choose another partition"
        )
    return parts


def _dirichlet(y: Indices, beta: float, clients: int, rng: np.random.RandomState) -> RaggedArray:
    n, classes = len(y), RaggedArray.group_by_value(y)
    least = max(_LEAST, _least(n, clients))
    for _ in range(_TRIES):
        drawn = _dirichlet_draw(classes, beta, clients, n, rng)
        if drawn is None or drawn[0].min() < least:
            continue
        pieces = [np.split(rows, cuts) for rows, cuts in drawn[1]]
        return RaggedArray.from_lists(np.concatenate([piece[j] for piece in pieces]) for j in range(clients))
    raise InvalidInputError(
        f"dirichlet:{beta:g} with {clients} clients: none of {_TRIES} draws gave every client at least "
        f"{least} of the {n} samples; use fewer clients or a larger beta"
    )


def _dirichlet_draw(
    classes: Sequence[Indices], beta: float, clients: int, n: int, rng: np.random.RandomState
) -> tuple[Indices, list[tuple[Indices, Indices]]] | None:
    """One draw: the clients' sizes, and each class shuffled with where to cut it; None if p has no sum.

    Cutting waits until a draw is accepted: hundreds may be thrown away, though all of them must be
    drawn in full because they share one stream.
    """
    sizes, pieces = np.zeros(clients, np.int64), []
    for members in classes:
        rows = members.copy()
        rng.shuffle(rows)
        with np.errstate(invalid="ignore"):  # with a tiny beta there can be inf, and inf times 0
            p = rng.dirichlet([beta] * clients) * (sizes < n / clients)
        total = p.sum()
        if not total > 0:  # also NaN: with a tiny beta every gamma variate can underflow
            return None
        cuts = (np.cumsum(p / total) * len(rows)).astype(np.int64)[:-1]
        sizes += np.diff(cuts, prepend=0, append=len(rows))
        pieces.append((rows, cuts))
    return sizes, pieces


def _pathological(y: Indices, labels: int, clients: int, rng: np.random.RandomState) -> RaggedArray:
    classes = RaggedArray.group_by_value(y)
    if labels > len(classes):
        raise InvalidInputError(
            f"pathological:{labels}: the data has {len(classes)} classes; allowed: 1..{len(classes)}"
        )
    holders = ceil(clients / len(classes) * labels)  # this order of float operations is the published one
    floor = _least(len(y), clients) / len(classes)
    quota = np.full(clients, labels)
    held: list[list[Indices]] = [[] for _ in range(clients)]
    for k, rows in enumerate(classes):
        chosen = np.flatnonzero(quota)[:holders]
        if not chosen.size:
            raise InvalidInputError(
                f"pathological:{labels} with {clients} clients: all their labels are given out after {k} of "
                f"{len(classes)} classes; use more clients or more labels per client"
            )
        share = len(rows) / len(chosen)
        low, high = int(max(share / 10, floor)), int(share)
        if len(chosen) > 1 and low >= high:
            raise InvalidInputError(
                f"pathological:{labels} with {clients} clients: class {y[rows[0]]} has {len(rows)} samples, "
                f"too few for {len(chosen)} clients; use fewer clients"
            )
        # int64 by name: the platform's default integer would give another stream on Windows
        sizes = rng.randint(low, high, len(chosen) - 1, dtype=np.int64)
        for j, piece in zip(chosen, np.split(rows, np.cumsum(sizes)), strict=True):
            held[j].append(piece)
        quota[chosen] -= 1
    return RaggedArray.from_lists(
        np.concatenate(pieces) if pieces else np.zeros(0, np.int64) for pieces in held
    )
