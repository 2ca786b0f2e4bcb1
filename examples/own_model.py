"""Your own model, without changing feddbe: a function that returns an nn.Module for your data.

    feddbe run fedavg+dbe --model examples/own_model.py:build --lr 0.1 --rounds 20
    feddbe run fedavg+dbe --model examples/own_model.py:build --cut mix --lr 0.1 --rounds 20
    feddbe run fedavg+dbe --model examples/own_model.py:halves --lr 0.1 --rounds 20

feddbe finds the layers that exactly one tensor leaves, and cuts before the last linear layer unless --cut
names another one. For a model that torch.fx cannot trace, return its two halves instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import feddbe


class Mixer(nn.Module):
    """Linear layers over rows and columns of an image, a residual connection, and a linear classifier."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.rows, self.columns = nn.Linear(width, width), nn.Linear(height, height)
        self.mix = nn.LayerNorm([channels, height, width])
        self.narrow = nn.Linear(channels * height * width, 32)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.columns(self.rows(x).relu().transpose(2, 3)).transpose(2, 3)
        z = self.mix(x + mixed)
        logits: Tensor = self.head(torch.relu(self.narrow(z.flatten(1))))
        return logits


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the model for inputs of `shape`; it is called with the run's seed set."""
    return Mixer(shape, classes)


class Steps(nn.Module):
    """A recurrent network over the rows; torch.fx cannot trace its loop over the data."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(features, 32)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32)
        for row in x.flatten(1, -2).unbind(1):
            state = self.cell(row, state)
        return state


def halves(shape: tuple[int, ...], classes: int) -> tuple[nn.Module, nn.Module]:
    """Return body and head; the cut is between them."""
    return Steps(shape[-1]), nn.Linear(32, classes)


if __name__ == "__main__":
    for function in ("build", "halves"):
        run = feddbe.run("fedavg+dbe", model=f"{__file__}:{function}", clients=5, lr=0.1, rounds=2)
        assert run["last"] is not None
        print(function, "accuracy", run["last"]["accuracy"])
