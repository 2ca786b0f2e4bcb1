"""What personalized methods have in common."""

from __future__ import annotations

from feddbe.methods.base import PERSONAL

__all__ = ["NO_MR", "NO_PRBM", "PERSONAL"]

_OWN_WAY = "it personalises in its own way, a second one goes against it (--force allows it)"
NO_PRBM = {"prbm": _OWN_WAY, "ft": _OWN_WAY}
"""What a personalized method refuses."""

_NOT_SGD = "its local scheme is not plain SGD, so it would need another definition"
NO_MR = {"mr": _NOT_SGD, "prbm": _NOT_SGD}
"""What one with steps of its own cannot take."""
