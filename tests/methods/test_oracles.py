"""Every method at its defaults against an independent plain loop: 3 clients, 3 rounds, two at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from feddbe import seeds
from feddbe.experiment import Experiment
from feddbe.methods import METHODS
from feddbe.state import State
from tests.federation import experiment, outcome
from tests.oracles import methods as oracle
from tests.oracles.methods import Result, Setting

PLAIN: dict[str, Callable[[Setting], Result]] = {
    "fedavg": oracle.fedavg,
    "scaffold": oracle.scaffold,
    "fedprox": oracle.fedprox,
    "moon": oracle.moon,
    "perfedavg": oracle.perfedavg,
    "pfedme": oracle.pfedme,
    "ditto": oracle.ditto,
    "fedper": oracle.fedper,
    "fedrep": lambda s: oracle.fedper(s, head_epochs=10),
    "fedrod": oracle.fedrod,
    "fedbabu": oracle.fedbabu,
    "apfl": oracle.apfl,
    "local": oracle.local,
}
DBE = ("fedavg", "scaffold", "fedprox", "moon")
MR = ("ditto", "fedper", "fedrep", "fedrod", "fedbabu", "apfl")
EXCHANGING = ("fedgen", "fedfomo", "apple")
"""Their server has more than a model: compared in test_exchanging.py."""


def test_every_method_has_an_oracle() -> None:
    """majority has nothing to train."""
    assert {*PLAIN, *EXCHANGING, "majority"} == METHODS.keys()


def setting(e: Experiment, addons: str = "") -> Setting:
    """The same task for an oracle."""
    with seeds.torch_seeded(seeds.torch_seed(0, "model")):
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 10)
    dataset = e.task.dataset
    return Setting(
        net,
        dataset.x if dataset.x.is_floating_point() else (dataset.x.float() / 16 - 0.5) / 0.5,
        dataset.y,
        e.task.split.train,
        rounds=e.task.rounds,
        lr=0.1,
        join=e.options.join,
        kappa=1.0 if addons in ("mr", "dbe") else None,
        prbm=addons in ("prbm", "dbe"),
    )


def in_order(state: State, parameters: list[str]) -> list[Tensor]:
    """The model's order; prefixed names after plain ones, PRBM's vector last (a file sorts by itself)."""

    def rank(name: str) -> tuple[int, bool, int]:
        last = name.split("/")[-1]
        return name == "prbm", "/" in name, parameters.index(last) if last in parameters else 0

    return [state[name] for name in sorted(state, key=rank)]


@pytest.mark.parametrize("name", [*PLAIN, *(f"{m}+dbe" for m in DBE), *(f"{m}+mr" for m in MR)])
def test_against_the_plain_loop(name: str, tmp_path: Path) -> None:
    """Server and private state to 1e-5 after three rounds."""
    method, _, addon = name.partition("+")
    e = experiment(name, rounds=3, join=0.67)
    plain = setting(e, addon)
    wanted, ran = PLAIN[method](plain), outcome(e, tmp_path)
    order = list(e.task.model.parameters)
    server = in_order({n: t for n, t in ran.server.items() if n != "mean"}, order)
    assert len(server) == len(wanted.server)
    for mine, other in zip(server, wanted.server, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    if addon:
        assert plain.z_bar is not None
        torch.testing.assert_close(ran.server["mean"], plain.z_bar, rtol=0, atol=1e-5)
    joined = {c for t in (1, 2, 3) for c in seeds.cohort(0, t, 3, 0.67)}
    assert ran.clients.keys() == (joined if wanted.private else set())
    for client, state in ran.clients.items():
        assert len(state) == len(wanted.private[client])
        for mine, other in zip(in_order(state, order), wanted.private[client], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
