"""Split of the data into each client's training, validation and test samples, from a partition or a file.

The partitions reproduce the published ones bit by bit, with the 75/25 split of every client. All randomness
of a split is a single numpy `RandomState` stream: first the partition, then the split of clients 0..N-1 in
order. Changing the order of draws changes every published number.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from feddbe.errors import InvalidInputError, unknown_name


@dataclass(frozen=True, eq=False)
class Split:
    """Indices of each client's samples in the data set; client k is item k."""

    train: RaggedArray
    test: RaggedArray
    parts: RaggedArray | None = None
    """Each client's samples before the 75/25 split, in the partition's order; None if loaded from a file."""
    validation: RaggedArray = field(default_factory=lambda: RaggedArray.from_lists(()))
    """Samples held out from the training data to select rounds or settings; often empty."""

    @classmethod
    def from_arrays(cls, train: Iterable[Indices], test: Iterable[Indices]) -> Split:
        """Return the split with these indices of each client."""
        return cls(RaggedArray.from_lists(train), RaggedArray.from_lists(test))

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.train)

    def with_validation(self, share: float) -> Split:
        """Return a split whose validation data is the last `share` of each client's training data.

        At least one sample is held out, unless the client has only one.
        """
        sizes = self.train.sizes
        validation_sizes = np.where(sizes > 1, np.maximum(1, (share * sizes).astype(np.int64)), 0)
        train, validation = self.train.split_at(sizes - validation_sizes)
        return replace(self, train=train, validation=validation)

    def with_whole_test_batches(self, size: int) -> Split:
        """Return a split without the last test samples of each client that do not fill a batch.

        Args:
            size: Samples of a batch.

        Raises:
            InvalidInputError: No client has a whole batch of test samples.
        """
        sizes = self.test.sizes
        test, _ = self.test.split_at(sizes // size * size)
        if not len(test.flat):
            raise InvalidInputError(
                f"last_test_batch = drop; no client has {size} test samples, which are one batch: use keep"
            )
        return replace(self, test=test)

    def index_sha256(self) -> dict[str, str | None]:
        """Return hashes of the indices (little-endian int64, in client order), as they are published."""
        return {
            "parts": None if self.parts is None else _hash_indices(self.parts),
            "train": _hash_indices(self.train),
            "test": _hash_indices(self.test),
        }

    def save(self, path: Path) -> None:
        """Write all clients' train_k and test_k to an npz file with exactly this name, atomically.

        Raises:
            InvalidInputError: The file cannot be written.
        """
        arrays: dict[str, Any] = {f"train_{k}": indices for k, indices in enumerate(self.train)}
        arrays |= {f"test_{k}": indices for k, indices in enumerate(self.test)}
        if not path.name:
            raise InvalidInputError(f"cannot write the split to '{path}'; name a file, as in split.npz")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            try:
                with temporary.open("wb") as file:  # an open file: to a path, numpy would append .npz
                    np.savez(file, **arrays)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise InvalidInputError(f"cannot write the split to {path}: {error.strerror or error}") from None


def _hash_indices(indices: RaggedArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(indices.flat, "<i8").data).hexdigest()


def load_split(path: Path, num_samples: int) -> Split:
    """Load a split that `Split.save` or `numpy.savez` wrote.

    Args:
        path: An .npz file with the arrays train_0, test_0, train_1, test_1, ...
        num_samples: Number of samples of the data set.

    Returns:
        The training and test samples of each client.

    Raises:
        InvalidInputError: The file cannot be read, or is not a split of this data set.
    """
    from feddbe.data.user.arrays import read_npz

    arrays, _ = read_npz(path)
    clients = sum(name.startswith("train_") for name in arrays)
    names = [f"{part}_{k}" for k in range(max(clients, 1)) for part in ("train", "test")]
    for name in names:
        if name not in arrays:
            raise InvalidInputError(
                f"{path} has no array '{name}'; it needs train_0, test_0, train_1, test_1, ... without a gap"
            )
    for name in arrays:
        if name not in names:
            raise InvalidInputError(
                f"{path} has an array '{name}' that belongs to no client; "
                "allowed: train_K with test_K, K from 0 on"
            )
    indices = {name: _check_indices(arrays[name], f"'{name}' in {path}", num_samples) for name in names}
    has_test_samples = any(indices[f"test_{k}"].size for k in range(clients))
    for name in names:
        may_be_empty = has_test_samples and name.startswith("test_")
        if not indices[name].size and not may_be_empty:
            raise InvalidInputError(
                f"'{name}' in {path} is empty; every client needs at least one sample to train, and some "
                "client one to test"
            )
    _check_unique(indices, path, num_samples)
    train = [indices[f"train_{k}"] for k in range(clients)]
    test = [indices[f"test_{k}"] for k in range(clients)]
    return Split.from_arrays(train, test)


def _check_indices(indices: npt.NDArray[Any], what: str, num_samples: int) -> Indices:
    if indices.dtype.kind not in "iu" or indices.ndim != 1:
        raise InvalidInputError(
            f"{what} is {indices.dtype} of shape {indices.shape}; "
            "it must be a plain list of row numbers (int64)"
        )
    outside = indices[(indices < 0) | (indices >= num_samples)]
    if outside.size:
        raise InvalidInputError(
            f"{what} has index {outside[0]}; "
            f"the data set has {num_samples} samples, allowed: 0..{num_samples - 1}"
        )
    return indices.astype(np.int64)


def _check_unique(indices: dict[str, Indices], path: Path, num_samples: int) -> None:
    counts = np.bincount(np.concatenate(list(indices.values())), minlength=num_samples)
    duplicates = np.flatnonzero(counts > 1)
    if duplicates.size:
        duplicate = duplicates[0]
        names = [name for name, values in indices.items() for _ in range(int((values == duplicate).sum()))]
        raise InvalidInputError(
            f"{path} uses index {duplicate} twice ('{names[0]}' and '{names[1]}'); "
            "every sample belongs to one client, to train or to test"
        )


Indices = npt.NDArray[np.int64]
REMOTE = -1
"""Index of a sample that another machine holds; only its existence is known here."""


class RaggedArray(Sequence[Indices]):
    """One array per client, stored as a single array: `self[k]` is a view of client k's part of `flat`.

    Access changes no reference counts, so forked processes share the memory.
    """

    def __init__(self, flat: Indices, sizes: Indices) -> None:
        self.flat = flat
        self._ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @classmethod
    def from_lists(cls, parts: Iterable[Indices]) -> RaggedArray:
        """Return a ragged array with copies of these arrays."""
        parts = list(parts)
        flat = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False)
        return cls(flat, np.fromiter(map(len, parts), np.int64, len(parts)))

    @classmethod
    def group_by_value(cls, values: Indices) -> RaggedArray:
        """Return the positions of each distinct value; values and positions are in ascending order."""
        _, sizes = np.unique(values, return_counts=True)
        return cls(np.argsort(values, kind="stable"), sizes)

    @classmethod
    def from_sizes(cls, sizes: Iterable[int]) -> RaggedArray:
        """Return arrays of these sizes for samples that other machines hold; each index is `REMOTE`."""
        counts = np.fromiter(sizes, np.int64)
        return cls(np.full(int(counts.sum()), REMOTE, np.int64), counts)

    @property
    def sizes(self) -> Indices:
        """Number of indices of each client."""
        return np.diff(self._ends)

    @property
    def owners(self) -> Indices:
        """Client of each item of `flat`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def histogram(self, values: Indices, num_values: int) -> Indices:
        """Return (clients x num_values) counts of the values 0..num_values-1 among each client's samples.

        Args:
            values: Value of each sample of the data set, such as its label.
            num_values: Number of possible values.
        """
        keys = self.owners * num_values + values[self.flat]
        return np.bincount(keys, minlength=len(self) * num_values).reshape(len(self), num_values)

    def split_at(self, sizes: Indices) -> tuple[RaggedArray, RaggedArray]:
        """Return the first `sizes[k]` indices of each client k, and the remaining ones."""
        position = np.arange(len(self.flat)) - np.repeat(self._ends[:-1], self.sizes)
        is_first = position < np.repeat(sizes, self.sizes)
        return RaggedArray(self.flat[is_first], sizes), RaggedArray(self.flat[~is_first], self.sizes - sizes)

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
        k = range(len(self))[key]  # resolves negative indices, and raises IndexError
        return self.flat[self._ends[k] : self._ends[k + 1]]

    def __iter__(self) -> Iterator[Indices]:
        ends = self._ends.tolist()
        return (self.flat[start:stop] for start, stop in pairwise(ends))


# --- partitions

_KINDS = ("dirichlet:BETA", "iid", "natural", "pathological:C")
_MAX_DRAWS = 10_000
_MIN_SAMPLES = 2  # one sample to train and one to test


def partition(
    y: Indices,
    spec: str,
    clients: int | None,
    seed: int = 1,
    client: Indices | None = None,
    client_names: Sequence[str] = (),
) -> Split:
    """Divide samples among clients, and split each client's samples 75/25 for training and testing.

    Args:
        y: Label of each sample.
        spec: `iid`, `dirichlet:BETA` (label skew), `pathological:C` (C labels per client) or `natural` (by
            the `client` column).
        clients: Number of clients; may be None for `natural`.
        seed: Seed of the partition; the published one is 1.
        client: Natural client of each sample.
        client_names: Names of the natural clients, for errors.

    Returns:
        The training and test samples of each client.

    Raises:
        InvalidInputError: The samples cannot be divided in this way.
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
        parts = _partition_natural(client, clients)
        remedy = f"leave such clients out, --min-samples {_MIN_SAMPLES}, or use another partition"
    else:
        num_clients = _check_num_clients(clients, len(y))
        remedy = "use fewer clients or another partition seed"
        if kind == "iid":
            parts = RaggedArray.from_lists(np.array_split(rng.permutation(len(y)), num_clients))
        elif kind == "dirichlet":
            parts = _partition_dirichlet(y, _parse_beta(spec, value), num_clients, rng)
        else:
            parts = _partition_pathological(y, _parse_labels_per_client(spec, value), num_clients, rng)
    for k in np.flatnonzero(parts.sizes < _MIN_SAMPLES)[:1]:
        name = f"client '{client_names[k]}'" if kind == "natural" and client_names else f"client {k}"
        raise InvalidInputError(
            f"partition '{spec}' leaves {name} with {len(parts[k])} of {len(y)} samples; every client "
            f"needs at least {_MIN_SAMPLES}, one to train and one to test: {remedy}"
        )
    return _split_clients(parts, rng)


