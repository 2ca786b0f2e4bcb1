"""What personalized methods have in common."""

from __future__ import annotations

__all__ = ["NO_MR", "NO_PRBM", "PERSONAL"]

PERSONAL = "personal/"
"""Prefix of a client's own parameters."""

NO_PRBM = {
    "prbm": "it personalises in its own way, a second private part goes against it (--force allows it)"
}
NO_MR = {"mr": "its local scheme is not plain SGD, so the client mean would need another definition"}
