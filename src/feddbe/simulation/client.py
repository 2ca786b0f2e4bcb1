"""One client's part of a round, as a pure function: the same task gives the same result on any engine."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from feddbe.errors import FeddbeError
from feddbe.methods import new_clients
from feddbe.methods.base import MODEL, Method, undeclared_names
from feddbe.metrics.builtin import compute_metrics, required_inputs
from feddbe.metrics.client_values import MetricsByMoment, MetricValues
from feddbe.state import (
    State,
    add_prefix,
    check_kept_state_layout,
    describe_layout,
    drop_keys,
    matches_pattern,
    nbytes,
    sha256,
    strip_prefix,
    to_device,
)
from feddbe.training.task import Context, Task, device_settings
from feddbe.training.trainer import ClientTrainer

BUFFER = "buffer/"
"""Prefix of BatchNorm statistics: `buffer/NAME` in a message, `buffer/TRACK/NAME` in a kept state."""


@dataclass(frozen=True)
class ClientTask:
    """Work of one client in one round: evaluate the received model, adapt it, then set up or train."""

    client: int
    round: int
    work: Literal["prepare", "train", "none"] = "none"
    """`prepare` is the setup before round 1."""
    evaluate: bool = False
    adapt_epochs: int | None = None
    """Epochs of adaptation before a second evaluation; 0: those of local training; None: no adaptation."""
    evaluate_after: bool = False
    """True if the client also evaluates after local training."""
    is_new_client: bool = False
    """True if the client joins after the last round. It is then evaluated after every epoch of adaptation."""
    adaptation: str = "full"
    """Adaptation of a new client (`methods/new_clients.py`)."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Names of the metrics to compute."""
    layers: tuple[str, ...] = ()
    """Layers of the deployed model whose activations are returned with each evaluation on test data. Only
    simulations use this: no method sends representations."""
    sample_indices: tuple[int, ...] | None = None
    """Test samples whose activations are returned; None: all."""


@dataclass(frozen=True)
class ClientResult:
    """Result of a client task: the upload, the state to keep, and the metrics."""

    client: int
    upload: State = field(default_factory=dict)
    private: State | None = None
    """New private state; None: unchanged."""
    metrics: MetricsByMoment = field(default_factory=dict)
    """Metrics of the received model by moment. `validation` is computed on held-out training data, for the
    model that the method deploys."""
    training_metrics: MetricValues = field(default_factory=dict)
    """Metrics of local training: `loss`, `seconds` of the whole call, `bytes_up`, `bytes_down` (with
    constants), and the requested metrics of training itself."""
    trainers: Mapping[str, str] = field(default_factory=dict)
    """Backends that trained (`training/backends.py`), each with the reason why faster ones were rejected."""
    representations: State = field(default_factory=dict)
    """Requested activations as MOMENT/LAYER, and their labels `y`. Empty if the method deploys no model."""

    def to(self, device: torch.device) -> ClientResult:
        """Return the result with all tensors on this device."""
        return dataclasses.replace(
            self,
            upload=to_device(self.upload, device),
            private=None if self.private is None else to_device(self.private, device),
            representations=to_device(self.representations, device),
        )

    def tensors(self) -> State:
        """Return upload and representations as one state, for transport separate from the other fields."""
        return add_prefix("upload/", self.upload) | add_prefix("representations/", self.representations)

    def without_tensors(self) -> ClientResult:
        """Return the fields that are not tensors; the others are empty."""
        return dataclasses.replace(self, upload={}, private=None, representations={})

    def with_tensors(self, tensors: State) -> ClientResult:
        """Return the result with the upload and representations that `tensors` returned."""
        return dataclasses.replace(
            self,
            upload=strip_prefix(tensors, "upload/"),
            representations=strip_prefix(tensors, "representations/"),
        )


class MissingClient(NamedTuple):
    """Replacement for the result of a client that did not reply."""

    client: int
    reason: str


