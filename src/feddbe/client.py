"""A client's work in one call: a pure function of the job, so that it can be done again anywhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

from feddbe.evaluate.accuracy import Measure, measure
from feddbe.local import Local
from feddbe.methods.base import Method
from feddbe.state import State, named, prefixed, taken, without
from feddbe.task import Context, Task

__all__ = ["BUFFER", "Job", "Reply", "perform"]

BUFFER = "buffer/"
"""Prefix of BatchNorm statistics: `buffer/NAME` in a message, `buffer/TRACK/NAME` in a private state."""


@dataclass(frozen=True)
class Job:
    """What a client is asked in one call: evaluate what it deploys now, then prepare or train."""

    client: int
    round: int
    work: Literal["prepare", "train", "none"] = "none"
    evaluate: bool = False
    after: bool = False
    """Evaluate once more after local training."""
    train_pass: bool = False
    """With the evaluation, measure the deployed model's loss on the training data too."""


class Reply(NamedTuple):
    """What a client answers, and the private state that stays with it (None: it is unchanged)."""

    client: int
    up: State
    private: State | None
    before: Measure | None
    after: Measure | None
    trained: tuple[float, int]
    """Sum of the loss over the samples trained on, and their number."""
    seconds: float


def perform(task: Task, method: Method, job: Job, received: State, private: State | None) -> Reply:
    """Do the job. `private` is None at first contact."""
    start = time.perf_counter()
    ctx = Context(task, job.round)
    if private is None:
        private = method.client_init(ctx)
    message, averaged = without(received, [BUFFER]), taken(received, BUFFER)
    private, kept = without(private, [BUFFER]), taken(private, BUFFER)
    buffers = {track: taken(kept, f"{track}/") for track in {name.split("/")[0] for name in kept}}
    if averaged:
        buffers["shared"] = averaged

    def evaluate(message: State, private: State, *, train_pass: bool) -> Measure:
        local = Local(task, job.round, job.client, buffers)
        deployed = method.deployed(ctx, local, message, private)

        def predict(on: Literal["train", "test"]) -> Measure:
            logits, y = local.predict(
                deployed, lambda p, x: method.logits(local, p, x), on=on, track=method.deployed_track
            )
            return measure(logits, y)

        measured = predict("test")
        return measured._replace(train_loss=predict("train").loss) if train_pass else measured

    before = evaluate(message, private, train_pass=job.train_pass) if job.evaluate else None
    if job.work == "none":
        return Reply(job.client, {}, None, before, None, (0.0, 0), time.perf_counter() - start)

    local = Local(task, job.round, job.client, buffers)
    work = method.prepare if job.work == "prepare" else method.train
    up, new = work(ctx, local, message, private)
    leak = next((name for name in up if named(name, method.private)), None)
    if leak is not None:
        raise AssertionError(f"{method.name} would send '{leak}', which it declares private")
    buffers = local.trained_buffers()
    after = evaluate(message | up, new, train_pass=False) if job.after else None
    if task.training.bn_buffers == "average":
        up = up | prefixed(BUFFER, buffers.pop("shared", {}))
    for track, state in buffers.items():
        new = new | prefixed(f"{BUFFER}{track}/", state)
    trained = local.losses.get("shared", (0.0, 0))
    changed = None if new is private else new
    return Reply(job.client, up, changed, before, after, trained, time.perf_counter() - start)
