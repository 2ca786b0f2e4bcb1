"""What is measured of the representations in a run when it is over: chosen, taken, and written into its file.

A result is rows (round, client or all, moment, name, value), named as in `mdl@z_g` and `mdl@z_g/bits`, what
is no number a state of its own kind, and in `meta` with which settings it was taken: the same question is
answered from the file, another one anew.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from feddbe.callbacks.base import Watch
from feddbe.config.user_code import NOTHING, Permission
from feddbe.data.dataset import Dataset
from feddbe.errors import BadInput
from feddbe.metrics.records import ALL, AT, Row
from feddbe.metrics.representations import registry
from feddbe.metrics.representations.mdl import listening
from feddbe.metrics.representations.points import Points, Taken
from feddbe.metrics.representations.registry import MEASURES
from feddbe.models.registry import ModelSource
from feddbe.results.document import Measurement, RunDocument
from feddbe.runs.experiment import Experiment
from feddbe.runs.replay import Entry, compare_under_each_model, entry_of, reopened
from feddbe.runs.store import Store, alone
from feddbe.simulation import engines
from feddbe.simulation.client import Reply
from feddbe.simulation.recorder import pool_representations
from feddbe.state import decode, encode

META = "measured"


@dataclass(frozen=True)
class Question:
    """What somebody wants to know of runs."""

    what: tuple[str, ...] = ("mdl",)
    round: str = "best"
    moments: tuple[str, ...] = ("before", "after")
    places: tuple[str, ...] = ("z_g",)
    n: int | None = 1000
    """Test samples kept, of those of all clients (of each, with `per_client`); None: all."""
    quick: bool = False
    per_client: bool = False
    """Take of each client alone what can be taken so."""


class _One(NamedTuple):
    """One measure at one place and moment, with its settings."""

    what: str
    moment: str
    place: str
    quick: bool
    each: bool
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.what}{'-clients' * self.each}{'-quick' * self.quick}{AT}{self.place}"


def answer(
    folder: Path,
    question: Question,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    allowed: Permission = NOTHING,
    watch: Watch | None = None,
) -> None:
    """Take what is not in the run's file yet. What is finished stays there, also if the rest fails."""
    for what in question.what if question.per_client else ():
        if not MEASURES[what].each:
            raise BadInput(f"{what} cannot be taken of single clients; leave out --per-client")
    store = Store.open(folder)
    try:
        if _missing(store, question):
            told = watch or Watch()
            with alone(folder), listening(told.part):
                experiment = reopened(store, dataset=dataset, model=model, allowed=allowed)
                _take_missing(store, question, experiment, told)
    finally:
        store.close()


def layout(document: RunDocument, one: Measurement) -> Points:
    """The points that t-SNE has laid out."""
    store = Store.open(Path(document["folder"]))
    try:
        state = store.state(key(one["round"], one["moment"], f"{one['what']}{AT}{one['place']}"))
        assert state is not None
        return registry.as_points(decode(state))
    finally:
        store.close()


def key(round: int, moment: str, name: str) -> str:
    """What a measurement is known by: in `meta`, and as the kind of its state."""
    return f"{round}/{moment}/{name}"


def _missing(store: Store, question: Question) -> list[_One]:
    """What has not been taken of this entry with these settings."""
    entry, known = entry_of(store, question.round), store.meta(META) or {}
    found = []
    for what in question.what:
        settings, quick = registry.settings_of(what, quick=question.quick)
        each = question.per_client and MEASURES[what].each
        for place in question.places:
            for moment in question.moments:
                one = _One(what, moment, place, quick, each, settings | {"samples": question.n})
                there = known.get(key(entry, moment, one.name))
                if there is None or there["settings"] != one.settings:
                    found.append(one)
    return found


def _take_missing(store: Store, question: Question, experiment: Experiment, watch: Watch) -> None:
    wanted = _missing(store, question)
    task = experiment.task
    task.model.check_places(question.places)
    entry = Entry(store, experiment, question.round)
    sizes = [len(rows) for rows in task.split.test[: task.members]]
    rows = _chosen(sizes, question.n, each=question.per_client)
    watch.begin(f"{experiment.name}: representations", store.folder, 0, 1 + len(wanted))
    own = [one for one in wanted if not MEASURES[one.what].shared]
    shared = [one for one in wanted if MEASURES[one.what].shared]
    if own:
        _take_pooled(entry, own, rows, watch)
    for what in dict.fromkeys(one.what for one in shared):
        asked = {(one.moment, one.place): one for one in shared if one.what == what}
        began, settings = time.perf_counter(), _keywords(next(iter(asked.values())))
        found = compare_under_each_model(entry, what, list(asked), rows, settings, watch)
        about = {"samples": sum(_counts(sizes, rows)), "seconds": time.perf_counter() - began}
        for done, (view, taken) in enumerate(found.items(), start=2 + len(own)):
            _write(store, entry.round, asked[view], taken, about)
            watch.round(done, None)


