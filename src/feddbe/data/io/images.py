"""Image files as one uint8 array."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from feddbe.data import rows
from feddbe.data.dataset import Dataset
from feddbe.data.io.cache import Cached
from feddbe.data.preprocessing import Preprocessing
from feddbe.errors import BadInput, one_line

_GREY = {"1", "L"}


def decode(
    files: Sequence[Path | bytes], names: Sequence[str], resize: tuple[int, int] | None = None
) -> npt.NDArray[np.uint8]:
    """(n, channels, height, width) pixels of images in files or in memory, which errors call by `names`.

    One channel if all are grey, otherwise red, green, blue for all. Their sizes must be the same, which is
    known from the files' heads before anything is decoded, unless all are brought to `resize`.
    """
    with ThreadPoolExecutor() as threads:  # Pillow lets other threads run while it decodes
        heads = [*threads.map(_head, files, names)]
        size = resize or heads[0][0]
        for (other, _), name in zip(heads, names, strict=True):
            if other != size and not resize:
                raise BadInput(
                    f"{name} is {other[0]}x{other[1]}, but {names[0]} is {size[0]}x{size[1]}; "
                    f"all images must have the same size: ?resize={min(*size, *other)} brings them to one"
                )
        mode = "L" if all(mode in _GREY for _, mode in heads) else "RGB"
        pixels = np.empty((len(files), len(mode), size[1], size[0]), np.uint8)

        def fill(row: int) -> None:
            pixels[row] = _pixels(files[row], names[row], mode, size)

        for _ in threads.map(fill, range(len(files))):
            pass
    return pixels


def _head(file: Path | bytes, name: str) -> tuple[tuple[int, int], str]:
    try:
        with rows.open_image(file) as image:
            return image.size, image.mode
    except Exception as error:  # damaged bytes make Pillow's many readers raise anything
        raise _damaged(name, error) from None


def _pixels(file: Path | bytes, name: str, mode: str, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    try:
        with rows.open_image(file) as opened:
            image = opened.convert(mode)
        if image.size != size:
            image = image.resize(size, Image.Resampling.BILINEAR)
        values = np.asarray(image)
    except Exception as error:
        raise _damaged(name, error) from None
    return values[np.newaxis] if values.ndim == 2 else values.transpose(2, 0, 1)


def _damaged(name: str, error: Exception) -> BadInput:
    return BadInput(f"cannot read the image {name}: {one_line(error)}; replace or remove it")


def preprocessed(pixels: npt.NDArray[np.uint8], resize: tuple[int, int] | None) -> Preprocessing:
    """What became of a user's images: pixels from -1 to 1, perhaps of another size."""
    return Preprocessing("images", pixels.shape[1:], scale=2 / 255, shift=-1.0, resized=resize is not None)


def images_of(found: Cached, name: str, classes: int, label_names: tuple[str, ...] = ()) -> Dataset:
    """The published form of a cache with pixels `x` and labels `y`: pixels from -1 to 1."""
    return Dataset(
        name=name,
        x=torch.from_numpy(found.arrays["x"]),
        y=torch.from_numpy(found.arrays["y"]),
        classes=classes,
        label_names=label_names,
        scale=2 / 255,
        shift=-1.0,
        known_sha256=found.sha256,
    )
