"""The round loop: results of rounds, evaluated clients, patience, and BatchNorm statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddbe import seeds
from feddbe.config.options import Config
from feddbe.errors import DivergenceError, InvalidInputError, StoreError
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import RunStore
from feddbe.simulation.client import BUFFER
from feddbe.simulation.loop import sample_evaluators
from feddbe.training.trainer import ClientTrainer
from tests.federation import Outcome, are_identical, client_values, experiment, make_dataset, run_outcome


def correct(e: Experiment, state: dict[str, Tensor], client: int, on: str = "test") -> int:
    """Hits of these parameters on one client's data, by a plain forward pass."""
    rows = torch.from_numpy(getattr(e.task.split, on)[client])
    logits = e.task.model.forward(state, e.task.dataset.inputs(e.task.dataset.x[rows])).logits
    return int((logits.argmax(1) == e.task.dataset.y[rows]).sum())


def test_result_t_is_the_model_after_t_aggregations(tmp_path: Path) -> None:
    """Entry 0 is theta^0, entry 1 the average after one round; `after` is each client's own trained model."""
    e = experiment("fedavg", rounds=1, eval_after=True)
    ran = run_outcome(e, tmp_path)
    start = e.task.model.parameters
    store = RunStore.open(tmp_path)
    accuracies = [client_values(store, 0), client_values(store, 1), client_values(store, 0, moment="after")]
    store.close()

    def accuracy(states: list[dict[str, Tensor]]) -> dict[int, float]:
        return {c: correct(e, states[c], c) / len(e.task.split.test[c]) for c in range(3)}

    trained = [ClientTrainer(e.task, 1, c).fit(start).params for c in range(3)]
    assert accuracies == [accuracy([start] * 3), accuracy([ran.server] * 3), accuracy(trained)]
    assert ran.rounds[0]["after"] is not None
    assert ran.rounds[1]["after"] is None  # no client has trained from this state
    assert [entry["moment"] for entry in ran.rounds] == ["before", "before"]


def test_results_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    """A run is on one thread whatever torch is set to, and leaves that as it was."""
    e = experiment("fedavg", make_dataset([400, 300]), batch_size=200, rounds=2)
    single_threaded = run_outcome(e, tmp_path / "one")
    torch.set_num_threads(2)
    try:
        two = run_outcome(e, tmp_path / "two")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert are_identical(single_threaded.server, two.server)


