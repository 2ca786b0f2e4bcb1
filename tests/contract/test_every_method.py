"""What holds for every method with every add-on it takes, on every engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from feddbe import seeds
from feddbe.errors import BadInput
from feddbe.methods import ADDONS, METHODS, hyper_parameters, parse
from feddbe.methods.base import Names, refused
from feddbe.runs.store import Store
from feddbe.state import matches
from tests.federation import (
    COMBINATIONS,
    ENGINES,
    Recorder,
    carry_out,
    experiment,
    measured,
    outcome,
    same_bits,
    samples,
    states,
)

every = pytest.mark.parametrize("name", COMBINATIONS)


def share(name: str) -> float:
    """Two of three clients take part, where a method can do with less than all."""
    return 1.0 if parse(name).needs_all else 0.67


@every
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_give_the_same_bits(name: str, engine: str, tmp_path: Path) -> None:
    """Wherever clients work, whoever is first: server, clients and accuracies as one after another."""
    e = experiment(name, join=share(name))
    serial, other = outcome(e, tmp_path / "serial"), outcome(e, tmp_path / "other", engine)
    assert same_bits(serial.server, other.server)
    assert serial.clients.keys() == other.clients.keys()
    assert all(same_bits(serial.clients[c], other.clients[c]) for c in serial.clients)
    for a, b in zip(serial.entries, other.entries, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


@every
def test_a_run_continued_after_each_round_is_the_same_run(name: str, tmp_path: Path) -> None:
    """Nothing is carried in memory from round to round that is not in the file, and all states are in it: the
    last ones and those of the best entry."""
    whole = outcome(experiment(name, rounds=3, join=share(name)), tmp_path / "whole")
    for rounds in range(4):
        parts = outcome(experiment(name, rounds=rounds, join=share(name)), tmp_path / "parts")
    assert same_bits(whole.server, parts.server)
    assert all(same_bits(whole.clients[c], parts.clients[c]) for c in whole.clients)
    for a, b in zip(whole.entries, parts.entries, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    assert states(tmp_path / "whole") == states(tmp_path / "parts")


@every
def test_secrets_stay_secret(name: str, tmp_path: Path) -> None:
    """That names are as declared is checked in every call; here are the values."""
    e = experiment(name)
    recorder = Recorder(e)
    carry_out(e, tmp_path, recorder)
    assert leaks(recorder, e.method.secret) == []
    assert refused(e.method.secret, e.method.keeps, e.task.model) == []
    kept = {n for state in recorder.private for n in state}
    assert all(any(matches(n, [pattern]) for n in kept) for pattern in e.method.keeps), "nothing in vain"


def leaks(recorder: Recorder, secret: Names) -> list[str]:
    """Secret names, and secret values of eight entries or more, that occur in any message."""
    found = [n for message in recorder.messages for n in message if matches(n, secret)]
    secrets = {
        f"{name} of state {i}": t.contiguous().numpy().tobytes()
        for i, state in enumerate(recorder.private)
        for name, t in state.items()
        if matches(name, secret) and t.numel() >= 8
    }
    for message in recorder.messages:
        for sent, tensor in message.items():
            data = tensor.contiguous().numpy().tobytes()
            found += [f"{name} in {sent}" for name, secret in secrets.items() if secret in data]
    return found


@every
def test_part_of_the_clients(name: str, tmp_path: Path) -> None:
    """One of ten per round; eight clients never take part and are evaluated all the same."""
    if parse(name).needs_all:
        with pytest.raises(BadInput, match=f"{name} needs join = 1 and no newcomers: every model is"):
            experiment(name, samples([24] * 10), join=0.1)
        return
    e = experiment(name, samples([24] * 10), join=0.1)
    ran = outcome(e, tmp_path)
    joined = {c for t in (1, 2) for c in seeds.cohort(0, t, 10, 0.1)}
    assert ran.clients.keys() <= joined
    store = Store.open(tmp_path)
    for entry in range(3):
        assert measured(store, entry).keys() == set(range(10))
    store.close()


@every
@pytest.mark.parametrize("sizes", [(60, 4), (40,)], ids=["less than a batch", "one client"])
def test_few_samples_and_few_clients(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    ran = outcome(experiment(name, samples(sizes)), tmp_path)
    assert all(torch.isfinite(t).all() for t in ran.server.values())
    assert all(entry["accuracy"] for entry in ran.entries)


NEEDS = {"contrast": "prbm", "mr_target": "mr", "level": "prbm"}
"""Options that say how a method goes with an add-on: without it they are dead, and may be."""
WITH: dict[str, dict[str, Any]] = {
    "delta": {"hessian": "free"}, "rounds_l": {"eta1": 0.1, "eta2": 0.1},
    "epsilon": {"m": 2}, "epsilon_decay": {"m": 2, "epsilon": 1},
}  # fmt: skip
"""Options that only act together with another one, or hardly without."""
OTHERS: dict[str, list[Any]] = {"m": [2], "epsilon": [1.0], "epsilon_decay": [1.0]}
"""Values that three clients can tell from the default in six rounds."""
GUARANTEE = {"init_mean": "start", "epsilon": 1, "delta": 1e-5, "clip": 2}
"""Options of MR that only go together."""


@every
def test_every_hyper_parameter_changes_the_result(name: str, tmp_path: Path) -> None:
    """A dead option would pass all degeneracies. mu = 0.5, because at 1 a debiased mean is the plain one."""
    method, _, addon = name.partition("+")
    parts = ADDONS.get(addon, ())
    fixed = {"mu": 0.5} if any(part.name == "mr" for part in parts) else {}
    plain = outcome(experiment(written(method, {}, addon, fixed)), tmp_path / "base")
    for part in (METHODS[method], *parts):
        for field in dataclasses.fields(part):
            if NEEDS.get(field.name, field.name) not in [field.name, *(p.name for p in parts)]:
                continue
            if method == "fedfomo" and field.name == "init_keep_model":
                continue  # refused: its server has no model
            if METHODS[method]().prepares and field.name == "init_clients":
                continue  # refused: all clients prepare for the method itself
            inner, base, rounds = part is METHODS[method], plain, 2
            beside = WITH.get(field.name, {}) if inner else {}
            among = fixed | GUARANTEE if part.name == "mr" and field.metadata["late"] else fixed
            if beside or among != fixed:
                rounds = 6 if beside else 2
                text = written(method, beside, addon, among)
                base = outcome(experiment(text, rounds=rounds), tmp_path / field.name)
            now = hyper_parameters(parse(written(method, {}, addon, fixed)))[part.name][field.name]
            for value in (OTHERS.get(field.name) if inner else None) or others(field, now):
                given = {field.name: value}
                text = written(
                    method,
                    {**beside, **given} if inner else {},
                    addon,
                    fixed if inner else {**among, **given},
                )
                changed = outcome(
                    experiment(text, rounds=rounds), tmp_path / f"{part.name}-{field.name}-{value}"
                )
                moved = not same_bits(base.server, changed.server) or any(
                    not same_bits(base.clients[c], changed.clients[c]) for c in base.clients
                )
                assert moved, f"{text}: {field.name} changes nothing"


def written(method: str, own: dict[str, Any], addon: str, given: dict[str, Any]) -> str:
    """method(own)+addon(given)."""

    def one(name: str, options: dict[str, Any]) -> str:
        return name + (f"({','.join(f'{k}={v}' for k, v in options.items())})" if options else "")

    return one(method, own) + (f"+{one(addon, given)}" if addon else "")


def others(field: dataclasses.Field[Any], now: Any) -> list[Any]:
    """Other values than the one in force."""
    if field.metadata["choices"]:
        return [c for c in field.metadata["choices"] if c != now]
    if isinstance(now, bool):
        return [str(not now).lower()]
    if now is None:
        return [2] if "int" in str(field.type) else [0.01]
    return [now + 1] if isinstance(now, int) else [now / 2 if now else 0.25]
