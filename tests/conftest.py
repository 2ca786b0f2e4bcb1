"""Settings of all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from feddbe.methods.registry import METHODS

# No deadline, since the first call imports torch; the same examples in every run, so that failures repeat.
settings.register_profile("feddbe", deadline=None, derandomize=True)
settings.load_profile("feddbe")
# Test processes share the cores, and threads of torch would wait for each other actively.
torch.set_num_threads(1)
# If the tests were started in the background, SIGINT is ignored, also by the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _restore_methods() -> Iterator[None]:
    """Remove the methods that a test registers."""
    yield
    for name in METHODS.keys() - set(METHODS.builtin):
        del METHODS[name]
