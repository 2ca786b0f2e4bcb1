"""A client's work in one call: a pure function of the job, so that it can be done again anywhere."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from feddbe.errors import FeddbeError
from feddbe.methods import new_clients
from feddbe.methods.base import MODEL, Method, refused
from feddbe.metrics.builtin import asked, take
from feddbe.metrics.records import Measured, Numbers
from feddbe.state import State, add_prefix, matches, moved, nbytes, strip_prefix, without
from feddbe.training.task import Context, Task, at_work
from feddbe.training.trainer import Local

BUFFER = "buffer/"
"""Prefix of BatchNorm statistics: `buffer/NAME` in a message, `buffer/TRACK/NAME` in a kept state."""


@dataclass(frozen=True)
class Job:
    """What a client is asked in one call: evaluate what it deploys now, adapt, then prepare or train."""

    client: int
    round: int
    work: Literal["prepare", "train", "none"] = "none"
    evaluate: bool = False
    adapt: int | None = None
    """Evaluate also after so many epochs of adapting (0: as many as a round has)."""
    after: bool = False
    """Evaluate once more after local training."""
    newcomer: bool = False
    """It joins now, after the last round, and is evaluated after every epoch of adapting."""
    way: str = "full"
    """How a new client adapts (`methods/new_clients.py`)."""
    measures: tuple[str, ...] = ("accuracy",)
    """What to measure, by name."""
    places: tuple[str, ...] = ()
    """With each evaluation on test data, send what is at these places of the deployed model. For simulations:
    no method sends representations."""
    rows: tuple[int, ...] | None = None
    """For these of its test samples, by number; None: for all."""


class Reply(NamedTuple):
    """What a client answers, and the state that stays with it (None: it is unchanged)."""

    client: int
    up: State = {}  # noqa: RUF012  (never written to)
    private: State | None = None
    measured: Measured = {}  # noqa: RUF012
    """By moment, of the model that it received: `validation` is on training data that was held out, at the
    moment that the method is judged by, `train` on the training data."""
    trained: Numbers = {}  # noqa: RUF012
    """Of local training: `loss`, `seconds` of the whole call, `bytes_up`, `bytes_down` with the constants,
    and measures of the training itself."""
    trainers: Mapping[str, str] = {}
    """Backends that trained (`training/backends.py`), each with the reason why no faster one did."""
    seen: State = {}  # noqa: RUF012
    """Representations that the job asked for, as MOMENT/PLACE, and `y`, their labels; nothing, if what the
    client deploys is no model."""

    def to(self, device: torch.device) -> Reply:
        """Return the same with all tensors on this device."""
        private = None if self.private is None else moved(self.private, device)
        return self._replace(up=moved(self.up, device), private=private, seen=moved(self.seen, device))

    def tensors(self) -> State:
        """All of them in one state, to be sent on a way of their own."""
        return add_prefix("up/", self.up) | add_prefix("seen/", self.seen)

    def with_tensors(self, sent: State) -> Reply:
        return self._replace(up=strip_prefix(sent, "up/"), seen=strip_prefix(sent, "seen/"))


class Missing(NamedTuple):
    """In place of a reply: the client did not answer."""

    client: int
    reason: str


def perform(task: Task, method: Method, job: Job, received: State, private: State | None) -> Reply:
    """Do the job where the task lies; messages and states come from the CPU, and go back there. `private` is
    None at first contact."""
    device, start = task.device, time.perf_counter()
    try:
        with at_work(device):
            kept = None if private is None else moved(private, device)
            call = _Call.begin(task, method, job, moved(received, device), kept)
            measured = call.evaluate() if job.evaluate else {}
            reply = Reply(job.client, measured=measured)
            if job.work != "none":
                reply = call.work(measured, start)
        return reply._replace(seen=call.seen).to(torch.device("cpu"))
    except SystemExit as error:  # it would end us as if all were well
        raise FeddbeError(
            f"client {job.client}, round {job.round}: the model's or method's own code called "
            f"sys.exit({'' if error.code is None else error.code})"
        ) from error


def deployed(
    task: Task, method: Method, job: Job, received: State, private: State | None
) -> tuple[Local, State]:
    """What the client predicts with, and where that is done: adapted, if the job says so."""
    with at_work(task.device):
        call = _Call.begin(task, method, job, received, private)
        if job.adapt is None:
            return call.deployed(call.private)
        return call.adapted(job.adapt or task.training.epochs)


@dataclass(frozen=True)
class _Call:
    """One client with what it has at hand: its message, what it kept, its BatchNorm statistics by track."""

    task: Task
    method: Method
    job: Job
    message: State
    private: State
    buffers: Mapping[str, State]
    bytes_down: int
    """Size of the received message."""
    seen: State
    """Filled with what the job wants to see."""

    @classmethod
    def begin(cls, task: Task, method: Method, job: Job, received: State, private: State | None) -> _Call:
        ctx = Context(task, job.round)
        message, averaged = without(received, [BUFFER]), strip_prefix(received, BUFFER)
        allowed = (MODEL,) if job.work == "prepare" else method.receives
        _refuse(method, "receive", refused(message, allowed, task.model))
        if private is None:
            private = method.newcomer(ctx, message) if job.newcomer else method.client_init(ctx)
        private, kept = without(private, [BUFFER]), strip_prefix(private, BUFFER)
        buffers = {track: strip_prefix(kept, f"{track}/") for track in {name.split("/")[0] for name in kept}}
        if averaged:
            buffers["shared"] = averaged
        return cls(task, method, job, message, private, buffers, nbytes(received), {})

    def local(self, task: Task) -> Local:
        return Local(task, self.job.round, self.job.client, self.buffers)

    def deployed(self, private: State) -> tuple[Local, State]:
        """What the client predicts with."""
        local, ctx = self.local(self.task), Context(self.task, self.job.round)
        return local, self.method.deployed(ctx, local, self.message, private)

    def look(self, moment: str, local: Local, state: State, on: str = "test") -> Numbers:
        """The measures of one pass over these rows; of the test rows also what the job wants to see."""
        job, method = self.job, self.method
        shown = job.places if on == "test" and self.task.model.parameters.keys() <= state.keys() else ()
        inside = {*shown, *(asked(job.measures) & {"z", "z_g"})}
        kept: dict[str, list[Tensor]] = {name: [] for name in inside - {"logits"}}

        def logits(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
            for name, value in local.at(params, x, kept).items() if kept else ():
                kept[name].append(value)
            return method.logits(local, params, x)

        own = logits if kept or method.own_logits else None
        found, y = (t.cpu() for t in local.predict(state, own, on=on, track=method.deployed_track))
        given = {name: torch.cat(parts).cpu() for name, parts in kept.items()} | {"logits": found, "y": y}
        rows = slice(None) if job.rows is None else list(job.rows)
        for place in shown:
            self.seen[f"{moment}/{place}"] = given[place][rows].flatten(1)
            self.seen["y"] = y[rows]
        return take(job.measures, given) if len(y) else {}

    def evaluate(self) -> dict[str, Numbers]:
        """By moment, of what it received."""
        job, method, task = self.job, self.method, self.task
        judged = self.deployed(self.private)
        measured = {"before": self.look("before", *judged)}
        if job.adapt is not None:
            if job.newcomer:
                for epochs in range(1, job.adapt):
                    moment = f"adapted {epochs}"
                    measured[moment] = self.look(moment, *self.adapted(epochs))
            adapted = self.adapted(job.adapt or task.training.epochs)
            measured["adapted"] = self.look("adapted", *adapted)
            if method.adapts == "each":
                judged = adapted
        if task.split.validation:
            measured["validation"] = self.look("validation", *judged, on="validation")
        return measured

    def adapted(self, epochs: int) -> tuple[Local, State]:
        """What the client predicts with after so many epochs of adapting. Each fit opens its streams anew, so
        that e epochs are the first e of any more, with every method."""
        task, method = self.task.adapting(epochs), self.method
        local, ctx = self.local(task), Context(task, self.job.round)
        if self.job.newcomer:
            state = new_clients.adapt(self.job.way, method, ctx, local, self.message, self.private)
        else:
            state = method.tune(ctx, local, self.message, self.private)
        return local, state

    def work(self, measured: dict[str, Numbers], start: float) -> Reply:
        """Prepare or train, as the job says.

        Args:
            measured: What was measured of the received model; the moment `after` is added to it.
            start: The time at which the call began.
        """
        job, method, model = self.job, self.method, self.task.model
        local = self.local(self.task)
        work = method.prepare if job.work == "prepare" else method.train
        upload, new = work(Context(self.task, job.round), local, self.message, self.private)
        _refuse(method, "send", [name for name in upload if matches(name, method.secret)])
        _refuse(method, "send", refused(upload, method.sends, model))
        _refuse(method, "keep", refused(new, method.keeps, model))
        buffers = local.trained_buffers()
        if job.after:
            after = dataclasses.replace(self, message=self.message | upload, buffers=buffers)
            measured["after"] = after.look("after", *after.deployed(new))
        upload, kept = self.with_statistics(upload, new, buffers)
        trained = self._training_metrics(local, upload, time.perf_counter() - start)
        return Reply(job.client, upload, kept, measured, trained, local.trainers)

    def _training_metrics(self, local: Local, upload: State, seconds: float) -> Numbers:
        """Return the loss and the cost of local training, and the metrics of training itself."""
        cost = {"seconds": seconds, "bytes_up": nbytes(upload), "bytes_down": self.bytes_down}
        trained: Numbers = {}
        values: dict[str, float] = dict(cost)
        loss_sum, samples = local.losses.get("shared", (0.0, 0))
        if samples:
            trained["loss"] = (loss_sum / samples, samples)
            values |= {"loss_sum": float(loss_sum / samples * samples), "samples": samples}
        trained |= {name: (value, 1) for name, value in cost.items()}
        return trained | take(self.job.measures, values)

    def with_statistics(self, up: State, new: State, buffers: dict[str, State]) -> tuple[State, State | None]:
        """What is sent and what is kept (None: it is unchanged), BatchNorm statistics with them."""
        if self.task.training.bn_buffers == "average":
            up = up | add_prefix(BUFFER, buffers.pop("shared", {}))
        for track, state in buffers.items():
            new = new | add_prefix(f"{BUFFER}{track}/", state)
        return up, None if new is self.private else new


def _refuse(method: Method, verb: str, names: list[str]) -> None:
    """A method that does other than it says is stopped before anything leaves the client."""
    if names:
        raise AssertionError(f"{method.base} would {verb} '{names[0]}', against what it declares")