def _take_pooled(
    entry: Entry, wanted: Sequence[_One], rows: Mapping[int, Sequence[int] | None], watch: Watch
) -> None:
    """Take the measures of points of all clients, each through its own model."""
    experiment, store = entry.experiment, entry.store
    task = experiment.task
    moments = {one.moment for one in wanted}
    jobs = entry.jobs(moments, dict.fromkeys(one.place for one in wanted), rows)
    engine = engines.make("auto", task, experiment.method)
    try:
        replies = entry.ask(jobs, engine, watch)
    finally:
        engine.close()
    _compare(store, entry.round, replies, watch)
    watch.round(1, None)
    same: dict[tuple[str, str], Taken] = {}  # z is z_g without PRBM, and a cut has several names
    for done, one in enumerate(wanted, start=2):
        began, points = time.perf_counter(), pool_representations(replies, one.moment, one.place)
        if points is None:
            raise BadInput(f"{experiment.method.base} deploys no model: it has no representations")
        what = one.what, sha256(points.x.tobytes()).hexdigest()
        if what not in same:
            same[what] = registry.take(one.what, points, task.dataset.classes, _keywords(one), each=one.each)
        about = {"samples": len(points.y), "seconds": time.perf_counter() - began}
        _write(store, entry.round, one, same[what], about)
        watch.round(done, None)


def _keywords(one: _One) -> dict[str, Any]:
    """Return the settings that the measure itself takes."""
    return {name: value for name, value in one.settings.items() if name != "samples"}


def _counts(sizes: Sequence[int], rows: Mapping[int, Sequence[int] | None]) -> list[int]:
    """Return the number of chosen samples of each client in `rows`."""
    return [sizes[client] if some is None else len(some) for client, some in rows.items()]


def _chosen(sizes: Sequence[int], n: int | None, *, each: bool) -> dict[int, list[int] | None]:
    """Which test samples, by client: of all, shuffled by RandomState(0), the first n; `each`: of every
    client's own. Clients of which none is chosen are left out."""
    if n is None or (each and n >= max(sizes)) or n >= sum(sizes):
        return {client: None for client, size in enumerate(sizes) if size}
    starts = np.cumsum([0, *sizes])
    if each:
        return {c: sorted(np.random.RandomState(0).permutation(s)[:n].tolist()) for c, s in enumerate(sizes)}
    kept = np.sort(np.random.RandomState(0).permutation(sum(sizes))[:n])
    parts = [kept[(kept >= a) & (kept < b)] - a for a, b in pairwise(starts)]
    return {client: part.tolist() for client, part in enumerate(parts) if len(part)}


def _compare(store: Store, entry: int, replies: Sequence[Reply], watch: Watch) -> None:
    """What is looked at must be what was evaluated then: say so if clients' accuracies differ."""
    known = {row[1:3]: row.value for row in store.rows(entry) if row.name == "accuracy" and row.client != ALL}
    apart = []
    for reply in replies:
        for moment, numbers in reply.measured.items():
            then, now = known.get((reply.client, moment)), numbers.get("accuracy")
            if then is not None and now is not None and float(now[0]) != then:
                apart.append((reply.client, moment, float(now[0]), then))
    if apart:
        client, moment, here, there = apart[0]
        watch.remark(
            f"the models are not bit for bit those of the run: accuracy of client {client} {moment} local "
            f"training is {here:.4f} here, {there:.4f} there ({len(apart)} differ: other versions?)"
        )


def _write(store: Store, entry: int, one: _One, taken: Taken, about: dict[str, Any]) -> None:
    """All of one measurement, in place of what was there under its name."""
    every = {ALL: taken.overall, **taken.clients}
    lines = [
        Row(entry, client, one.moment, f"{one.name}/{reading}".rstrip("/"), value, about["samples"])
        for client, read in every.items()
        for reading, value in read.items()
    ]
    fields = {"round": entry, "what": one.what, "place": one.place, "moment": one.moment}
    flags = {"quick": one.quick, "per_client": one.each, "settings": one.settings}
    with store.transaction(store.last_round()):
        store.drop_rows(entry, [one.moment], later=one.name)
        store.write_rows(lines)
        if taken.state:
            store.write_state(key(entry, one.moment, one.name), ALL, encode(taken.state), entry)
        known = store.meta(META) or {}
        store.set_meta(META, known | {key(entry, one.moment, one.name): fields | flags | about})
