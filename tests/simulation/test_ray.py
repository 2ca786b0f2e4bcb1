"""The Ray engine: two nodes and what can happen to them, and a machine alone. Each in a process of its own,
which prints what it found."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from feddbe.errors import InvalidInputError
from feddbe.simulation import engines
from feddbe.simulation.engines import ray
from tests.federation import COMBINATIONS, experiment

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY or sys.platform != "linux", reason="needs feddbe[ray], on Linux")
ALL = "FEDDBE_CASES" in os.environ
"""In `make test-all`."""
PATIENCE = 1800
"""Seconds after which a script hangs."""


def child(*words: str) -> dict[str, Any]:
    """What a script prints. One that hangs is interrupted, so that it says where, and tidies up."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, said = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                out, said = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == 0, said
    found: dict[str, Any] = json.loads(out)
    return found


def check(found: dict[str, Any], wanted: dict[str, Any], lines: dict[str, str]) -> None:
    """Values are equal, and what somebody is told is one line like this."""
    assert {name: found[name] for name in wanted} == wanted, found
    for name, pattern in lines.items():
        assert re.fullmatch(pattern, found[name].strip()), found[name]
    assert found.keys() == {*wanted, *lines}


@needs_ray
@pytest.mark.skipif(not ALL, reason="two minutes of dying nodes: make test-all")
def test_nodes_and_workers_come_and_go(tmp_path: Path) -> None:
    found = child(sys.executable, "-m", "tests.simulation.ray_faults", str(tmp_path))
    wanted = {
        "methods": dict.fromkeys(COMBINATIONS, True),
        "a method from a file": True, "copies": True,
        "a worker dies": True, "it died": True, "a worker is stuck": True,
        "a node dies": True, "a node joins": True, "it works": True,
    }  # fmt: skip
    lines = {
        "diverged": r"Diverged: training diverged: .* at client \d in round 1; the last good round is kept.*",
        "each worker dies": r"FeddbeError: client 1 in round 1: its worker died 3 times \(out of memory\?.*",
        "other sources": r"BadInput: node .* differs: feddbe's sources \w{12} there, \w{12} here; install .*",
        "other Python": r"BadInput: --engine ray: cannot join the cluster at .* 3\.9\.1 .*",
    }
    check(found, wanted, lines)


@needs_ray
def test_ray_started_here_is_local_and_has_the_bits_of_serial_although_a_worker_dies(tmp_path: Path) -> None:
    found = child(sys.executable, "-m", "tests.simulation.ray_local", str(tmp_path))
    same = {"same bits": True, "addresses": ["127.0.0.1"], "SIGTERM is ours": True, "a worker died": True}
    check(found, same, {})


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    e = experiment("fedavg")
    with pytest.raises(
        InvalidInputError, match=r"--engine ray needs Ray \(.*\): pip install 'feddbe\[ray\]'"
    ):
        engines.create_engine("ray", e.task, e.method)


def test_nobody_there_and_no_address() -> None:
    e = experiment("fedavg")
    with pytest.raises(
        InvalidInputError, match=r"cannot join the cluster at '127.0.0.1:1': .*refused \(docs/cluster"
    ):
        engines.create_engine("ray(address=127.0.0.1:1)", e.task, e.method)
    for wrong in ("auto", "127.0.0.1", "h:", "h:0", "h:65536"):
        with pytest.raises(
            InvalidInputError, match=f"ray address = '{wrong}'; allowed: HOST:PORT, as in 10.0.0.1:6379"
        ):
            engines.create_engine(f"ray(address={wrong})", e.task, e.method)


def test_where_machines_differ_is_said() -> None:
    here = ray.versions()
    assert ray.differences(here) == ""
    assert ray.differences({**here, "Python": "3.9.1"}) == f"Python {here['Python']} there, 3.9.1 here"


def test_options() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [engines.find_engine(n).processes() for n in ("ray", "ray(cpus=3)", "ray(address=h:1)")] == [
        cores,
        3,
        0,
    ]
    with pytest.raises(InvalidInputError, match="ray cpus = 2 with an address"):
        engines.find_engine("ray(address=10.0.0.1:6379,cpus=2)")
