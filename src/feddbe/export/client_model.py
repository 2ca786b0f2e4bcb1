"""The model that one client of a run predicts with, as a plain module.

    logits = h(f(x) + p_i)                      most methods; p_i if there is PRBM
    logits = h(z) + h_p(z) with z = f(x)        FedRoD

The parameters are those with which the round was evaluated, global and private parts together, recomputed
from the run's file (`runs/replay.py`). Preprocessing, labels and names of clients are those that the run
stored. The module must reproduce the method's logits on the client's test data and the run's accuracy;
otherwise it is not returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddbe.config.user_code import NO_PERMISSION, Permission, make_permission
from feddbe.data import rows
from feddbe.data.dataset import Dataset, Preprocessing
from feddbe.data.registry import dataset_from_object
from feddbe.errors import FeddbeError, InvalidInputError, one_line, truncate
from feddbe.methods.base import PERSONAL, Method
from feddbe.models.registry import MeanEmbedding, ModelSource
from feddbe.paths import expand_path
from feddbe.runs import folders
from feddbe.runs.replay import Checkpoint, load_experiment
from feddbe.runs.store import RunStore, corrupt_run_error
from feddbe.state import State, strip_prefix
from feddbe.training.trainer import ClientTrainer

_CLOSE = 1e-4
"""Allowed difference of logits, relative to the largest, because sums may have another order."""

_EDITED = (
    "columns, categories or labels of the training data have changed since the run started; "
    "the stored ones are used"
)


class DeployedModel(nn.Module):
    """Body, p_i, head, and for some methods a personal head whose logits are added."""

    def __init__(
        self, body: nn.Module, head: nn.Module, prbm: Tensor | None, personal_head: nn.Module | None
    ) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.personal_head = personal_head  # the attribute is a prefix of names in exported files
        self.prbm = None if prbm is None else nn.Parameter(prbm.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        if self.prbm is not None:
            z = z + self.prbm
        logits: Tensor = self.head(z)
        return logits if self.personal_head is None else logits + self.personal_head(z)


@dataclass(frozen=True)
class ClientModel:
    """A client's model, and the information needed to use it."""

    module: DeployedModel
    preprocessing: Preprocessing
    """Preprocessing of new rows, as the run stored it."""
    description: dict[str, Any]
    """Run, method, client, round and accuracy, as plain values."""
    sample: Tensor
    """Some of the client's inputs."""
    logits: Tensor
    """The run's logits for `sample`."""


def load_client_model(
    run: str | Path,
    client: int | str,
    round: str = "best",
    data: Any = None,
    model: ModelSource | None = None,
    allowed: Permission = NO_PERMISSION,
) -> ClientModel:
    """Return the model that a client uses after a round.

    Args:
        run: Folder of the run.
        client: Name or number of the client.
        round: `best` or `last`.
        data: The run's data, if it was a Python object.
        model: The run's model, if it was a Python object.
        allowed: Files whose code may be executed.

    Raises:
        InvalidInputError: The client or round does not exist, or the client has no test data or no model.
        FeddbeError: The module does not reproduce the run's logits or accuracy.
    """
    store = RunStore.open(folders.resolve_run(str(run)))
    try:
        experiment = load_experiment(store, dataset=dataset_from_object(data), model=model, allowed=allowed)
        checkpoint = Checkpoint(store, experiment, round)
        task, method = experiment.task, experiment.method
        dataset = task.dataset
        preprocessing, labels, names = _stored_data(store, dataset)
        index = _find_client(client, names, task.members)
        trainer, state = checkpoint.inference_model(index)
        has_changed = (preprocessing, labels) != (dataset.preprocessing_spec, list(dataset.labels))
        description = {
            "run": str(store.folder), "method": experiment.name, "data": experiment.config["data"],
            "model": experiment.config["model"], "client": index,
            "client_name": names[index] if names else str(index), "round": checkpoint.round,
            "labels": labels, "remark": _EDITED if has_changed else "",
        }  # fmt: skip
        client_model = make_client_model(trainer, state, method, preprocessing, description)
        accuracy, test_rows = client_model.description["accuracy"], client_model.description["test_rows"]
        _require_stored_accuracy(accuracy, test_rows, checkpoint, index)
        return client_model
    finally:
        store.close()