def _split_clients(parts: RaggedArray, rng: np.random.RandomState) -> Split:
    """Shuffle each client's samples and split them into 25% test and 75% training samples."""
    sizes = parts.sizes
    shuffled = RaggedArray(parts.flat.copy(), sizes)
    for indices in shuffled:
        rng.shuffle(indices)
    test, train = shuffled.split_at(sizes - sizes * 3 // 4)
    return Split(train, test, parts)


def _check_num_clients(clients: int | None, num_samples: int) -> int:
    if clients is None:
        raise InvalidInputError("the number of clients is missing; only the partition 'natural' defines it")
    if clients < 1:
        raise InvalidInputError(f"clients = {clients}; allowed: 1 or more")
    if clients * _MIN_SAMPLES > num_samples:
        raise InvalidInputError(
            f"clients = {clients} is too many for {num_samples} samples; every client needs at least "
            f"{_MIN_SAMPLES}, one to train and one to test: allowed 1..{num_samples // _MIN_SAMPLES}"
        )
    return clients


def _parse_beta(spec: str, value: str) -> float:
    try:
        beta = float(value)
    except ValueError:
        beta = float("nan")
    if not (isfinite(beta) and beta > 0):
        raise InvalidInputError(
            f"partition '{spec}': beta is '{value}'; it must be a number above 0, e.g. 'dirichlet:0.1'"
        )
    return beta


def _parse_labels_per_client(spec: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise InvalidInputError(
            f"partition '{spec}': labels per client is '{value}'; it must be a whole number from 1 on, "
            "e.g. 'pathological:2'"
        )
    return int(value)


def _published_minimum(num_samples: int, clients: int) -> int:
    """Return the published minimum: enough for a test batch of 10, but at most half an equal share."""
    return int(min(10 / 0.25, num_samples / clients / 2))


def _partition_natural(client: Indices | None, clients: int | None) -> RaggedArray:
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


def _partition_dirichlet(y: Indices, beta: float, clients: int, rng: np.random.RandomState) -> RaggedArray:
    num_samples, classes = len(y), RaggedArray.group_by_value(y)
    minimum = max(_MIN_SAMPLES, _published_minimum(num_samples, clients))
    for _ in range(_MAX_DRAWS):
        draw = _draw_dirichlet(classes, beta, clients, num_samples, rng)
        if draw is None or draw.sizes.min() < minimum:
            continue
        pieces = [np.split(indices, cuts) for indices, cuts in zip(draw.shuffled, draw.cuts, strict=True)]
        return RaggedArray.from_lists(np.concatenate([piece[k] for piece in pieces]) for k in range(clients))
    raise InvalidInputError(
        f"dirichlet:{beta:g} with {clients} clients: none of {_MAX_DRAWS} draws gave every client at least "
        f"{minimum} of the {num_samples} samples; use fewer clients or a larger beta"
    )


class _DirichletDraw(NamedTuple):
    sizes: Indices
    """Number of samples of each client."""
    shuffled: list[Indices]
    """Samples of each class."""
    cuts: list[Indices]
    """Positions in each class at which the next client's samples begin."""


def _draw_dirichlet(
    classes: Sequence[Indices], beta: float, clients: int, num_samples: int, rng: np.random.RandomState
) -> _DirichletDraw | None:
    """Draw the clients' shares of each class; return None if the shares of a class have no positive sum.

    Classes are cut only if the draw is accepted. Hundreds may be rejected, but all must be drawn completely
    because they share one stream.
    """
    draw = _DirichletDraw(np.zeros(clients, np.int64), [], [])
    for members in classes:
        indices = members.copy()
        rng.shuffle(indices)
        with np.errstate(invalid="ignore"):  # with a tiny beta there can be inf, and inf times 0
            p = rng.dirichlet([beta] * clients) * (draw.sizes < num_samples / clients)
        total = p.sum()
        if not total > 0:  # also NaN: with a tiny beta every gamma variate can underflow
            return None
        cuts = (np.cumsum(p / total) * len(indices)).astype(np.int64)[:-1]
        draw.sizes[:] += np.diff(cuts, prepend=0, append=len(indices))
        draw.shuffled.append(indices)
        draw.cuts.append(cuts)
    return draw


def _partition_pathological(
    y: Indices, labels_per_client: int, clients: int, rng: np.random.RandomState
) -> RaggedArray:
    classes = RaggedArray.group_by_value(y)
    if labels_per_client > len(classes):
        raise InvalidInputError(
            f"pathological:{labels_per_client}: the data has {len(classes)} classes; "
            f"allowed: 1..{len(classes)}"
        )
    # this order of float operations is the published one
    clients_per_class = ceil(clients / len(classes) * labels_per_client)
    class_minimum = _published_minimum(len(y), clients) / len(classes)
    free_labels = np.full(clients, labels_per_client)
    client_pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for k, indices in enumerate(classes):
        selected = np.flatnonzero(free_labels)[:clients_per_class]
        if not selected.size:
            raise InvalidInputError(
                f"pathological:{labels_per_client} with {clients} clients: all their labels are given out "
                f"after {k} of {len(classes)} classes; use more clients or more labels per client"
            )
        share = len(indices) / len(selected)
        low, high = int(max(share / 10, class_minimum)), int(share)
        if len(selected) > 1 and low >= high:
            raise InvalidInputError(
                f"pathological:{labels_per_client} with {clients} clients: class {y[indices[0]]} has "
                f"{len(indices)} samples, too few for {len(selected)} clients; use fewer clients"
            )
        # int64 by name: the platform's default integer would give another stream on Windows
        sizes = rng.randint(low, high, len(selected) - 1, dtype=np.int64)
        for client, piece in zip(selected, np.split(indices, np.cumsum(sizes)), strict=True):
            client_pieces[client].append(piece)
        free_labels[selected] -= 1
    empty = np.zeros(0, np.int64)
    return RaggedArray.from_lists(np.concatenate([empty, *pieces]) for pieces in client_pieces)
