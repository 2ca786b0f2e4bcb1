"""Analyses of the representations in finished runs, computed on request and stored in the run's file.

Numbers are stored as records (round, client or all, moment, name, value), named as in `mdl@z_g` and
`mdl@z_g/bits`. Other results are a state of their own kind. The settings are in `meta`: an analysis with
equal settings is read from the file, otherwise it is computed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
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
from feddbe.metrics.client_values import ALL, LAYER_SEPARATOR, Record
from feddbe.metrics.representations import registry
from feddbe.metrics.representations.mdl import report_progress_to
from feddbe.metrics.representations.points import AnalysisResult, Points
from feddbe.metrics.representations.registry import ANALYSES
from feddbe.models.registry import ModelSource
from feddbe.results.document import AnalysisDocument, RunDocument
from feddbe.runs.experiment import Experiment
from feddbe.runs.reopen import Checkpoint, analyze_under_each_model, checkpoint_round, load_experiment
from feddbe.runs.store import RunStore, corrupt_run_error, exclusive
from feddbe.simulation import engines
from feddbe.simulation.client import ClientResult
from feddbe.simulation.recorder import pool_representations
from feddbe.state import encode

META = "analyses"


@dataclass(frozen=True)
class AnalysisRequest:
    """Requested analyses of runs."""

    analyses: tuple[str, ...] = ("mdl",)
    round: str = "best"
    moments: tuple[str, ...] = ("before", "after")
    layers: tuple[str, ...] = ("z_g",)
    samples: int | None = 1000
    """Number of test samples over all clients (of each client, with `per_client`); None: all."""
    quick: bool = False
    per_client: bool = False
    """Analyze each client separately, if the analysis supports it."""
    on: str | None = None
    """Samples that each client's model represents: `own` or `all`; None: the default of each analysis."""


class _AnalysisItem(NamedTuple):
    """One analysis at one layer and moment, with its settings."""

    analysis: str
    moment: str
    layer: str
    on: str
    quick: bool
    per_client: bool
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        variant = "-all" * (self.on == "all") + "-clients" * self.per_client + "-quick" * self.quick
        return f"{self.analysis}{variant}{LAYER_SEPARATOR}{self.layer}"


def run_analyses(
    folder: Path,
    request: AnalysisRequest,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    allowed: Permission = NO_PERMISSION,
    callback: Callback | None = None,
) -> None:
    """Compute the requested analyses that are not in the run's file.

    Finished analyses are kept, also if a later one fails.

    Args:
        folder: Folder of the run.
        request: Analyses, round, moments and layers.
        dataset: The data, if it was passed to the run as a Python object.
        model: The model, if it was passed to the run as a Python object.
        allowed: Code in users' files that may be executed.
        callback: Notified of the progress.
    """
    for name in request.analyses if request.per_client else ():
        if not ANALYSES[name].supports_per_client:
            raise InvalidInputError(f"{name} cannot analyze single clients; leave out --per-client")
    callback = callback or Callback()
    with closing(RunStore.open(folder)) as store:
        if _missing_items(store, request):
            with exclusive(folder), report_progress_to(callback.on_analysis_progress):
                experiment = load_experiment(store, dataset=dataset, model=model, allowed=allowed)
                _compute_missing(store, request, experiment, callback)


def load_embedding(document: RunDocument, analysis: AnalysisDocument) -> Points:
    """Return the points of a stored t-SNE embedding."""
    name = f"{analysis['analysis']}{LAYER_SEPARATOR}{analysis['layer']}"
    with closing(RunStore.open(Path(document["folder"]))) as store:
        key = result_key(analysis["round"], analysis["moment"], name)
        state = store.decoded_state(key)
        if not registry.is_embedding(state):
            raise corrupt_run_error(store.folder, f"the state '{key}', not an embedding")
        return registry.points_from_state(state)


def result_key(round_: int, moment: str, name: str) -> str:
    """Return the key of a result in `meta`, which is also the kind of its state."""
    return f"{round_}/{moment}/{name}"


