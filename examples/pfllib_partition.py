"""A partition in PFLlib's format, with training and test data of each client.

The same on the command line: feddbe run fedavg+dbe --data partition --rounds 2
"""

import json
from pathlib import Path

import numpy as np

import feddbe

rng = np.random.default_rng(0)
for part, n in {"train": 30, "test": 10}.items():
    Path("partition", part).mkdir(parents=True)
    for client in range(3):
        y = rng.integers(2, size=n)
        x = rng.normal(size=(n, 1, 8, 8)).astype(np.float32) + y[:, None, None, None]
        np.savez_compressed(Path("partition", part, f"{client}.npz"), data={"x": x, "y": y})
Path("partition", "config.json").write_text(json.dumps({"num_clients": 3, "num_classes": 2}))

run = feddbe.run("fedavg+dbe", data="partition", rounds=2)
print(run["config"]["clients"], "clients, accuracy", run["last"]["accuracy"]["weighted"])
