"""Contract of engines: pending states become valid with the round, and results may be missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from feddbe.errors import FeddbeError, StoreError
from feddbe.methods.registry import parse_method
from feddbe.metrics.client_values import ALL
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import RETAINED, RunStore
from feddbe.simulation.client import ClientResult, ClientTask, MissingClient
from feddbe.simulation.engines.base import Broadcasts, ClientStates, Engine
from feddbe.simulation.loop import RoundLoop
from feddbe.state import Receipt, decode, sha256
from feddbe.training.task import Context
from tests.small_runs import (
    COMBINATIONS,
    EngineWithMissingClients,
    RemoteStateEngine,
    client_values,
    experiment,
    make_dataset,
    run_outcome,
    run_recorded,
)

all_combinations = pytest.mark.parametrize("name", COMBINATIONS)


def read_run(folder: Path) -> dict[str, Any]:
    """Return all contents of a run except times and counts of missing clients."""
    store = RunStore.open(folder)
    round_results = [{**result, "seconds": 0} for result in store.round_results()]
    records = [record for round_ in range(len(round_results)) for record in store.records(round_)]
    contents = {
        "hashes": store.hashes(),
        "round_results": round_results,
        "records": [r for r in records if "seconds" not in r.name and r.name != "missing"],
        "new_clients": store.meta("new_clients"),
        "best": {client: retained_sha256(store, client) for client in range(10)},
    }
    store.close()
    return contents


def retained_sha256(store: RunStore, client: int) -> str | None:
    """Return the hash of a client's state that is retained for the best round, or None."""
    kept = store.state(RETAINED["private"], client)
    if kept is None:
        return None
    receipt = Receipt.decode(kept)
    return receipt.sha256 if receipt else sha256(decode(kept))


def missing_by_round(store: RunStore) -> dict[int, float | None]:
    """Return the number of missing clients of each round that has any."""
    records = [record for record in store.aggregate_records() if record.name == "missing"]
    return {record.round: record.value for record in records if record.value}


class FailingEngine(RemoteStateEngine):
    """Engine without missing clients that fails once in each round, after all states are pending."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.failed: set[int] = set()

    def missing_client(self, round_: int) -> int:
        return -1

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]:
        yield from super().run(tasks, messages, states)
        if any(client_task.work != "none" for client_task in tasks) and tasks[0].round not in self.failed:
            self.failed.add(tasks[0].round)
            raise ConnectionError("the connection was closed")


@all_combinations
def test_states_of_a_failed_round_are_not_used(name: str, tmp_path: Path) -> None:
    """Each round fails after its clients wrote pending states, and is repeated from the states before it."""
    e = experiment(name)
    run_outcome(e, tmp_path / "serial")
    expected = read_run(tmp_path / "serial")
    engine = FailingEngine(e)
    failures = 0
    while True:
        try:
            run_recorded(e, tmp_path / "remote", engine)
            break
        except ConnectionError:
            failures += 1
    assert failures == 2 + e.method.has_setup
    assert read_run(tmp_path / "remote") == expected
    assert bool(engine.kept) == bool(expected["hashes"][1])


def test_receipt_is_an_error_for_another_engine(tmp_path: Path) -> None:
    engine = FailingEngine(experiment("ditto", rounds=1))
    engine.failed = {1}
    run_recorded(experiment("ditto", rounds=1), tmp_path, engine)
    with pytest.raises(
        StoreError, match=r"only the receipt of a state of round 1 .* the engine that started"
    ):
        run_outcome(experiment("ditto", rounds=2), tmp_path)


@all_combinations
@pytest.mark.parametrize("kind", [EngineWithMissingClients, RemoteStateEngine])
def test_round_with_missing_clients_equals_a_round_with_a_smaller_cohort(
    name: str, kind: type[EngineWithMissingClients], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States, bytes and accuracies are equal in the setup, in rounds and in the final evaluation."""
    e = experiment(name, rounds=3, eval="cohort", min_replies=2)
    engine = kind(e)
    assert len({engine.missing_client(round_) for round_ in range(5)}) > 1
    if parse_method(name).needs_all_clients:
        with pytest.raises(FeddbeError, match=r"client \d did not reply .*; apple needs all clients: "):
            run_recorded(e, tmp_path, engine)
        return
    run_recorded(e, tmp_path / "missing", engine)
    store = RunStore.open(tmp_path / "missing")
    rounds = range(0 if e.method.has_setup else 1, 4)
    assert missing_by_round(store) == dict.fromkeys(rounds, 1)
    store.close()

    sample_cohort = RoundLoop._sample_cohort

    def sample_smaller_cohort(loop: RoundLoop, round_: int) -> list[int]:
        return [client for client in sample_cohort(loop, round_) if client != engine.missing_client(round_)]

    monkeypatch.setattr(RoundLoop, "_sample_cohort", sample_smaller_cohort)
    run_outcome(e, tmp_path / "smaller")
    assert read_run(tmp_path / "missing") == read_run(tmp_path / "smaller")