def test_accuracy_is_weighted_by_test_samples(tmp_path: Path) -> None:
    e = experiment("fedavg", rounds=0)
    (entry,) = run_outcome(e, tmp_path).rounds
    hits = [correct(e, e.task.model.parameters, c) for c in range(3)]
    sizes = [len(rows) for rows in e.task.split.test]  # 15, 11, 7
    accuracies = sorted(h / n for h, n in zip(hits, sizes, strict=True))
    assert entry["accuracy"] is not None
    assert entry["accuracy"]["weighted"] == pytest.approx(sum(hits) / 33)
    assert entry["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 3)
    assert entry["accuracy"]["worst_tenth"] == pytest.approx(accuracies[0])


def test_train_loss_is_the_mean_over_batches(tmp_path: Path) -> None:
    """Training: over the batches as they were trained on (45, 33, 21 samples make 4, 3, 2 batches of ten)."""
    e = experiment("fedavg", rounds=1)
    ran = run_outcome(e, tmp_path / "training")
    total, samples = 0.0, 0
    for client in range(3):
        local = ClientTrainer(e.task, 1, client)
        local.fit(e.task.model.parameters)
        total, samples = total + local.losses["shared"][0], samples + local.losses["shared"][1]
    assert samples == 90
    assert ran.rounds[1]["train_loss"] == pytest.approx(total / 90)
    assert ran.rounds[0]["train_loss"] is None


@pytest.mark.parametrize("spec", ["all", "cohort", "sample:2"])
def test_evaluated_clients(spec: str, tmp_path: Path) -> None:
    """Those of the call in which the entry is evaluated: the next round's, also for the last entry."""
    e = experiment("fedavg+prbm", make_dataset([24] * 5), participation=0.4, eval=spec)
    run_outcome(e, tmp_path)
    store = RunStore.open(tmp_path)
    for entry in range(3):
        cohort = seeds.sample_cohort(0, entry + 1, 5, 0.4)
        expected = {
            "all": range(5),
            "cohort": cohort,
            "sample:2": sample_evaluators("sample:2", 0, entry + 1, 5, cohort),
        }
        assert list(client_values(store, entry)) == list(expected[spec])
    store.close()


def test_cohort_depends_on_the_seed_only(tmp_path: Path) -> None:
    def run_and_read_cohorts(name: str, seed: int) -> list[list[int]]:
        folder = tmp_path / f"{name}{seed}"
        run_outcome(experiment(name, make_dataset([24] * 6), participation=0.5, rounds=3, seed=seed), folder)
        store = RunStore.open(folder)
        cohorts = [list(client_values(store, t, "bytes_up", "training")) for t in (1, 2, 3)]
        store.close()
        return cohorts

    assert (
        run_and_read_cohorts("fedavg", 0)
        == run_and_read_cohorts("fedavg+dbe", 0)
        == [seeds.sample_cohort(0, t, 6, 0.5) for t in (1, 2, 3)]
    )
    assert run_and_read_cohorts("fedavg", 0) != run_and_read_cohorts("fedavg", 1)
    assert all(len(round) == 3 for round in run_and_read_cohorts("fedavg", 0))


@pytest.mark.parametrize("wrong", ["everyone", "sample:0", "sample:", "sample:-1"])
def test_invalid_eval_is_reported(wrong: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"eval = '{wrong}'; allowed: all, cohort, sample:M"):
        sample_evaluators(wrong, 0, 1, 5, [0])


def test_patience_stops_training(tmp_path: Path) -> None:
    """lr so small that no prediction changes: the best is entry 0. After round t, entries 0..t-1 are known,
    and the published rule stops when their number less the best one's place is above the patience: 3 - 0 >
    2."""
    ran = run_outcome(experiment("fedavg", lr=1e-12, rounds=50, patience=2), tmp_path)
    assert [entry["round"] for entry in ran.rounds] == [0, 1, 2, 3]
    assert all(entry["accuracy"] for entry in ran.rounds)


def test_best_server_state_is_kept(tmp_path: Path) -> None:
    e = experiment("fedavg", rounds=6, lr=1.0)
    ran = run_outcome(e, tmp_path)
    curve = [entry["accuracy"]["weighted"] for entry in ran.rounds if entry["accuracy"]]
    store = RunStore.open(tmp_path)
    best = store.server_state("best")
    store.close()
    hits = sum(correct(e, best, c) for c in range(3))
    assert hits / 33 == pytest.approx(max(curve))


def test_divergence_keeps_the_last_complete_round(tmp_path: Path) -> None:
    good = run_outcome(experiment("fedavg", rounds=2), tmp_path)
    with pytest.raises(DivergenceError, match=r"loss = (nan|inf) at client \d in round 3"):
        run_outcome(experiment("fedavg", rounds=4, lr=1e20), tmp_path)
    store = RunStore.open(tmp_path)
    assert store.last_round() == 2
    assert are_identical(store.server_state(), good.server)
    assert store.round_results() == good.rounds
    store.close()


def test_server_state_of_another_model_is_rejected(tmp_path: Path) -> None:
    """Checksums do not help where a state was written as it is."""
    e = experiment("fedavg", rounds=1)
    good = run_outcome(e, tmp_path)
    bias = good.server["fc.bias"]
    rest = {name: t for name, t in good.server.items() if name != "fc.bias"}
    for wrong, has in [
        (rest, "none"), (rest | {"bias": bias}, "none"),
        (rest | {"fc.bias": bias[:3]}, r"\(3,\) torch.float32"),
        (rest | {"fc.bias": bias.double()}, r"\(10,\) torch.float64"),
    ]:  # fmt: skip
        store = RunStore.open(tmp_path)
        with store.transaction(1):
            store.write_server_state("last", wrong)
        store.close()
        with pytest.raises(StoreError, match=rf"should have 'fc.bias' of \(10,\) .*, and has {has}; restore"):
            run_outcome(experiment("fedavg", rounds=2), tmp_path)


def test_resumed_run_drops_the_final_evaluation(tmp_path: Path) -> None:
    """Entry 1 was the last, and fine-tuned: in a run of two rounds it is not."""
    assert run_outcome(experiment("fedavg+ft", rounds=1), tmp_path).rounds[1]["adapted"]
    entries = run_outcome(experiment("fedavg+ft", rounds=2), tmp_path).rounds
    whole = run_outcome(experiment("fedavg+ft", rounds=2), tmp_path / "whole").rounds
    assert [e["adapted"] is not None for e in entries] == [False, False, True]
    assert [e["accuracy"] for e in entries] == [e["accuracy"] for e in whole]


class WithBatchNorm(nn.Module):
    """A traced module with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn, self.fc = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        return self.fc(torch.relu(self.bn(self.fc1(x.flatten(1)))))


def with_batch_norm(folder: Path, name: str, **options: Any) -> tuple[Experiment, Outcome]:
    chosen = Config(**{"partition": "natural", "rounds": 2, "lr": 0.1, **options})
    e = resolve(name, chosen, dataset=make_dataset(), model=lambda shape, classes: WithBatchNorm())
    return e, run_outcome(e, folder)


def test_batch_norm_statistics_stay_local(tmp_path: Path) -> None:
    """Each client's own, over all its batches of two rounds; the server has none of them."""
    e, ran = with_batch_norm(tmp_path, "fedavg", bn_buffers="local")
    assert ran.server.keys() == e.task.model.parameters.keys()
    batches = {c: ran.clients[c][f"{BUFFER}shared/bn.num_batches_tracked"].item() for c in ran.clients}
    assert batches == {0: 2 * 4, 1: 2 * 3, 2: 2 * 2}
    means = [ran.clients[c][f"{BUFFER}shared/bn.running_mean"] for c in range(3)]
    assert not torch.equal(means[0], means[1])


def test_batch_norm_statistics_are_averaged(tmp_path: Path) -> None:
    """After one round: n_i/n weighted like the parameters; nothing of them stays with the clients."""
    e, ran = with_batch_norm(tmp_path, "fedavg", bn_buffers="average")
    assert ran.clients == {}
    assert {n for n in ran.server if n.startswith(BUFFER)} == {
        BUFFER + n for n in ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked")
    }
    once = with_batch_norm(tmp_path / "once", "fedavg", bn_buffers="average", rounds=1)[1]
    expected = torch.zeros(16)
    for client, weight in enumerate((45, 33, 21)):
        local = ClientTrainer(e.task, 1, client)
        local.fit(e.task.model.parameters)
        expected += weight / 99 * local.buffers("shared")["bn.running_mean"]
    torch.testing.assert_close(once.server[f"{BUFFER}bn.running_mean"], expected)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_batch_norm_with_setup_on_every_engine(buffers: str, tmp_path: Path) -> None:
    """MR's epoch before round 1 moves the statistics (as in the published code), on serial and pool alike."""
    e, ran = with_batch_norm(tmp_path / "serial", "fedavg+dbe", bn_buffers=buffers)
    pool = run_outcome(e, tmp_path / "pool", "pool(workers=2)")
    assert are_identical(ran.server, pool.server)
    assert all(are_identical(ran.clients[c], pool.clients[c]) for c in ran.clients)
    holder = ran.server if buffers == "average" else ran.clients[0]
    count = holder[BUFFER + ("" if buffers == "average" else "shared/") + "bn.num_batches_tracked"]
    # client 0: three epochs of 4 batches; averaged: (45 * 4 + 33 * 3 + 21 * 2) / 99 = 3.24 each time, rounded
    assert count.item() == (12 if buffers == "local" else 9)