def run_client(
    task: Task, method: Method, client_task: ClientTask, received: State, private: State | None
) -> ClientResult:
    """Evaluate the received model, then train it.

    The work is done on the task's device. Arguments and result are on the CPU.

    Args:
        task: Model, data and training settings, shared by all clients.
        method: The federated method.
        client_task: The client's work in this round.
        received: The broadcast of this round.
        private: The client's own state after its last round, or None at first contact.

    Returns:
        The upload, the state to keep, and the metrics. Nothing is written and nothing global changes.

    Raises:
        FeddbeError: Code of the model or method called `sys.exit`, which would end the run without an error.
        FeddbeError: The method receives, sends or keeps a name that it does not declare.
    """
    started = time.perf_counter()
    device = task.device
    try:
        with device_settings(device):
            private = None if private is None else to_device(private, device)
            received = to_device(received, device)
            session = _ClientSession.start(task, method, client_task, received, private)
            metrics = session.evaluate() if client_task.evaluate else {}
            if client_task.work == "none":
                result = ClientResult(client_task.client, metrics=metrics)
            else:
                result = session.train(metrics, started)
            result = dataclasses.replace(result, representations=session.representations)
        return result.to(torch.device("cpu"))
    except SystemExit as error:
        code = "" if error.code is None else error.code
        raise FeddbeError(
            f"{task.dataset.describe_client(client_task.client)}, round {client_task.round}: "
            f"the model's or method's own code called sys.exit({code})"
        ) from error


def build_inference_model(
    task: Task, method: Method, client_task: ClientTask, received: State, private: State | None
) -> tuple[ClientTrainer, State]:
    """Return the client's trainer and the parameters with which it predicts, adapted if the task says so.

    The arguments are those of `run_client`.
    """
    with device_settings(task.device):
        session = _ClientSession.start(task, method, client_task, received, private)
        if client_task.adapt_epochs is None:
            return session.inference_model(session.private)
        return session.adapted_model(client_task.adapt_epochs or task.training.local_epochs)


