"""What holds for every method with every add-on it takes, on every engine."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from feddbe import testing
from feddbe.methods.registry import ADDONS, METHODS, hyperparameters, parse_method
from feddbe.simulation.engines import pool
from tests.federation import COMBINATIONS, ENGINES, Outcome, experiment, quick, run_outcome

every = pytest.mark.parametrize("name", [quick(name) for name in COMBINATIONS])


@every
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_give_the_same_bits(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of the pool hold what they made, as they do with large states."""
    monkeypatch.setattr(pool, "LARGE_BYTES", 1)
    testing.check_engines(name, tmp_path, engine)


@every
def test_a_run_continued_after_each_round_is_the_same_run(name: str, tmp_path: Path) -> None:
    testing.check_resume(name, tmp_path)


@every
def test_secrets_stay_secret(name: str, tmp_path: Path) -> None:
    testing.check_secrets(name, tmp_path)


@every
def test_part_of_the_clients(name: str, tmp_path: Path) -> None:
    testing.check_partial_participation(name, tmp_path)


@every
@pytest.mark.parametrize("sizes", [(60, 4), (40,)], ids=["less than a batch", "one client"])
def test_few_samples_and_few_clients(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    testing.check_small_clients(name, tmp_path, sizes)


NEEDS = {"contrast": "prbm", "mr_target": "mr", "level": "prbm"}
"""Options that say how a method goes with an add-on: without it they are dead, and may be."""
WITH: dict[str, dict[str, Any]] = {
    "delta": {"hessian": "free"}, "rounds_l": {"eta1": 0.1, "eta2": 0.1},
    "epsilon": {"m": 2}, "epsilon_decay": {"m": 2, "epsilon": 1},
}  # fmt: skip
"""Options that only act together with another one, or hardly without."""
OTHERS: dict[str, list[Any]] = {"m": [2], "epsilon": [1.0], "epsilon_decay": [1.0]}
"""Values that three clients can tell from the default in six rounds."""
EVERY_COMBINATION = "FEDDBE_CASES" in os.environ
"""`make test-all` tries every hyperparameter in every combination."""
GUARANTEED = ("epsilon", "delta", "clip", "init_clients")
"""Options of MR that are tried with a guarantee."""
GUARANTEE = {"init_mean": "start", "epsilon": 1, "delta": 1e-5, "clip": 2}
"""Options of MR that only go together."""


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_hyper_parameter_changes_the_result(name: str, tmp_path: Path) -> None:
    """A dead option would pass all degeneracies. mu = 0.5, because at 1 a debiased mean is the plain one."""
    method, _, addon = name.partition("+")
    parts = ADDONS.get(addon, ())
    fixed = {"mu": 0.5} if any(part.name == "mr" for part in parts) else {}
    bases = dict[str, Outcome]()
    for part in (METHODS[method], *parts):
        for field in dataclasses.fields(part):
            if NEEDS.get(field.name, field.name) not in [field.name, *(p.name for p in parts)]:
                continue
            if not EVERY_COMBINATION and is_checked_elsewhere(name, part.name, field.name):
                continue
            if method == "fedfomo" and field.name == "init_keep_model":
                continue  # refused: its server has no model
            if METHODS[method]().has_setup and field.name == "init_clients":
                continue  # refused: all clients prepare for the method itself
            inner = part is METHODS[method]
            beside = WITH.get(field.name, {}) if inner else {}
            among = fixed | GUARANTEE if part.name == "mr" and field.name in GUARANTEED else fixed
            text, rounds = written(method, beside, addon, among), 6 if beside else 2
            if text not in bases:
                bases[text] = run_outcome(experiment(text, rounds=rounds), tmp_path / field.name)
            now = hyperparameters(parse_method(written(method, {}, addon, fixed)))[part.name][field.name]
            for value in (OTHERS.get(field.name) if inner else None) or testing.list_other_values(field, now):
                given, place = {field.name: value}, tmp_path / f"{part.name}-{field.name}-{value}"
                other = written(
                    method,
                    {**beside, **given} if inner else {},
                    addon,
                    fixed if inner else {**among, **given},
                )
                changed = run_outcome(experiment(other, rounds=rounds), place)
                assert testing.outcomes_differ(bases[text], changed), f"{other}: {field.name} changes nothing"


def is_checked_elsewhere(name: str, part: str, field: str) -> bool:
    """Return whether the method alone, or the add-on with FedAvg, has the hyperparameter too; not kappa."""
    method, _, addon = name.partition("+")
    return bool(addon) and (part == method or method != "fedavg") and field != "kappa"


def written(method: str, own: dict[str, Any], addon: str, given: dict[str, Any]) -> str:
    """method(own)+addon(given)."""

    def one(name: str, options: dict[str, Any]) -> str:
        return name + (f"({','.join(f'{k}={v}' for k, v in options.items())})" if options else "")

    return one(method, own) + (f"+{one(addon, given)}" if addon else "")
