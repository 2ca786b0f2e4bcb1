"""BatchNorm statistics in a residual network: whose they are, who is sent them, who evaluates with them.

The field's most repeated bug: only parameters are averaged, and nobody says what happens to the statistics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import feddbe
from feddbe.config.options import Config
from feddbe.errors import InvalidInputError
from feddbe.methods.moon import Moon
from feddbe.methods.registry import METHODS
from feddbe.models.registry import BasicBlock
from feddbe.runs.experiment import Experiment, resolve
from feddbe.simulation.client import BUFFER
from feddbe.state import State, sha256, strip_prefix, weighted_mean
from feddbe.training.task import Context
from feddbe.training.terms import TermContext
from feddbe.training.trainer import ClientTrainer
from tests.federation import MessageRecorder, are_identical, make_dataset, run_outcome, run_recorded

SHARED = f"{BUFFER}shared/"


def residual(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small sibling of ResNet-18: stem, two of its blocks, mean, classifier."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        BasicBlock(6, 6, 1),
        BasicBlock(6, 12, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, classes),
    )


def experiment(name: str, **options: Any) -> Experiment:
    chosen = {"partition": "natural", "rounds": 2, "lr": 0.1, **options}
    return resolve(name, Config(**chosen), dataset=make_dataset(), model=residual)


def accuracy(e: Experiment, params: State, statistics: list[State]) -> float:
    """Over all clients, each evaluated with statistics[i], by the module itself."""
    data, hits, total = e.task.dataset, 0, 0
    for rows, buffers in zip(e.task.split.test, statistics, strict=True):
        x, y = data.inputs(data.x[torch.from_numpy(rows)]), data.y[torch.from_numpy(rows)]
        logits = functional_call(e.task.model.module.eval(), {**params, **buffers}, (x,))
        hits, total = hits + int((logits.argmax(1) == y).sum()), total + len(y)
    return hits / total


def trained(e: Experiment, round: int, client: int) -> ClientTrainer:
    """A client after its plain epoch of this round from theta^0."""
    local = ClientTrainer(e.task, round, client)
    local.fit(e.task.model.parameters)
    return local


def test_local_statistics_are_private_and_never_sent(tmp_path: Path) -> None:
    e = experiment("fedavg", bn_buffers="local")
    engine = MessageRecorder(e)
    ran = run_recorded(e, tmp_path, engine)
    assert len(engine.messages) > 6
    assert {name for message in engine.messages for name in message} == e.task.model.parameters.keys()
    held = [strip_prefix(state, SHARED) for state in engine.private]
    assert len(held) == 6, "three clients, two rounds"
    assert all(state.keys() == e.task.model.buffers.keys() for state in held)
    assert len({sha256(state) for state in held}) == 6
    means = {tuple(t.tolist()) for state in held for name, t in state.items() if name.endswith("_mean")}
    sent = {tuple(t.flatten().tolist()) for message in engine.messages for t in message.values()}
    assert not means & sent
    assert ran.server.keys() == e.task.model.parameters.keys()


def test_local_statistics_go_on_from_round_to_round(tmp_path: Path) -> None:
    """Round 2 starts from what round 1 left at this client, not from the start and not from others."""
    one = run_outcome(experiment("fedavg", bn_buffers="local", rounds=1), tmp_path / "one")
    e = experiment("fedavg", bn_buffers="local")
    two = run_outcome(e, tmp_path / "two")
    for client in range(3):
        before = strip_prefix(one.clients[client], SHARED)
        assert are_identical(before, trained(e, 1, client).buffers("shared"))
        local = ClientTrainer(e.task, 2, client, {"shared": before})
        local.fit(one.server)
        assert are_identical(strip_prefix(two.clients[client], SHARED), local.buffers("shared"))


def test_each_client_evaluates_with_its_own_statistics(tmp_path: Path) -> None:
    e = experiment("fedavg", bn_buffers="local", local_epochs=4)
    ran = run_outcome(e, tmp_path)
    own = [strip_prefix(ran.clients[c], SHARED) for c in range(3)]
    found = [entry["accuracy"]["weighted"] for entry in ran.rounds if entry["accuracy"]]
    assert found[0] == accuracy(e, e.task.model.parameters, [e.task.model.buffers] * 3)
    assert found[-1] == accuracy(e, ran.server, own)
    assert found[-1] != accuracy(e, ran.server, own[1:] + own[:1]), "others' statistics would show"


def test_averaged_statistics_travel_like_parameters(tmp_path: Path) -> None:
    """n_i/n of what each client's batches made of the statistics it was sent; counters are rounded."""
    e = experiment("fedavg", bn_buffers="average", local_epochs=4)
    engine = MessageRecorder(e)
    ran = run_recorded(e, tmp_path, engine)
    assert engine.private == []
    assert ran.clients == {}
    names = e.task.model.parameters.keys() | {BUFFER + name for name in e.task.model.buffers}
    assert all(message.keys() == names for message in engine.messages if message)

    statistics, params = e.task.model.buffers, e.task.model.parameters
    for round in (1, 2):
        locals = [ClientTrainer(e.task, round, client, {"shared": statistics}) for client in range(3)]
        fits = [local.fit(params).params for local in locals]
        weights = [local.samples for local in locals]
        statistics = weighted_mean([local.buffers("shared") for local in locals], weights)
        params = weighted_mean(fits, weights)
    assert are_identical(strip_prefix(ran.server, BUFFER), statistics)
    found = ran.rounds[-1]["accuracy"]
    assert found is not None
    assert found["weighted"] == accuracy(e, params, [statistics] * 3)
    assert found["weighted"] != accuracy(e, params, [e.task.model.buffers] * 3)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_the_preparation_discards_the_model_and_keeps_the_statistics(buffers: str, tmp_path: Path) -> None:
    """As in the published code: theta^0 comes again, the running statistics of the epoch stay."""
    e = experiment("fedavg+dbe", bn_buffers=buffers, rounds=0)
    engine = MessageRecorder(e)
    ran = run_recorded(e, tmp_path, engine)
    assert are_identical(
        {name: ran.server[name] for name in e.task.model.parameters}, e.task.model.parameters
    )
    after = [trained(e, 0, client).buffers("shared") for client in range(3)]
    if buffers == "local":
        assert not any(name.startswith(BUFFER) for message in engine.messages for name in message)
        statistics = [strip_prefix(ran.clients[c], SHARED) for c in range(3)]
        torch.testing.assert_close(statistics, after)  # where MR looks on, the classifier's end is by hand
    else:
        statistics = [strip_prefix(ran.server, BUFFER)] * 3
        torch.testing.assert_close(statistics[0], weighted_mean(after, e.task.samples))
    found = ran.rounds[0]["accuracy"]
    assert found is not None
    assert found["weighted"] == accuracy(e, e.task.model.parameters, statistics)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_a_run_says_which_it_was(buffers: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data": make_dataset(),
        "partition": "natural",
        "rounds": 0,
        "engine": "serial",
    }
    run = feddbe.run("fedavg", model=residual, bn_buffers=buffers, out=str(tmp_path / "run"), **options)
    assert run["bn_buffers"] == run["config"]["bn_buffers"] == buffers
    assert feddbe.load(tmp_path / "run")["bn_buffers"] == buffers
    plain = feddbe.run("fedavg", model="mlp", bn_buffers=buffers, out=str(tmp_path / "plain"), **options)
    assert plain["bn_buffers"] is None


