"""Which add-ons and options of local training methods do not take, and why."""

from __future__ import annotations

__all__ = ["NO_MR", "NO_PRBM", "OWN_STEPS", "SUM_OF_GRADIENTS", "TUNES", "TWO_MODELS"]

_OWN_WAY = "it personalises in its own way, a second one goes against it (--force allows it)"
NO_PRBM = {"prbm": _OWN_WAY, "ft": _OWN_WAY}
"""What a personalized method refuses."""

TWO_MODELS = {"prbm": "it trains two models, and PRBM is defined for one"}
"""What one with a global and a personal model cannot take."""

TUNES = {"ft": "it adapts its model to each client already"}
"""What one that tunes by itself cannot take."""

_NOT_SGD = "its local scheme is not plain SGD, so it would need another definition"
NO_MR = {"mr": _NOT_SGD, "prbm": _NOT_SGD}
"""What one with steps of its own cannot take."""

OWN_STEPS = dict.fromkeys(
    ("optimiser", "momentum", "weight_decay", "clip_norm"), "it takes steps of its own, not an optimiser's"
)
"""What one with steps of its own keeps to."""

SUM_OF_GRADIENTS = dict.fromkeys(
    ("optimiser", "momentum", "clip_norm"),
    "its control variates are mean gradients, which (x - y) / (T eta) is after plain SGD only",
)
"""What SCAFFOLD keeps to (its option II)."""
