"""The typed options of `feddbe.run` and `feddbe.compare` are those of `Config`."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal, get_args, get_type_hints

from feddbe.config.defaults import VARIANTS
from feddbe.config.options import (
    CompareOptions,
    Config,
    RunOptions,
    Variant,
    collect_options,
    identity_of_key,
)

ARGUMENTS = {"method", "data", "model"}
"""Options that have their own argument in Python."""


def _config_types() -> dict[str, Any]:
    """Return the type of each option; those with a list of values are literals."""
    hints = get_type_hints(Config)
    types = {}
    for field in dataclasses.fields(Config):
        if field.name in ARGUMENTS:
            continue
        hint = hints[field.name]
        if choices := field.metadata["choices"]:
            is_optional = type(None) in get_args(hint)
            hint = Literal[choices] | None if is_optional else Literal[choices]
        types[field.name] = hint
    return types


def test_options_of_a_run_are_those_of_config() -> None:
    assert get_type_hints(RunOptions) == _config_types()


def test_options_of_a_comparison_may_have_several_values() -> None:
    hints = get_type_hints(CompareOptions)
    for name, hint in _config_types().items():
        expected = hint
        if identity_of_key(name) != "no" and name not in ("seed", "partition_seed"):
            value = hint
            if type(None) in get_args(hint):
                (value,) = [kind for kind in get_args(hint) if kind is not type(None)]
            expected = hint | GenericAlias(Sequence, (value,))
        assert hints.pop(name) == expected, name
    for name in hints:  # those that `Config` does not have, such as seeds
        collect_options([], {name: 2})


def test_variants_are_those_with_values() -> None:
    assert get_args(Variant) == tuple(VARIANTS)


def test_a_type_checker_knows_the_options(tmp_path: Path) -> None:
    """mypy reports a misspelled option, a wrong type and an unknown value, and accepts correct ones."""
    script = tmp_path / "script.py"
    script.write_text(
        "import feddbe\n"
        "feddbe.run('fedavg', rounds=2, lr=0.1, partition='iid', quiet=True)\n"
        "feddbe.compare(['fedavg'], seeds=3, lr=[0.1, 0.01], rounds=2)\n"
        "feddbe.run('fedavg', round=2)\n"
        "feddbe.run('fedavg', rounds='2')\n"
        "feddbe.run('fedavg', lr=[0.1, 0.01])\n"
        "feddbe.run('fedavg', optimizer='adamw')\n"
        "feddbe.compare(['fedavg'], optimizer=['sgd', 'adamw'])\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", ".mypy_cache", str(script)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    lines = [int(line.split(":")[1]) for line in result.stdout.splitlines() if ": error:" in line]
    assert lines == [4, 5, 6, 7, 8], result.stdout + result.stderr
