"""fastText for classification: the mean of a text's word vectors, and two linear layers.

A step of ten texts touches a few hundred of some hundred thousand word vectors. So the gradient of the vectors
is sparse: the rows that were used, and nothing of the others. `Local.fit` adds it to those rows.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["REPRESENTATIONS", "MeanEmbedding", "fasttext"]

SIZE = 32
REPRESENTATIONS = ("linear", "logsoftmax")


class MeanEmbedding(nn.Module):
    """The mean of the word vectors over all positions of (batch, length) word numbers.

    Number 0, unknown or padding, is a vector of zeros that gets no gradient; its positions count in the mean.
    The start is that of `nn.Embedding`, N(0, 1).
    """

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(words, size))
        with torch.no_grad():
            self.weight[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        used = x != 0  # four of five positions are padding: cheaper to leave out than to look up
        lengths = used.sum(1)
        sums = F.embedding_bag(x[used], self.weight, lengths.cumsum(0) - lengths, mode="sum", sparse=True)
        return sums / x.shape[1]


def fasttext(words: int, classes: int, representation: str = "linear") -> nn.Sequential:
    """Vectors of 32 numbers, their mean, FC 32 without activation, FC.

    `representation`: `linear`, or `logsoftmax` as published, where the log-softmax meant for the logits comes
    before the last layer as soon as the model is split there.
    """
    layers: dict[str, nn.Module] = {"embedding": MeanEmbedding(words, SIZE), "fc1": nn.Linear(SIZE, SIZE)}
    if representation == "logsoftmax":
        layers["logsoftmax"] = nn.LogSoftmax(1)
    return nn.Sequential(OrderedDict(layers, fc=nn.Linear(SIZE, classes)))
