"""What the checksums of a run's file cost: python -m benchmarks.checksums

Seconds in CRC-32, and in what is read through when a run is carried on, as a share of the rounds' seconds; in
one process, by the time of its thread.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import feddbe
from feddbe.runs import store
from feddbe.runs import store as checksums

CASES: dict[str, dict[str, Any]] = {
    "digits CNN, fedavg+dbe": {"data": "digits", "rounds": 10},
    "digits perceptron, fedavg+dbe": {"data": "digits", "model": "mlp", "rounds": 10},
    "2.3 MB CNN, 20 x 75 samples, fedavg+dbe": {"rounds": 3, "model": "cnn"},
    "2.3 MB CNN, 20 x 75 samples, ditto": {"rounds": 3, "model": "cnn", "method": "ditto"},
}
spent = 0.0


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def outer(*arguments: Any) -> Any:
        global spent
        start = time.thread_time()
        try:
            return function(*arguments)
        finally:
            spent += time.thread_time() - start

    return outer


def synthetic(samples: int = 20 * 100) -> feddbe.Dataset:
    """Images of Fashion-MNIST's shape."""
    import torch

    dice = np.random.RandomState(0)
    x = torch.from_numpy(dice.randint(0, 256, (samples, 1, 28, 28)).astype(np.uint8))
    y = torch.from_numpy(dice.randint(0, 10, samples))
    return feddbe.Dataset("synthetic", x, y, 10, 2 / 255, -1.0, np.arange(samples) % 20)


def main() -> None:
    global spent
    store.crc32 = checksums.crc32 = timed(zlib.crc32)  # type: ignore[attr-defined]
    store.RunStore.verify = timed(store.RunStore.verify)  # type: ignore[method-assign]
    print("| | rounds s | checksums s | % |\n|---|---|---|---|")
    for name, options in CASES.items():
        given = {"method": "fedavg+dbe", "data": synthetic() if "data" not in options else "", **options}
        with tempfile.TemporaryDirectory() as folder:
            spent, start = 0.0, time.thread_time()
            feddbe.run(given.pop("method"), engine="serial", out=str(Path(folder) / "run"), **given)
            whole = time.thread_time() - start
        print(f"| {name} | {whole:.2f} | {spent:.4f} | {100 * spent / whole:.2f} |", flush=True)


if __name__ == "__main__":
    main()
