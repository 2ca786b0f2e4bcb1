"""Back to a round of a run: the same states, the same work, the same numbers; and the run stays as it was."""

from __future__ import annotations

import sqlite3
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from feddbe import engines
from feddbe.engines.client import Reply
from feddbe.methods import METHODS
from feddbe.runs.experiment import Experiment
from feddbe.runs.revisit import Entry
from feddbe.runs.store import FILE, Store
from feddbe.state import decode
from tests.federation import COMBINATIONS, experiment, measured, outcome, same_bits

MODELS = [name for name in METHODS if name != "majority"]


def look(
    e: Experiment,
    folder: Path,
    which: str,
    moments: tuple[str, ...],
    places: tuple[str, ...],
    engine: str = "serial",
) -> tuple[int, list[Reply]]:
    """The entry, and what all clients see of all their test samples."""
    store, made = Store.open(folder), engines.make(engine, e.task, e.method)
    try:
        entry = Entry(store, e, which)
        jobs = entry.jobs(moments, places, dict.fromkeys(range(e.task.members)))
        return entry.round, entry.ask(jobs, made)
    finally:
        made.close()
        store.close()


def accuracies(replies: list[Reply], moment: str) -> dict[int, float]:
    """By hand, from what was at the place `logits`."""
    found = {}
    for reply in replies:
        hits = (reply.seen[f"{moment}/logits"].argmax(1) == reply.seen["y"]).sum()
        found[reply.client] = float(Fraction(int(hits), len(reply.seen["y"])))
    return found


def stored(folder: Path, entry: int, moment: str) -> dict[int, float | None]:
    store = Store.open(folder)
    found = measured(store, entry, "accuracy", moment)
    store.close()
    return found


def everything(folder: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / FILE) as db:
        tables = ("SELECT * FROM states ORDER BY 1, 2", "SELECT * FROM rows", "SELECT * FROM meta")
        found = [row for table in tables for row in db.execute(table)]
    db.close()
    return found


@pytest.mark.parametrize("name", COMBINATIONS)
def test_before_is_what_was_evaluated_and_after_what_the_next_round_does(name: str, tmp_path: Path) -> None:
    """Two rounds, looked at; then a third, whose clients start from there. Their accuracies are equal."""
    e = experiment(name)
    outcome(e, tmp_path)
    before = everything(tmp_path)
    moments = ("before", "after", *["adapted"] * bool(e.method.adapts))
    _, replies = look(e, tmp_path, "last", moments, ("logits",))
    assert everything(tmp_path) == before, "nothing of the run has changed"
    if e.method.base == "majority":
        assert [reply.seen for reply in replies] == [{}] * 3, "it has no model"
        return
    assert accuracies(replies, "before") == stored(tmp_path, 2, "before")
    if e.method.adapts:
        assert accuracies(replies, "adapted") == stored(tmp_path, 2, "adapted")
    outcome(experiment(name, rounds=3), tmp_path)
    assert accuracies(replies, "after") == stored(tmp_path, 2, "after")


STEPS: dict[str, Any] = {"lr": 1.0, "join": 0.67, "rounds": 6}
"""Rates so high that the last round is not the best one."""


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_best_entry_has_the_states_that_it_was_evaluated_with(name: str, tmp_path: Path) -> None:
    """They are those of a run that ended there."""
    chosen = STEPS | ({"join": 1.0} if METHODS[name.split("+")[0]].needs_all else {})
    e = experiment(name, **chosen)
    outcome(e, tmp_path / "whole")
    store = Store.open(tmp_path / "whole")
    entry = Entry(store, e, "best")
    outcome(experiment(name, **chosen | {"rounds": entry.round}), tmp_path / "best")
    ended = Store.open(tmp_path / "best")
    assert same_bits(store.server("best"), ended.server())
    for client in range(3):
        was, is_ = entry.read(client), ended.read(client)
        assert (was is None) == (is_ is None)
        if was is not None and is_ is not None:
            assert same_bits(decode(was), decode(is_))
        if e.method.keeps_uploads and (entry.round or e.method.prepares):
            assert same_bits(entry.upload(client), ended.upload(client))
    kinds = {kind for kind, *_ in everything(tmp_path / "whole") if isinstance(kind, str)}
    assert not {kind for kind in kinds if kind.startswith("old ")}
    store.close()
    ended.close()
    if e.method.base != "majority":
        round, replies = look(e, tmp_path / "whole", "best", ("before", "after"), ("logits",))
        assert accuracies(replies, "before") == stored(tmp_path / "whole", round, "before")
        after = stored(tmp_path / "whole", round, "after")
        found = accuracies(replies, "after")
        assert {client: found[client] for client in after} == after
