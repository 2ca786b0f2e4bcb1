"""Who is asked in a round: who takes part, and who evaluates."""

from __future__ import annotations

import re
from collections.abc import Sequence

from feddbe import seeds
from feddbe.errors import BadInput
from feddbe.methods.base import Method


def who_prepares(method: Method, seed: int, clients: int) -> list[int]:
    """Who takes part before round 1: nobody, all, or as many as the method needs."""
    if not method.prepares:
        return []
    return seeds.draw(seeds.stream(seed, "prepare"), clients, method.preparing or clients)


def who_evaluates(spec: str, seed: int, round: int, clients: int, cohort: Sequence[int]) -> Sequence[int]:
    """Who evaluates in the call of this round: `all`, its `cohort`, or `sample:M` drawn anew each time."""
    if spec == "all":
        return range(clients)
    if spec == "cohort":
        return cohort
    match = re.fullmatch(r"sample:([1-9][0-9]*)", spec)
    if match is None:
        raise BadInput(f"eval = '{spec}'; allowed: all, cohort, sample:M with M >= 1")
    return seeds.draw(seeds.stream(seed, "evaluate", round), clients, int(match[1]))
