"""The learning task: model, data, split and training settings, shared by all methods."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from feddbe import seeds
from feddbe.data.dataset import Dataset
from feddbe.data.split import Split
from feddbe.errors import InvalidInputError
from feddbe.models.split_model import SplitModel
from feddbe.state import State


@dataclass(frozen=True)
class Optimizer:
    """Settings of torch's SGD or Adam.

    The optimizer's state is reset with every fit: a client keeps none between rounds, so that a round does
    not depend on when the client last took part.
    """

    name: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    """L2 penalty on the model's parameters; none on PRBM's vector, which is a translation."""
    clip_norm: float | None = None
    """Maximum norm of the gradient of all trained parameters."""

    @property
    def is_plain_sgd(self) -> bool:
        """True if this is SGD without momentum, decay and clipping, which backends implement directly."""
        return self == PLAIN

    def build(
        self, rates: Mapping[str, float], leaves: Mapping[str, Tensor], undecayed: Collection[str]
    ) -> torch.optim.Optimizer:
        """Return torch's optimizer of these tensors, each with its learning rate."""
        groups = []
        for name, rate in rates.items():
            weight_decay = 0.0 if name in undecayed else self.weight_decay
            groups.append({"params": [leaves[name]], "lr": rate, "weight_decay": weight_decay})
        if self.name == "adam":
            return torch.optim.Adam(groups)
        return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum)


PLAIN = Optimizer()


@dataclass(frozen=True)
class LearningRateDecay:
    """Schedule of the learning rate over rounds.

    `step:EVERY:FACTOR` multiplies it by FACTOR after every EVERY rounds; `cosine:ROUNDS` decreases it along
    half a cosine to 0 after ROUNDS rounds. The exchange before round 1 uses the rate of round 1.
    """

    kind: str
    rounds: int
    factor: float = 1.0

    @classmethod
    def parse(cls, text: str, rounds: int) -> LearningRateDecay:
        """Parse a schedule; `cosine` alone spans all `rounds` of the run."""
        if match := re.fullmatch(r"step:([1-9][0-9]{0,8}):([0-9.eE+-]+)", text):
            try:
                factor = float(match[2])
            except ValueError:
                factor = 0.0
            if 0 < factor <= 1:
                return cls("step", int(match[1]), factor)
        elif match := re.fullmatch(r"cosine(?::([1-9][0-9]{0,8}))?", text):
            return cls("cosine", int(match[1] or max(rounds, 1)))
        raise InvalidInputError(
            f"lr_decay = '{text}'; allowed: step:EVERY:FACTOR with a factor in 0 to 1, as in step:10:0.5, "
            "cosine or cosine:ROUNDS"
        )

    def __str__(self) -> str:
        return f"step:{self.rounds}:{self.factor:g}" if self.kind == "step" else f"cosine:{self.rounds}"

    def factor_at(self, round_: int) -> float:
        """Return the factor of the learning rate in this round."""
        past = max(round_ - 1, 0)
        if self.kind == "step":
            return self.factor ** (past // self.rounds)
        return (1 + math.cos(math.pi * min(past / self.rounds, 1.0))) / 2


@dataclass(frozen=True)
class Training:
    """Settings of local training; by default plain SGD with batches reshuffled every epoch."""

    lr: float
    batch_size: int = 10
    local_epochs: int = 1
    bn_buffers: str = "local"
    """BatchNorm statistics: `local` (private to each client) or `average` (exchanged like parameters)."""
    trainer: str = "auto"
    """Training backend: auto, compiled or autograd."""
    device: str = "cpu"
    """Device on which clients train."""
    optimizer: Optimizer = PLAIN
    decay: LearningRateDecay | None = None
    is_shuffled: bool = True
    """False if batches follow the order of the partition in every epoch."""

    def rate(self, round_: int) -> float:
        """Return the learning rate of a round."""
        return self.lr if self.decay is None else self.lr * self.decay.factor_at(round_)


@dataclass(frozen=True)
class Task:
    """A model at theta^0, the data, its split among clients, and the training settings."""

    model: SplitModel
    dataset: Dataset
    split: Split
    training: Training
    seed: int = 0
    rounds: int = 1
    new_clients: int = 0
    """Number of clients, the last ones, that join after training."""

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """n_i: training samples of each client."""
        return tuple(self.split.train.sizes.tolist())

    @property
    def members(self) -> int:
        """N: number of clients that take part in training."""
        return self.split.clients - self.new_clients

    @property
    def device(self) -> torch.device:
        """Device of the task's tensors."""
        return self.dataset.y.device

    def to(self, device: torch.device) -> Task:
        """Return the task with data and model on this device."""
        if device == self.device:
            return self
        x, y = self.dataset.x.to(device), self.dataset.y.to(device)
        return replace(self, dataset=replace(self.dataset, x=x, y=y), model=self.model.to(device))

    def for_adaptation(self, epochs: int) -> Task:
        """Return the task with this number of adaptation epochs and a constant learning rate."""
        return replace(self, training=replace(self.training, local_epochs=epochs, decay=None))


@dataclass(frozen=True)
class Context:
    """A task in one round; the exchange before round 1 is round 0."""

    task: Task
    round: int
    uploads: Callable[[int], State] | None = None
    """Last upload of each client, on the server of a method with `keeps_uploads`."""

    @property
    def lr(self) -> float:
        """Learning rate of this round."""
        return self.task.training.rate(self.round)

    def rng(self, purpose: str) -> np.random.RandomState:
        """Return the server's random generator for this purpose in this round."""
        return seeds.make_rng(self.task.seed, purpose, self.round)


def find_device(name: str) -> torch.device:
    """Return the device with this name; `auto` is the first GPU that torch can use, or the CPU."""
    gpus = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    available = [*gpus, "cpu"]
    if torch.backends.mps.is_available():
        available.insert(-1, "mps")
    aliases = {"auto": available[0], "cuda": "cuda:0"}
    device = aliases.get(name, name)
    if device not in available:
        raise InvalidInputError(f"device = '{name}'; torch can use here: {', '.join(available)}")
    return torch.device(device)


@contextmanager
def device_settings(device: torch.device) -> Iterator[None]:
    """Create tensors on this device inside the block, with deterministic algorithms."""
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
