"""An engine's promise: what is staged counts with the round's transaction, and an answer may be missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from feddbe.errors import FeddbeError, StoreError
from feddbe.methods.registry import parse_method
from feddbe.metrics.records import ALL
from feddbe.runs.experiment import Experiment
from feddbe.runs.store import RETAINED, RunStore
from feddbe.simulation.client import ClientResult, ClientTask, MissingClient
from feddbe.simulation.engines.base import Broadcasts, ClientStates, Engine
from feddbe.simulation.loop import RoundLoop
from feddbe.state import Receipt, decode, sha256
from feddbe.training.task import Context
from tests.federation import (
    COMBINATIONS,
    Elsewhere,
    Forgetful,
    client_values,
    experiment,
    make_dataset,
    run_outcome,
    run_recorded,
)

every = pytest.mark.parametrize("name", COMBINATIONS)


def left(folder: Path) -> dict[str, Any]:
    """All that a run leaves, times apart."""
    store = RunStore.open(folder)
    entries = [{**entry, "seconds": 0} for entry in store.round_results()]
    timeless = [row for t in range(len(entries)) for row in store.records(t) if "seconds" not in row.name]
    rows = [row for row in timeless if row.name != "missing"]
    found = {
        "hashes": store.hashes(),
        "entries": entries,
        "rows": rows,
        "new_clients": store.meta("new_clients"),
    }
    found["best"] = {c: digest(store, c) for c in range(10)}
    store.close()
    return found


def digest(store: RunStore, client: int) -> str | None:
    """Of the state of a client that is kept for the best entry, wherever it is."""
    kept = store.state(RETAINED["private"], client)
    if kept is None:
        return None
    receipt = Receipt.decode(kept)
    return receipt.sha256 if receipt else sha256(decode(kept))


def missing(store: RunStore) -> dict[int, float | None]:
    """How many did not answer, by round."""
    return {row.round: row.value for row in store.aggregate_records() if row.name == "missing" and row.value}


class Breaking(Elsewhere):
    """Nobody is forgotten; it fails once in each round, when all clients have staged."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.failed: set[int] = set()

    def forgotten(self, round: int) -> int:
        return -1

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]:
        yield from super().run(tasks, messages, states)
        if any(job.work != "none" for job in tasks) and tasks[0].round not in self.failed:
            self.failed.add(tasks[0].round)
            raise ConnectionError("the server went away")


@every
def test_states_kept_elsewhere_count_when_the_round_is_accepted(name: str, tmp_path: Path) -> None:
    """Each round is broken off after its clients staged, and done again: from the states before it."""
    e = experiment(name)
    run_outcome(e, tmp_path / "serial")
    wanted, engine, broken = left(tmp_path / "serial"), Breaking(e), 0
    while True:
        try:
            run_recorded(e, tmp_path / "elsewhere", engine)
            break
        except ConnectionError:
            broken += 1
    assert broken == 2 + e.method.has_setup
    assert left(tmp_path / "elsewhere") == wanted
    assert bool(engine.kept) == bool(wanted["hashes"][1])


def test_another_engine_cannot_read_a_receipt(tmp_path: Path) -> None:
    engine = Breaking(experiment("ditto", rounds=1))
    engine.failed = {1}
    run_recorded(experiment("ditto", rounds=1), tmp_path, engine)
    with pytest.raises(
        StoreError, match=r"only the receipt of a state of round 1 .* the engine that started"
    ):
        run_outcome(experiment("ditto", rounds=2), tmp_path)


@every
@pytest.mark.parametrize("kind", [Forgetful, Elsewhere])
def test_a_round_without_some_is_one_in_which_they_were_not_asked(
    name: str, kind: type[Forgetful], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the preparation, in rounds and in the last evaluation: the same bits, bytes and accuracies."""
    e = experiment(name, rounds=3, eval="cohort", min_replies=2)
    engine = kind(e)
    assert len({engine.forgotten(round) for round in range(5)}) > 1
    if parse_method(name).needs_all_clients:
        with pytest.raises(FeddbeError, match=r"client \d did not reply .*; apple needs all clients: "):
            run_recorded(e, tmp_path, engine)
        return
    run_recorded(e, tmp_path / "missing", engine)
    store = RunStore.open(tmp_path / "missing")
    counted = [t for t in range(4) if t or e.method.has_setup]
    assert missing(store) == dict.fromkeys(counted, 1)
    store.close()

    cohort = RoundLoop._sample_cohort

    def smaller(loop: RoundLoop, round: int) -> list[int]:
        return [client for client in cohort(loop, round) if client != engine.forgotten(round)]

    monkeypatch.setattr(RoundLoop, "_sample_cohort", smaller)
    run_outcome(e, tmp_path / "smaller")
    assert left(tmp_path / "missing") == left(tmp_path / "smaller")


class Without(Forgetful):
    """Client 1 never answers, nor does client 3."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.gone = {1, 3}

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult | MissingClient]:
        for job in tasks:
            if job.client in self.gone:
                yield MissingClient(job.client, "no connection")
            else:
                yield from self.serial.run([job], messages, states)


