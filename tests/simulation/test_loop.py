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
from tests.small_runs import Outcome, are_identical, client_values, experiment, make_dataset, run_outcome


def count_hits(e: Experiment, state: dict[str, Tensor], client: int) -> int:
    """Return the number of correct predictions on a client's test data, by a plain forward pass."""
    indices = torch.from_numpy(e.task.split.test[client])
    logits = e.task.model.forward(state, e.task.dataset.inputs(e.task.dataset.x[indices])).logits
    return int((logits.argmax(1) == e.task.dataset.y[indices]).sum())


def test_result_t_is_the_model_after_t_aggregations(tmp_path: Path) -> None:
    """Result 0 is theta^0, result 1 the mean after one round; `after` is each client's trained model."""
    e = experiment("fedavg", rounds=1, eval_after=True)
    ran = run_outcome(e, tmp_path)
    start = e.task.model.parameters
    store = RunStore.open(tmp_path)
    accuracies = [client_values(store, 0), client_values(store, 1), client_values(store, 0, moment="after")]
    store.close()

    def accuracy(states: list[dict[str, Tensor]]) -> dict[int, float]:
        return {c: count_hits(e, states[c], c) / len(e.task.split.test[c]) for c in range(3)}

    trained = [ClientTrainer(e.task, 1, c).fit(start).params for c in range(3)]
    assert accuracies == [accuracy([start] * 3), accuracy([ran.server] * 3), accuracy(trained)]
    assert ran.rounds[0]["after"] is not None
    assert ran.rounds[1]["after"] is None  # no client has trained from this state
    assert [result["moment"] for result in ran.rounds] == ["before", "before"]


def test_results_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    """A run uses one thread, and restores the number of threads that torch was set to."""
    e = experiment("fedavg", make_dataset([400, 300]), batch_size=200, rounds=2)
    single_threaded = run_outcome(e, tmp_path / "single")
    torch.set_num_threads(2)
    try:
        multi_threaded = run_outcome(e, tmp_path / "multi")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert are_identical(single_threaded.server, multi_threaded.server)


