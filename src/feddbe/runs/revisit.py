"""Go back to a round of a run: what clients did there, they can do again, because their work is a pure
function of what the run's file has. Nothing of the run changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from feddbe.data.dataset import Dataset
from feddbe.engines import Engine
from feddbe.engines.client import Job, Missing, Reply, deployed
from feddbe.errors import BadInput, FeddbeError, StoreError, short, unknown
from feddbe.methods import METHODS
from feddbe.models import ModelSource
from feddbe.options.config import pick_identity
from feddbe.options.from_file import Source, names_file
from feddbe.options.permission import NOTHING, Permission
from feddbe.runs.best import KEPT
from feddbe.runs.experiment import Experiment, resolve
from feddbe.runs.gate import admit
from feddbe.runs.layout import check_stored, layout_of
from feddbe.runs.messages import sent, steady
from feddbe.runs.rounds import start
from feddbe.runs.store import Store
from feddbe.runs.watch import Watch
from feddbe.state import State, decode
from feddbe.training.local import Local
from feddbe.training.task import Context

__all__ = ["MOMENTS", "Entry", "differences", "entry_of", "reopened"]

MOMENTS = ("before", "adapted", "after")
"""When a client's model can be looked at: as received, adapted to the client, after local training."""


def differences(store: Store, experiment: Experiment) -> str:
    """What tells a stored run and an experiment apart, in words; hyper-parameters only of parts that both
    have."""
    now = experiment.config
    before, after = pick_identity(store.meta("config")), pick_identity(now)
    found = [
        f"{key} {before.get(key)} there, {value} now"
        for key, value in after.items()
        if before.get(key) != value and (key in before or key in now)
    ]
    return "; ".join(found) or _edited(store, experiment) or "its data, its model or its method differ"


def _edited(store: Store, experiment: Experiment) -> str:
    """Name the first of the user's files that is not what the run began with."""
    for kind, source in experiment.sources.items():
        before = Source.from_json(store.meta("sources"), kind)
        if before and before.sha256 != source.sha256:
            return f"the {kind}'s file was edited"
        names = sorted({*source.modules, *(before.modules if before else ())})
        for name in names if before else ():
            if before and before.modules.get(name) != source.modules.get(name):
                return f"{short(name)}, which the {kind}'s file imports, was edited"
    return ""


def reopened(
    store: Store,
    *,
    dataset: Dataset | None = None,
    model: ModelSource | None = None,
    allowed: Permission = NOTHING,
) -> Experiment:
    """The experiment of a run. What was given to it as a Python object must be given again, and code in files
    must be `allowed`."""
    given: dict[str, Any] = {"device": "cpu", "engine": "auto"}  # those of the run may be elsewhere
    if model is not None:
        given["model"] = model if isinstance(model, str) else "own"
    method, options = admit(store, allowed, given)
    if options.model == "own" and model is None:
        raise BadInput(f"the model of '{store.folder}' came from Python; give it again: model=... in Python")
    try:
        found = resolve(method, options, dataset=dataset, model=model)
    except BadInput as error:
        name = next(iter(store.meta("config")["method_options"]))
        known = name in METHODS or names_file(method)
        hint = "" if known else f"; a class of yours is made known by feddbe.METHODS['{name}'] = CLASS"
        raise BadInput(f"the run in '{store.folder}' cannot be made again: {error}{hint}") from error
    if found.config_hash != store.meta("config_hash"):
        raise BadInput(
            f"the run in '{store.folder}' is another here ({differences(store, found)}); "
            "copy the files of data and model from where it began"
        )
    return found


def entry_of(store: Store, which: str) -> int:
    """The number of the `best` or the `last` entry."""
    if which not in ("best", "last"):
        raise unknown("round", which, ("best", "last"))
    if store.last_round() < 0:
        raise BadInput(f"'{store.folder}' has no finished round yet: there is nothing to look at")
    if (found := store.round_of(which)) is None:
        raise BadInput(f"'{store.folder}' has no evaluated round yet; look at the last, --round last")
    return found


class Entry:
    """The `best` or the `last` entry of a run, with the states that it was evaluated with. It is what engines
    read the clients' states from; what they stage is discarded."""

    def __init__(self, store: Store, experiment: Experiment, which: str) -> None:
        self.store, self.experiment, self.which = store, experiment, which
        self.round = entry_of(store, which)
        check_stored(store.server(which), layout_of(start(experiment)), store.folder)

    def read(self, client: int) -> bytes | None:
        return self._state("private", client)

    def stage(self, client: int, state: bytes) -> None:
        pass

    def stamp(self, client: int) -> None:
        """Whoever holds what was discarded must not go on from there."""

    def upload(self, client: int) -> State:
        """What a client had sent last then."""
        found = self._state("upload", client)
        assert found is not None, "a method asks for uploads that there are"
        return decode(found)

    def ask(self, jobs: Sequence[Job], engine: Engine, watch: Watch | None = None) -> list[Reply]:
        """Do these jobs with the messages of the round after this entry; the replies in client order."""
        method = self.experiment.method
        ctx = Context(self.experiment.task, self.round + 1, self.upload if method.keeps_uploads else None)
        replies: list[Reply] = []
        with steady():
            for answer in engine.run(jobs, sent(method, ctx, self.store.server(self.which)), self):
                if isinstance(answer, Missing):
                    raise FeddbeError(f"client {answer.client} did not answer ({answer.reason})")
                replies.append(answer)
                if watch:
                    watch.client(len(replies), len(jobs))
        return sorted(replies, key=lambda reply: reply.client)

    def deployed(self, client: int) -> tuple[Local, State]:
        """What this client predicts with at this entry: adapted, where that is part of the method."""
        method, task = self.experiment.method, self.experiment.task
        ctx = Context(task, self.round + 1, self.upload if method.keeps_uploads else None)
        adapt = {"each": 0, "last": self.experiment.options.adapt_epochs}.get(method.adapts)
        kept = self.read(client)
        with steady():
            received = sent(method, ctx, self.store.server(self.which)).to(client)
            job = Job(client, self.round + 1, adapt=adapt)
            return deployed(task, method, job, received, None if kept is None else decode(kept))

    def jobs(
        self, moments: Iterable[str], places: Iterable[str], rows: Mapping[int, Sequence[int] | None]
    ) -> list[Job]:
        """For each client in `rows`: show those of its test samples at these places and moments."""
        wanted, method, options = set(moments), self.experiment.method, self.experiment.options
        adapt = {"each": 0, "last": options.adapt_epochs}.get(method.adapts)
        allowed = [moment for moment in MOMENTS if moment != "adapted" or adapt is not None]
        for moment in wanted - set(allowed):
            raise unknown(f"moment of {method.base}", moment, allowed)
        return [
            Job(
                client,
                self.round + 1,
                "train" if "after" in wanted else "none",
                evaluate=True,
                adapt=adapt if "adapted" in wanted else None,
                after="after" in wanted,
                places=tuple(places),
                rows=None if some is None else tuple(some),
            )
            for client, some in rows.items()
        ]

    def _state(self, kind: str, client: int) -> bytes | None:
        store, made = self.store, self.store.round_of(kind, client)
        if made is None or made <= self.round:
            return store.state(kind, client)
        if (kept := store.state(KEPT[kind], client)) is None and not store.meta("keeps_best"):
            raise StoreError(
                f"'{store.folder}' was begun with --no-keep-best, or by a feddbe that did not keep the "
                "clients' states of the best round; look at the last one, --round last"
            )
        return kept  # None: it had none yet
