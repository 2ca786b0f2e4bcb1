"""kill -9 at any moment: the run continues, and ends with the same bits as one that was left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

KILLS = int(os.environ.get("FEDDBE_CASES", "4"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_kills() -> None:
    """In a process of its own, which forks; `make test-all` kills a thousand times."""
    child = [sys.executable, "-m", "tests.contract.kills", "--kills", str(KILLS), "--seed", "3"]
    ended = subprocess.run(child, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    counts = json.loads(ended.stdout)
    assert counts["runs"] + counts.get("workers", 0) >= KILLS
    assert {what: counts.get(what, 0) for what in ("differing", "orphans", "failed")} == {
        "differing": 0, "orphans": 0, "failed": 0,
    }, ended.stderr  # fmt: skip