def test_who_never_answers_leaves_nothing_and_is_sent_the_constants_when_it_does(tmp_path: Path) -> None:
    """Two of four answer in two rounds; then all do, and MR's mean is in the bytes of the other two."""
    data = make_dataset([40, 40, 30, 24])
    first = experiment("scaffold+dbe", data, rounds=2, min_replies=2)
    engine = Without(first)
    ran = run_recorded(first, tmp_path, engine)
    assert ran.clients.keys() == {0, 2}
    store = RunStore.open(tmp_path)
    for entry in range(3):
        assert {row.client for row in store.records(entry)} == {0, 2, ALL}
    assert missing(store) == {0: 2, 1: 2, 2: 2}
    store.close()
    engine.gone = set()
    whole = run_recorded(experiment("scaffold+dbe", data, rounds=3), tmp_path, engine)
    assert whole.clients.keys() == {0, 1, 2, 3}
    store = RunStore.open(tmp_path)
    down = [value or 0 for value in client_values(store, 3, "bytes_down", "training").values()]
    store.close()
    mean = 64 * 4
    assert [bytes - down[0] for bytes in down] == [0, mean, 0, mean]


@pytest.mark.parametrize("least", [None, 3])
def test_too_few_is_one_line_and_the_round_is_not_written(least: int | None, tmp_path: Path) -> None:
    data = make_dataset([40, 40, 30, 24])
    good = run_outcome(experiment("fedavg+dbe", data, rounds=1), tmp_path)
    e = experiment("fedavg+dbe", data, rounds=2, min_replies=least)
    needed = "3" if least else "all"
    words = rf"client 1 did not reply in round 2 \(no connection\): 2 of 4 replied, required: {needed} "
    with pytest.raises(FeddbeError, match=words) as error:
        run_recorded(e, tmp_path, Without(e))
    assert "\n" not in str(error.value)
    store = RunStore.open(tmp_path)
    assert (store.last_round(), missing(store)) == (1, {})
    assert dict(store.private_states()).keys() == good.clients.keys()
    store.close()
    whole = run_outcome(e, tmp_path / "whole")
    resumed = run_outcome(e, tmp_path)
    assert left(tmp_path)["hashes"] == left(tmp_path / "whole")["hashes"]
    assert len(resumed.rounds) == len(whole.rounds) == 3


def test_the_preparation_can_be_too_small(tmp_path: Path) -> None:
    e = experiment("fedgen", make_dataset([40, 40, 30, 24]), min_replies=3)
    with pytest.raises(FeddbeError, match=r"in round 0 .*: 2 of 4 replied, required: 3"):
        run_recorded(e, tmp_path, Without(e))
    store = RunStore.open(tmp_path)
    assert store.last_round() == -1
    store.close()


def test_fedgens_generator_waits_for_someone_whose_labels_are_known(tmp_path: Path) -> None:
    """Clients 0 and 2 answer in the preparation, in round 1 the two others: they cannot teach it."""
    e = experiment("fedgen(steps=2)", make_dataset([40, 40, 30, 24]), rounds=1, min_replies=1)

    class Turns(Without):
        def run(
            self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
        ) -> Iterator[Any]:
            self.gone = {0, 2} if tasks[0].round else {1, 3}
            return super().run(tasks, messages, states)

    ran = run_recorded(e, tmp_path, Turns(e))
    start = e.method.server_init(Context(e.task, 0))
    assert all(bool((ran.server[n] == t).all()) for n, t in start.items() if n.startswith("generator/"))
    assert not bool((ran.server["fc.bias"] == start["fc.bias"]).all())


def test_those_who_only_evaluate_are_not_needed(tmp_path: Path) -> None:
    """Half of the clients take part; all but two evaluate. Newcomers, too, are measured without those."""
    options: dict[str, Any] = {
        "dataset": make_dataset([24] * 6),
        "rounds": 1,
        "participation": 0.5,
        "new_clients": 2,
    }
    e = experiment("fedavg", **options, min_replies=2)

    class Idle(Without):
        def run(
            self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
        ) -> Iterator[Any]:
            idle = [job.client for job in tasks if job.work == "none" and not job.is_new_client]
            self.gone = {5, *idle[:1]}
            return super().run(tasks, messages, states)

    engine: Engine = Idle(e)
    with pytest.raises(FeddbeError, match=r"client 5 did not reply in round 2 .*: 1 of 2 replied"):
        run_recorded(e, tmp_path, engine)
    run_recorded(experiment("fedavg", **options, min_replies=1), tmp_path, engine)
    found = left(tmp_path)
    assert found["new_clients"]["clients"] == 1
    tested = [row.round for row in found["rows"] if row[2:4] == ("before", "accuracy") and row.client != ALL]
    assert (tested.count(0), tested.count(1)) == (3, 3)
