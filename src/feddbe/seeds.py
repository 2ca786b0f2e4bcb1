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

MAX_PERMUTED_CLIENTS = 100_000
"""Largest number of clients of which a sample is the head of a permutation (one or two milliseconds)."""


def _digest(seed: int, purpose: str, round_: int, client: int) -> bytes:
    return hashlib.sha256(f"{seed}/{purpose}/{round_}/{client}".encode()).digest()


def make_rng(seed: int, purpose: str, round_: int = 0, client: int = 0) -> np.random.RandomState:
    """Return the random generator of this stream, at its start.

    Args:
        seed: Seed of the run.
        purpose: Name of the decision, such as `batches`; results depend on it.
        round_: Round, or 0.
        client: Client, or 0.
    """
    return np.random.RandomState(np.frombuffer(_digest(seed, purpose, round_, client), dtype="<u4"))


class _ThreadRng(threading.local):
    """One generator per thread; reseeding takes a tenth of the time of creating one."""

    def __init__(self) -> None:
        self.rng = np.random.RandomState(0)


_thread_rng = _ThreadRng()


def sample_permutations(
    count: int, n: int, seed: int, purpose: str, round_: int = 0, client: int = 0
) -> list[npt.NDArray[np.int64]]:
    """Return the first `count` permutations of 0..n-1 from this stream."""
    rng = _thread_rng.rng
    rng.seed(np.frombuffer(_digest(seed, purpose, round_, client), dtype="<u4"))
    return [rng.permutation(n) for _ in range(count)]


def torch_seed(seed: int, purpose: str, round_: int = 0, client: int = 0) -> int:
    """Return a seed for the `torch.Generator` of this stream."""
    return int.from_bytes(_digest(seed, purpose, round_, client)[:8], "little") >> 1


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator inside the block and restore its state afterwards."""
    # torch.manual_seed would also queue a seed, with a stack trace, for each unused kind of device.
    generator = _default_generator(torch.get_default_device())
    previous_state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(previous_state)


def sample_cohort(seed: int, round_: int, num_clients: int, participation: float) -> list[int]:
    """Return the clients that take part in a round, in increasing order.

    max(1, round(participation * num_clients)) of them are drawn without replacement. The cohort is the same
    for every method at one seed.
    """
    size = max(1, int(participation * num_clients + 0.5))
    if size >= num_clients:
        return list(range(num_clients))
    return sample_clients(make_rng(seed, "cohort", round_), num_clients, size)


def sample_clients(rng: np.random.RandomState, num_clients: int, size: int) -> list[int]:
    """Draw at most `size` clients without replacement and return them in increasing order.

    For more than MAX_PERMUTED_CLIENTS clients, a minority is drawn one by one and duplicates are drawn again.
    The time then depends on the size of the sample and not on the number of clients.
    """
    if num_clients <= MAX_PERMUTED_CLIENTS or 2 * size > num_clients:
        return sorted(rng.permutation(num_clients)[:size].tolist())
    sampled: set[int] = set()
    while len(sampled) < size:
        sampled.update(rng.randint(0, num_clients, size - len(sampled), dtype=np.int64).tolist())
    return sorted(sampled)
