"""Stored runs opened again: experiments rebuilt from their options, and clients run from a stored round.

A client's work is a pure function of the content of the run's file, so it can be repeated. The run does not
change. Code of users is executed only with their permission.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from feddbe import data, methods
from feddbe.callbacks.base import Callback
from feddbe.config import user_code
from feddbe.config.options import Config, identifying_settings
from feddbe.config.user_code import NO_PERMISSION, Permission, StoredSource, is_file_reference
from feddbe.data.dataset import Dataset
from feddbe.data.split import Indices, RaggedArray
from feddbe.errors import FeddbeError, InvalidInputError, StoreError, truncate, unknown_name
from feddbe.methods.registry import METHODS
from feddbe.metrics.representations import registry
from feddbe.metrics.representations.discrepancy import enough_samples_mask
from feddbe.metrics.representations.mdl import split_progress
from feddbe.metrics.representations.points import AnalysisResult, make_points
from feddbe.metrics.representations.registry import ANALYSES
from feddbe.models.registry import ModelSource
from feddbe.paths import expand_path
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import RETAINED, RunStore, corrupt_run_error
from feddbe.simulation import engines
from feddbe.simulation.client import ClientResult, ClientTask, MissingClient, build_inference_model
from feddbe.simulation.engines.base import Broadcasts, ClientStates, Engine
from feddbe.simulation.loop import build_broadcast, deterministic_section, initial_server_state
from feddbe.state import State, check_stored_layout, decode, describe_layout
from feddbe.training import backends
from feddbe.training.task import Context, Task
from feddbe.training.trainer import ClientTrainer

MOMENTS = ("before", "adapted", "after")
"""Moments of a client's model: as received, adapted to the client, after local training."""


def describe_changes(store: RunStore, experiment: Experiment) -> str:
    """Return the differences between a stored run and an experiment as text.

    Edited files are always named. Other contents are compared only if all settings are equal, because the
    preprocessed data, the partition and the model follow from them. Hyper-parameters are compared only for
    parts that both have.
    """
    before = identifying_settings(store.meta("config"))
    after = identifying_settings(experiment.config)
    changes = [
        f"{key} {before.get(key)} in the run, {value} now"
        for key, value in after.items()
        if before.get(key) != value and (key in before or key in experiment.config)
    ]
    changes += _describe_changed_content(store, experiment, only_files=bool(changes))
    return "; ".join(changes) or "its data, its model or its method differ"


def _describe_changed_content(
    store: RunStore, experiment: Experiment, *, only_files: bool = False
) -> list[str]:
    """Return a text for each input, or each file with code, whose content differs from that of the run."""
    stored = store.meta("inputs") or {}
    changes = []
    kinds = sorted(
        kind for kind in {*stored, *experiment.inputs} if stored.get(kind) != experiment.inputs.get(kind)
    )
    if "data" in kinds and "partition" in kinds:
        kinds.remove("partition")  # it follows from the data
    for kind in kinds:
        before, after = stored.get(kind), experiment.inputs.get(kind)
        hashes = f"sha256 {truncate(str(before))[:12]} in the run, {str(after)[:12]} now"
        subject = _describe_edited_file(kind, store, experiment)
        if not subject:
            if only_files:
                continue
            subject = f"the content of {kind} '{truncate(str(experiment.config[kind]))}' changed"
        changes.append(f"{subject} ({hashes})")
    return changes


def _describe_edited_file(kind: str, store: RunStore, experiment: Experiment) -> str:
    """Return the user's file of this kind that differs from the one the run began with, or an empty text."""
    before, after = StoredSource.from_json(store.meta("sources"), kind), experiment.sources.get(kind)
    if before is None or after is None:
        return ""
    if before.sha256 != after.sha256:
        return f"the {kind}'s file was edited"
    for name in sorted({*after.modules, *before.modules}):
        if before.modules.get(name) != after.modules.get(name):
            return f"{truncate(name)}, which the {kind}'s file imports, was edited"
    return ""


