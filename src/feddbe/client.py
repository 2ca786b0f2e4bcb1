"""A client's work in one call: a pure function of the job, so that it can be done again anywhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

from feddbe.evaluate.accuracy import Measure, measure
from feddbe.local import Local
from feddbe.methods.base import MODEL, Method, refused
from feddbe.state import State, named, nbytes, prefixed, taken, without
from feddbe.task import Context, Task

__all__ = ["BUFFER", "Job", "Missing", "Reply", "perform"]

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
    train_pass: bool = False
    """With the evaluation, measure the deployed model's loss on the training data too."""
    newcomer: bool = False
    """It joins now, after the last round."""


class Reply(NamedTuple):
    """What a client answers, and the state that stays with it (None: it is unchanged)."""

    client: int
    up: State = {}  # noqa: RUF012  (never written to)
    private: State | None = None
    before: Measure | None = None
    adapted: Measure | None = None
    after: Measure | None = None
    validation: Measure | None = None
    """On the share of the training data that was held out, at the moment that the method is judged by."""
    trained: tuple[float, int] = (0.0, 0)
    """Sum of the loss over the samples trained on, and their number."""
    received: int = 0
    """Bytes of the message, with the constants."""
    seconds: float = 0.0


class Missing(NamedTuple):
    """In place of a reply: the client did not answer."""

    client: int
    reason: str


def perform(task: Task, method: Method, job: Job, received: State, private: State | None) -> Reply:
    """Do the job. `private` is None at first contact."""
    start = time.perf_counter()
    ctx = Context(task, job.round)
    message, averaged = without(received, [BUFFER]), taken(received, BUFFER)
    allowed = (MODEL,) if job.work == "prepare" else method.receives
    _refuse(method, "receive", refused(message, allowed, task.model))
    if private is None:
        private = method.newcomer(ctx, message) if job.newcomer else method.client_init(ctx)
    private, kept = without(private, [BUFFER]), taken(private, BUFFER)
    buffers = {track: taken(kept, f"{track}/") for track in {name.split("/")[0] for name in kept}}
    if averaged:
        buffers["shared"] = averaged

    def measured(local: Local, state: State, on: str = "test") -> Measure:
        logits, y = local.predict(
            state, lambda p, x: method.logits(local, p, x), on=on, track=method.deployed_track
        )
        return measure(logits, y)

    def deployed(message: State, private: State) -> tuple[Local, State]:
        local = Local(task, job.round, job.client, buffers)
        return local, method.deployed(ctx, local, message, private)

    reply = Reply(job.client, received=nbytes(received))
    if job.evaluate:
        judged = deployed(message, private)
        before = measured(*judged)
        if job.train_pass:
            before = before._replace(train_loss=measured(*judged, on="train").loss)
        reply = reply._replace(before=before)
        if job.adapt is not None:
            tuned = task.with_epochs(job.adapt or task.training.epochs)
            local = Local(tuned, job.round, job.client, buffers)
            adapt = method.adapt if job.newcomer else method.tune
            state = adapt(Context(tuned, job.round), local, message, private)
            reply = reply._replace(adapted=measured(local, state))
            if method.adapts == "each":
                judged = local, state
        if task.split.validation:
            reply = reply._replace(validation=measured(*judged, on="validation"))
    if job.work != "none":
        local = Local(task, job.round, job.client, buffers)
        work = method.prepare if job.work == "prepare" else method.train
        up, new = work(ctx, local, message, private)
        _refuse(method, "send", [name for name in up if named(name, method.secret)])
        _refuse(method, "send", refused(up, method.sends, task.model))
        _refuse(method, "keep", refused(new, method.keeps, task.model))
        buffers = local.trained_buffers()
        after = measured(*deployed(message | up, new)) if job.after else None
        if task.training.bn_buffers == "average":
            up = up | prefixed(BUFFER, buffers.pop("shared", {}))
        for track, state in buffers.items():
            new = new | prefixed(f"{BUFFER}{track}/", state)
        trained = local.losses.get("shared", (0.0, 0))
        reply = reply._replace(up=up, private=None if new is private else new, after=after, trained=trained)
    return reply._replace(seconds=time.perf_counter() - start)


def _refuse(method: Method, verb: str, names: list[str]) -> None:
    """A method that does other than it says is stopped before anything leaves the client."""
    if names:
        raise AssertionError(f"{method.base} would {verb} '{names[0]}', against what it declares")
