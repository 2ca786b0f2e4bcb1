"""A method that loses part of the server's state is named in the round in which it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from feddbe.errors import FeddbeError, StoreError
from feddbe.runs.store import RunStore
from tests.small_runs import experiment, run_outcome

METHOD = """
from dataclasses import dataclass
from typing import ClassVar
from feddbe import FedAvg
from feddbe.methods import parameter

@dataclass(frozen=True)
class Loses(FedAvg):
    name: ClassVar[str] = "loses"
    how: str = parameter("drop", "what becomes of it", choices=("drop", "cut", "double"))

    def aggregate(self, ctx, server, uploads):
        new = dict(super().aggregate(ctx, server, uploads))
        last = new.pop("fc.bias")
        if self.how == "drop":
            return new
        return new | {"fc.bias": last[:3] if self.how == "cut" else last.double()}
"""


@pytest.mark.parametrize(
    ("how", "has"), [("drop", "none"), ("cut", r"\(3,\) torch.float32"), ("double", r"\(10,\) torch.float64")]
)
@pytest.mark.parametrize("addon", ["", "+dbe"])
def test_a_method_that_loses_part_of_the_servers_state_is_named_in_round_1(
    how: str, has: str, addon: str, tmp_path: Path
) -> None:
    (tmp_path / "loses.py").write_text(METHOD)
    instance = experiment(f"{tmp_path / 'loses.py'}:Loses(how={how}){addon}")
    message = rf"^loses: aggregate loses .* in round 1: expected 'fc.bias' of \(10,\) .*, got {has};"
    with pytest.raises(FeddbeError, match=message) as caught:
        run_outcome(instance, tmp_path / "run")
    assert not isinstance(caught.value, StoreError), "the run's file is not to blame"
    assert "\n" not in str(caught.value)
    store = RunStore.open(tmp_path / "run")
    assert store.last_round() == 0
    store.close()
