"""kill -9 at any moment: the run can be resumed, and its bits equal those of an uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

KILLS = int(os.environ.get("FEDDBE_CASES", "4"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads processes from /proc")
def test_resume_after_kill_is_bit_exact() -> None:
    """A separate process forks the runs; `make test-all` kills a thousand times."""
    command = [sys.executable, "-m", "tests.contract.kills", "--kills", str(KILLS), "--seed", "3"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout)
    assert counts["runs"] + counts.get("workers", 0) >= KILLS
    assert {name: counts.get(name, 0) for name in ("differing", "orphans", "failed")} == {
        "differing": 0, "orphans": 0, "failed": 0,
    }, process.stderr  # fmt: skip
