"""What is left of a study would take: rounds of runs that were begun, or of a few batches of two clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from feddbe.engines.pool import cores
from feddbe.errors import Diverged
from feddbe.runs.preview import BATCHES, TESTED, estimate
from feddbe.runs.probe import probe
from feddbe.studies.runner import Planned

__all__ = ["Clock"]

_SAME = ("data", "model", "epochs", "join", "clients", "newcomers")
"""What, with the method, decides how long a round takes, nearly."""


class Clock:
    """Times a round of each kind of run once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], float] = {}

    def left(self, plans: Iterable[Planned]) -> float:
        """Seconds until the last of these runs would end here, side by side; none may stop early."""
        missing = {planned.place: planned for planned in plans if planned.missing}
        each = [self._left(planned) for planned in missing.values()]
        return sum(each) / max(1, min(cores(), len(each)))

    def _left(self, planned: Planned) -> float:
        assert planned.experiment
        rounds, found = planned.experiment.options.rounds or 0, planned.found
        if found and len(found["rounds"]) > 1:
            return max(0, rounds - found["rounds"][-1]["round"]) * found["cost"]["seconds"]
        return rounds * self._round(planned)

    def _round(self, planned: Planned) -> float:
        experiment = planned.experiment
        assert experiment
        options = dataclasses.replace(experiment.options, engine="serial")
        kind = (planned.cell.method.partition("(")[0], *(getattr(options, key) for key in _SAME))
        if kind not in self._known:
            alone = dataclasses.replace(experiment, options=options)
            try:
                timed = estimate(alone, probe(alone, BATCHES, TESTED))
                self._known[kind] = timed["seconds_per_round"]
            except Diverged:  # then the run will, as soon
                self._known[kind] = 0.0
        return self._known[kind]
