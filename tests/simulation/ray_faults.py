"""Faults of two Ray nodes on this machine: python -m tests.simulation.ray_faults FOLDER

Prints the results as JSON. `tests/simulation/test_ray.py` runs it in a separate process. Every method
runs once. No step depends on speed: if a node must start work, clients on the others wait.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import feddbe
from feddbe.errors import FeddbeError
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.scaffold import Scaffold
from feddbe.runs.experiment import Experiment
from feddbe.simulation import engines
from feddbe.simulation.client import ClientResult, ClientTask
from feddbe.simulation.engines import base
from feddbe.simulation.engines import ray as ray_engine
from feddbe.simulation.engines.base import Broadcasts, ClientStates, TimeoutPolicy
from feddbe.simulation.engines.ray import LOOPBACK_ONLY
from feddbe.state import State
from feddbe.testing import make_dataset
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import (
    COMBINATIONS,
    Outcome,
    are_identical,
    experiment,
    run_outcome,
    run_recorded,
)

QUICK = {
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_timeout_ms": 20000,
    "health_check_failure_threshold": 3, "automatic_object_spilling_enabled": False,
}  # fmt: skip
"""A dead node refuses connections and is noticed within seconds; one that a busy machine delays is not
considered dead."""
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}
METHOD_SOURCE = """
from dataclasses import dataclass
from typing import ClassVar
from feddbe import FedAvg
from feddbe.methods import parameter

@dataclass(frozen=True)
class Own(FedAvg):
    name: ClassVar[str] = "own"
    factor: float = parameter(0.9, "factor of the upload")

    def train(self, ctx, local, received, private):
        return {name: self.factor * value for name, value in local.fit(received).params.items()}, private
"""
FOLDER = "FEDDBE_TEST_FOLDER"
"""Environment variable with the folder in which `FaultyScaffold` finds its orders."""


class FaultyScaffold(Scaffold):
    """SCAFFOLD that records its raylet, and that fails on order."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        orders, raylet = Path(os.environ[FOLDER]), str(os.getppid())
        if trainer.client == 2 and remove_order(orders / "dies once"):
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.client == 1 and (orders / "dies").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if remove_order(orders / "stuck"):
            time.sleep(600)
        if read_order(orders / "doomed") == raylet:
            (orders / "caught").touch()
            time.sleep(600)
        (orders / f"at work for {raylet}").touch()
        started = time.monotonic()
        while order := read_order(orders / "wait for"):
            seconds, _, note = order.partition(" ")
            if (orders / note).exists() or time.monotonic() > started + int(seconds):
                break
            time.sleep(0.02)
        return super().train(ctx, trainer, received, private)


def read_order(order: Path) -> str:
    """Return the text of an order; empty if it does not exist."""
    return order.read_text() if order.exists() else ""


def remove_order(order: Path) -> bool:
    """Return True if the order existed and this process removed it."""
    try:
        order.unlink()
    except FileNotFoundError:
        return False
    return True


