"""fastText for classification: the mean of a text's word vectors, and two linear layers.

A step of ten texts touches a few hundred of some hundred thousand word vectors. So the gradient of the
vectors is sparse: the rows that were used, and nothing of the others. `Local.fit` adds it to those rows.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe.options import Parameters, parameter

__all__ = ["MeanEmbedding", "Representation", "fasttext"]

SIZE = 32


class MeanEmbedding(nn.Module):
    """The mean of the word vectors over all positions of (batch, length) word numbers.

    Number 0, unknown or padding, is a vector of zeros that gets no gradient; its positions count in the mean.
    The start is that of `nn.Embedding`, N(0, 1).
    """

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_()[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.embedding_bag(x, self.weight, mode="mean")
        # Each word of the batch once, times its share of each text. Fewer rows than positions; and a word's
        # gradients are summed before they are added to its vector, as in the dense gradient.
        words, place = torch.unique(x, return_inverse=True)
        shares = self.weight.new_zeros(len(x), len(words)).scatter_add_(
            1, place, (x != 0).to(self.weight) / x.shape[1]
        )
        return shares @ F.embedding(words, self.weight, sparse=True)


@dataclass(frozen=True)
class Representation(Parameters):
    """As published the log-softmax meant for the logits comes before the last layer as soon as the model is
    split there."""

    name: ClassVar[str] = "fasttext"

    rep: str = parameter(
        "linear",
        "representation: the hidden layer, or as published its log-softmax",
        choices=("linear", "logsoftmax"),
    )


def fasttext(words: int, classes: int, rep: str = "linear") -> nn.Sequential:
    """Vectors of 32 numbers, their mean, FC 32 without activation, FC; `rep`: see `Representation`."""
    layers: dict[str, nn.Module] = {"embedding": MeanEmbedding(words, SIZE), "fc1": nn.Linear(SIZE, SIZE)}
    if rep == "logsoftmax":
        layers["logsoftmax"] = nn.LogSoftmax(1)
    return nn.Sequential(OrderedDict(layers, fc=nn.Linear(SIZE, classes)))
