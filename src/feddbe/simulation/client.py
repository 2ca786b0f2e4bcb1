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
from feddbe.methods.base import MODEL, Method, undeclared_names
from feddbe.metrics.builtin import compute_metrics, required_inputs
from feddbe.metrics.records import MetricsByMoment, MetricValues
from feddbe.state import State, add_prefix, drop_keys, matches_pattern, nbytes, strip_prefix, to_device
from feddbe.training.task import Context, Task, device_settings
from feddbe.training.trainer import ClientTrainer

BUFFER = "buffer/"
"""Prefix of BatchNorm statistics: `buffer/NAME` in a message, `buffer/TRACK/NAME` in a kept state."""


@dataclass(frozen=True)
class ClientTask:
    """What a client is asked in one call: evaluate what it deploys now, adapt, then prepare or train."""

    client: int
    round: int
    work: Literal["prepare", "train", "none"] = "none"
    evaluate: bool = False
    adapt_epochs: int | None = None
    """Evaluate also after so many epochs of adapting (0: as many as a round has)."""
    evaluate_after: bool = False
    """Evaluate once more after local training."""
    is_new_client: bool = False
    """It joins now, after the last round, and is evaluated after every epoch of adapting."""
    adaptation: str = "full"
    """How a new client adapts (`methods/new_clients.py`)."""
    metrics: tuple[str, ...] = ("accuracy",)
    """What to measure, by name."""
    layers: tuple[str, ...] = ()
    """With each evaluation on test data, send what is at these places of the deployed model. For simulations:
    no method sends representations."""
    sample_indices: tuple[int, ...] | None = None
    """For these of its test samples, by number; None: for all."""


class ClientResult(NamedTuple):
    """What a client answers, and the state that stays with it (None: it is unchanged)."""

    client: int
    upload: State = {}  # noqa: RUF012  (never written to)
    private: State | None = None
    metrics: MetricsByMoment = {}  # noqa: RUF012
    """By moment, of the model that it received: `validation` is on training data that was held out, at the
    moment that the method is judged by, `train` on the training data."""
    training_metrics: MetricValues = {}  # noqa: RUF012
    """Of local training: `loss`, `seconds` of the whole call, `bytes_up`, `bytes_down` with the constants,
    and measures of the training itself."""
    trainers: Mapping[str, str] = {}
    """Backends that trained (`training/backends.py`), each with the reason why no faster one did."""
    representations: State = {}  # noqa: RUF012
    """Representations that the job asked for, as MOMENT/PLACE, and `y`, their labels; nothing, if what the
    client deploys is no model."""

    def to(self, device: torch.device) -> ClientResult:
        """Return the same with all tensors on this device."""
        private = None if self.private is None else to_device(self.private, device)
        return self._replace(
            upload=to_device(self.upload, device),
            private=private,
            representations=to_device(self.representations, device),
        )

    def tensors(self) -> State:
        """All of them in one state, to be sent on a way of their own."""
        return add_prefix("up/", self.upload) | add_prefix("seen/", self.representations)

    def with_tensors(self, sent: State) -> ClientResult:
        return self._replace(upload=strip_prefix(sent, "up/"), representations=strip_prefix(sent, "seen/"))


class MissingClient(NamedTuple):
    """In place of a reply: the client did not answer."""

    client: int
    reason: str


def run_client(
    task: Task, method: Method, client_task: ClientTask, received: State, private: State | None
) -> ClientResult:
    """Do the job where the task lies; messages and states come from the CPU, and go back there. `private` is
    None at first contact."""
    device, start = task.device, time.perf_counter()
    try:
        with device_settings(device):
            kept = None if private is None else to_device(private, device)
            call = _ClientSession.begin(task, method, client_task, to_device(received, device), kept)
            measured = call.evaluate() if client_task.evaluate else {}
            reply = ClientResult(client_task.client, metrics=measured)
            if client_task.work != "none":
                reply = call.work(measured, start)
        return reply._replace(representations=call.representations).to(torch.device("cpu"))
    except SystemExit as error:  # it would end us as if all were well
        raise FeddbeError(
            f"client {client_task.client}, round {client_task.round}: the model's or method's own code called "
            f"sys.exit({'' if error.code is None else error.code})"
        ) from error