def package_versions(experiment: Experiment) -> dict[str, str]:
    """Return the versions of all packages on which results depend, including the method's package."""
    packages = ["feddbe", "torch", "numpy", "scikit-learn", "safetensors", *backends.list_packages()]
    kind = experiment.task.dataset.preprocessing_spec.kind
    packages += {"table": ["pandas"], "texts": ["pandas"], "images": ["pillow"]}.get(kind, [])
    versions = {name: version(name) for name in packages}
    versions["python"] = platform.python_version()
    return versions | methods.package_versions(experiment.method)


def describe_versions(store: RunStore, experiment: Experiment) -> str:
    """Return the packages whose versions differ from those of the run, or an empty text."""
    before, after = store.meta("versions") or {}, package_versions(experiment)
    changes = [
        f"{name} {before.get(name, 'none')} before, {after.get(name, 'none')} now"
        for name in sorted({*before, *after} if before else ())
        if before.get(name) != after.get(name)
    ]
    return ", ".join(changes)


def describe_changed_inputs(experiments: Sequence[Experiment], folders: Iterable[Path]) -> list[str]:
    """Return notes on stored runs with the settings of an experiment, but other content or versions.

    Args:
        experiments: The requested experiments.
        folders: Folders of stored runs; those that cannot be read are skipped.
    """
    experiment_by_settings = {_settings_key(experiment.config): experiment for experiment in experiments}
    folders_by_note: dict[str, list[Path]] = {}
    for folder in folders:
        try:
            store = RunStore.open(folder)
        except StoreError:
            continue
        with closing(store):
            experiment = experiment_by_settings.get(_settings_key(store.meta("config") or {}))
            if experiment is None:
                continue
            if store.meta("config_hash") == experiment.config_hash:
                verb, changes = "reused with other versions", describe_versions(store, experiment)
            else:
                verb, changes = "not reused", "; ".join(_describe_changed_content(store, experiment))
        if changes:
            folders_by_note.setdefault(f"{verb}: {changes}", []).append(folder)
    notes = []
    for note, runs in folders_by_note.items():
        others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        notes.append(f"'{runs[0]}'{others}: {note}")
    return notes


def _settings_key(config: Mapping[str, Any]) -> str:
    return json.dumps(identifying_settings(config), sort_keys=True, default=str)


def load_experiment(
    store: RunStore,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    allowed: Permission = NO_PERMISSION,
) -> Experiment:
    """Rebuild the experiment of a stored run.

    Args:
        store: The run.
        dataset: The data, if it was passed to the run as a Python object.
        model: The model, if it was passed to the run as a Python object.
        allowed: Code in users' files that may be executed.

    Raises:
        InvalidInputError: The experiment cannot be rebuilt, or differs from that of the run.
    """
    overrides: dict[str, Any] = {"device": "cpu", "engine": "auto"}  # those of the run may not exist here
    if model is not None:
        overrides["model"] = model if isinstance(model, str) else "own"
    method, options = require_permissions(store, allowed, overrides)
    if data.is_remote(options.data):
        raise InvalidInputError(
            f"the rows and states of '{store.folder}' are on the nodes of '{truncate(options.data)}', "
            "where each exports its own model: feddbe federation export"
        )
    if options.model == "own" and model is None:
        raise InvalidInputError(
            f"the model of '{store.folder}' was a Python object; pass it again: model=... in Python"
        )
    try:
        experiment = resolve(method, options, dataset=dataset, model=model)
    except InvalidInputError as error:
        name = next(iter(store.meta("config")["method_options"]))
        is_known = name in METHODS or is_file_reference(method)
        hint = "" if is_known else f"; register your class with feddbe.METHODS['{name}'] = CLASS"
        raise InvalidInputError(f"the run in '{store.folder}' cannot be rebuilt: {error}{hint}") from error
    if experiment.config_hash != store.meta("config_hash"):
        raise InvalidInputError(
            f"the run in '{store.folder}' differs on this machine ({describe_changes(store, experiment)}); "
            "copy the files of data and model from where it began"
        )
    return experiment


