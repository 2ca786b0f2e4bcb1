"""Your own arrays in an .npz file: x, y, and the client of each sample.

The same on the command line: feddbe run fedavg+dbe --data arrays.npz --rounds 2
"""

import numpy as np

import feddbe

rng = np.random.default_rng(0)
y = rng.integers(3, size=120)
x = rng.integers(100, size=(120, 8, 8), dtype=np.uint8)  # gray; color images are (120, 8, 8, 3)
x[np.arange(120), 2 * y] += 150  # a bright line; its height is the class
np.savez("arrays.npz", x=x, y=y, client=rng.integers(4, size=120))

run = feddbe.run("fedavg+dbe", data="arrays.npz", rounds=2)
print(run["config"]["clients"], "clients, accuracy", run["last"]["accuracy"]["weighted"])