def test_accuracy_is_weighted_by_test_samples(tmp_path: Path) -> None:
    e = experiment("fedavg", rounds=0)
    (result,) = run_outcome(e, tmp_path).rounds
    hits = [count_hits(e, e.task.model.parameters, c) for c in range(3)]
    sizes = [len(indices) for indices in e.task.split.test]  # 15, 11, 7
    accuracies = sorted(h / n for h, n in zip(hits, sizes, strict=True))
    assert result["accuracy"] is not None
    assert result["accuracy"]["weighted"] == pytest.approx(sum(hits) / 33)
    assert result["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 3)
    assert result["accuracy"]["worst_tenth"] == pytest.approx(accuracies[0])


def test_train_loss_is_the_mean_over_batches(tmp_path: Path) -> None:
    """Clients with 45, 33 and 21 samples train on 4, 3 and 2 batches of ten."""
    e = experiment("fedavg", rounds=1)
    ran = run_outcome(e, tmp_path / "training")
    total, samples = 0.0, 0
    for client in range(3):
        trainer = ClientTrainer(e.task, 1, client)
        trainer.fit(e.task.model.parameters)
        client_total, client_samples = trainer.losses["shared"]
        total += client_total
        samples += client_samples
    assert samples == 90
    assert ran.rounds[1]["train_loss"] == pytest.approx(total / 90)
    assert ran.rounds[0]["train_loss"] is None


@pytest.mark.parametrize("spec", ["all", "cohort", "sample:2"])
def test_evaluators_of_the_next_round_evaluate_a_result(spec: str, tmp_path: Path) -> None:
    """Result t is evaluated by the evaluators of round t + 1, also after the last round."""
    e = experiment("fedavg+prbm", make_dataset([24] * 5), participation=0.4, eval=spec)
    run_outcome(e, tmp_path)
    store = RunStore.open(tmp_path)
    for round_ in range(3):
        cohort = seeds.sample_cohort(0, round_ + 1, 5, 0.4)
        expected = {
            "all": range(5),
            "cohort": cohort,
            "sample:2": sample_evaluators("sample:2", 0, round_ + 1, 5, cohort),
        }
        assert list(client_values(store, round_)) == list(expected[spec])
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
    assert all(len(cohort) == 3 for cohort in run_and_read_cohorts("fedavg", 0))


@pytest.mark.parametrize("wrong", ["everyone", "sample:0", "sample:", "sample:-1"])
def test_invalid_eval_is_reported(wrong: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"eval = '{wrong}'; allowed: all, cohort, sample:M"):
        sample_evaluators(wrong, 0, 1, 5, [0])


def test_patience_stops_training(tmp_path: Path) -> None:
    """No prediction changes with a tiny learning rate, so the best result is 0.

    After round t, results 0 to t - 1 are known. The published rule stops if their number minus the index of
    the best exceeds the patience: 3 - 0 > 2.
    """
    ran = run_outcome(experiment("fedavg", lr=1e-12, rounds=50, patience=2), tmp_path)
    assert [result["round"] for result in ran.rounds] == [0, 1, 2, 3]
    assert all(result["accuracy"] for result in ran.rounds)


def test_best_server_state_is_retained(tmp_path: Path) -> None:
    e = experiment("fedavg", rounds=6, lr=1.0)
    ran = run_outcome(e, tmp_path)
    curve = [result["accuracy"]["weighted"] for result in ran.rounds if result["accuracy"]]
    store = RunStore.open(tmp_path)
    best = store.server_state("best")
    store.close()
    hits = sum(count_hits(e, best, c) for c in range(3))
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
    """Its checksum is valid, so names, shapes and types are compared."""
    e = experiment("fedavg", rounds=1)
    good = run_outcome(e, tmp_path)
    bias = good.server["fc.bias"]
    rest = {name: t for name, t in good.server.items() if name != "fc.bias"}
    for wrong, actual in [
        (rest, "none"), (rest | {"bias": bias}, "none"),
        (rest | {"fc.bias": bias[:3]}, r"\(3,\) torch.float32"),
        (rest | {"fc.bias": bias.double()}, r"\(10,\) torch.float64"),
    ]:  # fmt: skip
        store = RunStore.open(tmp_path)
        with store.transaction(1):
            store.write_server_state("last", wrong)
        store.close()
        message = rf"expected 'fc.bias' of \(10,\) torch.float32, got {actual}; restore it from a copy"
        with pytest.raises(StoreError, match=message):
            run_outcome(experiment("fedavg", rounds=2), tmp_path)


def test_resumed_run_drops_the_final_evaluation(tmp_path: Path) -> None:
    """Result 1 is fine-tuned only while it is the last."""
    assert run_outcome(experiment("fedavg+ft", rounds=1), tmp_path).rounds[1]["adapted"]
    resumed = run_outcome(experiment("fedavg+ft", rounds=2), tmp_path).rounds
    uninterrupted = run_outcome(experiment("fedavg+ft", rounds=2), tmp_path / "uninterrupted").rounds
    assert [result["adapted"] is not None for result in resumed] == [False, False, True]
    assert [result["accuracy"] for result in resumed] == [result["accuracy"] for result in uninterrupted]


class BatchNormModel(nn.Module):
    """A traced module with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn, self.fc = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        return self.fc(torch.relu(self.bn(self.fc1(x.flatten(1)))))


def run_with_batch_norm(folder: Path, name: str, **options: Any) -> tuple[Experiment, Outcome]:
    config = Config(**{"partition": "natural", "rounds": 2, "lr": 0.1, **options})
    e = resolve(name, config, dataset=make_dataset(), model=lambda shape, classes: BatchNormModel())
    return e, run_outcome(e, folder)


def test_batch_norm_statistics_stay_local(tmp_path: Path) -> None:
    """Each client has statistics of all its batches in two rounds; the server has none."""
    e, ran = run_with_batch_norm(tmp_path, "fedavg", bn_buffers="local")
    assert ran.server.keys() == e.task.model.parameters.keys()
    batches = {c: ran.clients[c][f"{BUFFER}shared/bn.num_batches_tracked"].item() for c in ran.clients}
    assert batches == {0: 2 * 4, 1: 2 * 3, 2: 2 * 2}
    means = [ran.clients[c][f"{BUFFER}shared/bn.running_mean"] for c in range(3)]
    assert not torch.equal(means[0], means[1])


def test_batch_norm_statistics_are_averaged(tmp_path: Path) -> None:
    """Their mean has weights n_i/n, as for parameters; clients keep none."""
    e, ran = run_with_batch_norm(tmp_path, "fedavg", bn_buffers="average")
    assert ran.clients == {}
    assert {n for n in ran.server if n.startswith(BUFFER)} == {
        BUFFER + n for n in ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked")
    }
    first_round = run_with_batch_norm(tmp_path / "first", "fedavg", bn_buffers="average", rounds=1)[1]
    expected = torch.zeros(16)
    for client, weight in enumerate((45, 33, 21)):
        trainer = ClientTrainer(e.task, 1, client)
        trainer.fit(e.task.model.parameters)
        expected += weight / 99 * trainer.buffers("shared")["bn.running_mean"]
    torch.testing.assert_close(first_round.server[f"{BUFFER}bn.running_mean"], expected)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_batch_norm_with_setup_on_every_engine(buffers: str, tmp_path: Path) -> None:
    """MR's epoch before round 1 updates the statistics, as in the published code."""
    e, ran = run_with_batch_norm(tmp_path / "serial", "fedavg+dbe", bn_buffers=buffers)
    pool = run_outcome(e, tmp_path / "pool", "pool(workers=2)")
    assert are_identical(ran.server, pool.server)
    assert all(are_identical(ran.clients[c], pool.clients[c]) for c in ran.clients)
    if buffers == "average":
        count = ran.server[f"{BUFFER}bn.num_batches_tracked"]
    else:
        count = ran.clients[0][f"{BUFFER}shared/bn.num_batches_tracked"]
    # client 0: three epochs of 4 batches; averaged: (45 * 4 + 33 * 3 + 21 * 2) / 99 = 3.24 each time, rounded
    assert count.item() == (12 if buffers == "local" else 9)
