"""Checks for methods written by users."""

from feddbe.testing.contract import (
    CAN_KILL,
    check,
    check_engines,
    check_kill,
    check_partial_participation,
    check_resume,
    check_secrets,
    check_small_clients,
    find_leaks,
    list_other_values,
    outcomes_differ,
)

__all__ = [
    "CAN_KILL",
    "check",
    "check_engines",
    "check_kill",
    "check_partial_participation",
    "check_resume",
    "check_secrets",
    "check_small_clients",
    "find_leaks",
    "list_other_values",
    "outcomes_differ",
]
