"""The pool: dead workers, errors in workers, order of work. That it equals serial is in tests/contract."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from feddbe.errors import DivergenceError, FeddbeError, InvalidInputError
from feddbe.methods.fedavg import FedAvg
from feddbe.simulation import engines
from feddbe.simulation.client import ClientResult, ClientTask
from feddbe.simulation.engines import pool as worker
from feddbe.simulation.engines.base import Broadcasts, ClientStates, TimeoutPolicy
from feddbe.simulation.engines.pool import PackedState, Pool
from feddbe.simulation.engines.registry import Serial
from feddbe.state import State, encode
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.federation import are_identical, experiment, make_dataset, run_outcome, run_recorded


class Murderous(Pool):
    """Kills one of its workers when a reply has come, while the others are at work; at most two in a call:
    they may be those of one client, and a third would be one too many."""

    kills = 0

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        for number, reply in enumerate(super().run(tasks, messages, states)):
            if self.kills < 4 and number < 2:
                self.kills += 1
                os.kill(self.pids[self.kills % len(self.pids)], signal.SIGKILL)
            yield reply


def test_a_killed_worker_is_replaced_and_its_client_done_again(tmp_path: Path) -> None:
    e = experiment("fedavg+dbe", make_dataset([44] * 6), rounds=3)
    wanted = run_outcome(e, tmp_path / "serial")
    pool = Murderous(e.task, e.method, 2)
    before = set(pool.pids)
    ran = run_recorded(e, tmp_path / "pool", pool)
    assert pool.kills == 4
    assert len(pool.pids) == 2
    assert not before & set(pool.pids)
    pool.close()
    assert are_identical(wanted.server, ran.server)
    assert all(are_identical(wanted.clients[c], ran.clients[c]) for c in wanted.clients)


def test_a_client_that_always_kills_its_worker_is_named(tmp_path: Path) -> None:
    e = experiment("fedavg")
    pool = Suicidal(e.task, e.method, 2)
    with pytest.raises(FeddbeError, match="client 1 in round 1: its worker died 3 times"):
        run_recorded(e, tmp_path, pool)
    pool.close()


class Suicidal(Pool):
    """Client 1 is never answered: its worker is killed as soon as it has the job."""

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        class Deadly(type(states)):  # type: ignore[misc]
            def read(inner, client: int) -> bytes | None:
                if client == 1:
                    for pid in self.pids:
                        os.kill(pid, signal.SIGKILL)
                return None

        yield from super().run([j for j in tasks if j.client == 1], messages, Deadly.__new__(Deadly))


class _Dies(FedAvg):
    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        if trainer.client == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(ctx, trainer, received, private)


def test_of_clients_that_went_together_the_one_that_kills_is_named() -> None:
    e, done = experiment("fedavg", make_dataset([44] * 12)), list[int]()
    jobs, message = [ClientTask(c, 1, "train") for c in range(12)], Broadcasts(e.task.model.parameters)
    pool = Pool(e.task, _Dies(), 1)
    pool._worked.append(1e-6)
    with pytest.raises(FeddbeError, match="client 1 in round 1: its worker died 3 times"):
        done.extend(reply.client for reply in pool.run(jobs, message, _Empty()))
    pool.close()


def test_clients_that_take_little_go_together() -> None:
    e = experiment("fedavg+dbe", make_dataset([44] * 12))
    jobs, said = [ClientTask(c, 1, "train", evaluate=True) for c in range(12)], list[str]()
    message = Broadcasts(e.task.model.parameters | {"mean": torch.zeros(e.task.model.feature_shape)})
    pool = Pool(e.task, e.method, 2, TimeoutPolicy(warn_after=0.0, warn=said.append))
    pool._worked.append(1e-6)
    found = {reply.client: reply for reply in pool.run(jobs, message, _Empty())}
    pool.close()
    assert any(re.match(r"waiting for client \d+ and 2 more in round 1", line) for line in said)
    for wanted in Serial(e.task, e.method).run(jobs, message, _Empty()):
        assert are_identical(found[wanted.client].upload, wanted.upload)
        assert found[wanted.client].metrics == wanted.metrics


def test_a_divergence_in_a_worker_reaches_us_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError) as error:
        run_outcome(experiment("fedavg", lr=1e30), tmp_path, "pool(workers=2)")
    assert error.value.round == 1
    assert error.value.client in (0, 1, 2)


def test_other_errors_say_where_they_happened() -> None:
    e = experiment("fedavg")
    pool = Pool(e.task, e.method, 1)
    message = {**e.task.model.parameters, "fc.bias": torch.zeros(3)}
    with pytest.raises(RuntimeError, match="size") as error:
        list(pool.run([ClientTask(2, 1, "train")], Broadcasts(message), _Empty()))
    pool.close()
    assert "in client 2, round 1" in "".join(error.value.__notes__)


class _Empty(ClientStates):
    def read(self, client: int) -> bytes | None:
        return None

    def write_pending(self, client: int, state: bytes) -> None:
        pass

    def version(self, client: int) -> None:
        pass


class _States(ClientStates):
    """The clients' states, as long as no round is written those of before; who was asked for is known."""

    def __init__(self) -> None:
        self.accepted, self.staged, self.asked = dict[int, bytes](), dict[int, bytes](), list[int]()

    def read(self, client: int) -> bytes | None:
        self.asked.append(client)
        return self.staged.get(client, self.accepted.get(client))

    def write_pending(self, client: int, state: bytes) -> None:
        self.staged[client] = state

    def version(self, client: int) -> bytes | None:
        return self.staged.get(client, self.accepted.get(client))


