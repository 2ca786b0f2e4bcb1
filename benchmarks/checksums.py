"""Cost of the checksums of a run's file: python -m benchmarks.checksums

Seconds of CRC-32 and of the verification of resumed runs, as a share of the rounds' seconds. They are CPU
seconds of a single thread.
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

CASES: dict[str, dict[str, Any]] = {
    "digits CNN, fedavg+dbe": {"data": "digits", "rounds": 10},
    "digits perceptron, fedavg+dbe": {"data": "digits", "model": "mlp", "rounds": 10},
    "2.3 MB CNN, 20 x 75 samples, fedavg+dbe": {"rounds": 3, "model": "cnn"},
    "2.3 MB CNN, 20 x 75 samples, ditto": {"rounds": 3, "model": "cnn", "method": "ditto"},
}
checksum_seconds = 0.0


def count_time(function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        global checksum_seconds
        start = time.thread_time()
        try:
            return function(*arguments)
        finally:
            checksum_seconds += time.thread_time() - start

    return timed


def make_dataset(samples: int = 20 * 100) -> feddbe.Dataset:
    """Return random images of Fashion-MNIST's shape."""
    import torch

    rng = np.random.RandomState(0)
    x = torch.from_numpy(rng.randint(0, 256, (samples, 1, 28, 28)).astype(np.uint8))
    y = torch.from_numpy(rng.randint(0, 10, samples))
    return feddbe.Dataset("synthetic", x, y, 10, 2 / 255, -1.0, np.arange(samples) % 20)


def main() -> None:
    global checksum_seconds
    store.crc32 = count_time(zlib.crc32)  # type: ignore[attr-defined]
    store.RunStore.verify = count_time(store.RunStore.verify)  # type: ignore[method-assign]
    print("| | rounds s | checksums s | % |\n|---|---|---|---|")
    for name, options in CASES.items():
        settings = {
            "method": "fedavg+dbe",
            "data": make_dataset() if "data" not in options else "",
            **options,
        }
        with tempfile.TemporaryDirectory() as folder:
            checksum_seconds, start = 0.0, time.thread_time()
            feddbe.run(settings.pop("method"), engine="serial", out=str(Path(folder) / "run"), **settings)
            total = time.thread_time() - start
        share = 100 * checksum_seconds / total
        print(f"| {name} | {total:.2f} | {checksum_seconds:.4f} | {share:.2f} |", flush=True)


if __name__ == "__main__":
    main()