def make_client_model(
    trainer: ClientTrainer,
    state: State,
    method: Method,
    preprocessing: Preprocessing,
    description: dict[str, Any],
) -> ClientModel:
    """Return a client's model as a plain module that reproduces the method's logits on its test data.

    Args:
        trainer: Trainer of the client.
        state: Parameters with which the client predicts.
        method: The federated method.
        preprocessing: Preprocessing of new rows.
        description: Facts about the model; the accuracy and the number of test rows are added.

    Raises:
        InvalidInputError: The client has no test data or no model.
        FeddbeError: The module does not reproduce the logits.
    """
    test_indices, dataset = trainer.rows["test"], trainer.task.dataset
    if not len(test_indices):
        raise InvalidInputError(
            f"client {description['client']} has no test data to verify its model; choose another --client"
        )
    logits, y = trainer.predict(
        state, lambda p, x: method.logits(trainer, p, x), track=method.inference_track
    )
    module = _build_module(trainer, state, method.inference_track, method.base_name)
    sample = dataset.inputs(dataset.x[torch.from_numpy(test_indices)[:64]])
    expected = logits[:64].clone()
    _require_equal_logits(module, sample, expected, method.base_name)
    accuracy = float((logits.argmax(1) == y).double().mean())
    facts = {"test_rows": len(y), "accuracy": accuracy}
    return ClientModel(module, preprocessing, description | facts, sample, expected)


def _find_client(client: int | str, names: Sequence[str], members: int) -> int:
    """Return the index of a client, given by its name in the data or by its number."""
    text = str(client)
    if text in names:
        index = names.index(text)
    elif text.isdecimal():
        index = int(text)
    else:
        known = f": {truncate(', '.join(names))}" if names else f" by number, 0..{members - 1}"
        raise InvalidInputError(f"unknown client '{truncate(text)}'; the run has {members}{known}")
    if index >= members:
        raise InvalidInputError(
            f"client = {text}; the run trained {members} clients, allowed: 0..{members - 1}"
        )
    return index


def _stored_data(store: RunStore, dataset: Dataset) -> tuple[Preprocessing, list[str], list[str]]:
    """Return preprocessing, class names and client names as they were when the run started.

    The training data may have been edited since without a change of its hash.
    """
    stored = {key: store.meta(key) for key in ("preprocessing", "label_names", "client_names", "labels")}
    try:
        preprocessing = dataset.preprocessing_spec.restore(stored["preprocessing"])
    except ValueError:
        raise corrupt_run_error(store.folder, "metadata: preprocessing") from None
    labels, names = stored["label_names"], stored["client_names"]
    if not _are_names(labels) or len(labels) != dataset.classes:
        raise corrupt_run_error(store.folder, "metadata: label_names")
    if not _are_names(names) or (names and len(names) != len(dataset.client_names)):
        raise corrupt_run_error(store.folder, "metadata: client_names")
    is_large = stored["labels"] is None  # then names of clients are not stored
    return preprocessing, labels, list(dataset.client_names) if is_large else names


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _build_module(trainer: ClientTrainer, state: State, track: str, method_name: str) -> DeployedModel:
    model = trainer.task.model
    if not model.parameters.keys() <= state.keys():
        raise InvalidInputError(f"{method_name} has no model to export")
    statistics = trainer.buffers(track)
    body, head = (_replace_mean_embedding(half) for half in model.copy_halves({**state, **statistics}))
    personal, personal_head = strip_prefix(state, PERSONAL), None
    if personal:
        _, personal_head = model.copy_halves({**state, **personal, **statistics})
        personal_head = _replace_mean_embedding(personal_head)
    return DeployedModel(body, head, trainer.prbm, personal_head).eval().requires_grad_(False)


