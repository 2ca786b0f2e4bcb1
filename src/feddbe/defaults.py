"""The published settings, per data set and per model, and what each `--variant` changes.

Resolved before a run and stored with it; what the user gives wins, then the variant, the data set, the model.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CUTS", "GENERAL", "PER_DATA", "PER_MODEL", "VARIANTS"]

GENERAL: dict[str, Any] = {
    "partition": "dirichlet:0.1",
    "clients": 20,
    "rounds": 100,
    "short_batch": "keep",
    "har_layout": "channels",
}

PER_MODEL: dict[str, dict[str, Any]] = {
    "cnn": {"lr": 0.005, "mr": {"kappa": 50.0, "mu": 1.0}},
    "cnn_small": {"lr": 0.1, "mr": {"kappa": 1.0, "mu": 1.0}},
    "fasttext": {"lr": 0.1, "fasttext_rep": "linear", "mr": {"kappa": 0.1, "mu": 1.0}},
    "har_cnn": {"lr": 0.01, "mr": {"kappa": 1.0, "mu": 1.0}},
    "mlp": {"lr": 0.1, "mr": {"kappa": 1.0, "mu": 1.0}},
    "resnet18": {"lr": 0.1, "mr": {"kappa": 1.0, "mu": 0.1}},
    "own": {"lr": 0.01, "mr": {"kappa": 1.0, "mu": 1.0}},
}
"""Published are cnn's, resnet18's and fasttext's kappa and mu, and cnn's lr; for har_cnn nothing is. `own` is a module of
the user's. kappa elsewhere by the paper's criterion: MR's loss of the size of the task loss."""

PER_DATA: dict[str, dict[str, Any]] = {"digits": {"rounds": 40}, "har": {"partition": "natural"}, "ag_news": {"partition": "dirichlet:1"}}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"mr": {"init_mean": "exact"}},
    "official": {
        "short_batch": "refuse",
        "har_layout": "scrambled",
        "fasttext_rep": "logsoftmax",
        "mr": {"init_mean": "momentum", "init_epochs": "epochs"},
    },
}
"""`default`: recommended. `paper`: its text, and the default where it is silent. `official`: the published
code, whose preparation has as many epochs as a round, and which fails on a client smaller than a batch."""

CUTS: dict[str, dict[str, str]] = {"official": {"har_cnn": "conv2"}}
"""Variant -> model -> cut, where it is not before the last linear layer."""
