"""A client imports only what it needs, since every process of a federation pays for the rest."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import sys
import feddbe.simulation.client, feddbe.simulation.engines, feddbe.runs.experiment
from feddbe.methods import METHODS
from feddbe.methods.registry import parse_method
parse_method("fedavg+dbe")
assert "scaffold" in METHODS and len(METHODS) > 10 and list(METHODS)[0] == "fedavg"
print(*sys.modules)
"""


def test_client_imports_no_other_method_and_no_file_reader() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    top_level = {name.partition(".")[0] for name in imported}
    assert "torch" in top_level
    unneeded = {"PIL", "matplotlib", "sklearn", "pandas", "pyarrow", "datasets", "rich", "typer", "ray"}
    assert not top_level & unneeded
    for package, expected in {
        "methods": {"addons", "base", "fedavg", "dp_mean", "new_clients", "registry"},
        "data": {"dataset", "federated", "registry", "rows", "split"},
    }.items():
        prefix = f"feddbe.{package}."
        assert {name.removeprefix(prefix) for name in imported if name.startswith(prefix)} == expected
