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

from feddbe.callbacks.base import Callback
from feddbe.config.user_code import NO_PERMISSION, Permission
from feddbe.data.dataset import Dataset
from feddbe.errors import InvalidInputError
from feddbe.metrics.records import ALL, AT, Record
from feddbe.metrics.representations import registry
from feddbe.metrics.representations.mdl import report_progress_to
from feddbe.metrics.representations.points import AnalysisResult, Points
from feddbe.metrics.representations.registry import ANALYSES
from feddbe.models.registry import ModelSource
from feddbe.results.document import AnalysisDocument, RunDocument
from feddbe.runs.experiment import Experiment
from feddbe.runs.replay import Checkpoint, checkpoint_round, compare_under_each_model, load_experiment
from feddbe.runs.store import RunStore, exclusive
from feddbe.simulation import engines
from feddbe.simulation.client import ClientResult
from feddbe.simulation.recorder import pool_representations
from feddbe.state import decode, encode

META = "analyses"


@dataclass(frozen=True)
class AnalysisRequest:
    """What somebody wants to know of runs."""

    analyses: tuple[str, ...] = ("mdl",)
    round: str = "best"
    moments: tuple[str, ...] = ("before", "after")
    layers: tuple[str, ...] = ("z_g",)
    samples: int | None = 1000
    """Test samples kept, of those of all clients (of each, with `per_client`); None: all."""
    quick: bool = False
    per_client: bool = False
    """Take of each client alone what can be taken so."""


class _AnalysisItem(NamedTuple):
    """One measure at one place and moment, with its settings."""

    analysis: str
    moment: str
    layer: str
    quick: bool
    per_client: bool
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.analysis}{'-clients' * self.per_client}{'-quick' * self.quick}{AT}{self.layer}"


def run_analyses(
    folder: Path,
    question: AnalysisRequest,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    allowed: Permission = NO_PERMISSION,
    callback: Callback | None = None,
) -> None:
    """Take what is not in the run's file yet. What is finished stays there, also if the rest fails."""
    for what in question.analyses if question.per_client else ():
        if not ANALYSES[what].supports_per_client:
            raise InvalidInputError(f"{what} cannot be taken of single clients; leave out --per-client")
    store = RunStore.open(folder)
    try:
        if _missing_items(store, question):
            told = callback or Callback()
            with exclusive(folder), report_progress_to(told.on_analysis_progress):
                experiment = load_experiment(store, dataset=dataset, model=model, allowed=allowed)
                _compute_missing(store, question, experiment, told)
    finally:
        store.close()


def load_embedding(document: RunDocument, one: AnalysisDocument) -> Points:
    """The points that t-SNE has laid out."""
    store = RunStore.open(Path(document["folder"]))
    try:
        state = store.state(result_key(one["round"], one["moment"], f"{one['analysis']}{AT}{one['layer']}"))
        assert state is not None
        return registry.points_from_state(decode(state))
    finally:
        store.close()


def result_key(round: int, moment: str, name: str) -> str:
    """What a measurement is known by: in `meta`, and as the kind of its state."""
    return f"{round}/{moment}/{name}"


def _missing_items(store: RunStore, question: AnalysisRequest) -> list[_AnalysisItem]:
    """What has not been taken of this entry with these settings."""
    entry, known = checkpoint_round(store, question.round), store.meta(META) or {}
    found = []
    for what in question.analyses:
        settings, quick = registry.analysis_settings(what, quick=question.quick)
        each = question.per_client and ANALYSES[what].supports_per_client
        for place in question.layers:
            for moment in question.moments:
                one = _AnalysisItem(
                    what, moment, place, quick, each, settings | {"samples": question.samples}
                )
                there = known.get(result_key(entry, moment, one.name))
                if there is None or there["settings"] != one.settings:
                    found.append(one)
    return found