def _missing_items(store: RunStore, request: AnalysisRequest) -> list[_AnalysisItem]:
    """Return the analyses that are not stored for this round with these settings."""
    round_ = checkpoint_round(store, request.round)
    stored = store.meta(META) or {}
    missing = []
    for name in request.analyses:
        settings, quick = registry.analysis_settings(name, quick=request.quick)
        analysis = ANALYSES[name]
        settings = {**settings, "samples": None if analysis.uses_all_samples else request.samples}
        per_client = request.per_client and analysis.supports_per_client
        on = registry.samples_of_each_model(name, request.on, per_client=per_client)
        for layer in analysis.layers or request.layers:
            for moment in request.moments:
                item = _AnalysisItem(name, moment, layer, on, quick, per_client, settings)
                result = stored.get(result_key(round_, moment, item.name))
                if result is None or result["settings"] != item.settings:
                    missing.append(item)
    return missing


def _compute_missing(
    store: RunStore, request: AnalysisRequest, experiment: Experiment, callback: Callback
) -> None:
    items = _missing_items(store, request)
    task = experiment.task
    task.model.check_layers(request.layers)
    checkpoint = Checkpoint(store, experiment, request.round)
    sizes = [len(test) for test in task.split.test[: task.members]]
    pooled = [item for item in items if item.on == "own"]
    shared = [item for item in items if item.on == "all"]
    shared_analyses = list(dict.fromkeys(item.analysis for item in shared))
    steps = 1 + len(pooled) + len(shared_analyses)
    callback.on_run_begin(f"{experiment.name}: representations", store.folder, 0, steps)
    done = 1
    for samples in dict.fromkeys(item.settings["samples"] for item in pooled):
        sample_indices = _select_samples(sizes, samples, per_client=request.per_client)
        group = [item for item in pooled if item.settings["samples"] == samples]
        _compute_pooled(checkpoint, group, sample_indices, done, callback)
        done += len(group)
    sample_indices = _select_samples(sizes, request.samples, per_client=request.per_client)
    sample_count = sum(sizes[client] if ix is None else len(ix) for client, ix in sample_indices.items())
    callback.on_round_end(done, None)
    for analysis in shared_analyses:
        item_by_view = {(item.moment, item.layer): item for item in shared if item.analysis == analysis}
        settings = _keywords(next(iter(item_by_view.values())))
        started = time.perf_counter()
        results = analyze_under_each_model(
            checkpoint, analysis, list(item_by_view), sample_indices, settings, callback
        )
        seconds = time.perf_counter() - started
        for view, result in results.items():
            _write_result(store, checkpoint.round, item_by_view[view], result, sample_count, seconds)
        done += 1
        callback.on_round_end(done, None)


def _compute_pooled(
    checkpoint: Checkpoint,
    items: Sequence[_AnalysisItem],
    sample_indices: Mapping[int, Sequence[int] | None],
    done: int,
    callback: Callback,
) -> None:
    """Analyze the points of all clients together, each represented by its client's model.

    Args:
        checkpoint: The round whose models are used.
        items: Analyses of the same samples.
        sample_indices: Positions among each client's test samples; None: all of them.
        done: Number of finished steps, for the callback.
        callback: Notified of the progress.
    """
    experiment = checkpoint.experiment
    store = checkpoint.store
    moments = {item.moment for item in items}
    layers = dict.fromkeys(item.layer for item in items)
    tasks = checkpoint.client_tasks(moments, layers, sample_indices)
    with closing(engines.create_engine("auto", experiment.task, experiment.method)) as engine:
        client_results = checkpoint.run_tasks(tasks, engine, callback)
    _warn_if_models_differ(checkpoint, client_results, callback)
    callback.on_round_end(done, None)
    known: dict[tuple[str, str], AnalysisResult] = {}  # z is z_g without PRBM, and a cut has several names
    for item in items:
        started = time.perf_counter()
        points = pool_representations(client_results, item.moment, item.layer)
        if points is None:
            raise InvalidInputError(
                f"{experiment.method.base_name} deploys no model: it has no representations"
            )
        key = item.analysis, sha256(points.x.tobytes()).hexdigest()
        if key not in known:
            classes = experiment.task.dataset.classes
            known[key] = registry.compute_analysis(
                item.analysis, points, classes, _keywords(item), per_client=item.per_client
            )
        seconds = time.perf_counter() - started
        _write_result(store, checkpoint.round, item, known[key], len(points.y), seconds)
        done += 1
        callback.on_round_end(done, None)


