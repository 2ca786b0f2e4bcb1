"""Memory of this process and its workers."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import sys
from pathlib import Path

_TRIM, _MMAP = -1, -3
"""Names of two limits of glibc's `mallopt`."""


def used_mb() -> float:
    """Megabytes in use now (Linux: shared pages counted once, summed); elsewhere this process's peak."""
    pids = [os.getpid(), *(p.pid for p in multiprocessing.active_children() if p.pid)]
    total = 0
    for pid in pids:
        try:
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
        except (OSError, StopIteration):  # no such file system, or the worker has just ended
            continue
    if total:
        return total / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def keep_freed() -> None:
    """From now on this process, and what is forked from it, keeps up to a gigabyte of what it freed, in
    pieces of up to 32 MB. A round takes and gives back the same states over and over, and to get a new page
    from the system takes longer than to fill it. Where the C library is another one, nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP, 2**25)
        mallopt(_TRIM, 2**30)
