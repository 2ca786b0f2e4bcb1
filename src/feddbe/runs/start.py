"""Run methods: collect requests, resolve experiments, run or resume each in its folder.

`feddbe.run`, `feddbe.compare`, the command line and studies all use this module.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from feddbe import metrics
from feddbe.callbacks.base import Callback
from feddbe.config.options import Config, RawOptions, RunRequest
from feddbe.config.user_code import NO_PERMISSION, Permission, is_file_reference
from feddbe.data.dataset import Dataset
from feddbe.data.federated import label_counts
from feddbe.errors import DivergenceError, InvalidInputError
from feddbe.models.registry import ModelSource, parse_model
from feddbe.paths import RUNS_DIR, expand_path
from feddbe.results.document import RunDocument, truncate_run
from feddbe.runs import folders
from feddbe.runs.build_document import build_document, describe_divergence, load_document, read_divergence
from feddbe.runs.experiment import Experiment, resolve_all
from feddbe.runs.reopen import (
    describe_changed_inputs,
    describe_changes,
    describe_versions,
    package_versions,
    require_permissions,
)
from feddbe.runs.store import RunStore, exclusive, make_folder
from feddbe.simulation import engines, loop
from feddbe.simulation.engines import base
from feddbe.state import State, describe_layout


def run_requests(
    raw: RawOptions,
    *,
    single: bool,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    callback: Callback | None = None,
    hashes: bool = True,
    allowed: Permission = NO_PERMISSION,
) -> list[RunDocument]:
    """Run the requested methods; without a method, resume all runs in `out`.

    All methods of a request are resolved first, so that a mistake in the last is reported before the first
    one runs. If a method diverges, the others still run; its document records the divergence.

    Args:
        raw: Methods and options from the user.
        single: True if one run is requested rather than a comparison.
        dataset: Data that was passed as a Python object.
        model: Model that was passed as a Python object.
        callback: Notified while the runs proceed.
        hashes: True if the documents contain hashes of the states, for which all states are read.
        allowed: Code in users' files that may be executed for stored runs.

    Returns:
        A document per run, in the order of the methods.
    """
    callback = callback or Callback()
    documents: list[RunDocument] = []
    requests = collect_requests(raw, allowed, single=single)
    is_single = single or not raw.names
    if model is None and any(request.config.model == "own" for request in requests):
        raise InvalidInputError(
            f"the model of '{requests[0].config.out}' was a Python object; pass it again as model="
        )
    for request in requests:
        options = request.config
        experiments = resolve_request(request, single=is_single, dataset=dataset, model=model)
        output_dirs = choose_output_dirs(experiments, options, callback, single=is_single)
        with folders.remove_if_empty(output_dirs, root_is_new=not options.out):
            for experiment, folder in zip(experiments, output_dirs, strict=True):
                try:
                    document = run_or_resume(experiment, folder, callback, hashes=hashes)
                except DivergenceError:
                    document = load_document(folder, hashes=hashes)
                if not is_single and "rounds" in request.origins:  # a resumed run may have more rounds
                    document = truncate_run(document, experiment.options.rounds or 0, options.patience)
                documents.append(document)
    return documents


def collect_requests(
    raw: RawOptions, permission: Permission = NO_PERMISSION, *, single: bool
) -> list[RunRequest]:
    """Return the user's request or, without a method, the requests that resume the runs in `out`.

    Args:
        raw: Methods and options from the user. Options replace those of a stored run.
        permission: Code in users' files that may be executed for stored runs.
        single: True if only one run may be resumed.
    """
    if raw.names or not (raw.values.get("resume") and raw.values.get("out")):
        return [raw.request()]
    requests = []
    out = str(raw.values["out"])
    for folder in folders.resolve_runs(out):
        with closing(RunStore.open(folder)) as store:
            overrides = {"json": False, "quiet": False, **raw.values, "out": str(folder)}
            method, options = require_permissions(store, permission, overrides)
            origins = dict.fromkeys(store.meta("config"), f"the run in '{folder}'") | raw.origins
        requests.append(RunRequest([method], options, origins))
    if single and len(requests) > 1:
        raise InvalidInputError(
            f"'{out}' contains {len(requests)} runs; compare --resume --out {out} resumes them all"
        )
    return requests


def resolve_request(
    request: RunRequest, *, single: bool, dataset: Dataset | None = None, model: ModelSource | None = None
) -> list[Experiment]:
    """Return one experiment per method, with all defaults filled in; nothing is run or written."""
    names, options, origins = request
    if single and len(names) > 1:
        raise InvalidInputError(
            f"run takes one method, not {len(names)} ({', '.join(names)}); compare takes several"
        )
    # Invalid options are reported before the data is loaded.
    engines.find_engine(options.engine)
    loop.sample_evaluators(options.eval, 0, 0, 1, [])
    metrics.parse_metrics(options.metrics)
    source = model or options.model
    if isinstance(source, str) and not is_file_reference(source):
        parse_model(source)
    experiments = resolve_all(names, options, dataset=dataset, model=model, origins=origins)
    if len({folders.slug(name) for name in names}) < len(names):
        raise InvalidInputError(f"the same method twice: {', '.join(names)}")
    return experiments


def choose_output_dirs(
    experiments: Sequence[Experiment], options: Config, callback: Callback, *, single: bool
) -> list[Path]:
    """Return the folder of each run; all folders are checked before any run starts."""
    slugs = [folders.slug(experiment.name) for experiment in experiments]
    data = Path(experiments[0].task.dataset.name).stem
    if options.out:
        root = expand_path(options.out)
    elif options.resume:
        hashes = [experiment.config_hash for experiment in experiments]
        subfolders = ["."] if single else slugs
        hash_by_subfolder = dict(zip(subfolders, hashes, strict=True))
        try:
            root = folders.find_newest(hash_by_subfolder, on_message=callback.on_message)
        except InvalidInputError as error:
            notes = describe_changed_inputs(experiments, folders.list_runs(RUNS_DIR))
            raise InvalidInputError("; ".join([str(error), *notes])) from None
    else:
        root = folders.create_numbered(f"{data}-{slugs[0]}" if single else f"compare-{data}")
    output_dirs = [root] if single else [root / slug for slug in slugs]
    if options.resume and not any(map(RunStore.is_run, output_dirs)):
        raise InvalidInputError(f"--resume: no run in '{root}'; start it without --resume")
    for experiment, folder in zip(experiments, output_dirs, strict=True):
        if RunStore.is_run(folder):
            with closing(RunStore.open(folder)) as store:
                _require_same_run(experiment, store, resume=options.resume)
    return output_dirs


def run_or_resume(
    experiment: Experiment, folder: Path, callback: Callback, *, hashes: bool = False
) -> RunDocument:
    """Run one experiment in its folder, from its start or after the last complete round.

    Raises:
        DivergenceError: Training diverged. The run's document records it.
        StoreError: Another process uses the run, or its file cannot be used.
    """
    options = experiment.options
    timeouts = base.TimeoutPolicy(options.worker_timeout, warn=callback.on_message)
    with closing(_create_engine(experiment, folder, timeouts)) as engine:
        make_folder(folder)
        with exclusive(folder), closing(_open_or_create(experiment, folder, callback)) as store:
            try:
                loop.run_experiment(experiment, store, engine, callback)
            except DivergenceError as error:
                with store.transaction(store.last_round()):
                    store.set_meta("diverged", describe_divergence(error))
                raise
            remote = experiment.task.dataset.remote
            if remote:
                remote.finish_run(experiment, store, callback.on_message)
            return build_document(store, hashes=hashes)


def _create_engine(experiment: Experiment, folder: Path, timeouts: base.TimeoutPolicy) -> engines.Engine:
    """Return the engine that the options name, or that of the machines that hold the data."""
    options, task = experiment.options, experiment.task
    if task.dataset.remote is None:
        return engines.create_engine(options.engine, task, experiment.method, timeouts)
    for key in ("engine", "device"):
        if getattr(options, key) != getattr(Config, key):
            raise InvalidInputError(
                f"{key} = {getattr(options, key)}; the clients of '{options.data}' run on their nodes: "
                "leave it out"
            )
    engine: engines.Engine = task.dataset.remote.create_engine(experiment, folder, timeouts)
    return engine


def _open_or_create(experiment: Experiment, folder: Path, callback: Callback) -> RunStore:
    """Return the store of the run; another process may have created it since the folder was checked."""
    if not RunStore.is_run(folder):
        server_state = loop.initial_server_state(experiment)
        return RunStore.create(folder, initial_metadata(experiment, server_state), server_state)
    store = RunStore.open(folder)
    try:
        _require_same_run(experiment, store, resume=experiment.options.resume)
        _record_resume(experiment, store, callback)
    except BaseException:
        store.close()
        raise
    return store


def _require_same_run(experiment: Experiment, store: RunStore, *, resume: bool) -> None:
    """Raise an error if the folder contains another run, or the same run without `resume`."""
    folder = store.folder
    if store.meta("config_hash") != experiment.config_hash:
        changes = describe_changes(store, experiment)
        raise InvalidInputError(
            f"'{folder}' contains a run with another configuration ({changes}); choose another --out"
        )
    if not resume:
        raise InvalidInputError(
            f"'{folder}' contains this run already; resume it with --resume, or choose another --out"
        )


def _record_resume(experiment: Experiment, store: RunStore, callback: Callback) -> None:
    """Report and store how this process differs from the one that began the run."""
    recorded_notes = store.meta("remarks") or []
    notes = [*_describe_backend(experiment, store)]
    versions = describe_versions(store, experiment)
    if versions:
        notes.insert(0, f"resumed with other versions: {versions}")
    for note in notes:
        callback.on_message(note)
    divergence = read_divergence(store)
    if divergence:
        callback.on_message(
            f"{experiment.name} diverged in round {divergence['round']}, which is tried once more"
        )
    completed, rounds = store.last_round(), experiment.task.rounds
    if completed > rounds:
        callback.on_message(f"'{store.folder}' has {completed} rounds already, more than --rounds {rounds}")
    with store.transaction(store.last_round()):
        store.set_meta("config", experiment.config)  # it may have more rounds, or another folder
        if notes:
            new_notes = [note for note in notes if note not in recorded_notes]
            store.set_meta("remarks", [*recorded_notes, *new_notes])


def _describe_backend(experiment: Experiment, store: RunStore) -> Iterator[str]:
    """Yield a note if the training backend changed."""
    before = store.meta("config").get("trainer", "auto")
    after = experiment.options.trainer
    if before != after:
        yield f"resumed with trainer {after}, before with {before}: the last bits differ"


_MAX_LABEL_COUNTS = 100_000
"""Maximum number of stored label counts (clients times classes)."""


def initial_metadata(experiment: Experiment, server_state: State) -> dict[str, Any]:
    """Return the metadata that are stored when a run begins; `server_state` is the initial one."""
    task = experiment.task
    remote = task.dataset.remote
    is_small = task.split.clients * task.dataset.classes <= _MAX_LABEL_COUNTS
    has_label_counts = is_small and remote is None
    return {
        "config": experiment.config,
        "config_hash": experiment.config_hash,
        "layout": describe_layout(server_state),
        "majority_accuracy": experiment.majority_accuracy,
        "bn_buffers": experiment.options.bn_buffers if task.model.buffers else None,
        "note": task.dataset.note,
        "remarks": experiment.notes,
        "label_names": list(task.dataset.labels),
        "client_names": list(task.dataset.client_names) if is_small else [],
        "shift_labels": list(task.dataset.shift_labels),
        "preprocessing": task.dataset.preprocessing_spec.to_json(),
        "labels": label_counts(task.dataset, task.split).tolist() if has_label_counts else None,
        "keeps_best": experiment.options.keep_best,
        "remote": remote.describe() if remote else None,
        "begun": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "sources": {kind: source._asdict() for kind, source in experiment.sources.items()},
        "inputs": experiment.inputs,
        "versions": package_versions(experiment),
        "machine": platform.platform(),
        "git_commit": _git_commit(),
        "seeds": {"run": task.seed, "partition": experiment.options.partition_seed},
    }


def _git_commit() -> str | None:
    """Return the commit of the working directory, or None outside of a checkout."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
