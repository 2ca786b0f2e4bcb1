"""Feature shift: each client's images are transformed differently, so that clients differ in their domains.

A kind is given with its largest strength S, as in `rotate:30`. Each client draws its strength uniformly from
0 to S (an angle from -S to S; `invert` is a coin flip), from its own random stream. All its samples, for
training and for testing, get this strength. With several kinds, separated by commas, each client gets one of
them, as evenly as their number allows.

    rotate:DEGREES      about the center, counterclockwise, bilinear; edges repeated
    blur:PIXELS         with a Gaussian of this deviation, cut off at three deviations; edges repeated
    noise:SHARE         Gaussian, its deviation a share of the range of pixels; clipped to the range
    contrast:SHARE      x <- m + (1 - s) (x - m) with m the mean of the image
    invert              x <- low + high - x

Strengths belong to the data: they depend on the partition's seed, not on the run's.
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
"""Images transformed together; limits the memory needed in addition to the copy of the data."""


class ShiftKind(NamedTuple):
    """One kind of transformation."""

    apply: Callable[[Tensor, float, tuple[float, float], np.random.RandomState], Tensor]
    """(images as floats, strength, lowest and highest value, rng) -> images."""
    default: float
    max_strength: float
    unit: str


def _rotate(x: Tensor, angle: float, bounds: tuple[float, float], rng: np.random.RandomState) -> Tensor:
    height, width = x.shape[2:]
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    # the source of each pixel; affine_grid's axes range from -1 to 1 for any image size
    rotation = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(rotation.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def _blur(x: Tensor, sigma: float, bounds: tuple[float, float], rng: np.random.RandomState) -> Tensor:
    radius = math.ceil(3 * sigma)
    if not radius:
        return x
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float32)
    weights = torch.exp(-(offsets**2) / (2 * sigma**2))
    weights /= weights.sum()
    flat = x.flatten(0, 1)[:, None]
    # one axis at a time: padded on all sides at once, a small image with a large blur would become huge
    flat = F.conv2d(F.pad(flat, (radius, radius, 0, 0), mode="replicate"), weights[None, None, None, :])
    flat = F.conv2d(F.pad(flat, (0, 0, radius, radius), mode="replicate"), weights[None, None, :, None])
    return flat.reshape(x.shape)


def _add_noise(x: Tensor, share: float, bounds: tuple[float, float], rng: np.random.RandomState) -> Tensor:
    low, high = bounds
    noise = torch.from_numpy(rng.standard_normal(tuple(x.shape)).astype(np.float32))
    return (x + share * (high - low) * noise).clamp(low, high)


def _reduce_contrast(
    x: Tensor, share: float, bounds: tuple[float, float], rng: np.random.RandomState
) -> Tensor:
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    return mean + (1 - share) * (x - mean)


def _invert(
    x: Tensor, should_invert: float, bounds: tuple[float, float], rng: np.random.RandomState
) -> Tensor:
    return bounds[0] + bounds[1] - x if should_invert else x


SHIFT_KINDS = {
    "rotate": ShiftKind(_rotate, 30.0, 180.0, "degrees"),
    "blur": ShiftKind(_blur, 1.0, 100.0, "pixels"),
    "noise": ShiftKind(_add_noise, 0.2, 1.0, ""),
    "contrast": ShiftKind(_reduce_contrast, 0.8, 1.0, ""),
    "invert": ShiftKind(_invert, 1.0, 1.0, ""),
}


def parse_shift(spec: str) -> list[tuple[str, float]]:
    """Return the kinds in a specification such as `rotate:30,invert`, with their largest strengths."""
    kinds = []
    for item in spec.split(","):
        name, colon, text = item.strip().partition(":")
        if name not in SHIFT_KINDS:
            allowed_names = [f"{kind}:S" if kind != "invert" else kind for kind in SHIFT_KINDS]
            raise unknown_name("shift", name, allowed_names)
        kind = SHIFT_KINDS[name]
        try:
            strength = float(text) if colon else kind.default
        except ValueError:
            strength = math.nan
        if name == "invert" and colon:
            raise InvalidInputError(f"shift '{truncate(item)}': write 'invert'")
        if not 0 <= strength <= kind.max_strength:
            allowed = f"allowed: 0..{kind.max_strength:g} {kind.unit}".strip()
            raise InvalidInputError(f"shift '{truncate(item)}': {allowed}")
        kinds.append((name, strength))
    return kinds


def draw_client_shifts(spec: str, clients: int, seed: int) -> list[tuple[str, float]]:
    """Return each client's kind and strength."""
    kinds = parse_shift(spec)
    assignment = seeds.make_rng(seed, "shift kinds").permutation(clients) % len(kinds)
    shifts = []
    for client in range(clients):
        name, max_strength = kinds[assignment[client]]
        share = seeds.make_rng(seed, "shift", 0, client).random_sample()
        if name == "invert":
            strength = float(share >= 0.5)
        elif name == "rotate":
            strength = max_strength * (2 * share - 1)
        else:
            strength = max_strength * share
        shifts.append((name, strength))
    return shifts


def apply_shift(
    x: Tensor, name: str, strength: float, bounds: tuple[float, float], rng: np.random.RandomState
) -> Tensor:
    """Return the images with a shift of this kind and strength, in their own type; uint8 is rounded."""
    shifted = SHIFT_KINDS[name].apply(x.to(torch.float32), strength, bounds, rng)
    if x.dtype == torch.uint8:
        shifted = shifted.round().clamp(*bounds)
    return shifted.to(x.dtype)


def shift_images(dataset: Dataset, split: Split, spec: str, seed: int) -> Dataset:
    """Return a copy of the data set in which each client's images are shifted.

    Args:
        dataset: Images.
        split: The samples of each client.
        spec: Kinds with their largest strengths, such as `rotate:30,invert`.
        seed: The partition's seed.
    """
    shape = tuple(dataset.x.shape[1:])
    shifts = draw_client_shifts(spec, split.clients, seed)
    if dataset.num_words or len(shape) != 3 or min(shape[1:]) < 2:
        raise InvalidInputError(
            f"shift '{truncate(spec)}': it is for images; '{dataset.name}' has inputs of shape {shape}"
        )
    x = dataset.x.clone()
    bounds = _pixel_bounds(dataset)
    for client, (name, strength) in enumerate(shifts):
        parts = [part[client] for part in (split.train, split.validation, split.test) if len(part)]
        rng = seeds.make_rng(seed, "shift noise", 0, client)
        # in the order of the data: a sample's noise must not depend on the part that it belongs to
        for indices in torch.split(torch.from_numpy(np.sort(np.concatenate(parts))), _CHUNK):
            x[indices] = apply_shift(x[indices], name, strength, bounds, rng)
    known_sha256 = {key: value for key, value in dataset.known_sha256.items() if key != "x"}
    labels = tuple(_format_shift(name, strength) for name, strength in shifts)
    return replace(dataset, x=x, shift_labels=labels, known_sha256=known_sha256)


def _pixel_bounds(dataset: Dataset) -> tuple[float, float]:
    """Return the pixel values that become -1 and 1; for floats the lowest and highest value."""
    if dataset.x.dtype == torch.uint8:
        return 0.0, round((1 - dataset.shift) / dataset.scale)
    low, high = torch.aminmax(dataset.x)
    return float(low), float(high)


def _format_shift(name: str, strength: float) -> str:
    if name == "invert":
        return "inverted" if strength else "as it is"
    return f"{name} {strength:.3g}"
