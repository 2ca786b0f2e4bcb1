"""Memory in use, of this process and its workers."""

from __future__ import annotations

import multiprocessing
import sys
import time

import numpy as np
import pytest

from feddbe.evaluate.memory import used_mb


def test_memory_in_use_grows_with_what_is_touched() -> None:
    """200 MB of ones; other allocations of the process come and go, so half of it must show."""
    before = used_mb()
    assert before > 10, "a Python with torch in it"
    block = np.ones(200 * 2**20, np.uint8)
    grown = used_mb() - before
    assert 100 < grown < 300
    assert block[-1] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is the peak")
def test_memory_that_is_given_back_does_not_count() -> None:
    block = np.ones(200 * 2**20, np.uint8)
    before = used_mb()
    del block
    assert used_mb() < before - 100


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is this process's own")
def test_workers_count() -> None:
    """A Python that sleeps uses some megabytes that no one shares with it."""
    before = used_mb()
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        end = time.monotonic() + 20
        while used_mb() < before + 4 and time.monotonic() < end:
            time.sleep(0.02)
        assert used_mb() >= before + 4
    finally:
        worker.kill()
        worker.join()
    assert used_mb() < before + 4, "what has ended no longer counts"
