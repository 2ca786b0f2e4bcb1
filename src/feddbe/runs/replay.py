"""Go back to a round of a run: what clients did there, they can do again, because their work is a pure
function of what the run's file has. Nothing of the run changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from feddbe import methods
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
from feddbe.metrics.representations.points import AnalysisResult, make_points
from feddbe.models.registry import ModelSource
from feddbe.paths import expand_path
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.store import RETAINED, RunStore, corrupt_run_error
from feddbe.simulation import engines
from feddbe.simulation.client import ClientResult, ClientTask, MissingClient, build_inference_model
from feddbe.simulation.engines.base import ClientStates, Engine
from feddbe.simulation.loop import build_broadcast, deterministic_section, initial_server_state
from feddbe.state import State, check_stored, decode, layout_of
from feddbe.training.task import Context, Task
from feddbe.training.trainer import ClientTrainer

MOMENTS = ("before", "adapted", "after")
"""When a client's model can be looked at: as received, adapted to the client, after local training."""


def describe_changes(store: RunStore, experiment: Experiment) -> str:
    """What tells a stored run and an experiment apart, in words; hyper-parameters only of parts that both
    have."""
    now = experiment.config
    before, after = identifying_settings(store.meta("config")), identifying_settings(now)
    found = [
        f"{key} {before.get(key)} there, {value} now"
        for key, value in after.items()
        if before.get(key) != value and (key in before or key in now)
    ]
    return "; ".join(found) or _edited(store, experiment) or "its data, its model or its method differ"


def _edited(store: RunStore, experiment: Experiment) -> str:
    """Name the first of the user's files that is not what the run began with."""
    for kind, source in experiment.sources.items():
        before = StoredSource.from_json(store.meta("sources"), kind)
        if before and before.sha256 != source.sha256:
            return f"the {kind}'s file was edited"
        names = sorted({*source.modules, *(before.modules if before else ())})
        for name in names if before else ():
            if before and before.modules.get(name) != source.modules.get(name):
                return f"{truncate(name)}, which the {kind}'s file imports, was edited"
    return ""


def load_experiment(
    store: RunStore,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    allowed: Permission = NO_PERMISSION,
) -> Experiment:
    """The experiment of a run. What was given to it as a Python object must be given again, and code in files
    must be `allowed`."""
    given: dict[str, Any] = {"device": "cpu", "engine": "auto"}  # those of the run may be elsewhere
    if model is not None:
        given["model"] = model if isinstance(model, str) else "own"
    method, options = require_permissions(store, allowed, given)
    if options.model == "own" and model is None:
        raise InvalidInputError(
            f"the model of '{store.folder}' came from Python; give it again: model=... in Python"
        )
    try:
        found = resolve(method, options, dataset=dataset, model=model)
    except InvalidInputError as error:
        name = next(iter(store.meta("config")["method_options"]))
        known = name in METHODS or is_file_reference(method)
        hint = "" if known else f"; a class of yours is made known by feddbe.METHODS['{name}'] = CLASS"
        raise InvalidInputError(f"the run in '{store.folder}' cannot be made again: {error}{hint}") from error
    if found.config_hash != store.meta("config_hash"):
        raise InvalidInputError(
            f"the run in '{store.folder}' is another here ({describe_changes(store, found)}); "
            "copy the files of data and model from where it began"
        )
    return found


def checkpoint_round(store: RunStore, which: str) -> int:
    """The number of the `best` or the `last` entry."""
    if which not in ("best", "last"):
        raise unknown_name("round", which, ("best", "last"))
    if store.last_round() < 0:
        raise InvalidInputError(f"'{store.folder}' has no finished round yet: there is nothing to look at")
    if (found := store.round_of(which)) is None:
        raise InvalidInputError(
            f"'{store.folder}' has no evaluated round yet; look at the last, --round last"
        )
    return found


