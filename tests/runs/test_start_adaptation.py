"""Fine-tuning and new clients after the last round, and selection of the best round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from feddbe import api
from feddbe.config.options import Config
from feddbe.errors import InvalidInputError
from feddbe.methods.registry import parse_method
from feddbe.runs.build_document import read_new_clients
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import RunStore
from feddbe.simulation.client import ClientTask, run_client
from feddbe.state import State, matches_pattern, strip_prefix
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import are_identical, experiment, make_dataset, run_outcome


def final(name: str, folder: Path) -> tuple[Experiment, State]:
    e = experiment(name)
    return e, run_outcome(e, folder).server


def adapted(e: Experiment, server: State, epochs: int = 3, client: int = 0) -> tuple[ClientTrainer, State]:
    """What a client without a private state deploys after it adapted to what the server has."""
    task = e.task.for_adaptation(epochs)
    local, ctx = ClientTrainer(task, 3, client), Context(task, 3)
    return local, e.method.adapt(ctx, local, server, e.method.init_new_client(ctx, server))


@pytest.mark.parametrize(
    "name",
    [
        "fedavg+ft",
        "scaffold+ft",
        "fedprox(mu=1)+ft",
        "moon+ft",
        "fedgen(steps=2)+ft",
        "fedavg+mr(kappa=50)+ft",
    ],
)
def test_fine_tuning_is_plain_training_of_the_final_global_model(name: str, tmp_path: Path) -> None:
    """Without control variates, proximal term, contrast, generator or MR, whatever the method's own training
    has; a client that took part fine-tunes as one that did not."""
    e = experiment(name, adapt_epochs=3)
    ran = run_outcome(e, tmp_path)
    model = {n: ran.server[n] for n in e.task.model.parameters}
    task = e.task.for_adaptation(3)
    ctx = Context(task, 3)
    fixed = {n: t for n, t in ran.server.items() if matches_pattern(n, e.method.constant)}
    for client in range(3):
        private = ran.clients.get(client) or e.method.client_init(ctx)
        message = e.method.broadcast(ctx, ran.server, client) | fixed
        tuned = e.method.finetune(ctx, ClientTrainer(task, 3, client), message, private)
        assert are_identical(tuned, ClientTrainer(e.task, 3, client).fit(model, epochs=3).params)


@pytest.mark.parametrize("name", ["scaffold", "fedprox(mu=1)", "moon"])
def test_new_clients_train_by_the_method(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    _, new = adapted(e, server)
    model = {n: server[n] for n in e.task.model.parameters}
    assert not are_identical(new, ClientTrainer(e.task, 3, 0).fit(model, epochs=3).params)


@pytest.mark.parametrize("name", ["fedavg", "perfedavg", "fedprox(mu=0)"])
def test_new_client_without_terms_trains_by_plain_sgd(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    _, new = adapted(e, server)
    assert are_identical(new, ClientTrainer(e.task, 3, 0).fit(server, epochs=3).params)


def test_fine_tuning_with_prbm_trains_the_vector(tmp_path: Path) -> None:
    e = experiment("fedavg+dbe+ft")
    ran = run_outcome(e, tmp_path)
    local = ClientTrainer(e.task, 3, 1)
    e.method.finetune(Context(e.task, 3), local, ran.server, ran.clients[1])
    assert not torch.equal(local.extras["prbm"].value, ran.clients[1]["prbm"])


def test_fedbabu_tunes_body_and_head_from_the_global_body_without_mr(tmp_path: Path) -> None:
    e, server = final("fedbabu+mr", tmp_path)
    _, tuned = adapted(e, server)
    body = {n: server[n] for n in e.task.model.body}
    expected = ClientTrainer(e.task, 3, 0).fit(e.task.model.parameters | body, epochs=3).params
    assert are_identical(tuned, expected)
    assert not any(torch.equal(tuned[n], e.task.model.parameters[n]) for n in e.task.model.head)


def test_dbe_adapts_with_a_new_vector_and_the_server_mean(tmp_path: Path) -> None:
    e, server = final("fedavg+dbe", tmp_path)
    local, tuned = adapted(e, server)
    with_mr = (
        ClientTrainer(e.task, 3, 0).fit({n: t for n, t in server.items() if n != "mean"}, epochs=3).params
    )
    assert local.extras["prbm"].value.abs().sum() > 0
    assert not are_identical(tuned, with_mr)
    repeated, _ = adapted(e, server)
    assert torch.equal(local.extras["prbm"].value, repeated.extras["prbm"].value)


def test_adapted_accuracy_starts_from_the_last_server_state(tmp_path: Path) -> None:
    e = experiment("fedavg+ft", adapt_epochs=4)
    ran = run_outcome(e, tmp_path)
    assert [entry["adapted"] is not None for entry in ran.rounds] == [False, False, True]
    assert ran.rounds[2]["moment"] == "before"
    replies = [
        run_client(e.task, e.method, ClientTask(c, 3, evaluate=True, adapt_epochs=4), ran.server, None)
        for c in range(3)
    ]
    accuracies = [r.metrics["adapted"]["accuracy"] for r in replies]
    expected = float(sum(value * n for value, n in accuracies) / sum(n for _, n in accuracies))
    assert ran.rounds[2]["adapted"]["weighted"] == expected  # type: ignore[index]
    plain = run_outcome(experiment("fedavg"), tmp_path / "plain")
    assert are_identical(ran.server, plain.server)
    assert all(entry["adapted"] is None for entry in plain.rounds)


def test_perfedavg_records_adapted_and_global_model(tmp_path: Path) -> None:
    ran = run_outcome(experiment("perfedavg(alpha=0.5)"), tmp_path)
    for entry in ran.rounds:
        assert entry["moment"] == "adapted"
        assert entry["accuracy"] == entry["adapted"]
        assert entry["before"] is not None
    assert ran.rounds[1]["before"] != ran.rounds[1]["adapted"]


def test_new_clients_only_adapt_after_training(tmp_path: Path) -> None:
    data = make_dataset([40, 44, 28, 36])
    e = experiment("fedavg+dbe", data, new_clients=1, adapt_epochs=2)
    ran = run_outcome(e, tmp_path)
    assert ran.clients.keys() == {0, 1, 2}
    store = RunStore.open(tmp_path)
    result = read_new_clients(store)
    moments = {row.moment for t in range(3) for row in store.records(t) if row.client == 3}
    store.close()
    assert moments == {"newcomers before", "newcomers adapted 1", "newcomers adapted"}
    assert result
    assert (result["round"], result["clients"], result["epochs"]) == (2, 1, 2)
    reply = run_client(
        e.task,
        e.method,
        ClientTask(3, 3, evaluate=True, adapt_epochs=2, is_new_client=True),
        ran.server,
        None,
    )
    for when, accuracy in (("before", result["before"]), ("adapted", result["adapted"])):
        assert accuracy
        assert accuracy["weighted"] == float(reply.metrics[when]["accuracy"][0])


@pytest.mark.parametrize("name", ["fedavg+dbe", "scaffold+dbe", "moon", "ditto", "apfl"])
def test_training_clients_are_independent_of_new_clients(name: str, tmp_path: Path) -> None:
    three, four = make_dataset([40, 44, 28]), make_dataset([40, 44, 28, 36])
    ran = run_outcome(experiment(name, four, new_clients=1, participation=0.67), tmp_path / "four")
    without_new = run_outcome(experiment(name, three, participation=0.67), tmp_path / "three")
    assert are_identical(ran.server, without_new.server)
    assert ran.clients.keys() == without_new.clients.keys()
    assert all(are_identical(ran.clients[c], without_new.clients[c]) for c in without_new.clients)


@pytest.mark.parametrize("name", ["ditto", "pfedme", "apfl", "fedrod"])
def test_personal_model_of_a_new_client_starts_from_the_global_model(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    for key, value in strip_prefix(e.method.init_new_client(Context(e.task, 3), server), "personal/").items():
        assert torch.equal(value, server[key])
        assert not torch.equal(value, e.task.model.parameters[key])


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_head_of_a_new_client_starts_from_the_initial_head(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    private = strip_prefix(e.method.init_new_client(Context(e.task, 3), server), "personal/")
    assert are_identical(private, {n: e.task.model.parameters[n] for n in e.task.model.head})


def test_fedfomo_new_client_selects_models_of_other_clients(tmp_path: Path) -> None:
    ran = run_outcome(experiment("fedfomo", make_dataset([40, 44, 28, 36]), new_clients=1), tmp_path)
    store = RunStore.open(tmp_path)
    result = read_new_clients(store)
    assert result
    assert result["adapted"]
    assert result["adapted"]["weighted"] > 0
    store.close()
    assert ran.server["fomo/uploaded"].tolist() == [1, 1, 1, 0]


def test_unsupported_new_clients_are_rejected_with_the_reason() -> None:
    with pytest.raises(InvalidInputError, match="apple needs participation = 1 and no new clients"):
        experiment("apple", new_clients=1)
    with pytest.raises(InvalidInputError, match="new_clients = 3; at least one of 3 clients must train"):
        experiment("fedavg", new_clients=3)


# A validation share


def test_validation_data_is_the_end_of_the_training_data() -> None:
    plain, with_validation = experiment("fedavg").task.split, experiment("fedavg", validation=0.25).task.split
    for client in range(3):
        n = len(plain.train[client])
        assert len(with_validation.validation[client]) == int(0.25 * n)
        whole = np.concatenate([with_validation.train[client], with_validation.validation[client]])
        assert np.array_equal(whole, plain.train[client])
        assert np.array_equal(with_validation.test[client], plain.test[client])


def test_the_best_round_is_chosen_on_validation_data(tmp_path: Path) -> None:
    documents = api.compare(
        ["fedavg", "fedavg+dbe"], data="digits", clients=3, partition="dirichlet:0.5", rounds=5,
        validation=0.3, out=str(tmp_path / "r"), engine="serial",
    )  # fmt: skip
    for document in documents:
        scores = [e["validation"]["weighted"] for e in document["rounds"] if e["validation"]]
        assert len(scores) == 6
        best = document["best"]
        assert best is not None
        assert best["round"] == scores.index(max(scores))
        assert best["validation"] != best["accuracy"]
        store = RunStore.open(Path(document["folder"]))
        kept = store._db.execute("SELECT round FROM states WHERE kind = 'best'").fetchone()[0]
        store.close()
        assert kept == best["round"]


def test_single_training_sample_is_not_held_out() -> None:
    split = experiment("fedavg", make_dataset([60, 2]), validation=0.5).task.split
    assert (len(split.train[1]), len(split.validation[1])) == (1, 0)


def test_options_of_other_parts_follow_the_variant() -> None:
    """What the published code did to other methods, where it is an option."""
    for name, option, value in [
        ("fedrep", "head_epochs", 1), ("pfedme", "evaluate", "w"), ("fedgen", "lite", True)
    ]:  # fmt: skip
        assert getattr(experiment(name, variant="official").method, option) == value
        assert getattr(parse_method(name), option) != value
    assert Config().variant == "default"


@pytest.mark.parametrize(
    "name", ["perfedavg", "pfedme", "apple", "apfl", "fedgen", "fedfomo", "ditto", "fedrod"]
)
def test_every_method_has_a_training_loss(name: str, tmp_path: Path) -> None:
    """Of methods with steps of their own too."""
    losses = [entry["train_loss"] for entry in run_outcome(experiment(name), tmp_path).rounds[1:]]
    assert all(loss is not None and 0 < loss < 10 for loss in losses)
