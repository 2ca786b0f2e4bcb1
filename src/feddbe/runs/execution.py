"""Run methods: collect requests, resolve experiments, run or resume each in its folder.

`feddbe.run`, `feddbe.compare`, the command line and studies all go through the functions of this module.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from feddbe import methods, metrics
from feddbe.callbacks.base import Callback
from feddbe.config.options import Config, RawOptions, RunRequest
from feddbe.config.user_code import NO_PERMISSION, Permission
from feddbe.data.dataset import Dataset
from feddbe.data.federated import label_counts
from feddbe.errors import DivergenceError, InvalidInputError
from feddbe.models.registry import ModelSource
from feddbe.paths import expand_path
from feddbe.results.document import RunDocument, truncate_run
from feddbe.runs import folders, summary
from feddbe.runs.experiment import Experiment, resolve_all
from feddbe.runs.replay import describe_changes, require_permissions
from feddbe.runs.store import RunStore, exclusive, make_folder
from feddbe.simulation import engines, loop
from feddbe.simulation.engines import base
from feddbe.state import State, describe_layout
from feddbe.training import backends


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
    one runs. If a method diverges, the others run nevertheless; its document says so.

    Args:
        given: Methods and options from the user.
        single: Whether one run is requested rather than a comparison.
        dataset: Data that was passed as a Python object.
        model: Model that was passed as a Python object.
        watch: Notified while the runs proceed.
        hashes: Whether the documents contain hashes of the states, for which all states are read.
        allowed: Code in users' files that may be executed for stored runs.

    Returns:
        A document per run, in the order of the methods.
    """
    callbacks = callback or Callback()
    documents = list[RunDocument]()
    requests = collect_requests(raw, allowed, single=single)
    is_alone = single or not raw.names
    if model is None and any(request.config.model == "own" for request in requests):
        raise InvalidInputError(
            f"the model of '{requests[0].config.out}' came from Python; give it again as model="
        )
    for request in requests:
        options = request.config
        experiments = resolve_request(request, single=is_alone, dataset=dataset, model=model)
        output_dirs = choose_output_dirs(experiments, options, callbacks, single=is_alone)
        with folders.remove_if_empty(output_dirs, made=not options.out):
            for experiment, folder in zip(experiments, output_dirs, strict=True):
                try:
                    document = run_or_resume(experiment, folder, callbacks, hashes=hashes)
                except DivergenceError:
                    document = summary.load_document(folder, hashes=hashes)
                if not is_alone and "rounds" in request.origins:  # a resumed run may have more rounds
                    document = truncate_run(document, experiment.options.rounds or 0, options.patience)
                documents.append(document)
    return documents


def collect_requests(
    raw: RawOptions, allowed: Permission = NO_PERMISSION, *, single: bool
) -> list[RunRequest]:
    """Return the request that was given or, without a method, those of the runs in `out` to resume.

    Args:
        given: Methods and options from the user. Options win over those of a stored run.
        allowed: Code in users' files that may be executed for stored runs.
        single: Whether only one run may be resumed.
    """
    if raw.names or not (raw.values.get("resume") and raw.values.get("out")):
        return [raw.request()]
    requests = []
    out = str(raw.values["out"])
    for folder in folders.resolve_runs(out):
        with closing(RunStore.open(folder)) as store:
            options_now = {"json": False, "quiet": False, **raw.values, "out": str(folder)}
            method, options = require_permissions(store, allowed, options_now)
            origins = dict.fromkeys(store.meta("config"), f"the run in '{folder}'") | raw.origins
        requests.append(RunRequest([method], options, origins))
    if single and len(requests) > 1:
        raise InvalidInputError(
            f"'{out}' holds {len(requests)} runs; compare --resume --out {out} continues them all"
        )
    return requests


def resolve_request(
    asked: RunRequest, *, single: bool, dataset: Dataset | None = None, model: ModelSource | None = None
) -> list[Experiment]:
    """Return one experiment per method, with every default filled in; nothing is run or written."""
    names, options, origins = asked
    if single and len(names) > 1:
        raise InvalidInputError(
            f"run takes one method, not {len(names)} ({', '.join(names)}); compare takes several"
        )
    engines.find_engine(options.engine)
    loop.sample_evaluators(options.eval, 0, 0, 1, [])
    metrics.parse_metrics(options.metrics)
    experiments = resolve_all(names, options, dataset=dataset, model=model, origins=origins)
    if len({folders.slug(name) for name in names}) < len(names):
        raise InvalidInputError(f"the same method twice: {', '.join(names)}")
    return experiments


def choose_output_dirs(
    experiments: Sequence[Experiment], options: Config, callback: Callback, *, single: bool
) -> list[Path]:
    """Return the folder of each run; all are checked before any run begins."""
    slugs = [folders.slug(experiment.name) for experiment in experiments]
    data = Path(experiments[0].task.dataset.name).stem
    if options.out:
        root = expand_path(options.out)
    elif options.resume:
        hashes = [experiment.config_hash for experiment in experiments]
        wanted = dict(zip(["."] if single else slugs, hashes, strict=True))
        root = folders.newest_run(wanted, remark=callback.on_message)
    else:
        root = folders.next_numbered(f"{data}-{slugs[0]}" if single else f"compare-{data}")
    output_dirs = [root] if single else [root / slug for slug in slugs]
    if options.resume and not any(map(RunStore.is_run, output_dirs)):
        raise InvalidInputError(f"--resume: no run in '{root}'; start it without --resume")
    for experiment, folder in zip(experiments, output_dirs, strict=True):
        if RunStore.is_run(folder):
            with closing(RunStore.open(folder)) as store:
                _check_same(experiment, store, resume=options.resume)
    return output_dirs


