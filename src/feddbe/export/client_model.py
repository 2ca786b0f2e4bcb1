"""What one client of a run predicts with, as one plain module.

    logits = h(f(x) + p_i)                      of most methods; p_i where there is PRBM
    logits = h(z) + h_p(z) with z = f(x)        of FedRoD

The parameters are those with which the entry was evaluated, global and private parts together, recomputed
from the run's file (`runs/replay.py`). Preprocessing, labels and clients' names are those that the run
stored. Whatever a method does to predict, the module must give the same logits on the client's own test rows,
and the accuracy that the run has, or it is not handed out.
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
from feddbe.methods.base import PERSONAL
from feddbe.models.registry import MeanEmbedding, ModelSource
from feddbe.paths import expand_path
from feddbe.runs import folders
from feddbe.runs.replay import Checkpoint, load_experiment
from feddbe.runs.store import RunStore, corrupt_run_error
from feddbe.state import State, strip_prefix
from feddbe.training.trainer import ClientTrainer

_CLOSE = 1e-4
"""Logits may differ so much, relative to the largest: sums in another order."""

_EDITED = (
    "columns, categories or labels of the training data are not those that the run began with, which are used"
)


class Deployed(nn.Module):
    """Body, the client's translation, head, and perhaps a head of the client's own beside it."""

    def __init__(self, body: nn.Module, head: nn.Module, prbm: Tensor | None, own: nn.Module | None) -> None:
        super().__init__()
        self.body, self.head, self.own = body, head, own
        self.prbm = None if prbm is None else nn.Parameter(prbm.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        if self.prbm is not None:
            z = z + self.prbm
        logits: Tensor = self.head(z)
        return logits if self.own is None else logits + self.own(z)


@dataclass(frozen=True)
class ClientModel:
    """A client's model, and what must be known to use it."""

    module: Deployed
    preprocessing: Preprocessing
    """What new rows go through, as the run stored it."""
    about: dict[str, Any]
    """Run, method, client, round, accuracy: plain values."""
    sample: Tensor
    """Some of the client's inputs."""
    logits: Tensor
    """What the run computes for them."""


def load_client_model(
    run: str | Path,
    client: int | str,
    round: str = "best",
    data: Any = None,
    model: ModelSource | None = None,
    allowed: Permission = NO_PERMISSION,
) -> ClientModel:
    """The model that a client deploys at the `best` or the `last` round. `data` and `model`: those of the
    run, if they were given as Python objects; code in files must be `allowed`."""
    store = RunStore.open(folders.resolve_run(str(run)))
    try:
        experiment = load_experiment(store, dataset=dataset_from_object(data), model=model, allowed=allowed)
        entry = Checkpoint(store, experiment, round)
        task, method = experiment.task, experiment.method
        preprocessing, labels, names = _stored_data(store, task.dataset)
        now = task.dataset.preprocessing_spec, list(task.dataset.labels)
        number = _number(client, names, task.members)
        if not len(task.split.test[number]):
            raise InvalidInputError(
                f"client {number} has no test rows to check its model by; choose another --client"
            )
        local, state = entry.inference_model(number)
        logits, y = local.predict(
            state, lambda p, x: method.logits(local, p, x), track=method.inference_track
        )
        module = _module(local, state, method.inference_track, method.base_name)
        rows = torch.from_numpy(task.split.test[number])[:64]
        sample, expected = task.dataset.inputs(task.dataset.x[rows]), logits[:64].clone()
        _compare(module, sample, expected, method.base_name)
        accuracy = float((logits.argmax(1) == y).double().mean())
        _compare_accuracy(accuracy, len(y), entry, number)
        about = {
            "run": str(store.folder), "method": experiment.name, "data": experiment.config["data"],
            "model": experiment.config["model"], "client": number,
            "client_name": names[number] if names else str(number), "round": entry.round,
            "labels": labels, "test_rows": len(y), "accuracy": accuracy,
            "remark": _EDITED if (preprocessing, labels) != now else "",
        }  # fmt: skip
        return ClientModel(module, preprocessing, about, sample, expected)
    finally:
        store.close()


def _number(client: int | str, names: Sequence[str], members: int) -> int:
    """A client by its name in the data, or by its number."""
    text = str(client)
    if text in names:
        found = names.index(text)
    elif text.isdecimal():
        found = int(text)
    else:
        known = f": {truncate(', '.join(names))}" if names else f" by number, 0..{members - 1}"
        raise InvalidInputError(f"there is no client '{truncate(text)}'; the run has {members}{known}")
    if found >= members:
        raise InvalidInputError(
            f"client = {text}; the run trained {members} clients, allowed: 0..{members - 1}"
        )
    return found


