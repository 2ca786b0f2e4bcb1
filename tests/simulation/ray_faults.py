"""Two Ray nodes on this machine, and what can go wrong: python -m tests.simulation.ray_faults FOLDER

Prints what came of it as JSON. `tests/simulation/test_ray.py` has it done in a process of its own. Every
method runs once. No step depends on who is quicker: where a node has to come to work, clients on others wait.
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
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.federation import (
    COMBINATIONS,
    Outcome,
    are_identical,
    experiment,
    make_dataset,
    run_outcome,
    run_recorded,
)

QUICK = {
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_timeout_ms": 20000,
    "health_check_failure_threshold": 3, "automatic_object_spilling_enabled": False,
}  # fmt: skip
"""A dead node, which refuses at once, is noticed within seconds; one that a busy machine keeps waiting is not
taken for dead."""
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}
OWN = """
from dataclasses import dataclass
from typing import ClassVar
from feddbe import FedAvg
from feddbe.methods import parameter

@dataclass(frozen=True)
class Own(FedAvg):
    name: ClassVar[str] = "own"
    factor: float = parameter(0.9, "of what is sent")

    def train(self, ctx, local, received, private):
        return {name: self.factor * value for name, value in local.fit(received).params.items()}, private
"""
FOLDER = "FEDDBE_TEST_FOLDER"
"""Names the folder in which `Obedient` looks for orders."""


class Obedient(Scaffold):
    """Notes for which raylet it works, and has accidents on order."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        orders, raylet = Path(os.environ[FOLDER]), str(os.getppid())
        if trainer.client == 2 and taken(orders / "dies once"):
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.client == 1 and (orders / "dies").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if taken(orders / "stuck"):
            time.sleep(600)
        if read(orders / "doomed") == raylet:
            (orders / "caught").touch()
            time.sleep(600)
        (orders / f"at work for {raylet}").touch()
        begun = time.monotonic()
        while order := read(orders / "wait for"):
            seconds, _, note = order.partition(" ")
            if (orders / note).exists() or time.monotonic() > begun + int(seconds):
                break
            time.sleep(0.02)
        return super().train(ctx, trainer, received, private)


def read(order: Path) -> str:
    """What an order says; nothing where there is none."""
    return order.read_text() if order.exists() else ""


def taken(order: Path) -> bool:
    """Whether there was such an order, and it is this client who carries it out."""
    try:
        order.unlink()
    except FileNotFoundError:
        return False
    return True


class Writing(FedAvg):
    """Destroys the message when it is done with it."""

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        found = super().train(ctx, trainer, {name: t.clone() for name, t in received.items()}, private)
        for tensor in received.values():
            tensor.fill_(float("nan"))
        return found


class Nothing(ClientStates):
    """What clients have that keep nothing."""

    def read(self, client: int) -> bytes | None:
        return None

    def write_pending(self, client: int, state: bytes) -> None:
        raise AssertionError

    def version(self, client: int) -> None:
        pass


class Harmed:
    """An engine to which something happens once, after its eighth reply."""

    def __init__(self, inner: base.Engine, harm: Callable[[], object]) -> None:
        self.inner, self.harm, self.replies = inner, harm, 0

    def run(self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates) -> Iterator[Any]:
        for reply in self.inner.run(tasks, messages, states):
            self.replies += 1
            if self.replies == 8:
                self.harm()
            yield reply

    def close(self) -> None:
        self.inner.close()


