"""Two Ray nodes on this machine, and what can go wrong: python -m tests.engines.ray_faults FOLDER

Prints what came of it as JSON. `tests/engines/test_ray.py` has it done in a process of its own; with --all,
every method runs once, otherwise three.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import feddbe
from feddbe import engines
from feddbe.engines import ClientStates, Messages, Waiting, ray_cluster, ray_tasks
from feddbe.engines.client import Job, Reply
from feddbe.errors import FeddbeError
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.scaffold import Scaffold
from feddbe.runs.experiment import Experiment
from feddbe.state import State
from feddbe.training.local import Local
from feddbe.training.task import Context
from tests.federation import COMBINATIONS, Outcome, carry_out, experiment, outcome, same_bits, samples

METHODS = ("fedavg+dbe", "apple", "fedgen+dbe")
QUICK = {
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3, "automatic_object_spilling_enabled": False,
}  # fmt: skip
"""A dead node is noticed within seconds."""
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "node_ip_address": ray_cluster.LOOPBACK}
TRIES = 12
FOLDER = "FEDDBE_TEST_FOLDER"
"""Names the folder in which `Obedient` looks for orders."""


class Obedient(Scaffold):
    """Notes for which raylet it works, and has accidents on order."""

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        place = Path(os.environ[FOLDER])
        time.sleep(0.3)  # so that one node does not do it all before another one has begun
        with (place / "raylets").open("a") as file:
            print(os.getppid(), file=file)
        once, always, doomed, stuck = (place / n for n in ("dies once", "dies", "doomed", "stuck"))
        here = doomed.exists() and doomed.read_text() == str(os.getppid())
        if local.client == 2 and once.exists():
            once.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if local.client == 1 and always.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        with suppress(FileNotFoundError):
            stuck.unlink()
            time.sleep(600)
        if here:
            (place / "at work").touch()
            time.sleep(600)
        return super().train(ctx, local, received, private)


class Writing(FedAvg):
    """Destroys the message when it is done with it."""

    def train(self, ctx: Context, local: Local, received: State, private: State) -> tuple[State, State]:
        found = super().train(ctx, local, {name: t.clone() for name, t in received.items()}, private)
        for tensor in received.values():
            tensor.fill_(float("nan"))
        return found


class Nothing:
    """What clients have that keep nothing."""

    def read(self, client: int) -> bytes | None:
        return None

    def stage(self, client: int, state: bytes) -> None:
        raise AssertionError


class Harmed:
    """An engine to which something happens once, after its eighth reply."""

    def __init__(self, inner: engines.Engine, harm: Callable[[], object]) -> None:
        self.inner, self.harm, self.replies = inner, harm, 0

    def run(self, jobs: Sequence[Job], messages: Messages, states: ClientStates) -> Iterator[Any]:
        for reply in self.inner.run(jobs, messages, states):
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
        self.ours = ray_cluster._prepared(None, 1)
        self.ray = str(self.ours.folder) + "/ray"
        os.environ["HOME"] = str(self.ours.folder)  # of Ray's daemons; this process needs it no more
        from ray.cluster_utils import Cluster

        head = {**NODE, "include_dashboard": False, "_system_config": QUICK, "temp_dir": self.ray}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.add_node()
        self.engine = f"ray(address={self.cluster.address})"

    def end(self) -> None:
        ray_cluster.disconnect()
        self.cluster.shutdown()
        shutil.rmtree(str(self.ours.folder))

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {what}", file=sys.stderr, flush=True)

    @cached_property
    def obedient(self) -> tuple[Experiment, Outcome]:
        e = replace(experiment("scaffold", samples([44] * 6), rounds=3), method=Obedient())
        return e, outcome(e, self.place / "obedient")

    def equal(
        self, name: str, e: Experiment, serial: Outcome, harm: Callable[[], object], waiting: Waiting
    ) -> bool:
        """Whether server, clients and entries are those of serial."""
        made = engines.find(self.engine).make(e.task, e.method, waiting)
        with closing(Harmed(made, harm)) as engine:
            ray = carry_out(e, self.place / name, engine)
        self.say(name)
        return (
            same_bits(serial.server, ray.server)
            and serial.clients.keys() == ray.clients.keys()
            and all(same_bits(serial.clients[c], ray.clients[c]) for c in serial.clients)
            and [{**a, "seconds": 0} for a in serial.entries] == [{**a, "seconds": 0} for a in ray.entries]
        )

    def method(self, name: str) -> bool:
        e = experiment(name)
        serial = outcome(e, self.place / f"{name}-serial")
        return self.equal(name, e, serial, lambda: None, Waiting())

    def accident(self, name: str, harm: Callable[[], object], waiting: Waiting | None = None) -> bool:
        return self.equal(name, *self.obedient, harm, waiting or Waiting())

    def error(self, name: str, e: Experiment) -> str:
        """How it ends."""
        try:
            outcome(e, self.place / name, self.engine)
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
                ray_tasks.START = 60.0

        def harm() -> None:
            (self.orders / "stuck").touch()
            ray_tasks.START = 0.0

        same = self.accident("stuck", harm, Waiting(timeout=3.0, remark=remark))
        return same and any("did not answer for" in text for text in said)

    def raylet(self) -> int:
        return int(self.second.all_processes["raylet"][0].process.pid)

    def kill_node(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)

    def doom_node(self) -> None:
        """It is killed as soon as a client is at work there, which does not end before."""
        (self.orders / "doomed").write_text(str(self.raylet()))
        node = self.second

        def kill() -> None:
            while not (self.orders / "at work").exists():
                time.sleep(0.05)
            self.cluster.remove_node(node, allow_graceful=False)

        threading.Thread(target=kill, daemon=True).start()

    def node_dies(self) -> bool:
        """In a run, or in one of the next: whenever a client comes to it."""
        same = self.accident("node dies", self.doom_node)
        for attempt in range(TRIES):
            if not (self.orders / "at work").exists():
                same = self.accident(f"node dies {attempt}", lambda: None) and same
        return same

    def add_node(self, **environment: str) -> None:
        self.second = self.cluster.add_node(**NODE, temp_dir=self.ray, env_vars=environment or None)

    def works(self) -> bool:
        """Whether the second node is worked on, sooner or later: its first worker takes time to start."""
        for attempt in range(TRIES):
            if str(self.raylet()) in (self.orders / "raylets").read_text().split():
                return True
            self.accident(f"works {attempt}", lambda: None)
        return False

    def copies(self) -> bool:
        """A client that writes into its message does it to its own."""
        e = experiment("fedavg", samples([24] * 6))
        engine = engines.make(self.engine, e.task, Writing())
        jobs, message = [Job(c, 1, "train") for c in range(6)], Messages(dict(e.task.model.parameters))
        found = [reply for reply in engine.run(jobs, message, Nothing()) if isinstance(reply, Reply)]
        return len(found) == 6 and all(bool(t.isfinite().all()) for reply in found for t in reply.up.values())

    def other_sources(self) -> str:
        """A node whose feddbe is not ours."""
        shutil.copytree(Path(feddbe.__file__).parent, self.place / "other" / "feddbe")
        with (self.place / "other" / "feddbe" / "state.py").open("a") as file:
            file.write("# another version\n")
        self.add_node(PYTHONPATH=str(self.place / "other"))
        said = (self.error(f"other sources {attempt}", self.obedient[0]) for attempt in range(TRIES))
        return next((text for text in said if text != "no error"), "no error")

    def other_python(self) -> str:
        """Ray compares its own version and Python's when it is joined."""
        from ray._private import utils

        ray_cluster.disconnect()
        real = utils.compute_version_info
        utils.compute_version_info = lambda: (real()[0], "3.9.1")
        try:
            return self.error("other Python", self.obedient[0])
        finally:
            utils.compute_version_info = real

    def no_gpu(self) -> str:
        """What no node has is not waited for."""
        self.engine = self.engine.replace(")", ",gpus=1)")
        return self.error("no GPU", self.obedient[0])


