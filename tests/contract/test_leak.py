"""The privacy test must be able to fail: methods that leak on purpose."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from feddbe.local import Local
from feddbe.methods import MR, PRBM, Composed
from feddbe.methods.fedavg import FedAvg
from feddbe.state import State
from feddbe.task import Context
from tests.contract.test_every_method import leaks
from tests.federation import Recorder, carry_out, experiment


@dataclasses.dataclass(frozen=True)
class Renames(Composed):
    """Sends PRBM's vector inside an entry with an innocent name."""

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        up, new = super().train(ctx, local, received, private)
        return {**up, "statistics": new["prbm"].repeat(2)}, new


@dataclasses.dataclass(frozen=True)
class Names(Composed):
    """Sends it under its own name."""

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        up, new = super().train(ctx, local, received, private)
        return {**up, "prbm": new["prbm"]}, new


def test_a_private_value_under_another_name_is_found(tmp_path: Path) -> None:
    e = dataclasses.replace(experiment("fedavg+dbe"), method=Renames(FedAvg(), (PRBM(), MR())))
    recorder = Recorder(e)
    carry_out(e, tmp_path, recorder)
    assert "prbm in statistics" in leaks(recorder, e.method.private)


def test_a_private_name_does_not_even_leave_the_client(tmp_path: Path) -> None:
    e = dataclasses.replace(experiment("fedavg+dbe"), method=Names(FedAvg(), (PRBM(), MR())))
    with pytest.raises(AssertionError, match="would send 'prbm'"):
        carry_out(e, tmp_path, Recorder(e))
