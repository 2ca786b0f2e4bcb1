"""The pool: dead workers, errors in workers, order of work. Equality with serial is in tests/contract."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from feddbe.errors import DivergenceError, FeddbeError, InvalidInputError
from feddbe.methods.fedavg import FedAvg
from feddbe.simulation import engines
from feddbe.simulation.client import ClientResult, ClientTask
from feddbe.simulation.engines import pool as pool_module
from feddbe.simulation.engines.base import Broadcasts, ClientStates, TimeoutPolicy
from feddbe.simulation.engines.pool import PackedState, PoolEngine
from feddbe.simulation.engines.registry import SerialEngine
from feddbe.state import State, encode
from feddbe.testing import make_dataset
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import are_identical, experiment, run_outcome, run_recorded
from tests.waiting import wait_until


class KillingPool(PoolEngine):
    """Pool that kills one of its workers after a result, while the others work.

    It kills at most two in a call: they may run the same client, and a third attempt would be the last.
    """

    kills = 0

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        for number, result in enumerate(super().run(tasks, messages, states)):
            if self.kills < 4 and number < 2:
                self.kills += 1
                os.kill(self.pids[self.kills % len(self.pids)], signal.SIGKILL)
            yield result


def test_killed_worker_is_replaced_and_its_client_run_again(tmp_path: Path) -> None:
    e = experiment("fedavg+dbe", make_dataset([44] * 6), rounds=3)
    expected = run_outcome(e, tmp_path / "serial")
    pool = KillingPool(e.task, e.method, 2)
    before = set(pool.pids)
    ran = run_recorded(e, tmp_path / "pool", pool)
    assert pool.kills == 4
    assert len(pool.pids) == 2
    assert not before & set(pool.pids)
    pool.close()
    assert are_identical(expected.server, ran.server)
    assert all(are_identical(expected.clients[c], ran.clients[c]) for c in expected.clients)


def test_client_that_always_kills_its_worker_is_named(tmp_path: Path) -> None:
    e = experiment("fedavg")
    pool = PoolWithDeadlyClient(e.task, e.method, 2)
    with pytest.raises(FeddbeError, match="client 1 in round 1: its worker died 3 times"):
        run_recorded(e, tmp_path, pool)
    pool.close()


class PoolWithDeadlyClient(PoolEngine):
    """Pool whose workers are killed as soon as one receives client 1."""

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        class DeadlyStates(type(states)):  # type: ignore[misc]
            def read(inner, client: int) -> bytes | None:
                if client == 1:
                    for pid in self.pids:
                        os.kill(pid, signal.SIGKILL)
                return None

        yield from super().run(
            [client_task for client_task in tasks if client_task.client == 1],
            messages,
            DeadlyStates.__new__(DeadlyStates),
        )


class _DyingMethod(FedAvg):
    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        if trainer.client == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(ctx, trainer, received, private)


def test_client_that_kills_its_worker_is_named_in_a_group() -> None:
    e = experiment("fedavg", make_dataset([44] * 12))
    tasks = [ClientTask(c, 1, "train") for c in range(12)]
    message = Broadcasts(e.task.model.parameters)
    pool = PoolEngine(e.task, _DyingMethod(), 1)
    pool._cpu_seconds.append(1e-6)
    with pytest.raises(FeddbeError, match="client 1 in round 1: its worker died 3 times"):
        list(pool.run(tasks, message, _NoStates()))
    pool.close()


def test_short_tasks_are_sent_in_groups() -> None:
    e = experiment("fedavg+dbe", make_dataset([44] * 12))
    tasks = [ClientTask(c, 1, "train", evaluate=True) for c in range(12)]
    warnings = list[str]()
    message = Broadcasts(e.task.model.parameters | {"mean": torch.zeros(e.task.model.feature_shape)})
    pool = PoolEngine(e.task, e.method, 2, TimeoutPolicy(warn_after=0.0, warn=warnings.append))
    pool._cpu_seconds.append(1e-6)
    results = {result.client: result for result in pool.run(tasks, message, _NoStates())}
    pool.close()
    assert any(re.match(r"waiting for client \d+ and 2 more in round 1", line) for line in warnings)
    for expected in SerialEngine(e.task, e.method).run(tasks, message, _NoStates()):
        assert are_identical(results[expected.client].upload, expected.upload)
        assert results[expected.client].metrics == expected.metrics


def test_divergence_in_a_worker_is_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError) as error:
        run_outcome(experiment("fedavg", lr=1e30), tmp_path, "pool(workers=2)")
    assert error.value.round == 1
    assert error.value.client in (0, 1, 2)


def test_other_errors_name_client_and_round() -> None:
    e = experiment("fedavg")
    pool = PoolEngine(e.task, e.method, 1)
    message = {**e.task.model.parameters, "fc.bias": torch.zeros(3)}
    with pytest.raises(RuntimeError, match="size") as error:
        list(pool.run([ClientTask(2, 1, "train")], Broadcasts(message), _NoStates()))
    pool.close()
    assert "client 2 in round 1" in "".join(error.value.__notes__)


class _NoStates(ClientStates):
    def read(self, client: int) -> bytes | None:
        return None

    def write_pending(self, client: int, state: bytes) -> None:
        pass

    def version(self, client: int) -> None:
        pass


class _States(ClientStates):
    """States of the clients: committed and pending ones, and a list of the clients that were read."""

    def __init__(self) -> None:
        self.committed = dict[int, bytes]()
        self.pending = dict[int, bytes]()
        self.read_clients = list[int]()

    def read(self, client: int) -> bytes | None:
        self.read_clients.append(client)
        return self.pending.get(client, self.committed.get(client))

    def write_pending(self, client: int, state: bytes) -> None:
        self.pending[client] = state

    def version(self, client: int) -> bytes | None:
        return self.pending.get(client, self.committed.get(client))


@pytest.mark.parametrize("cache_bytes", [2**20, 30_000])
def test_large_state_stays_cached_in_its_worker(cache_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent if the round was not committed, the worker is new, or its cache is full."""
    monkeypatch.setattr(pool_module, "LARGE_BYTES", 1000)
    monkeypatch.setattr(pool_module, "CACHE_BYTES", cache_bytes)
    e = experiment("ditto", make_dataset([44] * 4))
    pool_states, serial_states = _States(), _States()
    message = Broadcasts(e.task.model.parameters)
    pool = PoolEngine(e.task, e.method, 1)

    def run_round(round_: int) -> set[int]:
        pool_states.read_clients.clear()
        tasks = [ClientTask(client, round_, "train", evaluate=True) for client in range(4)]
        serial = SerialEngine(e.task, e.method).run(tasks, message, serial_states)
        expected = {result.client: result for result in serial}
        for result in pool.run(tasks, message, pool_states):
            assert are_identical(result.upload, expected[result.client].upload)
            assert result.metrics == expected[result.client].metrics
        assert pool_states.pending == serial_states.pending
        return set(pool_states.read_clients)

    def commit() -> None:
        for states in (pool_states, serial_states):
            states.committed |= states.pending
            states.pending.clear()

    size = len(encode(e.method.client_init(Context(e.task, 0))))
    cached = min(4, cache_bytes // size)
    assert cached > 0
    assert (cached < 4) == (cache_bytes == 30_000)
    assert run_round(1) == set(range(4))
    commit()
    assert len(run_round(2)) == 4 - cached
    for states in (pool_states, serial_states):
        states.pending.clear()
    assert run_round(2) == set(range(4))
    commit()
    os.kill(pool.pids[0], signal.SIGKILL)
    assert run_round(3) == set(range(4))
    pool.close()


class StoppingPool(PoolEngine):
    """Pool that stops a worker after the first result, while it works or before its next task."""

    stopped = 0

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        for result in super().run(tasks, messages, states):
            if not self.stopped:
                self.stopped = self.pids[0]
                os.kill(self.stopped, signal.SIGSTOP)
            yield result


def test_hung_worker_is_named_and_replaced_and_its_client_run_again(tmp_path: Path) -> None:
    e = experiment("fedavg+dbe", make_dataset([44] * 6), rounds=3)
    expected = run_outcome(e, tmp_path / "serial")
    warnings = list[str]()
    pool = StoppingPool(e.task, e.method, 2, TimeoutPolicy(timeout=3.0, warn=warnings.append))
    ran = run_recorded(e, tmp_path / "pool", pool)
    assert pool.stopped not in pool.pids
    assert not Path(f"/proc/{pool.stopped}").exists()
    pool.close()
    assert are_identical(expected.server, ran.server)
    assert all(are_identical(expected.clients[c], ran.clients[c]) for c in expected.clients)
    message = rf"client \d in round \d \(worker {pool.stopped}\) did not reply for \d s and is run again"
    assert [line for line in warnings if re.fullmatch(message, line)]


def test_slow_worker_is_reported() -> None:
    e = experiment("fedavg")
    warnings = list[str]()
    pool = PoolEngine(e.task, e.method, 1, TimeoutPolicy(warn_after=0.0, warn=warnings.append))
    list(pool.run([ClientTask(2, 1, "train")], Broadcasts(e.task.model.parameters), _NoStates()))
    (pid,) = pool.pids
    pool.close()
    assert warnings == [
        f"waiting for client 2 in round 1 (worker {pid}) for 0 s; --worker-timeout sets a limit"
    ]


def test_worker_that_hangs_in_the_middle_of_a_message() -> None:
    """The message is larger than the buffer of a pipe."""
    e = experiment("fedavg")
    pool = PoolEngine(e.task, e.method, 1, TimeoutPolicy(timeout=0.5))
    os.kill(pool.pids[0], signal.SIGSTOP)
    packed = PackedState(data=bytearray(2**22))  # as without shared memory
    with pytest.raises(OSError, match="temporarily unavailable"):
        pool._send_tasks(pool._workers[0], [ClientTask(0, 1)], Broadcasts({}), packed, _NoStates())
    pool.close()


class _UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class _ExitingMethod(FedAvg):
    def train(self, *_: Any) -> Any:
        sys.exit(0)


class _FailingMethod(FedAvg):
    def train(self, *_: Any) -> Any:
        raise _UnpicklableError("a", "b")


@pytest.mark.parametrize("engine", ["serial", "pool(workers=2)"])
def test_sys_exit_in_a_method_is_an_error(engine: str, tmp_path: Path) -> None:
    e = dataclasses.replace(experiment("fedavg"), method=_ExitingMethod())
    with pytest.raises(FeddbeError, match=r"client \d, round 1: .* own code called sys.exit\(0\)"):
        run_outcome(e, tmp_path, engine)


def test_unpicklable_error_is_raised_with_its_text(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="_UnpicklableError: a b") as error:
        run_outcome(
            dataclasses.replace(experiment("fedavg"), method=_FailingMethod()), tmp_path, "pool(workers=2)"
        )
    assert "in train" in "".join(error.value.__notes__)


def test_clients_with_more_samples_are_first() -> None:
    e = experiment("fedavg", make_dataset([24, 60, 44]))
    pool = PoolEngine(e.task, e.method, 1)
    tasks = [ClientTask(c, 1, "train") for c in range(3)]
    order = [result.client for result in pool.run(tasks, Broadcasts(e.task.model.parameters), _NoStates())]
    pool.close()
    assert order == [1, 2, 0]


def test_close_ends_all_processes() -> None:
    e = experiment("fedavg")
    pool = PoolEngine(e.task, e.method, 3)
    pids = pool.pids
    pool.close()
    wait_until(lambda: not any(p.pid in pids for p in multiprocessing.active_children()), "their end")


def test_engine_specs_set_the_number_of_processes() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [engines.find_engine(n).processes() for n in ("serial", "pool", "pool(workers=5)")] == [
        0,
        cores,
        5,
    ]
    e = experiment("fedavg")
    for name, kind in (("serial", SerialEngine), ("pool(workers=1)", PoolEngine)):
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