def run_or_resume(
    experiment: Experiment, folder: Path, callback: Callback, *, hashes: bool = False
) -> RunDocument:
    """Run one experiment in its folder, from its start or after the last complete round.

    Raises:
        Diverged: Training diverged. The run's document says so from then on.
        StoreError: Another process works on the run, or its file cannot be used.
    """
    options = experiment.options
    waiting = base.TimeoutPolicy(options.worker_timeout, warn=callback.on_message)
    with closing(
        engines.create_engine(options.engine, experiment.task, experiment.method, waiting)
    ) as engine:
        make_folder(folder)
        with exclusive(folder), closing(_open_or_create(experiment, folder, callback)) as store:
            try:
                loop.run_experiment(experiment, store, engine, callback)
            except DivergenceError as error:
                with store.transaction(store.last_round()):
                    store.set_meta("diverged", summary.read_divergence(error))
                raise
            return summary.build_document(store, hashes=hashes)


def _open_or_create(experiment: Experiment, folder: Path, callback: Callback) -> RunStore:
    """Return the run in this folder, which another process may have begun since it was checked."""
    if not RunStore.is_run(folder):
        start = loop.initial_server_state(experiment)
        return RunStore.create(folder, describe_run(experiment, start), start)
    store = RunStore.open(folder)
    try:
        _check_same(experiment, store, resume=experiment.options.resume)
        _record_resume(experiment, store, callback)
    except BaseException:
        store.close()
        raise
    return store


def _check_same(experiment: Experiment, store: RunStore, *, resume: bool) -> None:
    """Refuse a folder that holds another run, and refuse to begin the same one again."""
    folder = store.folder
    if store.meta("config_hash") != experiment.config_hash:
        raise InvalidInputError(
            f"'{folder}' holds a run with another configuration ({describe_changes(store, experiment)}); choose "
            "another --out"
        )
    if not resume:
        raise InvalidInputError(
            f"'{folder}' holds this run already; continue it with --resume, or choose another --out"
        )


def _record_resume(experiment: Experiment, store: RunStore, callback: Callback) -> None:
    """Report and store how this process differs from the one that began the run."""
    recorded, known = store.meta("versions"), store.meta("remarks") or []
    others = _other_versions(recorded, experiment) if recorded else ""
    news = [text for text in (others, _other_trainer(experiment, store)) if text]
    for text in news:
        callback.on_message(text)
    if mark := summary.is_diverged(store):
        callback.on_message(f"{experiment.name} diverged in round {mark['round']}, which is tried once more")
    with store.transaction(store.last_round()):
        store.set_meta("config", experiment.config)  # it may have been extended, or moved
        if news:
            store.set_meta("remarks", [*known, *(text for text in news if text not in known)])


def _other_trainer(experiment: Experiment, store: RunStore) -> str:
    then, now = store.meta("config").get("trainer", "auto"), experiment.options.trainer
    return "" if then == now else f"carried on with trainer {now}, before with {then}: the last bits differ"


_LABELS_AT_MOST = 100_000
"""Label counts of larger federations are not stored: nobody can look at them."""


def describe_run(experiment: Experiment, start: State) -> dict[str, Any]:
    """What is written about a run when it begins; `start` is the server's state then."""
    task = experiment.task
    small = task.split.clients * task.dataset.classes <= _LABELS_AT_MOST
    return {
        "config": experiment.config,
        "config_hash": experiment.config_hash,
        "layout": describe_layout(start),
        "majority_accuracy": experiment.majority_accuracy,
        "bn_buffers": experiment.options.bn_buffers if task.model.buffers else None,
        "note": task.dataset.note,
        "remarks": experiment.notes,
        "label_names": list(task.dataset.labels),
        "client_names": list(task.dataset.client_names) if small else [],
        "shift_labels": list(task.dataset.shift_labels),
        "preprocessing": task.dataset.preprocessing_spec.to_json(),
        "labels": label_counts(task.dataset, task.split).tolist() if small else None,
        "keeps_best": experiment.options.keep_best,
        "begun": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "sources": {kind: source._asdict() for kind, source in experiment.sources.items()},
        "versions": _versions(experiment),
        "machine": platform.platform(),
        "git_commit": _git_commit(),
        "seeds": {"run": task.seed, "partition": experiment.options.partition_seed},
    }


def _versions(experiment: Experiment) -> dict[str, str]:
    """Of what numbers depend on, the package that brings the method among it."""
    packages = ("feddbe", "torch", "numpy", "scikit-learn", "safetensors", *backends.packages())
    found = {name: version(name) for name in packages} | {"python": platform.python_version()}
    return found | methods.package_versions(experiment.method)


def _other_versions(recorded: Mapping[str, str], experiment: Experiment) -> str:
    """What to say if a run goes on with others than it began with; its bits may then be others, too."""
    now = _versions(experiment)
    others = [
        f"{name} {recorded.get(name, 'none')} then, {now.get(name, 'none')} now"
        for name in sorted({*recorded, *now})
        if recorded.get(name) != now.get(name)
    ]
    return f"carried on with other versions: {', '.join(others)}" if others else ""


def _git_commit() -> str | None:
    """The commit that the working directory is at, if it is a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
