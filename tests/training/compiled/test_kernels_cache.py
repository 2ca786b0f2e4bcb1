"""Bits of the compiled backend do not depend on numba's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from feddbe.state import sha256
from feddbe.training.compiled import backend
from tests.training.compiled.test_backend import make_plan, mr

for name in ("small", "perceptron"):
    result = backend.train(make_plan(name, prbm=True, terms=[mr()]))
    print(name, sha256(result.params | result.extras))
"""


def test_compiled_and_cached_kernels_give_equal_bits(tmp_path: Path) -> None:
    """The first process compiles the kernels, the second one loads them.

    With products and sums that LLVM was free to fuse, one weight of the perceptron differed in its last bit.
    """
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_DEBUG_CACHE": "1"}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for _ in range(2)
    ]
    hashes = [[line for line in lines if line.startswith(("small ", "perceptron "))] for lines in outputs]
    assert any("data saved" in line for line in outputs[0])
    assert not any("data saved" in line for line in outputs[1])
    assert len(hashes[0]) == 2
    assert hashes[0] == hashes[1]