class DisconnectedClients(EngineWithMissingClients):
    """Engine whose clients 1 and 3 never reply."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.disconnected = {1, 3}

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]:
        for client_task in tasks:
            if client_task.client in self.disconnected:
                yield MissingClient(client_task.client, "no connection")
            else:
                yield from self.serial.run([client_task], messages, states)


def test_missing_clients_have_no_records_and_receive_constants_with_their_first_reply(tmp_path: Path) -> None:
    """Two of four clients reply in rounds 0 to 2; in round 3 all do, and the others receive MR's mean."""
    data = make_dataset([40, 40, 30, 24])
    partial = experiment("scaffold+dbe", data, rounds=2, min_replies=2)
    engine = DisconnectedClients(partial)
    ran = run_recorded(partial, tmp_path, engine)
    assert ran.clients.keys() == {0, 2}
    store = RunStore.open(tmp_path)
    for round_ in range(3):
        assert {record.client for record in store.records(round_)} == {0, 2, ALL}
    assert missing_by_round(store) == {0: 2, 1: 2, 2: 2}
    store.close()
    engine.disconnected = set()
    whole = run_recorded(experiment("scaffold+dbe", data, rounds=3), tmp_path, engine)
    assert whole.clients.keys() == {0, 1, 2, 3}
    store = RunStore.open(tmp_path)
    bytes_down = [value or 0 for value in client_values(store, 3, "bytes_down", "training").values()]
    store.close()
    mean = 64 * 4
    assert [size - bytes_down[0] for size in bytes_down] == [0, mean, 0, mean]


@pytest.mark.parametrize("min_replies", [None, 3])
def test_too_few_replies_is_an_error_and_the_round_is_not_written(
    min_replies: int | None, tmp_path: Path
) -> None:
    data = make_dataset([40, 40, 30, 24])
    good = run_outcome(experiment("fedavg+dbe", data, rounds=1), tmp_path)
    e = experiment("fedavg+dbe", data, rounds=2, min_replies=min_replies)
    required = "3" if min_replies else "all"
    message = rf"client 1 did not reply in round 2 \(no connection\): 2 of 4 replied, required: {required} "
    with pytest.raises(FeddbeError, match=message) as error:
        run_recorded(e, tmp_path, DisconnectedClients(e))
    assert "\n" not in str(error.value)
    store = RunStore.open(tmp_path)
    assert (store.last_round(), missing_by_round(store)) == (1, {})
    assert dict(store.private_states()).keys() == good.clients.keys()
    store.close()
    whole = run_outcome(e, tmp_path / "whole")
    resumed = run_outcome(e, tmp_path)
    assert read_run(tmp_path)["hashes"] == read_run(tmp_path / "whole")["hashes"]
    assert len(resumed.rounds) == len(whole.rounds) == 3


def test_a_missing_client_is_named(tmp_path: Path) -> None:
    data = replace(make_dataset([40, 40, 30, 24]), client_names=("Bonn", "Lyon", "Turin", "Ulm"))
    e = experiment("fedavg", data, rounds=2)
    with pytest.raises(FeddbeError, match=r"^client 'Lyon' did not reply in round \d"):
        run_recorded(e, tmp_path, DisconnectedClients(e))


def test_too_few_replies_in_the_setup_is_an_error(tmp_path: Path) -> None:
    e = experiment("fedgen", make_dataset([40, 40, 30, 24]), min_replies=3)
    with pytest.raises(FeddbeError, match=r"in round 0 .*: 2 of 4 replied, required: 3"):
        run_recorded(e, tmp_path, DisconnectedClients(e))
    store = RunStore.open(tmp_path)
    assert store.last_round() == -1
    store.close()


def test_fedgen_does_not_train_its_generator_with_unknown_label_counts(tmp_path: Path) -> None:
    """Clients 0 and 2 reply in the setup, the two others in round 1: their label counts are unknown."""
    e = experiment("fedgen(steps=2)", make_dataset([40, 40, 30, 24]), rounds=1, min_replies=1)

    class AlternatingClients(DisconnectedClients):
        def run(
            self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
        ) -> Iterator[Any]:
            self.disconnected = {0, 2} if tasks[0].round else {1, 3}
            return super().run(tasks, messages, states)

    ran = run_recorded(e, tmp_path, AlternatingClients(e))
    start = e.method.server_init(Context(e.task, 0))
    assert all(bool((ran.server[n] == t).all()) for n, t in start.items() if n.startswith("generator/"))
    assert not bool((ran.server["fc.bias"] == start["fc.bias"]).all())


def test_min_replies_counts_only_clients_that_train(tmp_path: Path) -> None:
    """Half of the clients train and one evaluator is missing; the adaptation lacks one of two new clients."""
    options: dict[str, Any] = {
        "dataset": make_dataset([24] * 6),
        "rounds": 1,
        "participation": 0.5,
        "new_clients": 2,
    }
    e = experiment("fedavg", **options, min_replies=2)

    class DisconnectedEvaluators(DisconnectedClients):
        def run(
            self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
        ) -> Iterator[Any]:
            evaluators = [t.client for t in tasks if t.work == "none" and not t.is_new_client]
            self.disconnected = {5, *evaluators[:1]}
            return super().run(tasks, messages, states)

    engine: Engine = DisconnectedEvaluators(e)
    with pytest.raises(FeddbeError, match=r"client 5 did not reply in round 2 .*: 1 of 2 replied"):
        run_recorded(e, tmp_path, engine)
    run_recorded(experiment("fedavg", **options, min_replies=1), tmp_path, engine)
    contents = read_run(tmp_path)
    assert contents["new_clients"]["clients"] == 1
    accuracies = [record for record in contents["records"] if record[2:4] == ("before", "accuracy")]
    rounds = [record.round for record in accuracies if record.client != ALL]
    assert (rounds.count(0), rounds.count(1)) == (3, 3)