class OverwritingFedAvg(FedAvg):
    """FedAvg that overwrites the received message after training."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        result = super().train(ctx, trainer, {name: t.clone() for name, t in received.items()}, private)
        for tensor in received.values():
            tensor.fill_(float("nan"))
        return result


class NoStates(ClientStates):
    """States of clients that keep nothing."""

    def read(self, client: int) -> bytes | None:
        return None

    def write_pending(self, client: int, state: bytes) -> None:
        raise AssertionError

    def version(self, client: int) -> None:
        pass


class FaultyEngine:
    """Engine to which a fault happens once, after its eighth result."""

    def __init__(self, inner: base.Engine, cause_fault: Callable[[], object]) -> None:
        self.inner = inner
        self.cause_fault = cause_fault
        self.results = 0

    def run(self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates) -> Iterator[Any]:
        for result in self.inner.run(tasks, messages, states):
            self.results += 1
            if self.results == 8:
                self.cause_fault()
            yield result

    def close(self) -> None:
        self.inner.close()


class TestCluster:
    """A cluster of two nodes, one CPU each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = time.monotonic()
        self.orders = folder / "orders"
        self.orders.mkdir()
        os.environ[FOLDER] = str(self.orders)
        self.ray = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of Ray's sockets must be short
        os.environ |= LOOPBACK_ONLY
        os.environ["RAY_TMPDIR"] = self.ray  # `Cluster` writes its address to Ray's default folder
        from ray.cluster_utils import Cluster

        head = {**NODE, "include_dashboard": False, "_system_config": QUICK, "temp_dir": f"{self.ray}/ray"}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.add_node()
        self.engine = f"ray(address={self.cluster.address})"

    def shut_down(self) -> None:
        sys.modules["ray"].shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self.ray)

    def log(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", file=sys.stderr, flush=True)

    @cached_property
    def faulty_run(self) -> tuple[Experiment, Outcome]:
        e = replace(experiment("scaffold", make_dataset([44] * 6), rounds=3), method=FaultyScaffold())
        return e, run_outcome(e, self.folder / "faulty")

    def is_equal_to_serial(
        self,
        name: str,
        e: Experiment,
        serial: Outcome,
        cause_fault: Callable[[], object],
        timeouts: TimeoutPolicy,
    ) -> bool:
        """Return True if server, clients and round results are those of serial."""
        ray_engine_instance = engines.find_engine(self.engine).create(e.task, e.method, timeouts)
        with closing(FaultyEngine(ray_engine_instance, cause_fault)) as engine:
            ray = run_recorded(e, self.folder / name, engine)
        self.log(name)
        return (
            are_identical(serial.server, ray.server)
            and serial.clients.keys() == ray.clients.keys()
            and all(are_identical(serial.clients[c], ray.clients[c]) for c in serial.clients)
            and [{**a, "seconds": 0} for a in serial.rounds] == [{**a, "seconds": 0} for a in ray.rounds]
        )

    def check_method(self, name: str) -> bool:
        e, folder = experiment(name), name.rpartition("/")[2]
        serial = run_outcome(e, self.folder / f"{folder}-serial")
        return self.is_equal_to_serial(folder, e, serial, lambda: None, TimeoutPolicy())

    def check_fault(
        self, name: str, cause_fault: Callable[[], object], waiting: TimeoutPolicy | None = None
    ) -> bool:
        return self.is_equal_to_serial(name, *self.faulty_run, cause_fault, waiting or TimeoutPolicy())

    def run_with_error(self, name: str, e: Experiment) -> str:
        """Return the error with which the run ends."""
        try:
            run_outcome(e, self.folder / name, self.engine)
        except FeddbeError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.log(name)
        return "no error"

    def check_stuck_worker(self) -> bool:
        """Return True if a worker that does not reply is given up, and a new one has time to start."""
        warnings = list[str]()

        def record_warning(text: str) -> None:
            warnings.append(text)
            if "is run again" in text:
                ray_engine.STARTUP_SECONDS = 60.0

        def cause_fault() -> None:
            self.order("stuck")
            ray_engine.STARTUP_SECONDS = 0.0

        is_equal = self.check_fault("stuck", cause_fault, TimeoutPolicy(timeout=3.0, warn=record_warning))
        return is_equal and any("did not reply for" in text for text in warnings)

    def order(self, name: str, text: object = "") -> None:
        """Write an order atomically."""
        (self.folder / "order").write_text(str(text))
        (self.folder / "order").rename(self.orders / name)

    def add_node(self, **environment: str) -> None:
        self.second = self.cluster.add_node(**NODE, temp_dir=f"{self.ray}/ray", env_vars=environment or None)
        self.raylet = self.second.all_processes["raylet"][0].process.pid

    def join_node(self) -> None:
        """Add a node, and let clients wait for one that works there, for at most three seconds.

        A task that waits for a node is not moved to another; only later tasks are.
        """
        self.add_node()
        self.order("wait for", f"3 at work for {self.raylet}")

    def kill_node(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)

    def check_node_death(self) -> bool:
        """Return True if a node can be killed while a client works there and no other ends before."""

        def kill() -> None:
            while not (self.orders / "caught").exists():
                time.sleep(0.02)
            self.kill_node()

        killer = threading.Thread(target=kill, daemon=True)

        def doom() -> None:
            self.order("doomed", self.raylet)
            self.order("wait for", "600 caught")
            killer.start()

        is_equal = self.check_fault("node dies", doom)
        killer.join()
        return is_equal

    def check_copies(self) -> bool:
        """Return True if a client that overwrites its message changes only its own copy."""
        e = experiment("fedavg", make_dataset([24] * 6))
        engine = engines.create_engine(self.engine, e.task, OverwritingFedAvg())
        tasks = [ClientTask(c, 1, "train") for c in range(6)]
        message = Broadcasts(dict(e.task.model.parameters))
        results = [r for r in engine.run(tasks, message, NoStates()) if isinstance(r, ClientResult)]
        tensors = [t for result in results for t in result.upload.values()]
        return len(results) == 6 and all(bool(t.isfinite().all()) for t in tensors)

    def other_sources(self) -> str:
        """Return the error for a node with another feddbe; clients on the other node wait until cancelled."""
        shutil.copytree(Path(feddbe.__file__).parent, self.folder / "other" / "feddbe")
        with (self.folder / "other" / "feddbe" / "state.py").open("a") as file:
            file.write("# another version\n")
        self.kill_node()
        self.add_node(PYTHONPATH=str(self.folder / "other"))
        self.order("wait for", "600 no such note")
        return self.run_with_error("other sources", self.faulty_run[0])

    def other_python(self) -> str:
        """Return the error for another Python: Ray compares versions when a driver joins."""
        from ray._private import utils

        sys.modules["ray"].shutdown()
        real = utils.compute_version_info
        utils.compute_version_info = lambda: (real()[0], "3.9.1")
        try:
            return self.run_with_error("other Python", self.faulty_run[0])
        finally:
            utils.compute_version_info = real


def run_all(folder: Path) -> dict[str, Any]:
    """Return the results of all checks."""
    cluster = TestCluster(folder)
    orders = cluster.orders
    cluster.log("two nodes")
    try:
        results: dict[str, Any] = {"methods": {name: cluster.check_method(name) for name in COMBINATIONS}}
        (folder / "own.py").write_text(METHOD_SOURCE)
        results["a method from a file"] = cluster.check_method(f"{folder / 'own.py'}:Own+dbe")
        results["copies"] = cluster.check_copies()
        results["diverged"] = cluster.run_with_error("diverged", experiment("fedavg", lr=1e30))
        results["a worker dies"] = cluster.check_fault("dies once", lambda: cluster.order("dies once"))
        results["it died"] = not (orders / "dies once").exists()
        results["a worker is stuck"] = cluster.check_stuck_worker()
        cluster.order("dies")
        results["every worker dies"] = cluster.run_with_error("dies", cluster.faulty_run[0])
        (orders / "dies").unlink()
        results["a node dies"] = cluster.check_node_death()
        results["a node joins"] = cluster.check_fault("node joins", cluster.join_node)
        results["it works"] = (orders / f"at work for {cluster.raylet}").exists()
        results["other sources"] = cluster.other_sources()
        results["other Python"] = cluster.other_python()
        return results
    finally:
        cluster.shut_down()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    print(json.dumps(run_all(arguments.parse_args().folder)))
