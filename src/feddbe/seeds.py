"""Random streams, each named by (seed, purpose, round, client): no choice depends on the order of others.

The streams are numpy's `RandomState`, whose output numpy has promised never to change.
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
"""Up to so many clients a draw is the head of a permutation of all: a millisecond or two."""


def _digest(seed: int, purpose: str, round: int, client: int) -> bytes:
    return hashlib.sha256(f"{seed}/{purpose}/{round}/{client}".encode()).digest()


def stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.RandomState:
    """The random stream with this name, at its start."""
    return np.random.RandomState(np.frombuffer(_digest(seed, purpose, round, client), dtype="<u4"))


class _Draws(threading.local):
    """One generator for each thread, to be seeded again: that takes a tenth of making one."""

    def __init__(self) -> None:
        self.rng = np.random.RandomState(0)


_draws = _Draws()


def permutations(
    count: int, n: int, seed: int, purpose: str, round: int = 0, client: int = 0
) -> list[npt.NDArray[np.int64]]:
    """The first `count` permutations of 0..n-1 from the stream with this name."""
    rng = _draws.rng
    rng.seed(np.frombuffer(_digest(seed, purpose, round, client), dtype="<u4"))
    return [rng.permutation(n) for _ in range(count)]


def torch_seed(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """A seed for a `torch.Generator` with this name."""
    return int.from_bytes(_digest(seed, purpose, round, client)[:8], "little") >> 1


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.default_generator


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """torch's own generator, of the device that is at work, starts at `seed` in the block, and goes on as
    before after it."""
    # not torch.manual_seed: it also queues a seed, with a stack trace, for each kind of device not in use
    generator = _generator(torch.get_default_device())
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def cohort(seed: int, round: int, clients: int, join: float) -> list[int]:
    """Who takes part in a round: max(1, round(join * clients)) of them without replacement, in id order.

    The same for every method at one seed.
    """
    size = max(1, int(join * clients + 0.5))
    if size >= clients:
        return list(range(clients))
    return draw(stream(seed, "cohort", round), clients, size)


def draw(rng: np.random.RandomState, clients: int, size: int) -> list[int]:
    """`size` of the clients (all, if there are no more) without replacement, in id order.

    Of more than PERMUTED clients a minority is drawn one by one, and who is there already once more: that
    takes as long as the draw is large, however many clients there are.
    """
    if clients <= PERMUTED or 2 * size > clients:
        return sorted(rng.permutation(clients)[:size].tolist())
    found: set[int] = set()
    while len(found) < size:
        found.update(rng.randint(0, clients, size - len(found), dtype=np.int64).tolist())
    return sorted(found)
