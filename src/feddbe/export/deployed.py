"""What one client of a run predicts with, as one plain module.

    logits = h(f(x) + p_i)                      of most methods; p_i where there is PRBM
    logits = h(z) + h_p(z) with z = f(x)        of FedRoD

The parameters are those with which the entry was evaluated, global and private parts together, recomputed
from the run's file (`runs/revisit.py`). Whatever a method does to predict, the module must give the same
logits on the client's own test rows, or it is not handed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddbe.data import in_memory
from feddbe.data.dataset import Dataset
from feddbe.errors import BadInput, FeddbeError, short
from feddbe.methods.base import PERSONAL
from feddbe.models import ModelSource
from feddbe.models.fasttext import MeanEmbedding
from feddbe.options.permission import NOTHING, Permission
from feddbe.runs import folders
from feddbe.runs.revisit import Entry, reopened
from feddbe.runs.store import Store
from feddbe.state import State, strip_prefix
from feddbe.training.local import Local

__all__ = ["Deployed", "Taken", "close", "take", "weights_of"]

_CLOSE = 1e-4
"""Logits may differ so much, relative to the largest: sums in another order."""


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
class Taken:
    """A client's model, and what must be known to use it."""

    module: Deployed
    dataset: Dataset
    about: dict[str, Any]
    """Run, method, client, round, accuracy: plain values."""
    sample: Tensor
    """Some of the client's inputs."""
    logits: Tensor
    """What the run computes for them."""


def take(
    run: str | Path,
    client: int | str,
    round: str = "best",
    data: Any = None,
    model: ModelSource | None = None,
    allowed: Permission = NOTHING,
) -> Taken:
    """The model that a client deploys at the `best` or the `last` round. `data` and `model`: those of the
    run, if they were given as Python objects; code in files must be `allowed`."""
    store = Store.open(folders.find(str(run)))
    try:
        experiment = reopened(store, dataset=in_memory(data), model=model, allowed=allowed)
        entry = Entry(store, experiment, round)
        task, method = experiment.task, experiment.method
        number = _number(client, task.dataset.client_names, task.members)
        local, state = entry.deployed(number)
        logits, y = local.predict(state, lambda p, x: method.logits(local, p, x), track=method.deployed_track)
        module = _module(local, state, method.deployed_track, method.base)
        rows = torch.from_numpy(task.split.test[number])[:64]
        sample, expected = task.dataset.inputs(task.dataset.x[rows]), logits[:64].clone()
        _compare(module, sample, expected, method.base)
        about = {
            "run": str(store.folder), "method": experiment.name, "data": experiment.config["data"],
            "model": experiment.config["model"], "client": number,
            "client_name": _name(task.dataset.client_names, number), "round": entry.round,
            "labels": list(task.dataset.labels), "test_rows": len(y),
            "accuracy": float((logits.argmax(1) == y).double().mean()),
        }  # fmt: skip
        return Taken(module, task.dataset, about, sample, expected)
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
        known = f": {short(', '.join(names))}" if names else f" by number, 0..{members - 1}"
        raise BadInput(f"there is no client '{short(text)}'; the run has {members}{known}")
    if found >= members:
        raise BadInput(f"client = {text}; the run trained {members} clients, allowed: 0..{members - 1}")
    return found


def _name(names: Sequence[str], client: int) -> str:
    return names[client] if names else str(client)


def _module(local: Local, state: State, track: str, base: str) -> Deployed:
    model = local.task.model
    if not model.parameters.keys() <= state.keys():
        raise BadInput(f"{base} deploys no model: there is nothing to take home")
    statistics = local.buffers(track)
    body, head = (_plain(half) for half in model.apart({**state, **statistics}))
    own = strip_prefix(state, PERSONAL)
    second = _plain(model.apart({**state, **own, **statistics})[1]) if own else None
    return Deployed(body, head, local.prbm, second).eval().requires_grad_(False)


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
    if not close(found, expected):
        raise FeddbeError(
            f"{base} predicts in a way of its own, which a plain module does not reproduce (its logits "
            f"differ by {float((found - expected).abs().max()):.2g}): its model cannot be taken home"
        )


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether these are the same logits, but for sums in another order."""
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return found.shape == expected.shape and bool(((found - expected).abs() <= _CLOSE * largest).all())


def weights_of(module: nn.Module) -> Mapping[str, Tensor]:
    """By name, each in memory of its own: safetensors refuses what is shared."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in module.state_dict().items()}