def checkpoint_round(store: RunStore, which: str) -> int:
    """Return the number of the `best` or the `last` round."""
    if which not in ("best", "last"):
        raise unknown_name("round", which, ("best", "last"))
    if store.last_round() < 0:
        raise InvalidInputError(f"'{store.folder}' has no finished round yet")
    round_ = store.round_of(which)
    if round_ is None:
        raise InvalidInputError(f"'{store.folder}' has no evaluated round yet; use the last, --round last")
    return round_


class Checkpoint(ClientStates):
    """The `best` or the `last` round of a run, with the states that were evaluated.

    Engines read clients' states from it; states that they write are discarded.
    """

    def __init__(self, store: RunStore, experiment: Experiment, which: str) -> None:
        self.store = store
        self.experiment = experiment
        self.which = which
        self.round = checkpoint_round(store, which)
        expected = describe_layout(initial_server_state(experiment))
        check_stored_layout(store.server_state(which), expected, store.folder)

    def read(self, client: int) -> bytes | None:
        return self._state("private", client)

    def write_pending(self, client: int, state: bytes) -> None:
        pass

    @property
    def run_id(self) -> str:
        return self.store.run_id

    def referenced(self, client: int) -> list[bytes]:
        return self.store.referenced(client)

    def version(self, client: int) -> None:
        """Return None: workers must not use cached states, because written states are discarded."""

    def upload(self, client: int) -> State:
        """Return the client's last upload at this round."""
        upload = self._state("upload", client)
        if upload is None:  # methods request only uploads that exist
            raise corrupt_run_error(self.store.folder, f"no upload of client {client}")
        return decode(upload)

    def run_tasks(
        self, tasks: Sequence[ClientTask], engine: Engine, callback: Callback | None = None
    ) -> list[ClientResult]:
        """Run the tasks with the broadcast of the next round and return the results in client order."""
        results: list[ClientResult] = []
        with deterministic_section(), self.store.computing_with_states():
            for result in engine.run(tasks, self.broadcasts(), self):
                if isinstance(result, MissingClient):
                    name = self.experiment.task.dataset.describe_client(result.client)
                    raise FeddbeError(f"{name} did not reply ({result.reason})")
                results.append(result)
                if callback:
                    callback.on_client_end(len(results), len(tasks))
        return sorted(results, key=lambda result: result.client)

    def inference_model(self, client: int) -> tuple[ClientTrainer, State]:
        """Return trainer and parameters with which the client predicts, adapted if the method adapts."""
        method = self.experiment.method
        task = ClientTask(client, self.round + 1, adapt_epochs=self.adapt_epochs())
        private = self.load(client)
        with deterministic_section(), self.store.computing_with_states():
            received = self.broadcasts().message_for(client)
            return build_inference_model(self.experiment.task, method, task, received, private)

    def client_tasks(
        self,
        moments: Iterable[str],
        layers: Iterable[str],
        sample_indices: Mapping[int, Sequence[int] | None],
    ) -> list[ClientTask]:
        """Return a task per client that computes representations of test samples.

        Args:
            moments: Moments of the client's model.
            layers: Layers of the model.
            sample_indices: Positions among each client's test samples; None: all of them.
        """
        requested = set(moments)
        adapt_epochs = self.adapt_epochs()
        allowed = [moment for moment in MOMENTS if moment != "adapted" or adapt_epochs is not None]
        for moment in requested - set(allowed):
            raise unknown_name(f"moment of {self.experiment.method.base_name}", moment, allowed)
        layers = tuple(layers)
        return [
            ClientTask(
                client,
                self.round + 1,
                "train" if "after" in requested else "none",
                evaluate=True,
                adapt_epochs=adapt_epochs if "adapted" in requested else None,
                evaluate_after="after" in requested,
                layers=layers,
                sample_indices=None if indices is None else tuple(indices),
            )
            for client, indices in sample_indices.items()
        ]

    def adapt_epochs(self) -> int | None:
        """Return the epochs of adaptation before predictions; None if the method does not adapt."""
        epochs = {"each": 0, "last": self.experiment.options.adapt_epochs}
        return epochs.get(self.experiment.method.adapts)

    def broadcasts(self) -> Broadcasts:
        """Return the messages with which the clients' models of this round are completed."""
        method = self.experiment.method
        uploads = self.upload if method.keeps_uploads else None
        ctx = Context(self.experiment.task, self.round + 1, uploads)
        return build_broadcast(method, ctx, self.store.server_state(self.which))

    def _state(self, kind: str, client: int) -> bytes | None:
        """Return the client's state at this round; None if it had none yet."""
        state_round = self.store.round_of(kind, client)
        if state_round is None or state_round <= self.round:
            return self.store.state(kind, client)
        retained = self.store.state(RETAINED[kind], client)
        if retained is None and not self.store.meta("keeps_best"):
            raise StoreError(
                f"'{self.store.folder}' was begun with --no-keep-best, or by a version of feddbe that did "
                "not retain the clients' states of the best round; use the last round, --round last"
            )
        return retained


