"""What comes after the last round (fine-tuning, newcomers), and how a round is chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from feddbe import api
from feddbe.config.options import Config
from feddbe.errors import BadInput
from feddbe.methods.registry import parse
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import Store
from feddbe.runs.summary import newcomers
from feddbe.simulation.client import Job, perform
from feddbe.state import State, matches, strip_prefix
from feddbe.training.task import Context
from feddbe.training.trainer import Local
from tests.federation import experiment, outcome, same_bits, samples


def final(name: str, folder: Path) -> tuple[Experiment, State]:
    e = experiment(name)
    return e, outcome(e, folder).server


def adapted(e: Experiment, server: State, epochs: int = 3, client: int = 0) -> tuple[Local, State]:
    """What a client without a private state deploys after it adapted to what the server has."""
    task = e.task.adapting(epochs)
    local, ctx = Local(task, 3, client), Context(task, 3)
    return local, e.method.adapt(ctx, local, server, e.method.newcomer(ctx, server))


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
    ran = outcome(e, tmp_path)
    model = {n: ran.server[n] for n in e.task.model.parameters}
    task = e.task.adapting(3)
    ctx = Context(task, 3)
    fixed = {n: t for n, t in ran.server.items() if matches(n, e.method.constant)}
    for client in range(3):
        private = ran.clients.get(client) or e.method.client_init(ctx)
        message = e.method.down(ctx, ran.server, client) | fixed
        tuned = e.method.tune(ctx, Local(task, 3, client), message, private)
        assert same_bits(tuned, Local(e.task, 3, client).fit(model, epochs=3).params)


@pytest.mark.parametrize("name", ["scaffold", "fedprox(mu=1)", "moon"])
def test_newcomers_keep_the_methods_own_training(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    _, new = adapted(e, server)
    model = {n: server[n] for n in e.task.model.parameters}
    assert not same_bits(new, Local(e.task, 3, 0).fit(model, epochs=3).params)


@pytest.mark.parametrize("name", ["fedavg", "perfedavg", "fedprox(mu=0)"])
def test_a_newcomer_without_terms_of_the_methods_trains_plainly(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    _, new = adapted(e, server)
    assert same_bits(new, Local(e.task, 3, 0).fit(server, epochs=3).params)


def test_fine_tuning_with_prbm_trains_the_vector_too(tmp_path: Path) -> None:
    e = experiment("fedavg+dbe+ft")
    ran = outcome(e, tmp_path)
    local = Local(e.task, 3, 1)
    e.method.tune(Context(e.task, 3), local, ran.server, ran.clients[1])
    assert not torch.equal(local.extras["prbm"].value, ran.clients[1]["prbm"])


def test_fedbabu_tunes_body_and_head_from_the_global_body_without_mr(tmp_path: Path) -> None:
    e, server = final("fedbabu+mr", tmp_path)
    _, tuned = adapted(e, server)
    body = {n: server[n] for n in e.task.model.body}
    expected = Local(e.task, 3, 0).fit(e.task.model.parameters | body, epochs=3).params
    assert same_bits(tuned, expected)
    assert not any(torch.equal(tuned[n], e.task.model.parameters[n]) for n in e.task.model.head)


def test_dbe_adapts_with_a_new_translation_and_the_servers_mean(tmp_path: Path) -> None:
    e, server = final("fedavg+dbe", tmp_path)
    local, tuned = adapted(e, server)
    with_mr = Local(e.task, 3, 0).fit({n: t for n, t in server.items() if n != "mean"}, epochs=3).params
    assert local.extras["prbm"].value.abs().sum() > 0
    assert not same_bits(tuned, with_mr)
    again, _ = adapted(e, server)
    assert torch.equal(local.extras["prbm"].value, again.extras["prbm"].value)


def test_adapted_is_recorded_where_the_method_has_it_and_starts_from_the_last_server(tmp_path: Path) -> None:
    e = experiment("fedavg+ft", adapt_epochs=4)
    ran = outcome(e, tmp_path)
    assert [entry["adapted"] is not None for entry in ran.entries] == [False, False, True]
    assert ran.entries[2]["when"] == "before"
    replies = [
        perform(e.task, e.method, Job(c, 3, evaluate=True, adapt=4), ran.server, None) for c in range(3)
    ]
    found = [r.measured["adapted"]["accuracy"] for r in replies]
    expected = float(sum(value * n for value, n in found) / sum(n for _, n in found))
    assert ran.entries[2]["adapted"]["weighted"] == expected  # type: ignore[index]
    plain = outcome(experiment("fedavg"), tmp_path / "plain")
    assert same_bits(ran.server, plain.server)
    assert all(entry["adapted"] is None for entry in plain.entries)


def test_perfedavg_counts_after_one_step_and_records_the_global_model_too(tmp_path: Path) -> None:
    ran = outcome(experiment("perfedavg(alpha=0.5)"), tmp_path)
    for entry in ran.entries:
        assert entry["when"] == "adapted"
        assert entry["accuracy"] == entry["adapted"]
        assert entry["before"] is not None
    assert ran.entries[1]["before"] != ran.entries[1]["adapted"]


def test_newcomers_take_no_part_and_adapt_at_the_end(tmp_path: Path) -> None:
    data = samples([40, 44, 28, 36])
    e = experiment("fedavg+dbe", data, newcomers=1, adapt_epochs=2)
    ran = outcome(e, tmp_path)
    assert ran.clients.keys() == {0, 1, 2}
    store = Store.open(tmp_path)
    found = newcomers(store)
    moments = {row.moment for t in range(3) for row in store.rows(t) if row.client == 3}
    store.close()
    assert moments == {"newcomers before", "newcomers adapted 1", "newcomers adapted"}
    assert found
    assert (found["round"], found["clients"], found["epochs"]) == (2, 1, 2)
    reply = perform(e.task, e.method, Job(3, 3, evaluate=True, adapt=2, newcomer=True), ran.server, None)
    for when, accuracy in (("before", found["before"]), ("adapted", found["adapted"])):
        assert accuracy
        assert accuracy["weighted"] == float(reply.measured[when]["accuracy"][0])


@pytest.mark.parametrize("name", ["fedavg+dbe", "scaffold+dbe", "moon", "ditto", "apfl"])
def test_the_others_do_not_notice_who_comes_later(name: str, tmp_path: Path) -> None:
    three, four = samples([40, 44, 28]), samples([40, 44, 28, 36])
    ran = outcome(experiment(name, four, newcomers=1, join=0.67), tmp_path / "four")
    alone = outcome(experiment(name, three, join=0.67), tmp_path / "three")
    assert same_bits(ran.server, alone.server)
    assert ran.clients.keys() == alone.clients.keys()
    assert all(same_bits(ran.clients[c], alone.clients[c]) for c in alone.clients)


@pytest.mark.parametrize("name", ["ditto", "pfedme", "apfl", "fedrod"])
def test_a_newcomers_personal_model_begins_at_the_global_one(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    for key, value in strip_prefix(e.method.newcomer(Context(e.task, 3), server), "personal/").items():
        assert torch.equal(value, server[key])
        assert not torch.equal(value, e.task.model.parameters[key])


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_a_newcomers_head_begins_at_the_start_where_the_server_has_none(name: str, tmp_path: Path) -> None:
    e, server = final(name, tmp_path)
    private = strip_prefix(e.method.newcomer(Context(e.task, 3), server), "personal/")
    assert same_bits(private, {n: e.task.model.parameters[n] for n in e.task.model.head})


def test_a_fomo_newcomer_chooses_among_the_others_models(tmp_path: Path) -> None:
    ran = outcome(experiment("fedfomo", samples([40, 44, 28, 36]), newcomers=1), tmp_path)
    store = Store.open(tmp_path)
    found = newcomers(store)
    assert found
    assert found["adapted"]
    assert found["adapted"]["weighted"] > 0
    store.close()
    assert ran.server["fomo/uploaded"].tolist() == [1, 1, 1, 0]


def test_who_cannot_join_late_is_told_why() -> None:
    with pytest.raises(BadInput, match="apple needs join = 1 and no newcomers"):
        experiment("apple", newcomers=1)
    with pytest.raises(BadInput, match="newcomers = 3; of 3 clients at least one must train"):
        experiment("fedavg", newcomers=3)


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
        store = Store.open(Path(document["folder"]))
        kept = store._db.execute("SELECT round FROM states WHERE kind = 'best'").fetchone()[0]
        store.close()
        assert kept == best["round"]


def test_one_training_sample_is_not_held_out() -> None:
    split = experiment("fedavg", samples([60, 2]), validation=0.5).task.split
    assert (len(split.train[1]), len(split.validation[1])) == (1, 0)


def test_options_of_other_parts_follow_the_variant() -> None:
    """What the published code did to other methods, where it is an option."""
    for name, option, value in [
        ("fedrep", "head_epochs", 1), ("pfedme", "evaluate", "w"), ("fedgen", "lite", True)
    ]:  # fmt: skip
        assert getattr(experiment(name, variant="official").method, option) == value
        assert getattr(parse(name), option) != value
    assert Config().variant == "default"


@pytest.mark.parametrize(
    "name", ["perfedavg", "pfedme", "apple", "apfl", "fedgen", "fedfomo", "ditto", "fedrod"]
)
def test_every_method_has_a_training_loss(name: str, tmp_path: Path) -> None:
    """Of methods with steps of their own too."""
    losses = [entry["train_loss"] for entry in outcome(experiment(name), tmp_path).entries[1:]]
    assert all(loss is not None and 0 < loss < 10 for loss in losses)
