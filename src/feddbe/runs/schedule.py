"""Who is asked in a round: who takes part, and who evaluates."""

from __future__ import annotations

import re
from collections.abc import Sequence

from feddbe import seeds
from feddbe.errors import BadInput

__all__ = ["who_evaluates"]


def who_evaluates(spec: str, seed: int, round: int, clients: int, cohort: Sequence[int]) -> Sequence[int]:
    """Who evaluates in the call of this round: `all`, its `cohort`, or `sample:M` drawn anew each time."""
    if spec == "all":
        return range(clients)
    if spec == "cohort":
        return cohort
    match = re.fullmatch(r"sample:([1-9][0-9]*)", spec)
    if match is None:
        raise BadInput(f"eval = '{spec}'; allowed: all, cohort, sample:M with M >= 1")
    drawn: list[int] = seeds.stream(seed, "evaluate", round).permutation(clients)[: int(match[1])].tolist()
    return sorted(drawn)