def require_permissions(
    store: RunStore, allowed: Permission, overrides: Mapping[str, Any]
) -> tuple[str, Config]:
    """Return method and options of a stored run, with `overrides`; nothing is executed.

    A file that the user named replaces the path that the run has.

    Args:
        store: The run.
        allowed: Code that the user allows to be executed.
        overrides: Options from the user.

    Raises:
        InvalidInputError: The run names code that is not allowed, or that differs from the stored content.
    """
    settings = store.meta("config")
    method = settings["method"]
    names = {field.name for field in dataclasses.fields(Config)} - {"method"}
    stored = {key: settings[key] for key in names & settings.keys() if settings[key] is not None}
    options = Config(**stored | dict(overrides))
    file = methods.file_reference(method)
    if file:
        allowed_file = _require_file_permission("method", file, store, allowed)
        method = method.replace(file, allowed_file, 1)
        if methods.file_reference(method) != allowed_file:
            raise InvalidInputError(
                f"cannot use the path '{truncate(allowed_file)}' in a method's name; rename it"
            )
    if "model" not in overrides and options.model and is_file_reference(options.model):
        model = _require_file_permission("model", options.model, store, allowed)
        options = dataclasses.replace(options, model=model)
    is_engine_chosen = "engine" in overrides or allowed.trust
    if not is_engine_chosen and not engines.find_engine(options.engine).is_local():
        raise InvalidInputError(
            f"the run in '{store.folder}' names an engine on other machines, '{truncate(options.engine)}'; "
            "set --engine, or --trust if the run is your own"
        )
    return method, options


def _require_file_permission(kind: str, reference: str, store: RunStore, allowed: Permission) -> str:
    """Return the `FILE.py:NAME` that may be executed for the reference that the run stores."""
    file, name = user_code.split_reference(reference)
    short_reference = truncate(reference)
    if not allowed.code and not allowed.trust:
        raise InvalidInputError(
            f"the {kind} of '{store.folder}' is code in a file, '{short_reference}', which is not executed "
            "for a stored run: name it, --code FILE.py, or confirm that the run is your own, --trust (in "
            "Python code=, trust=True)"
        )
    stored = StoredSource.from_json(store.meta("sources"), kind)
    if stored is None:
        raise InvalidInputError(
            f"'{store.folder}' does not store the content of its {kind}'s file '{short_reference}', "
            "so that it cannot be compared; name method and model in the command"
        )
    path = _find_named_file(kind, name, stored, allowed)
    if path is None and not allowed.trust:
        raise InvalidInputError(
            f"--code {truncate(', '.join(allowed.code))}: not the {kind}'s file with which '{store.folder}' "
            f"began ('{short_reference}', sha256 {truncate(stored.sha256[:12])}); name that one, too"
        )
    path = path or expand_path(file)
    user_code.check_content(kind, path, stored)
    return f"{path}:{name}"


def _find_named_file(kind: str, name: str, stored: StoredSource, allowed: Permission) -> Path | None:
    """Return the file named by the user that has the stored content, or None."""
    for reference in allowed.code:
        file, allowed_name = user_code.split_reference(reference)
        path = expand_path(file)
        if allowed_name in ("", name) and user_code.content_sha256(kind, path) == stored.sha256:
            return path
    return None