def _compute_missing(
    store: RunStore, question: AnalysisRequest, experiment: Experiment, callback: Callback
) -> None:
    wanted = _missing_items(store, question)
    task = experiment.task
    task.model.check_layers(question.layers)
    entry = Checkpoint(store, experiment, question.round)
    sizes = [len(rows) for rows in task.split.test[: task.members]]
    rows = _chosen(sizes, question.samples, each=question.per_client)
    callback.on_run_begin(f"{experiment.name}: representations", store.folder, 0, 1 + len(wanted))
    own = [one for one in wanted if not ANALYSES[one.analysis].compares_under_each_model]
    shared = [one for one in wanted if ANALYSES[one.analysis].compares_under_each_model]
    if own:
        _compute_pooled(entry, own, rows, callback)
    for what in dict.fromkeys(one.analysis for one in shared):
        asked = {(one.moment, one.layer): one for one in shared if one.analysis == what}
        began, settings = time.perf_counter(), _keywords(next(iter(asked.values())))
        found = compare_under_each_model(entry, what, list(asked), rows, settings, callback)
        about = {"samples": sum(_counts(sizes, rows)), "seconds": time.perf_counter() - began}
        for done, (view, taken) in enumerate(found.items(), start=2 + len(own)):
            _write(store, entry.round, asked[view], taken, about)
            callback.on_round_end(done, None)


def _compute_pooled(
    entry: Checkpoint,
    wanted: Sequence[_AnalysisItem],
    rows: Mapping[int, Sequence[int] | None],
    callback: Callback,
) -> None:
    """Take the measures of points of all clients, each through its own model."""
    experiment, store = entry.experiment, entry.store
    task = experiment.task
    moments = {one.moment for one in wanted}
    jobs = entry.client_tasks(moments, dict.fromkeys(one.layer for one in wanted), rows)
    engine = engines.create_engine("auto", task, experiment.method)
    try:
        replies = entry.run_tasks(jobs, engine, callback)
    finally:
        engine.close()
    _compare(store, entry.round, replies, callback)
    callback.on_round_end(1, None)
    same: dict[tuple[str, str], AnalysisResult] = {}  # z is z_g without PRBM, and a cut has several names
    for done, one in enumerate(wanted, start=2):
        began, points = time.perf_counter(), pool_representations(replies, one.moment, one.layer)
        if points is None:
            raise InvalidInputError(
                f"{experiment.method.base_name} deploys no model: it has no representations"
            )
        what = one.analysis, sha256(points.x.tobytes()).hexdigest()
        if what not in same:
            same[what] = registry.compute_analysis(
                one.analysis, points, task.dataset.classes, _keywords(one), per_client=one.per_client
            )
        about = {"samples": len(points.y), "seconds": time.perf_counter() - began}
        _write(store, entry.round, one, same[what], about)
        callback.on_round_end(done, None)


def _keywords(one: _AnalysisItem) -> dict[str, Any]:
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


def _compare(store: RunStore, entry: int, replies: Sequence[ClientResult], callback: Callback) -> None:
    """What is looked at must be what was evaluated then: say so if clients' accuracies differ."""
    known = {
        row[1:3]: row.value for row in store.records(entry) if row.name == "accuracy" and row.client != ALL
    }
    apart = []
    for reply in replies:
        for moment, numbers in reply.metrics.items():
            then, now = known.get((reply.client, moment)), numbers.get("accuracy")
            if then is not None and now is not None and float(now[0]) != then:
                apart.append((reply.client, moment, float(now[0]), then))
    if apart:
        client, moment, here, there = apart[0]
        callback.on_message(
            f"the models are not bit for bit those of the run: accuracy of client {client} {moment} local "
            f"training is {here:.4f} here, {there:.4f} there ({len(apart)} differ: other versions?)"
        )


def _write(
    store: RunStore, entry: int, one: _AnalysisItem, taken: AnalysisResult, about: dict[str, Any]
) -> None:
    """All of one measurement, in place of what was there under its name."""
    every = {ALL: taken.overall, **taken.clients}
    lines = [
        Record(entry, client, one.moment, f"{one.name}/{reading}".rstrip("/"), value, about["samples"])
        for client, read in every.items()
        for reading, value in read.items()
    ]
    fields = {"round": entry, "analysis": one.analysis, "layer": one.layer, "moment": one.moment}
    flags = {"quick": one.quick, "per_client": one.per_client, "settings": one.settings}
    with store.transaction(store.last_round()):
        store.drop_records(entry, [one.moment], later=one.name)
        store.write_records(lines)
        if taken.state:
            store.write_state(result_key(entry, one.moment, one.name), ALL, encode(taken.state), entry)
        known = store.meta(META) or {}
        store.set_meta(META, known | {result_key(entry, one.moment, one.name): fields | flags | about})