def build_inference_model(
    task: Task, method: Method, client_task: ClientTask, received: State, private: State | None
) -> tuple[ClientTrainer, State]:
    """What the client predicts with, and where that is done: adapted, if the job says so."""
    with device_settings(task.device):
        call = _ClientSession.begin(task, method, client_task, received, private)
        if client_task.adapt_epochs is None:
            return call.inference_model(call.private)
        return call.adapted_model(client_task.adapt_epochs or task.training.local_epochs)


@dataclass(frozen=True)
class _ClientSession:
    """One client with what it has at hand: its message, what it kept, its BatchNorm statistics by track."""

    task: Task
    method: Method
    client_task: ClientTask
    message: State
    private: State
    buffers: Mapping[str, State]
    bytes_down: int
    """Size of the received message."""
    representations: State
    """Filled with what the job wants to see."""

    @classmethod
    def begin(
        cls, task: Task, method: Method, client_task: ClientTask, received: State, private: State | None
    ) -> _ClientSession:
        ctx = Context(task, client_task.round)
        message, averaged = drop_keys(received, [BUFFER]), strip_prefix(received, BUFFER)
        allowed = (MODEL,) if client_task.work == "prepare" else method.receives
        _check_message(method, "receive", undeclared_names(message, allowed, task.model))
        if private is None:
            private = (
                method.init_new_client(ctx, message) if client_task.is_new_client else method.client_init(ctx)
            )
        private, kept = drop_keys(private, [BUFFER]), strip_prefix(private, BUFFER)
        buffers = {track: strip_prefix(kept, f"{track}/") for track in {name.split("/")[0] for name in kept}}
        if averaged:
            buffers["shared"] = averaged
        return cls(task, method, client_task, message, private, buffers, nbytes(received), {})

    def trainer(self, task: Task) -> ClientTrainer:
        return ClientTrainer(task, self.client_task.round, self.client_task.client, self.buffers)

    def inference_model(self, private: State) -> tuple[ClientTrainer, State]:
        """What the client predicts with."""
        local, ctx = self.trainer(self.task), Context(self.task, self.client_task.round)
        return local, self.method.inference_params(ctx, local, self.message, private)

    def compute_metrics(
        self, moment: str, trainer: ClientTrainer, state: State, on: str = "test"
    ) -> MetricValues:
        """The measures of one pass over these rows; of the test rows also what the job wants to see."""
        job, method = self.client_task, self.method
        shown = job.layers if on == "test" and self.task.model.parameters.keys() <= state.keys() else ()
        inside = {*shown, *(required_inputs(job.metrics) & {"z", "z_g"})}
        kept: dict[str, list[Tensor]] = {name: [] for name in inside - {"logits"}}

        def logits(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
            for name, value in trainer.activations(params, x, kept).items() if kept else ():
                kept[name].append(value)
            return method.logits(trainer, params, x)

        own = logits if kept or method.has_own_logits else None
        found, y = (t.cpu() for t in trainer.predict(state, own, on=on, track=method.inference_track))
        given = {name: torch.cat(parts).cpu() for name, parts in kept.items()} | {"logits": found, "y": y}
        rows = slice(None) if job.sample_indices is None else list(job.sample_indices)
        for place in shown:
            self.representations[f"{moment}/{place}"] = given[place][rows].flatten(1)
            self.representations["y"] = y[rows]
        return compute_metrics(job.metrics, given) if len(y) else {}

    def evaluate(self) -> dict[str, MetricValues]:
        """By moment, of what it received."""
        job, method, task = self.client_task, self.method, self.task
        judged = self.inference_model(self.private)
        measured = {"before": self.compute_metrics("before", *judged)}
        if job.adapt_epochs is not None:
            if job.is_new_client:
                for epochs in range(1, job.adapt_epochs):
                    moment = f"adapted {epochs}"
                    measured[moment] = self.compute_metrics(moment, *self.adapted_model(epochs))
            adapted = self.adapted_model(job.adapt_epochs or task.training.local_epochs)
            measured["adapted"] = self.compute_metrics("adapted", *adapted)
            if method.adapts == "each":
                judged = adapted
        if task.split.validation:
            measured["validation"] = self.compute_metrics("validation", *judged, on="validation")
        return measured

    def adapted_model(self, epochs: int) -> tuple[ClientTrainer, State]:
        """What the client predicts with after so many epochs of adapting. Each fit opens its streams anew, so
        that e epochs are the first e of any more, with every method."""
        task, method = self.task.for_adaptation(epochs), self.method
        local, ctx = self.trainer(task), Context(task, self.client_task.round)
        if self.client_task.is_new_client:
            state = new_clients.adapt(
                self.client_task.adaptation, method, ctx, local, self.message, self.private
            )
        else:
            state = method.finetune(ctx, local, self.message, self.private)
        return local, state

    def work(self, measured: dict[str, MetricValues], start: float) -> ClientResult:
        """Prepare or train, as the job says.

        Args:
            measured: What was measured of the received model; the moment `after` is added to it.
            start: The time at which the call began.
        """
        job, method, model = self.client_task, self.method, self.task.model
        local = self.trainer(self.task)
        work = method.client_setup if job.work == "prepare" else method.train
        upload, new = work(Context(self.task, job.round), local, self.message, self.private)
        _check_message(method, "send", [name for name in upload if matches_pattern(name, method.secret)])
        _check_message(method, "send", undeclared_names(upload, method.sends, model))
        _check_message(method, "keep", undeclared_names(new, method.keeps, model))
        buffers = local.trained_buffers()
        if job.evaluate_after:
            after = dataclasses.replace(self, message=self.message | upload, buffers=buffers)
            measured["after"] = after.compute_metrics("after", *after.inference_model(new))
        upload, kept = self.with_statistics(upload, new, buffers)
        trained = self._training_metrics(local, upload, time.perf_counter() - start)
        return ClientResult(job.client, upload, kept, measured, trained, local.trainers)

    def _training_metrics(self, trainer: ClientTrainer, upload: State, seconds: float) -> MetricValues:
        """Return the loss and the cost of local training, and the metrics of training itself."""
        cost = {"seconds": seconds, "bytes_up": nbytes(upload), "bytes_down": self.bytes_down}
        trained: MetricValues = {}
        values: dict[str, float] = dict(cost)
        loss_sum, samples = trainer.losses.get("shared", (0.0, 0))
        if samples:
            trained["loss"] = (loss_sum / samples, samples)
            values |= {"loss_sum": float(loss_sum / samples * samples), "samples": samples}
        trained |= {name: (value, 1) for name, value in cost.items()}
        return trained | compute_metrics(self.client_task.metrics, values)

    def with_statistics(self, up: State, new: State, buffers: dict[str, State]) -> tuple[State, State | None]:
        """What is sent and what is kept (None: it is unchanged), BatchNorm statistics with them."""
        if self.task.training.bn_buffers == "average":
            up = up | add_prefix(BUFFER, buffers.pop("shared", {}))
        for track, state in buffers.items():
            new = new | add_prefix(f"{BUFFER}{track}/", state)
        return up, None if new is self.private else new


def _check_message(method: Method, verb: str, names: list[str]) -> None:
    """A method that does other than it says is stopped before anything leaves the client."""
    if names:
        raise AssertionError(f"{method.base_name} would {verb} '{names[0]}', against what it declares")
