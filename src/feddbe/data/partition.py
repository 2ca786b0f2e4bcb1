"""Who holds which sample: the published partitions, bit by bit, and the 75/25 split of every client.

All randomness of one split is a single numpy `RandomState` stream: first the partition, then the
split of clients 0..N-1 in order. Changing the order of draws changes every published number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite

import numpy as np

from feddbe.data.split import Indices, Ragged, Split
from feddbe.errors import BadInput, unknown

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
        raise unknown("partition", kind, _KINDS)
    if kind in ("iid", "natural") and colon:
        raise BadInput(f"partition '{spec}': '{kind}' takes no value; write '{kind}'")
    if not 0 <= seed < 2**32:
        raise BadInput(f"partition seed {seed} is out of range; allowed: 0..{2**32 - 1}")
    rng = np.random.RandomState(seed)

    if kind == "natural":
        parts = _natural(client, clients)
        remedy = "leave that client's rows out of the data, or use another partition"
    else:
        number = _checked_clients(clients, len(y))
        remedy = "use fewer clients or another partition seed"
        if kind == "iid":
            parts = Ragged.of(np.array_split(rng.permutation(len(y)), number))
        elif kind == "dirichlet":
            parts = _dirichlet(y, _beta(spec, value), number, rng)
        else:
            parts = _pathological(y, _labels(spec, value), number, rng)
    for k in np.flatnonzero(parts.sizes < _LEAST)[:1]:
        raise BadInput(
            f"partition '{spec}' leaves client {k} with {len(parts[k])} of {len(y)} samples; every client "
            f"needs at least {_LEAST}, one to train and one to test: {remedy}"
        )
    return _split(parts, rng)


def _split(parts: Ragged, rng: np.random.RandomState) -> Split:
    sizes = parts.sizes
    shuffled = Ragged(parts.flat.copy(), sizes)
    for rows in shuffled:
        rng.shuffle(rows)
    test, train = shuffled.cut(sizes - sizes * 3 // 4)
    return Split(train, test, parts)


def _checked_clients(clients: int | None, n: int) -> int:
    if clients is None:
        raise BadInput("the number of clients is missing; only the partition 'natural' has one of its own")
    if clients < 1:
        raise BadInput(f"clients = {clients}; allowed: 1 or more")
    if clients * _LEAST > n:
        raise BadInput(
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
        raise BadInput(
            f"partition '{spec}': beta is '{value}'; it must be a number above 0, e.g. 'dirichlet:0.1'"
        )
    return beta


def _labels(spec: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise BadInput(
            f"partition '{spec}': labels per client is '{value}'; it must be a whole number from 1 on, "
            "e.g. 'pathological:2'"
        )
    return int(value)


def _least(n: int, clients: int) -> int:
    """The published minimum: enough for a test batch of 10, but no more than half an equal share."""
    return int(min(10 / 0.25, n / clients / 2))


def _natural(client: Indices | None, clients: int | None) -> Ragged:
    if client is None:
        raise BadInput(
            "partition 'natural' needs data with a client column, which this data set lacks; "
            "use iid, dirichlet:BETA or pathological:C"
        )
    parts = Ragged.by_value(client)
    if clients is not None and clients != len(parts):
        raise BadInput(
            f"clients = {clients}, but the data's client column has {len(parts)}; "
            f"leave the number out, give {len(parts)}, or choose another partition"
        )
    return parts


def _dirichlet(y: Indices, beta: float, clients: int, rng: np.random.RandomState) -> Ragged:
    n, classes = len(y), Ragged.by_value(y)
    least = max(_LEAST, _least(n, clients))
    for _ in range(_TRIES):
        drawn = _dirichlet_draw(classes, beta, clients, n, rng)
        if drawn is None or drawn[0].min() < least:
            continue
        pieces = [np.split(rows, cuts) for rows, cuts in drawn[1]]
        return Ragged.of(np.concatenate([piece[j] for piece in pieces]) for j in range(clients))
    raise BadInput(
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


def _pathological(y: Indices, labels: int, clients: int, rng: np.random.RandomState) -> Ragged:
    classes = Ragged.by_value(y)
    if labels > len(classes):
        raise BadInput(
            f"pathological:{labels}: the data has {len(classes)} classes; allowed: 1..{len(classes)}"
        )
    holders = ceil(clients / len(classes) * labels)  # this order of float operations is the published one
    floor = _least(len(y), clients) / len(classes)
    quota = np.full(clients, labels)
    held: list[list[Indices]] = [[] for _ in range(clients)]
    for k, rows in enumerate(classes):
        chosen = np.flatnonzero(quota)[:holders]
        if not chosen.size:
            raise BadInput(
                f"pathological:{labels} with {clients} clients: all their labels are given out after {k} of "
                f"{len(classes)} classes; use more clients or more labels per client"
            )
        share = len(rows) / len(chosen)
        low, high = int(max(share / 10, floor)), int(share)
        if len(chosen) > 1 and low >= high:
            raise BadInput(
                f"pathological:{labels} with {clients} clients: class {y[rows[0]]} has {len(rows)} samples, "
                f"too few for {len(chosen)} clients; use fewer clients"
            )
        # int64 by name: the platform's default integer would give another stream on Windows
        sizes = rng.randint(low, high, len(chosen) - 1, dtype=np.int64)
        for j, piece in zip(chosen, np.split(rows, np.cumsum(sizes)), strict=True):
            held[j].append(piece)
        quota[chosen] -= 1
    return Ragged.of(np.concatenate(pieces) if pieces else np.zeros(0, np.int64) for pieces in held)
