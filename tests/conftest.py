"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# No deadline: the first call imports torch. The same examples every time: a red run must be red again.
settings.register_profile("feddbe", deadline=None, derandomize=True)
settings.load_profile("feddbe")
