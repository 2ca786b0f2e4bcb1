"""BatchNorm statistics in a residual network: where they are kept, sent and used for evaluation.

A frequent bug in this field: only parameters are averaged, and the statistics are left undefined.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import feddbe
from feddbe.config.options import BatchNormBuffers, Config
from feddbe.errors import InvalidInputError
from feddbe.methods.moon import Moon
from feddbe.methods.registry import METHODS
from feddbe.models.registry import BasicBlock
from feddbe.runs.experiment import Experiment, resolve
from feddbe.simulation.client import BUFFER
from feddbe.state import State, sha256, strip_prefix, weighted_mean
from feddbe.training.loss_terms import TermContext
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import MessageRecorder, are_identical, make_dataset, run_outcome, run_recorded

SHARED = f"{BUFFER}shared/"


def make_residual_network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a small version of ResNet-18: stem, two of its blocks, mean, classifier."""
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


def make_experiment(name: str, **options: Any) -> Experiment:
    config = {"partition": "natural", "rounds": 2, "lr": 0.1, **options}
    return resolve(name, Config(**config), dataset=make_dataset(), model=make_residual_network)


def evaluate(e: Experiment, params: State, statistics: list[State]) -> float:
    """Return the accuracy over all clients; the module evaluates client i with statistics[i]."""
    dataset = e.task.dataset
    hits = total = 0
    for indices, buffers in zip(e.task.split.test, statistics, strict=True):
        x = dataset.inputs(dataset.x[torch.from_numpy(indices)])
        y = dataset.y[torch.from_numpy(indices)]
        logits = functional_call(e.task.model.module.eval(), {**params, **buffers}, (x,))
        hits += int((logits.argmax(1) == y).sum())
        total += len(y)
    return hits / total


def train_client(e: Experiment, round_: int, client: int) -> ClientTrainer:
    """Return a client's trainer after one plain fit from theta^0."""
    trainer = ClientTrainer(e.task, round_, client)
    trainer.fit(e.task.model.parameters)
    return trainer


def test_local_statistics_are_private_and_never_sent(tmp_path: Path) -> None:
    e = make_experiment("fedavg", bn_buffers="local")
    engine = MessageRecorder(e)
    ran = run_recorded(e, tmp_path, engine)
    assert len(engine.messages) > 6
    assert {name for message in engine.messages for name in message} == e.task.model.parameters.keys()
    private = [strip_prefix(state, SHARED) for state in engine.private]
    assert len(private) == 6, "three clients, two rounds"
    assert all(state.keys() == e.task.model.buffers.keys() for state in private)
    assert len({sha256(state) for state in private}) == 6
    means = {tuple(t.tolist()) for state in private for name, t in state.items() if name.endswith("_mean")}
    sent_values = {tuple(t.flatten().tolist()) for message in engine.messages for t in message.values()}
    assert not means & sent_values
    assert ran.server.keys() == e.task.model.parameters.keys()


def test_local_statistics_continue_in_the_next_round(tmp_path: Path) -> None:
    """Round 2 starts from the client's statistics after round 1, not from initial ones or those of others."""
    first = run_outcome(make_experiment("fedavg", bn_buffers="local", rounds=1), tmp_path / "first")
    e = make_experiment("fedavg", bn_buffers="local")
    both = run_outcome(e, tmp_path / "both")
    for client in range(3):
        before = strip_prefix(first.clients[client], SHARED)
        assert are_identical(before, train_client(e, 1, client).buffers("shared"))
        trainer = ClientTrainer(e.task, 2, client, {"shared": before})
        trainer.fit(first.server)
        assert are_identical(strip_prefix(both.clients[client], SHARED), trainer.buffers("shared"))