def _replace_mean_embedding(module: nn.Module) -> nn.Module:
    """Replace fastText's mean embedding, which trains with sparse gradients, by `nn.EmbeddingBag`."""
    if isinstance(module, MeanEmbedding):
        return _to_embedding_bag(module)
    for name, child in module.named_children():
        if isinstance(child, MeanEmbedding):
            setattr(module, name, _to_embedding_bag(child))
    return module


def _to_embedding_bag(layer: MeanEmbedding) -> nn.EmbeddingBag:
    words, size = layer.weight.shape
    bag = nn.EmbeddingBag(words, size, mode="mean")
    bag.load_state_dict({"weight": layer.weight.detach()})
    return bag


def _require_equal_logits(module: nn.Module, sample: Tensor, expected: Tensor, method_name: str) -> None:
    with torch.inference_mode():
        logits = module(sample)
    if not is_close(logits, expected):
        raise FeddbeError(
            f"{method_name}'s predictions cannot be reproduced by a plain module (logits differ by "
            f"{float((logits - expected).abs().max()):.2g}): its model cannot be exported"
        )


def _require_stored_accuracy(accuracy: float, test_rows: int, checkpoint: Checkpoint, client: int) -> None:
    """Reject a model whose accuracy on the client's test data differs from the stored one, if there is one.

    Other versions or another machine can change the last bits, and with them one prediction in a hundred.
    """
    moment = "adapted" if checkpoint.experiment.method.adapts else "before"
    where = "AND client = ? AND moment = ? AND name = 'accuracy'"
    for record in checkpoint.store.records(checkpoint.round, where, client, moment):
        stored = record.value
        if stored is not None and abs(accuracy - stored) > max(1.5 / test_rows, 0.01):
            raise FeddbeError(
                f"the model of client {client} has an accuracy of {100 * accuracy:.2f} % on its test data "
                f"now, and of {100 * stored:.2f} % in the run: code, packages or data have changed. "
                "The model is not exported"
            )


def is_close(logits: Tensor, expected: Tensor) -> bool:
    """Return True if the logits are equal up to rounding."""
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return logits.shape == expected.shape and bool(((logits - expected).abs() <= _CLOSE * largest).all())


_BATCH = 256


def predict(
    run: str | Path,
    client: int | str,
    data: str | Path,
    *,
    round: str = "best",
    trained_on: Any = None,
    model: ModelSource | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
) -> dict[str, Any]:
    """Return the predictions of a client's model for the rows of a file.

    Args:
        run: Folder of the run.
        client: Name or number of the client.
        data: File with new rows.
        round: `best` or `last`.
        trained_on: The run's data, if it was a Python object.
        model: The run's model, if it was a Python object.
        code: Files whose code may be executed, if their content is that of the run.
        trust: Allow all code of the run, because it is the user's own.

    Returns:
        The model's description, with `labels`, and `rows` with `label` and `probabilities` of each row.
    """
    client_model = load_client_model(
        run, client, round, trained_on, model, make_permission(code, trust=trust)
    )
    path = expand_path(data)
    try:
        x = torch.from_numpy(rows.read_rows(client_model.preprocessing.to_json(), path))
    except OSError as error:
        raise InvalidInputError(f"cannot read '{path}': {error.strerror or one_line(error)}") from None
    except ValueError as error:
        raise InvalidInputError(one_line(error)) from None
    with torch.inference_mode():
        batches = [client_model.module(batch).softmax(dim=1) for batch in torch.split(x, _BATCH)]
    labels = client_model.description["labels"]
    predictions = []
    for probabilities in torch.cat(batches):
        label = labels[int(probabilities.argmax())]
        predictions.append({"label": label, "probabilities": [float(value) for value in probabilities]})
    return {**client_model.description, "rows": predictions}