def _stored_data(store: RunStore, dataset: Dataset) -> tuple[Preprocessing, list[str], list[str]]:
    """Return preprocessing, names of the classes and of the clients as they were when the run began.

    The training data may have been edited since in ways that its numbers do not show.
    """
    stored = {key: store.meta(key) for key in ("preprocessing", "label_names", "client_names", "labels")}
    try:
        preprocessing = dataset.preprocessing_spec.restore(stored["preprocessing"])
    except ValueError:
        raise corrupt_run_error(store.folder, "what is written about it: preprocessing") from None
    labels, names = stored["label_names"], stored["client_names"]
    if not _are_names(labels) or len(labels) != dataset.classes:
        raise corrupt_run_error(store.folder, "what is written about it: label_names")
    if not _are_names(names) or (names and len(names) != len(dataset.client_names)):
        raise corrupt_run_error(store.folder, "what is written about it: client_names")
    is_large = stored["labels"] is None  # then names of clients are not stored
    return preprocessing, labels, list(dataset.client_names) if is_large else names


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _module(trainer: ClientTrainer, state: State, track: str, base: str) -> Deployed:
    model = trainer.task.model
    if not model.parameters.keys() <= state.keys():
        raise InvalidInputError(f"{base} deploys no model: there is nothing to take home")
    statistics = trainer.buffers(track)
    body, head = (_plain(half) for half in model.copy_halves({**state, **statistics}))
    own = strip_prefix(state, PERSONAL)
    second = _plain(model.copy_halves({**state, **own, **statistics})[1]) if own else None
    return Deployed(body, head, trainer.prbm, second).eval().requires_grad_(False)


def _plain(module: nn.Module) -> nn.Module:
    """fastText's mean of vectors as torch's own layer: one that trains sparsely is for training."""
    if isinstance(module, MeanEmbedding):
        return _bag(module)
    for name, child in module.named_children():
        if isinstance(child, MeanEmbedding):
            setattr(module, name, _bag(child))
    return module


def _bag(layer: MeanEmbedding) -> nn.EmbeddingBag:
    words, size = layer.weight.shape
    bag = nn.EmbeddingBag(words, size, mode="mean")
    bag.load_state_dict({"weight": layer.weight.detach()})
    return bag


def _compare(module: nn.Module, sample: Tensor, expected: Tensor, base: str) -> None:
    with torch.inference_mode():
        found = module(sample)
    if not is_close(found, expected):
        raise FeddbeError(
            f"{base} predicts in a way of its own, which a plain module does not reproduce (its logits "
            f"differ by {float((found - expected).abs().max()):.2g}): its model cannot be taken home"
        )


def _compare_accuracy(accuracy: float, test_rows: int, entry: Checkpoint, client: int) -> None:
    """Refuse a model that does not score on the client's test rows as it did in the run, if that is known.

    Other versions or another machine can move the last bits, and with them a sample in a hundred.
    """
    moment = "adapted" if entry.experiment.method.adapts else "before"
    where = "AND client = ? AND moment = ? AND name = 'accuracy'"
    for row in entry.store.records(entry.round, where, client, moment):
        then = row.value
        if then is not None and abs(accuracy - then) > max(1.5 / test_rows, 0.01):
            raise FeddbeError(
                f"the model of client {client} scores {100 * accuracy:.2f} % on its test rows here, and "
                f"{100 * then:.2f} % in the run: its code, a package or the data is another one; nothing is "
                "handed out"
            )


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether these are the same logits, but for sums in another order."""
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return found.shape == expected.shape and bool(((found - expected).abs() <= _CLOSE * largest).all())


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
    """What this client's model says of the rows in a file: `labels`, their names, and for each row `label`
    and `probabilities`. `trained_on` and `model`: the run's, if they were given as Python objects. Code in
    files is executed only if `code` names the files or `trust` says that the run is your own, and if its
    content is the same."""
    taken = load_client_model(run, client, round, trained_on, model, make_permission(code, trust=trust))
    path = expand_path(data)
    try:
        x = torch.from_numpy(rows.read_rows(taken.preprocessing.to_json(), path))
    except OSError as error:
        raise InvalidInputError(f"cannot read '{path}': {error.strerror or one_line(error)}") from None
    except ValueError as error:
        raise InvalidInputError(one_line(error)) from None
    with torch.inference_mode():
        p = torch.cat([taken.module(some).softmax(dim=1) for some in torch.split(x, _BATCH)])
    labels = taken.about["labels"]
    found = [
        {"label": labels[int(row.argmax())], "probabilities": [float(value) for value in row]} for row in p
    ]
    return {**taken.about, "rows": found}