def test_each_client_evaluates_with_its_own_statistics(tmp_path: Path) -> None:
    e = make_experiment("fedavg", bn_buffers="local", local_epochs=4)
    ran = run_outcome(e, tmp_path)
    statistics = [strip_prefix(ran.clients[c], SHARED) for c in range(3)]
    curve = [result["accuracy"]["weighted"] for result in ran.rounds if result["accuracy"]]
    assert curve[0] == evaluate(e, e.task.model.parameters, [e.task.model.buffers] * 3)
    assert curve[-1] == evaluate(e, ran.server, statistics)
    exchanged = statistics[1:] + statistics[:1]
    assert curve[-1] != evaluate(e, ran.server, exchanged), "statistics of other clients change the accuracy"


def test_averaged_statistics_are_sent_and_aggregated_like_parameters(tmp_path: Path) -> None:
    """Each client updates the statistics it received; the mean has weights n_i/n, counters are rounded."""
    e = make_experiment("fedavg", bn_buffers="average", local_epochs=4)
    engine = MessageRecorder(e)
    ran = run_recorded(e, tmp_path, engine)
    assert engine.private == []
    assert ran.clients == {}
    names = e.task.model.parameters.keys() | {BUFFER + name for name in e.task.model.buffers}
    assert all(message.keys() == names for message in engine.messages if message)

    statistics, params = e.task.model.buffers, e.task.model.parameters
    for round_ in (1, 2):
        trainers = [ClientTrainer(e.task, round_, client, {"shared": statistics}) for client in range(3)]
        fits = [trainer.fit(params).params for trainer in trainers]
        weights = [trainer.samples for trainer in trainers]
        statistics = weighted_mean([trainer.buffers("shared") for trainer in trainers], weights)
        params = weighted_mean(fits, weights)
    assert are_identical(strip_prefix(ran.server, BUFFER), statistics)
    accuracy = ran.rounds[-1]["accuracy"]
    assert accuracy is not None
    assert accuracy["weighted"] == evaluate(e, params, [statistics] * 3)
    assert accuracy["weighted"] != evaluate(e, params, [e.task.model.buffers] * 3)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_setup_discards_the_model_and_keeps_the_statistics(buffers: str, tmp_path: Path) -> None:
    """As in the published code: round 1 starts from theta^0 with the running statistics of the setup."""
    e = make_experiment("fedavg+dbe", bn_buffers=buffers, rounds=0)
    engine = MessageRecorder(e)
    ran = run_recorded(e, tmp_path, engine)
    assert are_identical(
        {name: ran.server[name] for name in e.task.model.parameters}, e.task.model.parameters
    )
    after = [train_client(e, 0, client).buffers("shared") for client in range(3)]
    if buffers == "local":
        assert not any(name.startswith(BUFFER) for message in engine.messages for name in message)
        statistics = [strip_prefix(ran.clients[c], SHARED) for c in range(3)]
        torch.testing.assert_close(statistics, after)  # with MR, the gradient of the classifier is explicit
    else:
        statistics = [strip_prefix(ran.server, BUFFER)] * 3
        torch.testing.assert_close(statistics[0], weighted_mean(after, e.task.samples))
    accuracy = ran.rounds[0]["accuracy"]
    assert accuracy is not None
    assert accuracy["weighted"] == evaluate(e, e.task.model.parameters, statistics)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_run_records_bn_buffers(buffers: BatchNormBuffers, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data": make_dataset(),
        "partition": "natural",
        "rounds": 0,
        "engine": "serial",
    }
    run = feddbe.run(
        "fedavg", model=make_residual_network, bn_buffers=buffers, out=str(tmp_path / "run"), **options
    )
    assert run["bn_buffers"] == run["config"]["bn_buffers"] == buffers
    assert feddbe.load_run(tmp_path / "run")["bn_buffers"] == buffers
    plain = feddbe.run("fedavg", model="mlp", bn_buffers=buffers, out=str(tmp_path / "plain"), **options)
    assert plain["bn_buffers"] is None


@pytest.mark.parametrize(("sizes", "batch"), [((40, 2), 10), ((40, 30), 1)])
def test_batch_of_one_sample_is_an_error(sizes: tuple[int, ...], batch: int, tmp_path: Path) -> None:
    config = Config(partition="natural", rounds=1, batch_size=batch)
    e = resolve("fedavg", config, dataset=make_dataset(sizes), model=make_residual_network)
    with pytest.raises(
        InvalidInputError, match=r"^client \d trains on one sample at a time, too few for BatchNorm"
    ):
        run_outcome(e, tmp_path)