class Checkpoint(ClientStates):
    """The `best` or the `last` entry of a run, with the states that it was evaluated with. It is what engines
    read the clients' states from; what they stage is discarded."""

    def __init__(self, store: RunStore, experiment: Experiment, which: str) -> None:
        self.store, self.experiment, self.which = store, experiment, which
        self.round = checkpoint_round(store, which)
        check_stored(store.server_state(which), layout_of(initial_server_state(experiment)), store.folder)

    def read(self, client: int) -> bytes | None:
        return self._state("private", client)

    def write_pending(self, client: int, state: bytes) -> None:
        pass

    def version(self, client: int) -> None:
        """Whoever holds what was discarded must not go on from there."""

    def upload(self, client: int) -> State:
        """What a client had sent last then."""
        found = self._state("upload", client)
        assert found is not None, "a method asks for uploads that there are"
        return decode(found)

    def run_tasks(
        self, tasks: Sequence[ClientTask], engine: Engine, callback: Callback | None = None
    ) -> list[ClientResult]:
        """Do these jobs with the messages of the round after this entry; the replies in client order."""
        method = self.experiment.method
        ctx = Context(self.experiment.task, self.round + 1, self.upload if method.keeps_uploads else None)
        replies: list[ClientResult] = []
        with deterministic_section():
            for answer in engine.run(
                tasks, build_broadcast(method, ctx, self.store.server_state(self.which)), self
            ):
                if isinstance(answer, MissingClient):
                    raise FeddbeError(f"client {answer.client} did not answer ({answer.reason})")
                replies.append(answer)
                if callback:
                    callback.on_client_end(len(replies), len(tasks))
        return sorted(replies, key=lambda reply: reply.client)

    def inference_model(self, client: int) -> tuple[ClientTrainer, State]:
        """What this client predicts with at this entry: adapted, where that is part of the method."""
        method, task = self.experiment.method, self.experiment.task
        ctx = Context(task, self.round + 1, self.upload if method.keeps_uploads else None)
        adapt = {"each": 0, "last": self.experiment.options.adapt_epochs}.get(method.adapts)
        kept = self.load(client)
        with deterministic_section():
            received = build_broadcast(method, ctx, self.store.server_state(self.which)).message_for(client)
            job = ClientTask(client, self.round + 1, adapt_epochs=adapt)
            return build_inference_model(task, method, job, received, kept)

    def client_tasks(
        self, moments: Iterable[str], places: Iterable[str], rows: Mapping[int, Sequence[int] | None]
    ) -> list[ClientTask]:
        """For each client in `rows`: show those of its test samples at these places and moments."""
        wanted, method, options = set(moments), self.experiment.method, self.experiment.options
        adapt = {"each": 0, "last": options.adapt_epochs}.get(method.adapts)
        allowed = [moment for moment in MOMENTS if moment != "adapted" or adapt is not None]
        for moment in wanted - set(allowed):
            raise unknown_name(f"moment of {method.base_name}", moment, allowed)
        return [
            ClientTask(
                client,
                self.round + 1,
                "train" if "after" in wanted else "none",
                evaluate=True,
                adapt_epochs=adapt if "adapted" in wanted else None,
                evaluate_after="after" in wanted,
                layers=tuple(places),
                sample_indices=None if some is None else tuple(some),
            )
            for client, some in rows.items()
        ]

    def _state(self, kind: str, client: int) -> bytes | None:
        store, made = self.store, self.store.round_of(kind, client)
        if made is None or made <= self.round:
            return store.state(kind, client)
        if (kept := store.state(RETAINED[kind], client)) is None and not store.meta("keeps_best"):
            raise StoreError(
                f"'{store.folder}' was begun with --no-keep-best, or by a feddbe that did not keep the "
                "clients' states of the best round; look at the last one, --round last"
            )
        return kept  # None: it had none yet


def require_permissions(store: RunStore, allowed: Permission, given: Mapping[str, Any]) -> tuple[str, Config]:
    """Return method and options of a stored run, with what is `given` now in place of what it has.

    Nothing is executed here. A file that the user named replaces the path that the run has.

    Args:
        store: The run.
        allowed: What the user allows it to do.
        given: Options that come from the user.

    Raises:
        BadInput: The run names code that is not allowed, or whose content is not what the run stored.
        Damaged: The stored configuration cannot be read.
    """
    settings = store.meta("config")
    match settings:
        case {"method": str(method), "method_options": dict(parts)} if parts:
            pass
        case _:
            raise corrupt_run_error(store.folder, "what is written about it: config")
    names = {field.name for field in dataclasses.fields(Config)} - {"method"}
    stored = {key: settings[key] for key in names & settings.keys() if settings[key] is not None}
    options = Config(**stored | dict(given))
    if file := methods.file_reference(method):
        admitted = _require_file_permission("method", file, store, allowed)
        method = method.replace(file, admitted, 1)
        if methods.file_reference(method) != admitted:
            raise InvalidInputError(
                f"cannot use the path '{truncate(admitted)}' in a method's name; rename it"
            )
    if "model" not in given and options.model and is_file_reference(options.model):
        options = dataclasses.replace(
            options, model=_require_file_permission("model", options.model, store, allowed)
        )
    if "engine" not in given and not allowed.trust and not engines.find_engine(options.engine).is_local():
        raise InvalidInputError(
            f"the run in '{store.folder}' names an engine on other machines, '{truncate(options.engine)}'; say "
            "which one yourself (--engine), or --trust if the run is your own"
        )
    return method, options


