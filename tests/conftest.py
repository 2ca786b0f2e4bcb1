"""Settings of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from feddbe.methods.registry import METHODS

# No deadline: the first call imports torch. The same examples every time: a red run must be red again.
settings.register_profile("feddbe", deadline=None, derandomize=True)
settings.load_profile("feddbe")
# Two threads of torch wait for each other actively, and two processes of tests share two cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def methods_are_feddbe_s() -> Iterator[None]:
    """What a test adds is gone after it."""
    yield
    for name in METHODS.keys() - set(METHODS.builtin):
        del METHODS[name]