def _keywords(item: _AnalysisItem) -> dict[str, Any]:
    """Return the settings that are arguments of the analysis function."""
    return {name: value for name, value in item.settings.items() if name != "samples"}


def _select_samples(
    sizes: Sequence[int], samples: int | None, *, per_client: bool
) -> dict[int, list[int] | None]:
    """Return positions of test samples by client: the first `samples` of all, shuffled by RandomState(0).

    With `per_client`, they are selected from each client. Clients without a selected sample are left out.
    """
    if samples is None or (per_client and samples >= max(sizes)) or samples >= sum(sizes):
        return {client: None for client, size in enumerate(sizes) if size}
    if per_client:
        return {
            client: sorted(np.random.RandomState(0).permutation(size)[:samples].tolist())
            for client, size in enumerate(sizes)
        }
    selected = np.sort(np.random.RandomState(0).permutation(sum(sizes))[:samples])
    positions = {}
    for client, (start, end) in enumerate(pairwise(np.cumsum([0, *sizes]))):
        part = selected[(selected >= start) & (selected < end)] - start
        if len(part):
            positions[client] = part.tolist()
    return positions


def _warn_if_models_differ(
    checkpoint: Checkpoint, client_results: Sequence[ClientResult], callback: Callback
) -> None:
    """Report clients whose accuracies differ from those of the run: their models are not those evaluated."""
    stored = {
        (record.client, record.moment): record.value
        for record in checkpoint.store.records(checkpoint.round)
        if record.name == "accuracy" and record.client != ALL
    }
    differences = []
    for result in client_results:
        for moment, metrics in result.metrics.items():
            before = stored.get((result.client, moment))
            accuracy = metrics.get("accuracy")
            if before is not None and accuracy is not None and float(accuracy[0]) != before:
                differences.append((result.client, moment, float(accuracy[0]), before))
    if differences:
        client, moment, after, before = differences[0]
        name = checkpoint.experiment.task.dataset.describe_client(client)
        callback.on_message(
            f"the models are not bit for bit those of the run: accuracy of {name} {moment} local "
            f"training is {after:.4f} here, {before:.4f} in the run "
            f"({len(differences)} differ: other versions?)"
        )


def _write_result(
    store: RunStore, round_: int, item: _AnalysisItem, result: AnalysisResult, samples: int, seconds: float
) -> None:
    """Store the result of one analysis, in place of an earlier one."""
    key = result_key(round_, item.moment, item.name)
    values_by_client = {ALL: result.overall, **result.clients}
    records = [
        Record(round_, client, item.moment, f"{item.name}/{reading}".rstrip("/"), value, samples)
        for client, values in values_by_client.items()
        for reading, value in values.items()
    ]
    description = {
        "round": round_,
        "analysis": item.analysis,
        "layer": item.layer,
        "moment": item.moment,
        "on": item.on,
        "quick": item.quick,
        "per_client": item.per_client,
        "settings": item.settings,
        "samples": samples,
        "seconds": seconds,
    }
    with store.transaction(store.last_round()):
        store.drop_records(round_, [item.moment], analysis=item.name)
        store.write_records(records)
        if result.state:
            store.write_state(key, ALL, encode(result.state), round_)
        stored = store.meta(META) or {}
        store.set_meta(META, stored | {key: description})
