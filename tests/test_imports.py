"""What a client needs is all that is imported for it: each process of a federation pays for the rest."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import sys
import feddbe.simulation.client, feddbe.simulation.engines, feddbe.runs.experiment
from feddbe.methods import METHODS, parse
parse("fedavg+dbe")
assert "scaffold" in METHODS and len(METHODS) > 10 and list(METHODS)[0] == "fedavg"
print(*sys.modules)
"""


def test_a_client_imports_no_other_method_and_no_reader() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    tops = {name.partition(".")[0] for name in found}
    assert "torch" in tops
    others = {"PIL", "matplotlib", "sklearn", "pandas", "pyarrow", "datasets", "rich", "typer", "ray"}
    assert not tops & others
    for package, wanted in {
        "methods": {
            "addons",
            "base",
            "fedavg",
            "dp_mean",
            "new_clients",
            "registry",
        },
        "data": {"dataset", "federated", "registry", "rows", "split"},
    }.items():
        prefix = f"feddbe.{package}."
        assert {name.removeprefix(prefix) for name in found if name.startswith(prefix)} == wanted
