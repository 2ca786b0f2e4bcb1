"""ResNet-18 (He et al., CVPR 2016) with the ImageNet stem, as the paper uses it: untrained, for 64x64 images.

Parameter names, layer order and initialisation are those of torchvision's `resnet18`, so its pretrained
weights load: `module = resnet18((3, 224, 224), 1000); module.load_state_dict(load_file(FILE))`. A module made
in this way starts a run from Python: `feddbe.run(METHOD, model=module)`.

Published: kappa 1, mu 0.1. The learning rate is not; 0.1 is what the authors are thought to have used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["CUTS", "ResNet18", "resnet18"]

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
