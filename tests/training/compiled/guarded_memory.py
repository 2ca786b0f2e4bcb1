"""Compiled training in guarded memory: python -m tests.training.compiled.guarded_memory first|last [LANES]

Every array of a network is between two protected pages: its first number follows the page before it, or its
last one precedes the page after it. The gaps between its pieces are NaN. Results must have
the bits of a network in ordinary memory. LANES is the number of floats in a vector (default: this
processor's).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import torch
from llvmlite import binding

FEATURES = {4: {}, 8: {"avx": True}, 16: {"avx512f": True}}
if len(sys.argv) > 2:  # LANES is chosen when `tiles` is imported
    real_features = binding.get_host_cpu_features
    binding.get_host_cpu_features = lambda: FEATURES[int(sys.argv[2])]
    import feddbe.training.compiled.inner_loops  # noqa: F401

    binding.get_host_cpu_features = real_features

from feddbe.state import sha256  # noqa: E402
from feddbe.training.compiled import backend  # noqa: E402
from feddbe.training.compiled import network as layout  # noqa: E402
from feddbe.training.compiled.inner_loops import Array  # noqa: E402
from feddbe.training.compiled.network import PADDING, Layout, allocate, round_up  # noqa: E402
from feddbe.training.fit_plan import FitPlan  # noqa: E402
from tests.training.compiled.test_backend import NETWORKS, make_plan, mr  # noqa: E402

PAGE = mmap.PAGESIZE
_mappings = list[mmap.mmap]()
_libc = ctypes.CDLL(None, use_errno=True)
_allocate, _reserve = allocate, Layout._reserve_numbers


def allocate_guarded(n: int, number: np.dtype[Any], *, last: bool) -> Array:
    """Return n zeros next to a page that ends the process if it is read or written."""
    size = n * number.itemsize
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    _mappings.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        if _libc.mprotect(ctypes.c_void_p(start + page * PAGE), PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE + (pages * PAGE - size if last else 0)
    return np.frombuffer(memory, number, n, offset)


def poison(network: Layout, gaps: list[tuple[int, int]]) -> None:
    """Write NaN into the gaps of the numbers and after the end of work arrays."""
    for start, end in gaps:
        network.arrays.numbers[start:end] = np.nan
    network.arrays.block[-PADDING:] = np.nan
    network.arrays.values[-PADDING:] = np.nan
    network.arrays.row_offsets[-PADDING:] = np.iinfo(np.int32).max
    network.arrays.counts[-PADDING:] = np.iinfo(np.int64).max


class Guards:
    """Context manager in which new networks are in guarded memory with poisoned gaps."""

    def __init__(self, *, last: bool) -> None:
        self.last = last

    def __enter__(self) -> None:
        gaps, original_init = list[tuple[int, int]](), Layout.__init__

        def reserve(network: Layout, n: int) -> int:
            start = _reserve(network, n)
            gaps.append((start + round_up(n, 16), network._end))
            return start

        def init(network: Layout, *arguments: Any, **options: Any) -> None:
            gaps.clear()
            original_init(network, *arguments, **options)
            poison(network, gaps)

        self.original_init = original_init
        layout.allocate = lambda n, number: allocate_guarded(n, number, last=self.last)
        Layout._reserve_numbers = reserve  # type: ignore[method-assign, assignment]
        Layout.__init__ = init  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        layout.allocate, Layout._reserve_numbers = _allocate, _reserve  # type: ignore[method-assign]
        Layout.__init__ = self.original_init  # type: ignore[method-assign]


def compute_hashes(name: str) -> list[str]:
    """Return hashes of a gradient, of trained parameters and of predictions."""
    plan: FitPlan = make_plan(name, prbm=True, terms=[mr()])
    x, y = plan.batches.dataset.x, plan.batches.dataset.y
    gradient = backend.compute_gradient(plan.model, plan.params, {}, x[:10], y[:10]).gradients
    fitted = backend.train(plan)
    predicted = backend.CompiledPredictor(plan.model, plan.params, plan.extras["prbm"])(x[:7])
    hidden = {"logits": predicted.logits, "z": predicted.z, "z_g": predicted.z_g}
    return [sha256(dict(gradient)), sha256(fitted.params | fitted.extras), sha256(hidden)]


def main() -> None:
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        for name in NETWORKS:
            expected = compute_hashes(name)
            print(name, dtype, flush=True)
            with Guards(last=sys.argv[1] == "last"):
                if compute_hashes(name) != expected:
                    sys.exit(f"{name} in {dtype}: different bits in guarded memory")
    print("all equal")


if __name__ == "__main__":
    main()
