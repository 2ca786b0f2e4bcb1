"""The paper's 4-layer CNN, its small sibling for 8x8 images, and a perceptron for plain features.

Pooling comes before ReLU: the two commute exactly (values and gradients), and ReLU then sees a quarter of
the numbers. The place `conv1` is after both, as in the paper.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

__all__ = ["blocks", "cnn", "cnn_small", "mlp"]


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
