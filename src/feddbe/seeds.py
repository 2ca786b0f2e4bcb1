"""Random streams, each named by (seed, purpose, round, client): no draw depends on the order of others.

The streams are numpy's `RandomState`, whose output numpy guarantees never to change.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

PERMUTED = 100_000
"""Maximum number of clients that are permuted as a whole for a draw, which takes one or two milliseconds."""


def _digest(seed: int, purpose: str, round: int, client: int) -> bytes:
    return hashlib.sha256(f"{seed}/{purpose}/{round}/{client}".encode()).digest()


def make_rng(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.RandomState:
    """Return the random generator with this name, at its start."""
    return np.random.RandomState(np.frombuffer(_digest(seed, purpose, round, client), dtype="<u4"))


class _Draws(threading.local):
    """One generator per thread; reseeding takes a tenth of the time of creating one."""

    def __init__(self) -> None:
        self.rng = np.random.RandomState(0)


_draws = _Draws()


def permutations(
    count: int, n: int, seed: int, purpose: str, round: int = 0, client: int = 0
) -> list[npt.NDArray[np.int64]]:
    """Return the first `count` permutations of 0..n-1 from the stream with this name."""
    rng = _draws.rng
    rng.seed(np.frombuffer(_digest(seed, purpose, round, client), dtype="<u4"))
    return [rng.permutation(n) for _ in range(count)]


def torch_seed(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """Return a seed for a `torch.Generator` with this name."""
    return int.from_bytes(_digest(seed, purpose, round, client)[:8], "little") >> 1


def _generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator of a device."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator inside the block and restore its state afterwards."""
    # Not torch.manual_seed: it also queues a seed, with a stack trace, for each unused kind of device.
    generator = _generator(torch.get_default_device())
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def sample_cohort(seed: int, round: int, clients: int, join: float) -> list[int]:
    """Return the clients that take part in a round, in increasing order.

    max(1, round(join * clients)) of them are drawn without replacement, equally for every method at one seed.
    """
    size = max(1, int(join * clients + 0.5))
    if size >= clients:
        return list(range(clients))
    return sample_clients(make_rng(seed, "cohort", round), clients, size)


def sample_clients(rng: np.random.RandomState, clients: int, size: int) -> list[int]:
    """Draw `size` of the clients without replacement, in increasing order; all, if there are not more.

    For more than PERMUTED clients, a minority is drawn one by one and duplicates are drawn again, so that the
    time depends on the size of the draw and not on the number of clients.
    """
    if clients <= PERMUTED or 2 * size > clients:
        return sorted(rng.permutation(clients)[:size].tolist())
    sampled: set[int] = set()
    while len(sampled) < size:
        sampled.update(rng.randint(0, clients, size - len(sampled), dtype=np.int64).tolist())
    return sorted(sampled)
