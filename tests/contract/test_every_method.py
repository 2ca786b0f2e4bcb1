"""Guarantees for every method with every supported add-on, on every engine."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from feddbe import testing
from feddbe.methods.registry import ADDONS, METHODS, hyperparameters, parse_method
from feddbe.simulation.engines import pool
from tests.small_runs import COMBINATIONS, ENGINES, Outcome, experiment, run_outcome, shorten_fedgen

all_combinations = pytest.mark.parametrize("name", [shorten_fedgen(name) for name in COMBINATIONS])


@all_combinations
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_are_bit_identical(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of the pool cache all states, as they do with large ones."""
    monkeypatch.setattr(pool, "LARGE_BYTES", 1)
    testing.check_engines(name, tmp_path, engine)


@all_combinations
def test_resume_after_each_round_is_bit_exact(name: str, tmp_path: Path) -> None:
    testing.check_resume(name, tmp_path)


@all_combinations
def test_secrets_are_not_sent(name: str, tmp_path: Path) -> None:
    testing.check_secrets(name, tmp_path)


@all_combinations
def test_partial_participation_trains_the_cohort_only(name: str, tmp_path: Path) -> None:
    testing.check_partial_participation(name, tmp_path)


@all_combinations
@pytest.mark.parametrize("sizes", [(60, 4), (40,)], ids=["less than a batch", "one client"])
def test_small_clients_and_a_single_client(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    testing.check_small_clients(name, tmp_path, sizes)


NEEDS = {"contrast": "prbm", "mr_target": "mr", "level": "prbm"}
"""Options of methods that have an effect only with this add-on."""
PREREQUISITES: dict[str, dict[str, Any]] = {
    "delta": {"hessian": "free"}, "rounds_l": {"eta1": 0.1, "eta2": 0.1},
    "epsilon": {"m": 2}, "epsilon_decay": {"m": 2, "epsilon": 1},
}  # fmt: skip
"""Other options that an option needs to have a visible effect."""
VALUES: dict[str, list[Any]] = {"m": [2], "epsilon": [1.0], "epsilon_decay": [1.0]}
"""Values whose results differ from the default within six rounds of three clients."""
EVERY_COMBINATION = "FEDDBE_CASES" in os.environ
"""True in `make test-all`: every hyperparameter is tested in every combination."""
PRIVACY_OPTIONS = ("epsilon", "delta", "clip", "init_clients")
"""Options of MR that are tested with differential privacy."""
PRIVACY = {"init_mean": "start", "epsilon": 1, "delta": 1e-5, "clip": 2}
"""Options of MR that differential privacy requires together."""


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_hyperparameter_changes_the_result(name: str, tmp_path: Path) -> None:
    """mu is 0.5, because at 1 bias correction has no effect."""
    method, _, addon = name.partition("+")
    parts = ADDONS.get(addon, ())
    fixed: dict[str, Any] = {"mu": 0.5} if any(part.name == "mr" for part in parts) else {}
    bases = dict[str, Outcome]()
    for part in (METHODS[method], *parts):
        for field in dataclasses.fields(part):
            if NEEDS.get(field.name, field.name) not in [field.name, *(p.name for p in parts)]:
                continue
            if not EVERY_COMBINATION and is_checked_elsewhere(name, part.name, field.name):
                continue
            if method == "fedfomo" and field.name == "init_keep_model":
                continue  # unsupported: its server has no model
            if METHODS[method]().has_setup and field.name == "init_clients":
                continue  # unsupported: the method's setup needs all clients
            is_method_option = part is METHODS[method]
            method_options = PREREQUISITES.get(field.name, {}) if is_method_option else {}
            addon_options = fixed
            if part.name == "mr" and field.name in PRIVACY_OPTIONS:
                addon_options = fixed | PRIVACY
            base = format_spec(method, method_options, addon, addon_options)
            rounds = 6 if method_options else 2
            if base not in bases:
                bases[base] = run_outcome(experiment(base, rounds=rounds), tmp_path / field.name)
            default_method = parse_method(format_spec(method, {}, addon, fixed))
            current = hyperparameters(default_method)[part.name][field.name]
            values = VALUES.get(field.name) if is_method_option else None
            for value in values or testing.list_other_values(field, current):
                option = {field.name: value}
                if is_method_option:
                    other = format_spec(method, {**method_options, **option}, addon, fixed)
                else:
                    other = format_spec(method, {}, addon, {**addon_options, **option})
                folder = tmp_path / f"{part.name}-{field.name}-{value}"
                changed = run_outcome(experiment(other, rounds=rounds), folder)
                assert testing.outcomes_differ(bases[base], changed), f"{other}: {field.name} has no effect"


def is_checked_elsewhere(name: str, part: str, field: str) -> bool:
    """Return True if the method without add-on or the add-on with FedAvg covers the option, except kappa."""
    method, _, addon = name.partition("+")
    return bool(addon) and (part == method or method != "fedavg") and field != "kappa"


def format_spec(
    method: str, method_options: dict[str, Any], addon: str, addon_options: dict[str, Any]
) -> str:
    """Return method(method_options)+addon(addon_options)."""

    def format_part(name: str, options: dict[str, Any]) -> str:
        pairs = ",".join(f"{key}={value}" for key, value in options.items())
        return f"{name}({pairs})" if pairs else name

    spec = format_part(method, method_options)
    return f"{spec}+{format_part(addon, addon_options)}" if addon else spec