def trial(place: Path, every: bool) -> dict[str, Any]:
    """What came of everything."""
    cluster = Trial(place)
    orders = cluster.orders
    cluster.say("two nodes")
    try:
        found: dict[str, Any] = {
            "methods": {name: cluster.method(name) for name in (COMBINATIONS if every else METHODS)}
        }
        found["copies"] = cluster.copies()
        found["diverged"] = cluster.error("diverged", experiment("fedavg", lr=1e30))
        found["a worker dies"] = cluster.accident("dies once", (orders / "dies once").touch)
        found["it died"] = not (orders / "dies once").exists()
        found["a worker is stuck"] = cluster.stuck()
        (orders / "dies").touch()
        found["each worker dies"] = cluster.error("dies", cluster.obedient[0])
        (orders / "dies").unlink()
        if every:  # slow to begin, and slow to be missed
            found["a node dies"] = cluster.node_dies()
            found["while at work"] = (orders / "at work").exists()
            found["a node joins"] = cluster.accident("node joins", cluster.add_node)
            found["it works"] = cluster.works()
            cluster.kill_node()
            found["other sources"] = cluster.other_sources()
        found["other Python"] = cluster.other_python()
        found["no GPU"] = cluster.no_gpu()
        return found
    finally:
        cluster.end()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--all", action="store_true")
    given = arguments.parse_args()
    print(json.dumps(trial(given.folder, given.all)))