def _require_file_permission(kind: str, text: str, store: RunStore, allowed: Permission) -> str:
    """Return the `FILE.py:NAME` that may be executed in place of what the run names."""
    shown, (file, name) = truncate(text), user_code.split_reference(text)
    if not allowed.code and not allowed.trust:
        raise InvalidInputError(
            f"the {kind} of '{store.folder}' is code in a file, '{shown}', which is not executed for a "
            "stored run: name it, --code FILE.py, or say that the run is your own, --trust (in Python code=, "
            "trust=True)"
        )
    stored = StoredSource.from_json(store.meta("sources"), kind)
    if stored is None:
        raise InvalidInputError(
            f"'{store.folder}' does not store the content of its {kind}'s file '{shown}', so that it cannot "
            "be compared; name method and model in the command"
        )
    path = _named_file(kind, name, stored, allowed)
    if path is None and not allowed.trust:
        raise InvalidInputError(
            f"--code {truncate(', '.join(allowed.code))}: this is not the {kind}'s file that '{store.folder}' "
            f"began with ('{shown}', sha256 {truncate(stored.sha256[:12])}); name that one, too"
        )
    path = path or expand_path(file)
    user_code.check_content(kind, path, stored)
    return f"{path}:{name}"


def _named_file(kind: str, name: str, stored: StoredSource, allowed: Permission) -> Path | None:
    """Return the file among those that the user named which has the stored content."""
    for text in allowed.code:
        file, only = user_code.split_reference(text)
        path = expand_path(file)
        if only in ("", name) and user_code.content_sha256(kind, path) == stored.sha256:
            return path
    return None


View = tuple[str, str]
"""A moment and a place of the model."""
_GROUP = 16
"""Clients whose replies are in memory at once: each has the representations of all samples."""


def compare_under_each_model(
    entry: Checkpoint,
    what: str,
    views: Sequence[View],
    chosen: Mapping[int, Sequence[int] | None],
    settings: Mapping[str, Any],
    callback: Callback,
) -> dict[View, AnalysisResult]:
    """Compare each client with the others, all of them as its own model represents them.

    Args:
        entry: The entry of a run whose models are compared.
        what: The name of the measure, one that is `shared`.
        views: Moments and places at which it is taken.
        chosen: Test samples by client, as positions among its own; None: all of them.
        settings: Keyword arguments of the measure.
        watch: Is told of each client.

    Returns:
        The measurement at each view; of every client that has two of the chosen samples.
    """
    task = entry.experiment.task
    tests = [_choose(task.split.test[client], positions) for client, positions in chosen.items()]
    counts = np.array([len(rows) for rows in tests])
    owners = np.repeat(list(chosen), counts)
    enough = enough_samples_mask(np.array(list(chosen)), counts)
    clients = np.array(list(chosen))[enough].tolist()
    parts: dict[View, list[AnalysisResult]] = {view: [] for view in views}
    for reply in _ask_on_all_samples(entry, clients, np.concatenate(tests), views, callback):
        known: dict[str, AnalysisResult] = {}  # without PRBM z is z_g, and a cut has several names
        for view, part in parts.items():
            values = reply.representations.get("/".join(view))
            if values is None:
                raise InvalidInputError(
                    f"{entry.experiment.method.base_name} deploys no model: it has no representations"
                )
            seen = make_points(values.numpy(), reply.representations["y"].numpy(), owners)
            key = sha256(seen.x.tobytes()).hexdigest()
            if key not in known:
                alone = {**settings, "clients": (reply.client,)}
                known[key] = registry.compute_analysis(what, seen, task.dataset.classes, alone)
            part.append(known[key])
    return {view: registry.combine_client_results(part) for view, part in parts.items()}


def _ask_on_all_samples(
    entry: Checkpoint, clients: Sequence[int], rows: Indices, views: Sequence[View], callback: Callback
) -> Iterator[ClientResult]:
    """Do these clients' work with `rows` as the test samples of each; the replies in client order."""
    task = _with_test_rows(entry.experiment.task, rows)
    moments, places = (dict.fromkeys(names) for names in zip(*views, strict=True))
    engine = engines.create_engine("auto", task, entry.experiment.method)
    try:
        for start in range(0, len(clients), _GROUP):
            group = clients[start : start + _GROUP]
            yield from entry.run_tasks(
                entry.client_tasks(moments, places, dict.fromkeys(group)), engine, callback
            )
    finally:
        engine.close()


def _choose(rows: Indices, positions: Sequence[int] | None) -> Indices:
    return rows if positions is None else rows[list(positions)]


def _with_test_rows(task: Task, rows: Indices) -> Task:
    """Return the task with these test rows for every client; training stays as it is."""
    clients = task.split.clients
    test = RaggedArray(np.tile(rows, clients), np.full(clients, len(rows)))
    return dataclasses.replace(task, split=dataclasses.replace(task.split, test=test))
