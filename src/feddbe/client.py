"""A client's work in one call: a pure function of the job, so that it can be done again anywhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from feddbe.local import Local
from feddbe.measures import asked, take
from feddbe.measures.rows import Measured, Numbers
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
    """With the evaluation, measure the deployed model on the training data too."""
    newcomer: bool = False
    """It joins now, after the last round."""
    measures: tuple[str, ...] = ("accuracy",)
    """What to measure, by name."""


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
    trainers: tuple[str, ...] = ()
    """Who did the training (`training/trainers`)."""


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

    def look(local: Local, state: State, on: str = "test") -> Numbers:
        kept: dict[str, list[Tensor]] = {name: [] for name in asked(job.measures) & {"z", "z_g"}}

        def logits(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
            out = local.forward(params, x) if kept else None
            for name, parts in kept.items():
                parts.append(getattr(out, name))
            return method.logits(local, params, x)

        found, y = local.predict(state, logits, on=on, track=method.deployed_track)
        given = {name: torch.cat(parts) for name, parts in kept.items()}
        return take(job.measures, given | {"logits": found, "y": y}) if len(y) else {}

    def deployed(message: State, private: State) -> tuple[Local, State]:
        local = Local(task, job.round, job.client, buffers)
        return local, method.deployed(ctx, local, message, private)

    reply, measured = Reply(job.client), dict[str, Numbers]()
    if job.evaluate:
        judged = deployed(message, private)
        measured["before"] = look(*judged)
        if job.train_pass:
            measured["train"] = look(*judged, on="train")
        if job.adapt is not None:
            tuned = task.with_epochs(job.adapt or task.training.epochs)
            local = Local(tuned, job.round, job.client, buffers)
            adapt = method.adapt if job.newcomer else method.tune
            state = adapt(Context(tuned, job.round), local, message, private)
            measured["adapted"] = look(local, state)
            if method.adapts == "each":
                judged = local, state
        if task.split.validation:
            measured["validation"] = look(*judged, on="validation")
    if job.work != "none":
        local = Local(task, job.round, job.client, buffers)
        work = method.prepare if job.work == "prepare" else method.train
        up, new = work(ctx, local, message, private)
        _refuse(method, "send", [name for name in up if named(name, method.secret)])
        _refuse(method, "send", refused(up, method.sends, task.model))
        _refuse(method, "keep", refused(new, method.keeps, task.model))
        buffers = local.trained_buffers()
        if job.after:
            measured["after"] = look(*deployed(message | up, new))
        if task.training.bn_buffers == "average":
            up = up | prefixed(BUFFER, buffers.pop("shared", {}))
        for track, state in buffers.items():
            new = new | prefixed(f"{BUFFER}{track}/", state)
        loss, seen = local.losses.get("shared", (0.0, 0))
        seconds = time.perf_counter() - start
        cost = {"seconds": seconds, "bytes_up": nbytes(up), "bytes_down": nbytes(received)}
        trained: Numbers = {name: (value, 1) for name, value in cost.items()}
        if seen:
            trained["loss"] = loss / seen, seen
        trained |= take(job.measures, {"loss_sum": loss, "samples": seen, **cost})
        reply = reply._replace(
            up=up,
            private=None if new is private else new,
            trained=trained,
            trainers=tuple(sorted(local.trainers)),
        )
    return reply._replace(measured=measured)


def _refuse(method: Method, verb: str, names: list[str]) -> None:
    """A method that does other than it says is stopped before anything leaves the client."""
    if names:
        raise AssertionError(f"{method.base} would {verb} '{names[0]}', against what it declares")
