"""Where clients train: the CPU, or one GPU on which the data, the model and a client's state are at work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from feddbe.errors import BadInput

__all__ = ["at_work", "find"]


def find(name: str) -> torch.device:
    """`auto` is the first GPU that torch can use, or the CPU."""
    gpus = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    there = [*gpus, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]
    wanted = there[0] if name == "auto" else "cuda:0" if name == "cuda" else name
    if wanted not in there:
        raise BadInput(f"device = '{name}'; torch can use here: {', '.join(there)}")
    return torch.device(wanted)


@contextmanager
def at_work(device: torch.device) -> Iterator[None]:
    """What is made in the block lies on this device, and the same work gives the same bits there."""
    if device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with device:
            yield
    finally:
        torch.use_deterministic_algorithms(before)
