"""Memory in use, of this process and its workers."""

from __future__ import annotations

import mmap
import multiprocessing
import sys
import time

import numpy as np
import pytest

from feddbe.measures.memory import used_mb


def touched(megabytes: int) -> mmap.mmap:
    """Memory straight from the system: what malloc gives may have been in use before."""
    block = mmap.mmap(-1, megabytes * 2**20)
    np.frombuffer(block, np.uint8)[:] = 1
    return block


def test_memory_in_use_grows_with_what_is_touched() -> None:
    """Other allocations of the process come and go, so half of it must show."""
    before = used_mb()
    assert before > 10, "a Python with torch in it"
    with touched(200):
        assert 100 < used_mb() - before < 300


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is the peak")
def test_memory_that_is_given_back_does_not_count() -> None:
    with touched(200):
        before = used_mb()
    assert used_mb() < before - 100


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is this process's own")
def test_workers_count() -> None:
    """Much, because what processes share moves from one to the others as they come and go."""
    before, hold = used_mb(), "import time; much = b'x' * (200 << 20); time.sleep(60)"
    worker = multiprocessing.get_context("spawn").Process(target=exec, args=(hold, {}))
    worker.start()
    try:
        end = time.monotonic() + 20
        while used_mb() < before + 150 and time.monotonic() < end:
            time.sleep(0.02)
        assert used_mb() >= before + 150
    finally:
        worker.kill()
        worker.join()
    assert used_mb() < before + 100, "what has ended no longer counts"