class Trial:
    """A cluster of two nodes, one CPU each."""

    def __init__(self, place: Path) -> None:
        self.place, self.began, self.orders = place, time.monotonic(), place / "orders"
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

    def end(self) -> None:
        sys.modules["ray"].shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self.ray)

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {what}", file=sys.stderr, flush=True)

    @cached_property
    def obedient(self) -> tuple[Experiment, Outcome]:
        e = replace(experiment("scaffold", make_dataset([44] * 6), rounds=3), method=Obedient())
        return e, run_outcome(e, self.place / "obedient")

    def equal(
        self, name: str, e: Experiment, serial: Outcome, harm: Callable[[], object], timeouts: TimeoutPolicy
    ) -> bool:
        """Whether server, clients and entries are those of serial."""
        made = engines.find_engine(self.engine).create(e.task, e.method, timeouts)
        with closing(Harmed(made, harm)) as engine:
            ray = run_recorded(e, self.place / name, engine)
        self.say(name)
        return (
            are_identical(serial.server, ray.server)
            and serial.clients.keys() == ray.clients.keys()
            and all(are_identical(serial.clients[c], ray.clients[c]) for c in serial.clients)
            and [{**a, "seconds": 0} for a in serial.rounds] == [{**a, "seconds": 0} for a in ray.rounds]
        )

    def method(self, name: str) -> bool:
        e, folder = experiment(name), name.rpartition("/")[2]
        serial = run_outcome(e, self.place / f"{folder}-serial")
        return self.equal(folder, e, serial, lambda: None, TimeoutPolicy())

    def accident(self, name: str, harm: Callable[[], object], waiting: TimeoutPolicy | None = None) -> bool:
        return self.equal(name, *self.obedient, harm, waiting or TimeoutPolicy())

    def error(self, name: str, e: Experiment) -> str:
        """How it ends."""
        try:
            run_outcome(e, self.place / name, self.engine)
        except FeddbeError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.say(name)
        return "no error"

    def stuck(self) -> bool:
        """A worker that does not answer is given up. It has been there for long; the next one begins."""
        said = list[str]()

        def remark(text: str) -> None:
            said.append(text)
            if "is done again" in text:
                ray_engine.START = 60.0

        def harm() -> None:
            self.order("stuck")
            ray_engine.START = 0.0

        same = self.accident("stuck", harm, TimeoutPolicy(timeout=3.0, warn=remark))
        return same and any("did not answer for" in text for text in said)

    def order(self, name: str, text: object = "") -> None:
        """As a whole: nobody reads half of it."""
        (self.place / "order").write_text(str(text))
        (self.place / "order").rename(self.orders / name)

    def add_node(self, **environment: str) -> None:
        self.second = self.cluster.add_node(**NODE, temp_dir=f"{self.ray}/ray", env_vars=environment or None)
        self.raylet = self.second.all_processes["raylet"][0].process.pid

    def join(self) -> None:
        """And clients wait for one that is at work there: but not for ever, because a job that waits for a
        node is not given to another, only later ones are."""
        self.add_node()
        self.order("wait for", f"3 at work for {self.raylet}")

    def kill_node(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)

    def node_dies(self) -> bool:
        """It is killed as soon as a client is at work there, and none ends before."""

        def kill() -> None:
            while not (self.orders / "caught").exists():
                time.sleep(0.02)
            self.kill_node()

        killer = threading.Thread(target=kill, daemon=True)

        def doom() -> None:
            self.order("doomed", self.raylet)
            self.order("wait for", "600 caught")
            killer.start()

        same = self.accident("node dies", doom)
        killer.join()
        return same

    def copies(self) -> bool:
        """A client that writes into its message does it to its own."""
        e = experiment("fedavg", make_dataset([24] * 6))
        engine = engines.create_engine(self.engine, e.task, Writing())
        jobs, message = (
            [ClientTask(c, 1, "train") for c in range(6)],
            Broadcasts(dict(e.task.model.parameters)),
        )
        found = [reply for reply in engine.run(jobs, message, Nothing()) if isinstance(reply, ClientResult)]
        return len(found) == 6 and all(
            bool(t.isfinite().all()) for reply in found for t in reply.upload.values()
        )

    def other_sources(self) -> str:
        """A node whose feddbe is not ours; clients on the other one wait until they are cancelled."""
        shutil.copytree(Path(feddbe.__file__).parent, self.place / "other" / "feddbe")
        with (self.place / "other" / "feddbe" / "state.py").open("a") as file:
            file.write("# another version\n")
        self.kill_node()
        self.add_node(PYTHONPATH=str(self.place / "other"))
        self.order("wait for", "600 no such note")
        return self.error("other sources", self.obedient[0])

    def other_python(self) -> str:
        """Ray compares its own version and Python's when it is joined."""
        from ray._private import utils

        sys.modules["ray"].shutdown()
        real = utils.compute_version_info
        utils.compute_version_info = lambda: (real()[0], "3.9.1")
        try:
            return self.error("other Python", self.obedient[0])
        finally:
            utils.compute_version_info = real


def trial(place: Path) -> dict[str, Any]:
    """What came of everything."""
    cluster = Trial(place)
    orders = cluster.orders
    cluster.say("two nodes")
    try:
        found: dict[str, Any] = {"methods": {name: cluster.method(name) for name in COMBINATIONS}}
        (place / "own.py").write_text(OWN)
        found["a method from a file"] = cluster.method(f"{place / 'own.py'}:Own+dbe")
        found["copies"] = cluster.copies()
        found["diverged"] = cluster.error("diverged", experiment("fedavg", lr=1e30))
        found["a worker dies"] = cluster.accident("dies once", lambda: cluster.order("dies once"))
        found["it died"] = not (orders / "dies once").exists()
        found["a worker is stuck"] = cluster.stuck()
        cluster.order("dies")
        found["each worker dies"] = cluster.error("dies", cluster.obedient[0])
        (orders / "dies").unlink()
        found["a node dies"] = cluster.node_dies()
        found["a node joins"] = cluster.accident("node joins", cluster.join)
        found["it works"] = (orders / f"at work for {cluster.raylet}").exists()
        found["other sources"] = cluster.other_sources()
        found["other Python"] = cluster.other_python()
        return found
    finally:
        cluster.end()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    print(json.dumps(trial(arguments.parse_args().folder)))
