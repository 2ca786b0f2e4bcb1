"""Checks for users' own methods."""

from feddbe.testing.contract import (
    CAN_KILL,
    check,
    continues,
    engines_agree,
    few,
    keeps_secrets,
    leaks,
    moved,
    others,
    part_of_the_clients,
    survives_a_kill,
)

__all__ = [
    "CAN_KILL",
    "check",
    "continues",
    "engines_agree",
    "few",
    "keeps_secrets",
    "leaks",
    "moved",
    "others",
    "part_of_the_clients",
    "survives_a_kill",
]
