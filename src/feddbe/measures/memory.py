"""Memory of this process and its workers, shared pages counted once."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from pathlib import Path

__all__ = ["used_mb"]


def used_mb() -> float:
    """Megabytes in use now (Linux: proportional set size, summed); elsewhere this process's peak."""
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