@pytest.mark.parametrize("buffers", ["local", "average"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_send_statistics_only_if_averaged(name: str, buffers: str, tmp_path: Path) -> None:
    e = make_experiment(name, bn_buffers=buffers, rounds=1)
    engine = MessageRecorder(e)
    ran = run_recorded(e, tmp_path, engine)
    sent_names = {n for message in engine.messages for n in message if n.startswith(BUFFER)}
    kept = {n for state in ran.clients.values() for n in state if n.startswith(SHARED)}
    if buffers == "local":
        assert sent_names == set()
    else:
        assert sent_names == {BUFFER + n for n in e.task.model.buffers} or name == "majority"
        assert kept == set()
    assert {BUFFER + n for n in e.task.model.buffers} >= {n for n in ran.server if n.startswith(BUFFER)}


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_apfl_with_alpha_one_equals_local_training_and_statistics(buffers: str, tmp_path: Path) -> None:
    local = run_outcome(make_experiment("local", bn_buffers=buffers, rounds=4), tmp_path / "local")
    e = make_experiment("apfl(alpha=1,adaptive=false)", bn_buffers=buffers, rounds=4)
    mixed = run_outcome(e, tmp_path / "apfl")
    for client in range(3):
        for prefix in ("personal/", f"{BUFFER}personal/"):
            actual = strip_prefix(mixed.clients[client], prefix)
            expected = strip_prefix(local.clients[client], prefix)
            assert actual.keys() == expected.keys() != set()
            assert all(torch.allclose(actual[n], expected[n], rtol=0, atol=1e-6) for n in actual)
    assert [result["accuracy"] for result in mixed.rounds] == [result["accuracy"] for result in local.rounds]
    shared = run_outcome(make_experiment("fedavg", bn_buffers=buffers, rounds=4), tmp_path / "fedavg")
    assert are_identical(mixed.server, shared.server)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_moon_keeps_statistics_of_its_global_and_previous_model(buffers: str, tmp_path: Path) -> None:
    """In round 1 the global and the previous model are equal in every batch; in round 2 they differ."""
    e = make_experiment("moon", bn_buffers=buffers)
    models: list[tuple[State, State]] = []

    class RecordingMoon(Moon):
        def _contrastive_loss(self, context: TermContext, state: State) -> tuple[torch.Tensor, State]:
            const = {name: tensor.clone() for name, tensor in context.const.items()}
            models.append((strip_prefix(const, "global/"), strip_prefix(const, "previous/")))
            return super()._contrastive_loss(context, state)

    method = RecordingMoon()
    server = {**e.task.model.parameters}
    trainer = ClientTrainer(e.task, 1, 0)
    upload, private = method.train(
        Context(e.task, 1), trainer, server, method.client_init(Context(e.task, 1))
    )
    assert len(models) >= 4
    start = e.task.model.parameters | e.task.model.buffers
    for global_model, previous_model in models:
        assert are_identical(global_model, start)
        assert are_identical(previous_model, start)
    trained = trainer.buffers("shared")
    assert are_identical(trainer.buffers("previous"), trained)
    assert not are_identical(trained, e.task.model.buffers)

    models.clear()
    received = {name: b + 1 for name, b in e.task.model.buffers.items()}
    trainer = ClientTrainer(e.task, 2, 0, {"shared": received, "previous": trained})
    method.train(Context(e.task, 2), trainer, server, private)
    for global_model, previous_model in models:
        assert are_identical(global_model, server | received)
        assert are_identical(previous_model, upload | trained)
    ran = run_outcome(e, tmp_path)
    kept = {name for state in ran.clients.values() for name in state if name.startswith(BUFFER)}
    assert {name.split("/")[1] for name in kept} == {"previous"} | (
        {"shared"} if buffers == "local" else set()
    )
