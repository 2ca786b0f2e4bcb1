"""Memory of this process and its workers."""

from __future__ import annotations

import mmap
import multiprocessing
import platform
import subprocess
import sys

import numpy as np
import pytest

from feddbe.simulation.engines.base import peak_memory_mb
from tests.waiting import wait_until


def allocate(megabytes: int) -> mmap.mmap:
    """Return memory directly from the system; malloc might reuse pages that were counted before."""
    block = mmap.mmap(-1, megabytes * 2**20)
    np.frombuffer(block, np.uint8)[:] = 1
    return block


def test_memory_grows_with_touched_pages() -> None:
    """Other allocations vary, so at least half of it must be visible."""
    before = peak_memory_mb()
    assert before > 10, "a Python with torch in it"
    with allocate(200):
        assert 100 < peak_memory_mb() - before < 300


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is the peak")
def test_released_memory_does_not_count() -> None:
    with allocate(200):
        before = peak_memory_mb()
    assert peak_memory_mb() < before - 100


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is this process's own")
def test_memory_of_workers_counts() -> None:
    """The amount is large, because the attribution of shared pages changes when processes start and end."""
    before, hold = peak_memory_mb(), "import time; much = b'x' * (200 << 20); time.sleep(600)"
    worker = multiprocessing.get_context("spawn").Process(target=exec, args=(hold, {}))
    worker.start()
    try:
        wait_until(lambda: peak_memory_mb() >= before + 150, "the worker's memory")
    finally:
        worker.kill()
        worker.join()
    assert peak_memory_mb() < before + 100, "ended processes no longer count"


FAULTS = """
import resource, sys, torch
from feddbe.simulation.engines.base import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for repeat in range(6):
    if repeat == 1:  # nothing to reuse before
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    states = [torch.ones(3 * 2**20) for _ in range(10)]
    del states
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_reused() -> None:
    """Five times ten states of 12 MB are 153,600 pages."""
    kept, not_kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, check=True).stdout)
        for how in ("kept", "not")
    )
    assert 2 * kept < not_kept
