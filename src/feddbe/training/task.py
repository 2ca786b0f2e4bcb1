"""What is to be learnt, by whom and how: the part of an experiment that every method shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from feddbe import seeds
from feddbe.data.dataset import Dataset
from feddbe.data.split import Split
from feddbe.errors import BadInput
from feddbe.models.split_model import SplitModel
from feddbe.state import State
from feddbe.training.optimizer import PLAIN, Decay, Optimiser


@dataclass(frozen=True)
class Training:
    """How a client trains: by default plain SGD, batches reshuffled every epoch, the incomplete last one
    dropped."""

    lr: float
    batch: int = 10
    epochs: int = 1
    bn_buffers: str = "local"
    """BatchNorm statistics: `local` (private to each client) or `average` (exchanged like parameters)."""
    trainer: str = "auto"
    """Training backend: auto, compiled or autograd."""
    device: str = "cpu"
    """Where clients train (`training/device.py`)."""
    optimiser: Optimiser = PLAIN
    decay: Decay | None = None

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        return self.lr if self.decay is None else self.lr * self.decay.at(round)


@dataclass(frozen=True)
class Task:
    """A model at theta^0, data, who holds which rows of it, and how they train."""

    model: SplitModel
    dataset: Dataset
    split: Split
    training: Training
    seed: int = 0
    rounds: int = 1
    newcomers: int = 0
    """So many of the clients, the last ones, join when training is over."""

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """n_i: training samples of each client."""
        return tuple(self.split.train.sizes.tolist())

    @property
    def members(self) -> int:
        """N: the clients that training is about."""
        return self.split.clients - self.newcomers

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return self.dataset.y.device

    def on(self, device: torch.device) -> Task:
        """The same task with data and model on this device."""
        if device == self.device:
            return self
        x, y = self.dataset.x.to(device), self.dataset.y.to(device)
        return replace(self, dataset=replace(self.dataset, x=x, y=y), model=self.model.on(device))

    def adapting(self, epochs: int) -> Task:
        """The same task for so many epochs of adaptation, whose learning rate no round lowers."""
        return replace(self, training=replace(self.training, epochs=epochs, decay=None))


@dataclass(frozen=True)
class Context:
    """A task at one round; the preparation before round 1 is round 0."""

    task: Task
    round: int
    uploads: Callable[[int], State] | None = None
    """On the server of a method that `keeps_uploads`: the last upload of each client."""

    @property
    def lr(self) -> float:
        """The learning rate of this round."""
        return self.task.training.rate(self.round)

    def stream(self, purpose: str) -> np.random.RandomState:
        """The server's own randomness in this round."""
        return seeds.stream(self.task.seed, purpose, self.round)


def find(name: str) -> torch.device:
    """`auto` is the first GPU that torch can use, or the CPU."""
    gpus = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    there = [*gpus, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]
    wanted = there[0] if name == "auto" else "cuda:0" if name == "cuda" else name
    if wanted not in there:
        raise BadInput(f"device = '{name}'; torch can use here: {', '.join(there)}")
    return torch.device(wanted)


@contextmanager
def at_work(device: torch.device) -> Iterator[None]:
    """What is made in the block lies on this device, and the same work gives the same bits there."""
    if device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with device:
            yield
    finally:
        torch.use_deterministic_algorithms(before)
