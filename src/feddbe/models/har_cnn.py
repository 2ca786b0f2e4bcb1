"""The CNN for wearable sensors: windows of (signals, 1, steps), such as HAR's 9 x 1 x 128.

Pooling comes before ReLU as in `cnn.py`, with the same numbers. There is no published kappa, mu or learning
rate for this network. The published code takes all three linear layers for the classifier (the cut `conv2`,
`--variant official`); the paper's text, and the default here, only the last one.
"""

from __future__ import annotations

from torch import nn

from feddbe.models.cnn import blocks

__all__ = ["har_cnn"]


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
