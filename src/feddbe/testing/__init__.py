"""Checks for users' own methods."""

from feddbe.testing.contract import (
    CAN_KILL,
    check_engines,
    check_hyperparameters,
    check_kill,
    check_method,
    check_partial_participation,
    check_resume,
    check_secrets,
    check_small_clients,
    find_leaks,
    other_values,
)

__all__ = [
    "CAN_KILL",
    "check_engines",
    "check_hyperparameters",
    "check_kill",
    "check_method",
    "check_partial_participation",
    "check_resume",
    "check_secrets",
    "check_small_clients",
    "find_leaks",
    "other_values",
]
