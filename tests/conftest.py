"""Settings of all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

# No deadline: the first call imports torch. The same examples every time: a red run must be red again.
settings.register_profile("feddbe", deadline=None, derandomize=True)
settings.load_profile("feddbe")
# Two threads of torch wait for each other actively, and two processes of tests share two cores.
torch.set_num_threads(1)
