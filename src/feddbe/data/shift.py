"""Feature shift: each client's images look different, so that clients differ in domain, not in labels only.

A kind with its largest strength S, as in `rotate:30`: each client draws its own strength evenly from 0 to S
(an angle from -S to S; `invert` is a coin), from a stream of its own, and all its rows, to train and to test,
get it. Of several kinds with commas each client has one, as evenly as their number allows.

    rotate:DEGREES      about the centre, counterclockwise, bilinear; what comes in repeats the edge
    blur:PIXELS         with a Gaussian of this deviation, cut off at three of them; edges repeated
    noise:SHARE         Gaussian, its deviation a share of the range of pixels; cut off at the range
    contrast:SHARE      x <- m + (1 - s) (x - m) with m the mean of the image
    invert              x <- low + high - x

Strengths belong to the data: they follow from the partition's seed, not the run's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe import seeds
from feddbe.data.dataset import Dataset
from feddbe.data.split import Split
from feddbe.errors import InvalidInputError, truncate, unknown_name

_CHUNK = 512
"""Images that are worked on at once: what is needed besides the copy of the data."""


class Kind(NamedTuple):
    """One way to look different."""

    apply: Callable[[Tensor, float, tuple[float, float], np.random.RandomState], Tensor]
    """(images as floats, strength, lowest and highest value, randomness) -> images."""
    default: float
    most: float
    unit: str


def _rotate(x: Tensor, angle: float, bounds: tuple[float, float], rng: np.random.RandomState) -> Tensor:
    height, width = x.shape[2:]
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    # where each pixel comes from; affine_grid's axes run from -1 to 1 whatever the sides are
    turn = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def _blur(x: Tensor, sigma: float, bounds: tuple[float, float], rng: np.random.RandomState) -> Tensor:
    reach = math.ceil(3 * sigma)
    if not reach:
        return x
    place = torch.arange(-reach, reach + 1, dtype=torch.float32)
    weights = torch.exp(-(place**2) / (2 * sigma**2))
    weights /= weights.sum()
    flat = x.flatten(0, 1)[:, None]
    # one axis at a time: padded on all sides at once, a small image with a large blur would become huge
    flat = F.conv2d(F.pad(flat, (reach, reach, 0, 0), mode="replicate"), weights[None, None, None, :])
    flat = F.conv2d(F.pad(flat, (0, 0, reach, reach), mode="replicate"), weights[None, None, :, None])
    return flat.reshape(x.shape)


def _noise(x: Tensor, share: float, bounds: tuple[float, float], rng: np.random.RandomState) -> Tensor:
    low, high = bounds
    drawn = torch.from_numpy(rng.standard_normal(tuple(x.shape)).astype(np.float32))
    return (x + share * (high - low) * drawn).clamp(low, high)


def _contrast(x: Tensor, share: float, bounds: tuple[float, float], rng: np.random.RandomState) -> Tensor:
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    return mean + (1 - share) * (x - mean)


def _invert(x: Tensor, on: float, bounds: tuple[float, float], rng: np.random.RandomState) -> Tensor:
    return bounds[0] + bounds[1] - x if on else x


KINDS = {
    "rotate": Kind(_rotate, 30.0, 180.0, "degrees"),
    "blur": Kind(_blur, 1.0, 100.0, "pixels"),
    "noise": Kind(_noise, 0.2, 1.0, ""),
    "contrast": Kind(_contrast, 0.8, 1.0, ""),
    "invert": Kind(_invert, 1.0, 1.0, ""),
}


def parse_shift(spec: str) -> list[tuple[str, float]]:
    """The kinds that `rotate:30,invert` names, each with its largest strength."""
    found = []
    for item in spec.split(","):
        name, colon, text = item.strip().partition(":")
        if name not in KINDS:
            raise unknown_name("shift", name, [f"{kind}:S" if kind != "invert" else kind for kind in KINDS])
        kind = KINDS[name]
        try:
            strength = float(text) if colon else kind.default
        except ValueError:
            strength = math.nan
        if not 0 <= strength <= kind.most or (name == "invert" and colon):
            allowed = (
                "write 'invert'" if name == "invert" else f"allowed: 0..{kind.most:g} {kind.unit}".strip()
            )
            raise InvalidInputError(f"shift '{truncate(item)}': {allowed}")
        found.append((name, strength))
    return found


def client_strengths(spec: str, clients: int, seed: int) -> list[tuple[str, float]]:
    """Each client's kind and strength."""
    kinds = parse_shift(spec)
    turn = seeds.make_rng(seed, "shift kinds").permutation(clients) % len(kinds)
    drawn = []
    for client in range(clients):
        name, most = kinds[turn[client]]
        share = seeds.make_rng(seed, "shift", 0, client).random_sample()
        if name == "invert":
            drawn.append((name, float(share >= 0.5)))
        else:
            drawn.append((name, most * (2 * share - 1 if name == "rotate" else share)))
    return drawn


def apply_shift(
    x: Tensor, name: str, strength: float, bounds: tuple[float, float], rng: np.random.RandomState
) -> Tensor:
    """These images, of any type, with one strength of one kind; uint8 is rounded."""
    found = KINDS[name].apply(x.to(torch.float32), strength, bounds, rng)
    return found.round().clamp(*bounds).to(x.dtype) if x.dtype == torch.uint8 else found.to(x.dtype)


def shift_images(dataset: Dataset, split: Split, spec: str, seed: int) -> Dataset:
    """The data with each client's images in its own look: one copy of `x`, written client by client."""
    shape = tuple(dataset.x.shape[1:])
    kinds = parse_shift(spec)
    if dataset.tokens or len(shape) != 3 or min(shape[1:]) < 2:
        raise InvalidInputError(
            f"shift '{truncate(spec)}': it is for images; '{dataset.name}' has inputs of shape {shape}"
        )
    x, bounds = dataset.x.clone(), _bounds(dataset)
    drawn = client_strengths(spec, split.clients, seed)
    for client, (name, strength) in enumerate(drawn):
        parts = [part[client] for part in (split.train, split.validation, split.test) if len(part)]
        rng = seeds.make_rng(seed, "shift noise", 0, client)
        # in the order of the data: what a row looks like does not depend on what it is held out for
        for some in torch.split(torch.from_numpy(np.sort(np.concatenate(parts))), _CHUNK):
            x[some] = apply_shift(x[some], name, strength, bounds, rng)
    known = {key: value for key, value in dataset.known_sha256.items() if key != "x"}
    looks = tuple(_look(name, strength) for name, strength in drawn)
    assert kinds
    return replace(dataset, x=x, shift_labels=looks, known_sha256=known)


def _bounds(dataset: Dataset) -> tuple[float, float]:
    """Lowest and highest value of a pixel: what becomes -1 and 1, of floats what is there."""
    if dataset.x.dtype == torch.uint8:
        return 0.0, round((1 - dataset.shift) / dataset.scale)
    low, high = torch.aminmax(dataset.x)
    return float(low), float(high)


def _look(name: str, strength: float) -> str:
    if name == "invert":
        return "inverted" if strength else "as it is"
    return f"{name} {strength:.3g}"
