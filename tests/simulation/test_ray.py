"""The Ray engine on two nodes with faults, and on one machine, each in a separate process."""

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
from tests.small_runs import COMBINATIONS, experiment

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY or sys.platform != "linux", reason="needs feddbe[ray], on Linux")
RUN_ALL = "FEDDBE_CASES" in os.environ
"""True in `make test-all`."""
PATIENCE = 1800
"""Seconds after which a script counts as hanging."""


def run_script(*command: str) -> dict[str, Any]:
    """Return the JSON that a script prints; one that hangs is interrupted, so that it prints a traceback."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                stdout, stderr = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == 0, stderr
    results: dict[str, Any] = json.loads(stdout)
    return results


def check_results(results: dict[str, Any], expected: dict[str, Any], messages: dict[str, str]) -> None:
    """Check that values are equal, and that error messages match these patterns."""
    assert {name: results[name] for name in expected} == expected, results
    for name, pattern in messages.items():
        assert re.fullmatch(pattern, results[name].strip()), results[name]
    assert results.keys() == {*expected, *messages}


@needs_ray
@pytest.mark.skipif(not RUN_ALL, reason="takes two minutes: make test-all")
def test_results_equal_serial_with_faults_of_nodes_and_workers(tmp_path: Path) -> None:
    results = run_script(sys.executable, "-m", "tests.simulation.ray_faults", str(tmp_path))
    expected = {
        "methods": dict.fromkeys(COMBINATIONS, True),
        "a method from a file": True, "copies": True,
        "a worker dies": True, "it died": True, "a worker is stuck": True,
        "a node dies": True, "a node joins": True, "it works": True,
    }  # fmt: skip
    messages = {
        "diverged": r"DivergenceError: training diverged: .* at client \d in round 1; "
        r"the last good round is kept.*",
        "every worker dies": r"FeddbeError: client 1 in round 1: its worker died 3 times \(out of memory\?.*",
        "other sources": r"InvalidInputError: node .* differs: feddbe's sources \w{12} there, "
        r"\w{12} here; install .*",
        "other Python": r"InvalidInputError: --engine ray: cannot join the cluster at .* 3\.9\.1 .*",
    }
    check_results(results, expected, messages)


@needs_ray
def test_local_ray_listens_on_loopback_and_equals_serial_after_a_worker_died(tmp_path: Path) -> None:
    results = run_script(sys.executable, "-m", "tests.simulation.ray_local", str(tmp_path))
    expected = {"same bits": True, "addresses": ["127.0.0.1"], "SIGTERM is ours": True, "a worker died": True}
    check_results(results, expected, {})


def test_error_without_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    e = experiment("fedavg")
    with pytest.raises(
        InvalidInputError, match=r"--engine ray needs Ray \(.*\): pip install 'feddbe\[ray\]'"
    ):
        engines.create_engine("ray", e.task, e.method)


def test_unreachable_and_malformed_addresses_are_errors() -> None:
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


def test_version_differences_are_named() -> None:
    actual = ray.versions()
    assert ray.differences(actual) == ""
    assert ray.differences({**actual, "Python": "3.9.1"}) == f"Python {actual['Python']} there, 3.9.1 here"


def test_ray_options_set_the_number_of_processes() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [engines.find_engine(n).processes() for n in ("ray", "ray(cpus=3)", "ray(address=h:1)")] == [
        cores,
        3,
        0,
    ]
    with pytest.raises(InvalidInputError, match="ray cpus = 2 with an address"):
        engines.find_engine("ray(address=10.0.0.1:6379,cpus=2)")
