"""How a client's steps follow from gradients, and how the learning rate falls from round to round."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from feddbe.errors import BadInput


@dataclass(frozen=True)
class Optimiser:
    """torch's SGD or Adam. Its memory begins anew with every fit: a client keeps none between rounds, so that
    a round does not depend on when the client last took part."""

    name: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    """Pull of the model's parameters to 0, as a part of the gradient; PRBM's vector has none, which is a
    translation and not a weight."""
    clip_norm: float | None = None
    """The norm of the gradient of all that moves is at most this."""

    @property
    def plain(self) -> bool:
        """SGD without anything, which trainers have written out."""
        return self == PLAIN

    def over(
        self, rates: Mapping[str, float], leaves: Mapping[str, Tensor], undecayed: Collection[str]
    ) -> torch.optim.Optimizer:
        """For these leaves, each with its rate."""
        groups = [
            {
                "params": [leaves[name]],
                "lr": rate,
                "weight_decay": 0.0 if name in undecayed else self.weight_decay,
            }
            for name, rate in rates.items()
        ]
        if self.name == "adam":
            return torch.optim.Adam(groups)
        return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum)


PLAIN = Optimiser()


@dataclass(frozen=True)
class Decay:
    """The learning rate of a round: times `factor` after every so many rounds (`step:EVERY:FACTOR`), or along
    half a cosine to 0 after so many (`cosine:ROUNDS`). The preparation has that of round 1."""

    kind: str
    rounds: int
    factor: float = 1.0

    @classmethod
    def parse(cls, text: str, rounds: int) -> Decay:
        """`cosine` alone is over all `rounds` of the run."""
        if match := re.fullmatch(r"step:([1-9][0-9]{0,8}):([0-9.eE+-]+)", text):
            try:
                factor = float(match[2])
            except ValueError:
                factor = 0.0
            if 0 < factor <= 1:
                return cls("step", int(match[1]), factor)
        elif match := re.fullmatch(r"cosine(?::([1-9][0-9]{0,8}))?", text):
            return cls("cosine", int(match[1] or max(rounds, 1)))
        raise BadInput(
            f"lr_decay = '{text}'; allowed: step:EVERY:FACTOR with a factor in 0 to 1, as in step:10:0.5, "
            "cosine or cosine:ROUNDS"
        )

    def __str__(self) -> str:
        return f"step:{self.rounds}:{self.factor:g}" if self.kind == "step" else f"cosine:{self.rounds}"

    def at(self, round: int) -> float:
        """What is left of the learning rate in this round."""
        past = max(round - 1, 0)
        if self.kind == "step":
            return self.factor ** (past // self.rounds)
        return (1 + math.cos(math.pi * min(past / self.rounds, 1.0))) / 2