@dataclass(frozen=True)
class _ClientSession:
    """One client during a task: its message, private state, and BatchNorm statistics by track."""

    task: Task
    method: Method
    client_task: ClientTask
    message: State
    private: State
    buffers: Mapping[str, State]
    bytes_down: int
    """Size of the received message."""
    representations: State
    """Activations that the task requests, collected during evaluation."""

    @classmethod
    def start(
        cls, task: Task, method: Method, client_task: ClientTask, received: State, private: State | None
    ) -> _ClientSession:
        """Check the received names and separate BatchNorm statistics from message and private state."""
        context = Context(task, client_task.round)
        message = drop_keys(received, [BUFFER])
        allowed = (MODEL,) if client_task.work == "prepare" else method.receives
        _check_message_names(method, "receive", undeclared_names(message, allowed, task.model))

        if private is None and client_task.is_new_client:
            private = method.init_new_client(context, message)
        elif private is None:
            private = method.client_init(context)
        else:
            _check_kept_state(task, method, client_task, private)

        kept_buffers = strip_prefix(private, BUFFER)
        tracks = {name.split("/")[0] for name in kept_buffers}
        buffers = {track: strip_prefix(kept_buffers, f"{track}/") for track in tracks}
        averaged_buffers = strip_prefix(received, BUFFER)
        if averaged_buffers:
            buffers["shared"] = averaged_buffers
        private = drop_keys(private, [BUFFER])
        return cls(task, method, client_task, message, private, buffers, nbytes(received), {})

    def evaluate(self) -> dict[str, MetricValues]:
        """Return the metrics of the received model by moment."""
        model = self.inference_model(self.private)
        metrics = {"before": self.compute_metrics("before", *model)}
        if self.client_task.adapt_epochs is not None:
            if self.client_task.is_new_client:
                for epochs in range(1, self.client_task.adapt_epochs):
                    moment = f"adapted {epochs}"
                    metrics[moment] = self.compute_metrics(moment, *self.adapted_model(epochs))
            epochs = self.client_task.adapt_epochs or self.task.training.local_epochs
            adapted = self.adapted_model(epochs)
            metrics["adapted"] = self.compute_metrics("adapted", *adapted)
            if self.method.adapts == "each":
                model = adapted
        if self.task.split.validation:
            metrics["validation"] = self.compute_metrics("validation", *model, on="validation")
        return metrics

    def train(self, metrics: dict[str, MetricValues], started: float) -> ClientResult:
        """Set up or train, and return the result.

        Args:
            metrics: Metrics of the received model; the moment `after` is added to them.
            started: Time at which the call began.
        """
        # 1. Train.
        method, model = self.method, self.task.model
        trainer = self._trainer(self.task)
        work = method.client_setup if self.client_task.work == "prepare" else method.train
        context = Context(self.task, self.client_task.round)
        upload, private = work(context, trainer, self.message, self.private)

        # 2. Check: only declared names may leave the client or be kept.
        secrets = [name for name in upload if matches_pattern(name, method.secret)]
        _check_message_names(method, "send", secrets)
        _check_message_names(method, "send", undeclared_names(upload, method.sends, model))
        _check_message_names(method, "keep", undeclared_names(private, method.keeps, model))

        # 3. Evaluate the trained model.
        buffers = trainer.trained_buffers()
        if self.client_task.evaluate_after:
            trained = dataclasses.replace(self, message=self.message | upload, buffers=buffers)
            metrics["after"] = trained.compute_metrics("after", *trained.inference_model(private))

        # 4. Add the BatchNorm statistics to the upload or to the private state.
        if self.task.training.bn_buffers == "average":
            upload = upload | add_prefix(BUFFER, buffers.pop("shared", {}))
        for track, statistics in buffers.items():
            private = private | add_prefix(f"{BUFFER}{track}/", statistics)
        return ClientResult(
            self.client_task.client,
            upload,
            None if private is self.private else private,
            metrics,
            self._training_metrics(trainer, upload, time.perf_counter() - started),
            trainer.trainers,
        )

    def inference_model(self, private: State) -> tuple[ClientTrainer, State]:
        """Return a trainer and the parameters with which the client predicts."""
        trainer = self._trainer(self.task)
        context = Context(self.task, self.client_task.round)
        return trainer, self.method.inference_params(context, trainer, self.message, private)

    def adapted_model(self, epochs: int) -> tuple[ClientTrainer, State]:
        """Return a trainer and the parameters after this number of epochs of adaptation.

        Every fit starts its random streams from the beginning. Therefore e epochs equal the first e epochs of
        a longer adaptation, for every method.
        """
        task = self.task.for_adaptation(epochs)
        trainer = self._trainer(task)
        context = Context(task, self.client_task.round)
        if not self.client_task.is_new_client:
            return trainer, self.method.finetune(context, trainer, self.message, self.private)
        adaptation = self.client_task.adaptation
        state = new_clients.adapt(adaptation, self.method, context, trainer, self.message, self.private)
        return trainer, state

    def compute_metrics(
        self, moment: str, trainer: ClientTrainer, state: State, on: str = "test"
    ) -> MetricValues:
        """Return the metrics of one pass over these samples; on test data, collect the representations."""
        has_model = self.task.model.parameters.keys() <= state.keys()
        layers = self.client_task.layers if on == "test" and has_model else ()
        metric_layers = required_inputs(self.client_task.metrics) & {"z", "z_g"}
        batches: dict[str, list[Tensor]] = {name: [] for name in {*layers, *metric_layers} - {"logits"}}

        def record_and_predict(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
            if batches:
                for name, activation in trainer.activations(params, x, batches).items():
                    batches[name].append(activation)
            return self.method.logits(trainer, params, x)

        function = record_and_predict if batches or self.method.has_custom_logits else None
        logits, y = trainer.predict(state, function, on=on, track=self.method.inference_track)
        logits, y = logits.cpu(), y.cpu()
        inputs = {name: torch.cat(parts).cpu() for name, parts in batches.items()}
        inputs |= {"logits": logits, "y": y}
        if on == "test" and "global_logits" in required_inputs(self.client_task.metrics):
            inputs["global_logits"] = self.global_logits(moment, trainer, state)
            inputs["global_y"] = self.task.dataset.y[trainer.indices("global")].cpu()

        indices = self.client_task.sample_indices
        selected = slice(None) if indices is None else list(indices)
        for layer in layers:
            self.representations[f"{moment}/{layer}"] = inputs[layer][selected].flatten(1)
            self.representations["y"] = y[selected]
        return compute_metrics(self.client_task.metrics, inputs) if len(y) else {}

    def global_logits(self, moment: str, trainer: ClientTrainer, state: State) -> Tensor:
        """Return the logits of a client's model on the test data of all clients that take part.

        Clients of one process whose models are equal at this moment share one pass. Predictions of a method's
        own may depend on more than the model, so that each client then has its own pass.
        """
        trainer.rows["global"] = self.task.split.test[: self.task.members].flat
        method, track = self.method, self.method.inference_track
        if method.has_custom_logits:

            def predict(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
                return method.logits(trainer, params, x)

            return trainer.predict(state, predict, on="global", track=track)[0].cpu()
        extras = {name: extra.value for name, extra in trainer.extras.items()}
        model = state | add_prefix(BUFFER, trainer.buffers(track)) | add_prefix("extra/", extras)
        digest = sha256(model)
        last = _last_global_pass.get(moment)
        if last is None or last.task() is not self.task or last.digest != digest:
            logits, _ = trainer.predict(state, on="global", track=track)
            last = _GlobalPass(weakref.ref(self.task), digest, logits.cpu())
            _last_global_pass[moment] = last
        return last.logits

    def _trainer(self, task: Task) -> ClientTrainer:
        return ClientTrainer(task, self.client_task.round, self.client_task.client, self.buffers)

    def _training_metrics(self, trainer: ClientTrainer, upload: State, seconds: float) -> MetricValues:
        """Return the loss and the cost of local training, and the metrics of training itself."""
        costs = {"seconds": seconds, "bytes_up": nbytes(upload), "bytes_down": self.bytes_down}
        metrics: MetricValues = {}
        inputs: dict[str, float] = dict(costs)
        loss_sum, samples = trainer.losses.get("shared", (0.0, 0))
        if samples:
            metrics["loss"] = (loss_sum / samples, samples)
            inputs |= {"loss_sum": float(loss_sum / samples * samples), "samples": samples}
        metrics |= {name: (value, 1) for name, value in costs.items()}
        return metrics | compute_metrics(self.client_task.metrics, inputs)


def _check_kept_state(task: Task, method: Method, client_task: ClientTask, private: State) -> None:
    """Raise an error if a stored state lacks an entry of the first one, or has other shapes or types."""
    expected = describe_layout(method.client_init(Context(task, client_task.round)))
    client = task.dataset.describe_client(client_task.client)
    check_kept_state_layout(private, expected, method.base_name, client)


class _GlobalPass(NamedTuple):
    """A model's pass over the test data of all clients."""

    task: weakref.ref[Task]
    digest: str
    """Hash of everything on which the logits depend."""
    logits: Tensor


_last_global_pass: dict[str, _GlobalPass] = {}
"""The last pass of this process by moment. It saves work and does not change results."""


def _check_message_names(method: Method, verb: str, names: list[str]) -> None:
    """Raise an error if there are undeclared names, before anything leaves the client."""
    if names:
        raise FeddbeError(
            f"{method.base_name} would {verb} '{names[0]}', which it does not declare (or declares as secret)"
            ". Leave it out, or declare it in sends, receives or keeps."
        )