@pytest.mark.parametrize("room", [2**20, 30_000])
def test_a_large_state_that_a_worker_made_does_not_come_back_to_it(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But it does, if the round was not written, the worker is a new one, or has no room for it."""
    monkeypatch.setattr(worker, "LARGE", 1000)
    monkeypatch.setattr(worker, "ROOM", room)
    e, ours, theirs = experiment("ditto", make_dataset([44] * 4)), _States(), _States()
    message, pool = Broadcasts(e.task.model.parameters), Pool(e.task, e.method, 1)

    def asked_in(round: int) -> set[int]:
        ours.asked.clear()
        jobs = [ClientTask(client, round, "train", evaluate=True) for client in range(4)]
        wanted = {reply.client: reply for reply in Serial(e.task, e.method).run(jobs, message, theirs)}
        for reply in pool.run(jobs, message, ours):
            assert are_identical(reply.upload, wanted[reply.client].upload)
            assert reply.metrics == wanted[reply.client].metrics
        assert ours.staged == theirs.staged
        return set(ours.asked)

    def written() -> None:
        for states in (ours, theirs):
            states.accepted |= states.staged
            states.staged.clear()

    size = len(encode(e.method.client_init(Context(e.task, 0))))
    held = min(4, room // size)
    assert held > 0
    assert (held < 4) == (room == 30_000)
    assert asked_in(1) == set(range(4))
    written()
    assert len(asked_in(2)) == 4 - held
    for states in (ours, theirs):
        states.staged.clear()
    assert asked_in(2) == set(range(4))
    written()
    os.kill(pool.pids[0], signal.SIGKILL)
    assert asked_in(3) == set(range(4))
    pool.close()


class Stopping(Pool):
    """Stops a worker when the first reply has come, while it is at work or about to get some."""

    stopped = 0

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        for reply in super().run(tasks, messages, states):
            if not self.stopped:
                self.stopped = self.pids[0]
                os.kill(self.stopped, signal.SIGSTOP)
            yield reply


def test_a_hung_worker_is_named_replaced_and_its_client_done_again(tmp_path: Path) -> None:
    e = experiment("fedavg+dbe", make_dataset([44] * 6), rounds=3)
    wanted = run_outcome(e, tmp_path / "serial")
    said: list[str] = []
    pool = Stopping(e.task, e.method, 2, TimeoutPolicy(timeout=3.0, warn=said.append))
    ran = run_recorded(e, tmp_path / "pool", pool)
    assert pool.stopped not in pool.pids
    assert not Path(f"/proc/{pool.stopped}").exists()
    pool.close()
    assert are_identical(wanted.server, ran.server)
    assert all(are_identical(wanted.clients[c], ran.clients[c]) for c in wanted.clients)
    gone = rf"client \d in round \d \(worker {pool.stopped}\) did not answer for \d s and is done again"
    assert [line for line in said if re.fullmatch(gone, line)]


def test_who_is_waited_for_is_said() -> None:
    e, said = experiment("fedavg"), list[str]()
    pool = Pool(e.task, e.method, 1, TimeoutPolicy(warn_after=0.0, warn=said.append))
    list(pool.run([ClientTask(2, 1, "train")], Broadcasts(e.task.model.parameters), _Empty()))
    (pid,) = pool.pids
    pool.close()
    assert said == [f"waiting for client 2 in round 1 (worker {pid}) for 0 s; --worker-timeout sets a limit"]


def test_a_worker_that_hangs_in_the_middle_of_a_message() -> None:
    """What it is sent is more than a pipe holds."""
    e = experiment("fedavg")
    pool = Pool(e.task, e.method, 1, TimeoutPolicy(timeout=0.5))
    os.kill(pool.pids[0], signal.SIGSTOP)
    many = PackedState(data=bytearray(2**22))  # as if there were no memory to lay it into
    with pytest.raises(OSError, match="temporarily unavailable"):
        pool._give(pool._workers[0], [ClientTask(0, 1)], Broadcasts({}), many, _Empty())
    pool.close()


class _TwoWords(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class _Exits(FedAvg):
    def train(self, *_: Any) -> Any:
        sys.exit(0)


class _Fails(FedAvg):
    def train(self, *_: Any) -> Any:
        raise _TwoWords("a", "b")


@pytest.mark.parametrize("engine", ["serial", "pool(workers=2)"])
def test_a_model_that_ends_the_program_is_an_error(engine: str, tmp_path: Path) -> None:
    e = dataclasses.replace(experiment("fedavg"), method=_Exits())
    with pytest.raises(FeddbeError, match=r"client \d, round 1: .* own code called sys.exit\(0\)"):
        run_outcome(e, tmp_path, engine)


def test_an_error_that_cannot_be_pickled_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="_TwoWords: a b") as error:
        run_outcome(dataclasses.replace(experiment("fedavg"), method=_Fails()), tmp_path, "pool(workers=2)")
    assert "in train" in "".join(error.value.__notes__)


def test_long_clients_come_first() -> None:
    e = experiment("fedavg", make_dataset([24, 60, 44]))
    pool = Pool(e.task, e.method, 1)
    jobs = [ClientTask(c, 1, "train") for c in range(3)]
    order = [reply.client for reply in pool.run(jobs, Broadcasts(e.task.model.parameters), _Empty())]
    pool.close()
    assert order == [1, 2, 0]


def test_closing_leaves_no_process() -> None:
    e = experiment("fedavg")
    pool = Pool(e.task, e.method, 3)
    pids = pool.pids
    pool.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(p.pid in pids for p in multiprocessing.active_children()):
        time.sleep(0.01)
    assert not [p for p in multiprocessing.active_children() if p.pid in pids]


def test_names() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [engines.find_engine(n).processes() for n in ("serial", "pool", "pool(workers=5)")] == [
        0,
        cores,
        5,
    ]
    e = experiment("fedavg")
    for name, kind in (("serial", Serial), ("pool(workers=1)", Pool)):
        engine = engines.create_engine(name, e.task, e.method)
        assert type(engine) is kind
        engine.close()
    for wrong in ("pools", "pool:2", "pool(workers=2", ""):
        with pytest.raises(
            InvalidInputError,
            match=r"unknown engine .* allowed: auto, pool, pool\(workers=N\), ray, .*, serial",
        ):
            engines.find_engine(wrong)
    with pytest.raises(InvalidInputError, match="pool workers = 'x'; allowed: a whole number >= 1"):
        engines.find_engine("pool(workers=x)")
