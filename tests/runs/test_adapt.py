"""What comes after the last round (fine-tuning, newcomers), and how a round is chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from feddbe import api
from feddbe.config.options import Config
from feddbe.errors import InvalidInputError
from feddbe.methods.registry import parse_method
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import RunStore
from feddbe.runs.summary import read_new_clients
from feddbe.simulation.client import ClientTask, run_client
from feddbe.state import State, matches_pattern, strip_prefix
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.federation import are_identical, experiment, make_samples, run_outcome


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
def test_newcomers_keep_the_methods_own_training(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    _, new = adapted(e, server)
    model = {n: server[n] for n in e.task.model.parameters}
    assert not are_identical(new, ClientTrainer(e.task, 3, 0).fit(model, epochs=3).params)


@pytest.mark.parametrize("name", ["fedavg", "perfedavg", "fedprox(mu=0)"])
def test_a_newcomer_without_terms_of_the_methods_trains_plainly(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    _, new = adapted(e, server)
    assert are_identical(new, ClientTrainer(e.task, 3, 0).fit(server, epochs=3).params)


def test_fine_tuning_with_prbm_trains_the_vector_too(tmp_path: Path) -> None:
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


def test_dbe_adapts_with_a_new_translation_and_the_servers_mean(tmp_path: Path) -> None:
    e, server = final("fedavg+dbe", tmp_path)
    local, tuned = adapted(e, server)
    with_mr = (
        ClientTrainer(e.task, 3, 0).fit({n: t for n, t in server.items() if n != "mean"}, epochs=3).params
    )
    assert local.extras["prbm"].value.abs().sum() > 0
    assert not are_identical(tuned, with_mr)
    again, _ = adapted(e, server)
    assert torch.equal(local.extras["prbm"].value, again.extras["prbm"].value)


def test_adapted_is_recorded_where_the_method_has_it_and_starts_from_the_last_server(tmp_path: Path) -> None:
    e = experiment("fedavg+ft", adapt_epochs=4)
    ran = run_outcome(e, tmp_path)
    assert [entry["adapted"] is not None for entry in ran.entries] == [False, False, True]
    assert ran.entries[2]["moment"] == "before"
    replies = [
        run_client(e.task, e.method, ClientTask(c, 3, evaluate=True, adapt_epochs=4), ran.server, None)
        for c in range(3)
    ]
    found = [r.metrics["adapted"]["accuracy"] for r in replies]
    expected = float(sum(value * n for value, n in found) / sum(n for _, n in found))
    assert ran.entries[2]["adapted"]["weighted"] == expected  # type: ignore[index]
    plain = run_outcome(experiment("fedavg"), tmp_path / "plain")
    assert are_identical(ran.server, plain.server)
    assert all(entry["adapted"] is None for entry in plain.entries)


def test_perfedavg_counts_after_one_step_and_records_the_global_model_too(tmp_path: Path) -> None:
    ran = run_outcome(experiment("perfedavg(alpha=0.5)"), tmp_path)
    for entry in ran.entries:
        assert entry["moment"] == "adapted"
        assert entry["accuracy"] == entry["adapted"]
        assert entry["before"] is not None
    assert ran.entries[1]["before"] != ran.entries[1]["adapted"]


def test_newcomers_take_no_part_and_adapt_at_the_end(tmp_path: Path) -> None:
    data = make_samples([40, 44, 28, 36])
    e = experiment("fedavg+dbe", data, new_clients=1, adapt_epochs=2)
    ran = run_outcome(e, tmp_path)
    assert ran.clients.keys() == {0, 1, 2}
    store = RunStore.open(tmp_path)
    found = read_new_clients(store)
    moments = {row.moment for t in range(3) for row in store.records(t) if row.client == 3}
    store.close()
    assert moments == {"newcomers before", "newcomers adapted 1", "newcomers adapted"}
    assert found
    assert (found["round"], found["clients"], found["epochs"]) == (2, 1, 2)
    reply = run_client(
        e.task,
        e.method,
        ClientTask(3, 3, evaluate=True, adapt_epochs=2, is_new_client=True),
        ran.server,
        None,
    )
    for when, accuracy in (("before", found["before"]), ("adapted", found["adapted"])):
        assert accuracy
        assert accuracy["weighted"] == float(reply.metrics[when]["accuracy"][0])


@pytest.mark.parametrize("name", ["fedavg+dbe", "scaffold+dbe", "moon", "ditto", "apfl"])
def test_the_others_do_not_notice_who_comes_later(name: str, tmp_path: Path) -> None:
    three, four = make_samples([40, 44, 28]), make_samples([40, 44, 28, 36])
    ran = run_outcome(experiment(name, four, new_clients=1, participation=0.67), tmp_path / "four")
    alone = run_outcome(experiment(name, three, participation=0.67), tmp_path / "three")
    assert are_identical(ran.server, alone.server)
    assert ran.clients.keys() == alone.clients.keys()
    assert all(are_identical(ran.clients[c], alone.clients[c]) for c in alone.clients)


@pytest.mark.parametrize("name", ["ditto", "pfedme", "apfl", "fedrod"])
def test_a_newcomers_personal_model_begins_at_the_global_one(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    for key, value in strip_prefix(e.method.init_new_client(Context(e.task, 3), server), "personal/").items():
        assert torch.equal(value, server[key])
        assert not torch.equal(value, e.task.model.parameters[key])


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_a_newcomers_head_begins_at_the_start_where_the_server_has_none(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    private = strip_prefix(e.method.init_new_client(Context(e.task, 3), server), "personal/")
    assert are_identical(private, {n: e.task.model.parameters[n] for n in e.task.model.head})


def test_a_fomo_newcomer_chooses_among_the_others_models(tmp_path: Path) -> None:
    ran = run_outcome(experiment("fedfomo", make_samples([40, 44, 28, 36]), new_clients=1), tmp_path)
    store = RunStore.open(tmp_path)
    found = read_new_clients(store)
    assert found
    assert found["adapted"]
    assert found["adapted"]["weighted"] > 0
    store.close()
    assert ran.server["fomo/uploaded"].tolist() == [1, 1, 1, 0]


def test_who_cannot_join_late_is_told_why() -> None:
    with pytest.raises(InvalidInputError, match="apple needs join = 1 and no newcomers"):
        experiment("apple", new_clients=1)
    with pytest.raises(InvalidInputError, match="newcomers = 3; of 3 clients at least one must train"):
        experiment("fedavg", new_clients=3)


# A validation share


def test_validation_data_is_the_end_of_the_training_data() -> None:
    plain, held = experiment("fedavg").task.split, experiment("fedavg", validation=0.25).task.split
    for client in range(3):
        n = len(plain.train[client])
        assert len(held.validation[client]) == int(0.25 * n)
        whole = np.concatenate([held.train[client], held.validation[client]])
        assert np.array_equal(whole, plain.train[client])
        assert np.array_equal(held.test[client], plain.test[client])


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


def test_one_training_sample_is_not_held_out() -> None:
    split = experiment("fedavg", make_samples([60, 2]), validation=0.5).task.split
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
    losses = [entry["train_loss"] for entry in run_outcome(experiment(name), tmp_path).entries[1:]]
    assert all(loss is not None and 0 < loss < 10 for loss in losses)
