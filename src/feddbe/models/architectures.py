"""The paper's 4-layer CNN, its small sibling for 8x8 images, and a perceptron for plain features.

Pooling comes before ReLU: the two commute exactly (values and gradients), and ReLU then sees a quarter of
the numbers. The place `conv1` is after both, as in the paper.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe.config.parameters import Parameters, parameter


def cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """conv 5x5 (32), conv 5x5 (64), each with 2x2 pooling and ReLU, FC 512, FC: for images from 16x16."""
    channels, height, width = shape
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return blocks(
        conv1=[nn.Conv2d(channels, 32, 5), nn.MaxPool2d(2), nn.ReLU()],
        conv2=[nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU()],
        fc1=[nn.Flatten(), nn.Linear(64 * rows * columns, 512), nn.ReLU()],
        fc=[nn.Linear(512, classes)],
    )


def cnn_small(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """conv 3x3 (16), conv 3x3 (32), padded, each with 2x2 pooling and ReLU, FC 64, FC; images from 4x4."""
    channels, height, width = shape
    return blocks(
        conv1=[nn.Conv2d(channels, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()],
        conv2=[nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()],
        fc1=[nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), 64), nn.ReLU()],
        fc=[nn.Linear(64, classes)],
    )


def mlp(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """FC 64 with ReLU, FC: for plain features of any shape."""
    size = 1
    for side in shape:
        size *= side
    return blocks(
        fc1=[nn.Flatten(), nn.Linear(size, 64), nn.ReLU()],
        fc=[nn.Linear(64, classes)],
    )


def blocks(**blocks: list[nn.Module]) -> nn.Sequential:
    """Named blocks in a row; a block of one layer is that layer."""
    layers = {name: block[0] if len(block) == 1 else nn.Sequential(*block) for name, block in blocks.items()}
    return nn.Sequential(OrderedDict(layers))


def har_cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """conv 1x9 (32), conv 1x9 (64), each with 1x2 pooling and ReLU, FC 1024, FC 512, FC; from 28 steps."""
    signals, _, steps = shape
    left = ((steps - 8) // 2 - 8) // 2
    return blocks(
        conv1=[nn.Conv2d(signals, 32, (1, 9)), nn.MaxPool2d((1, 2)), nn.ReLU()],
        conv2=[nn.Conv2d(32, 64, (1, 9)), nn.MaxPool2d((1, 2)), nn.ReLU()],
        fc1=[nn.Flatten(), nn.Linear(64 * left, 1024), nn.ReLU()],
        fc2=[nn.Linear(1024, 512), nn.ReLU()],
        fc=[nn.Linear(512, classes)],
    )


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


CUTS = {"conv": "maxpool", "b1": "layer1", "b2": "layer2", "b3": "layer3", "b4": "layer4", "pool": "flatten"}
"""The paper's names of the six places between stem and classifier."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, and around them the identity, or a 1x1 convolution where shapes change."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride > 1 or channels != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        around = x if self.downsample is None else self.downsample(x)
        inside = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu(inside + around)
        return out


class ResNet18(nn.Module):
    """Stem, four layers of two blocks each, mean over the image, linear classifier."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Convolutions normal with variance 2/fan-out; BatchNorm 1 and 0, its statistics too; fc as torch."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(layer, nn.BatchNorm2d | nn.Linear):
                layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return out


def resnet18(shape: tuple[int, ...], classes: int) -> ResNet18:
    """ResNet-18 for images of this shape (channels, height, width)."""
    return ResNet18(shape[0], classes)