View = tuple[str, str]
"""A moment and a layer of the model."""
_GROUP_SIZE = 16
"""Clients whose results are in memory at once: each has the representations of all samples."""


def analyze_under_each_model(
    checkpoint: Checkpoint,
    analysis: str,
    views: Sequence[View],
    sample_indices: Mapping[int, Sequence[int] | None],
    settings: Mapping[str, Any],
    callback: Callback,
) -> dict[View, AnalysisResult]:
    """Analyze the samples of all clients, represented by each client's model in turn.

    Equal models, as before local training without personalization, are analyzed once.

    Args:
        checkpoint: The round of a run whose models are used.
        analysis: Name of an analysis that supports samples of all clients.
        views: Moments and layers that are analyzed.
        sample_indices: Positions among each client's test samples; None: all of them.
        settings: Keyword arguments of the analysis.
        callback: Notified after each client.

    Returns:
        The result for each view, over all clients. An analysis that compares clients leaves out those with
        fewer than two samples.
    """
    task = checkpoint.experiment.task
    tests = [
        task.split.test[client] if positions is None else task.split.test[client][list(positions)]
        for client, positions in sample_indices.items()
    ]
    counts = np.array([len(test) for test in tests])
    all_clients = np.array(list(sample_indices))
    owners = np.repeat(list(sample_indices), counts)
    compares_clients = ANALYSES[analysis].compares_clients
    if compares_clients:
        clients = all_clients[enough_samples_mask(all_clients, counts)].tolist()
    else:
        clients = list(range(task.members))
    known: dict[str, AnalysisResult] = {}  # by content: models of clients may be equal, and z may be z_g
    results: dict[View, list[AnalysisResult]] = {view: [] for view in views}
    client_results = _run_on_all_samples(checkpoint, clients, np.concatenate(tests), views, callback)
    for _, client_result in zip(split_progress(clients), client_results, strict=True):
        representations = client_result.representations
        if compares_clients:
            known = {}
        for view in split_progress(views):
            values = representations.get("/".join(view))
            if values is None:
                raise InvalidInputError(
                    f"{checkpoint.experiment.method.base_name} deploys no model: it has no representations"
                )
            points = make_points(values.numpy(), representations["y"].numpy(), owners)
            key = sha256(points.x.tobytes()).hexdigest()
            if key not in known:
                extra = {"clients": (client_result.client,)} if compares_clients else {}
                known[key] = registry.compute_analysis(
                    analysis, points, task.dataset.classes, {**settings, **extra}
                )
            result = known[key]
            if not compares_clients:
                result = AnalysisResult(result.overall, {client_result.client: result.overall})
            results[view].append(result)
    return {
        view: registry.combine_client_results(analysis, view_results)
        for view, view_results in results.items()
    }


def _run_on_all_samples(
    checkpoint: Checkpoint,
    clients: Sequence[int],
    indices: Indices,
    views: Sequence[View],
    callback: Callback,
) -> Iterator[ClientResult]:
    """Run these clients with the same test samples for each; yield the results in client order."""
    task = _with_test_indices(checkpoint.experiment.task, indices)
    moments = dict.fromkeys(moment for moment, _ in views)
    layers = dict.fromkeys(layer for _, layer in views)
    engine = engines.create_engine("auto", task, checkpoint.experiment.method)
    try:
        for start in range(0, len(clients), _GROUP_SIZE):
            group = clients[start : start + _GROUP_SIZE]
            tasks = checkpoint.client_tasks(moments, layers, dict.fromkeys(group))
            yield from checkpoint.run_tasks(tasks, engine, callback)
    finally:
        engine.close()


def _with_test_indices(task: Task, indices: Indices) -> Task:
    """Return the task with the same test samples for every client; training data is unchanged."""
    clients = task.split.clients
    test = RaggedArray(np.tile(indices, clients), np.full(clients, len(indices)))
    return dataclasses.replace(task, split=dataclasses.replace(task.split, test=test))