@pytest.mark.parametrize(("sizes", "batch"), [((40, 2), 10), ((40, 30), 1)])
def test_one_sample_has_no_statistics(sizes: tuple[int, ...], batch: int, tmp_path: Path) -> None:
    chosen = Config(partition="natural", rounds=1, batch_size=batch)
    e = resolve("fedavg", chosen, dataset=make_dataset(sizes), model=residual)
    with pytest.raises(
        InvalidInputError, match=r"^client \d trains on one sample at a time, too few for BatchNorm"
    ):
        run_outcome(e, tmp_path)


@pytest.mark.parametrize("buffers", ["local", "average"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_sends_statistics_only_where_they_are_averaged(
    name: str, buffers: str, tmp_path: Path
) -> None:
    e = experiment(name, bn_buffers=buffers, rounds=1)
    engine = MessageRecorder(e)
    ran = run_recorded(e, tmp_path, engine)
    sent = {n for message in engine.messages for n in message if n.startswith(BUFFER)}
    kept = {n for state in ran.clients.values() for n in state if n.startswith(SHARED)}
    if buffers == "local":
        assert sent == set()
    else:
        assert sent == {BUFFER + n for n in e.task.model.buffers} or name == "majority"
        assert kept == set()
    assert {BUFFER + n for n in e.task.model.buffers} >= {n for n in ran.server if n.startswith(BUFFER)}


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_apfl_at_alpha_one_is_local_training_with_statistics_of_its_own(buffers: str, tmp_path: Path) -> None:
    alone = run_outcome(experiment("local", bn_buffers=buffers, rounds=4), tmp_path / "local")
    e = experiment("apfl(alpha=1,adaptive=false)", bn_buffers=buffers, rounds=4)
    mixed = run_outcome(e, tmp_path / "apfl")
    for client in range(3):
        for prefix in ("personal/", f"{BUFFER}personal/"):
            mine, other = (
                strip_prefix(mixed.clients[client], prefix),
                strip_prefix(alone.clients[client], prefix),
            )
            assert mine.keys() == other.keys() != set()
            assert all(torch.allclose(mine[n], other[n], rtol=0, atol=1e-6) for n in mine)
    assert [entry["accuracy"] for entry in mixed.rounds] == [entry["accuracy"] for entry in alone.rounds]
    shared = run_outcome(experiment("fedavg", bn_buffers=buffers, rounds=4), tmp_path / "fedavg")
    assert are_identical(mixed.server, shared.server)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_moons_other_models_have_statistics_of_their_own_which_stay(buffers: str, tmp_path: Path) -> None:
    """In the first batch of round 1 the global and the previous model are one, in the second they still
    are."""
    e = experiment("moon", bn_buffers=buffers)
    seen: list[tuple[State, State]] = []

    class Watching(Moon):
        def _contrast(self, context: TermContext, carry: State) -> tuple[torch.Tensor, State]:
            seen.append((strip_prefix(context.const, "global/"), strip_prefix(context.const, "previous/")))
            seen[-1] = tuple({n: t.clone() for n, t in s.items()} for s in seen[-1])  # type: ignore[assignment]
            return super()._contrastive_loss(context, carry)

    method = Watching()
    server = {**e.task.model.parameters}
    local = ClientTrainer(e.task, 1, 0)
    up, private = method.train(Context(e.task, 1), local, server, method.client_init(Context(e.task, 1)))
    assert len(seen) >= 4
    start = e.task.model.parameters | e.task.model.buffers
    assert all(are_identical(one, start) and are_identical(two, start) for one, two in seen)
    left = local.buffers("shared")
    assert are_identical(local.buffers("previous"), left)
    assert not are_identical(left, e.task.model.buffers)

    seen.clear()
    came = {name: b + 1 for name, b in e.task.model.buffers.items()}
    again = ClientTrainer(e.task, 2, 0, {"shared": came, "previous": left})
    method.train(Context(e.task, 2), again, server, private)
    assert all(are_identical(one, server | came) and are_identical(two, up | left) for one, two in seen)
    ran = run_outcome(e, tmp_path)
    kept = {name for state in ran.clients.values() for name in state if name.startswith(BUFFER)}
    assert {name.split("/")[1] for name in kept} == {"previous"} | (
        {"shared"} if buffers == "local" else set()
    )
