"""Image files of the user, from memory or from a folder with a folder per class, as one uint8 array."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from feddbe.data import rows
from feddbe.data.dataset import Dataset, Preprocessing
from feddbe.data.user.arrays import EncodedColumn, build_dataset
from feddbe.errors import InvalidInputError, one_line


def load_folder(folder: Path, resize: tuple[int, int] | None = None) -> Dataset:
    """Classes and files in the order of their names, `train` before `test`; hidden files are left out.
    `resize`: width and height that all images are brought to."""
    parts = [folder]
    inside = _folders(folder)
    if folder / "train" in inside and _folders(folder / "train"):
        parts = [part for part in (folder / "train", folder / "test") if part in inside]
        if others := [part.name for part in inside if part not in parts]:
            raise InvalidInputError(
                f"{folder} has train, and also {', '.join(others)}; read is only test: move it away"
            )
    classes = sorted({place.name for part in parts for place in _folders(part)})
    if len(classes) < 2:
        raise InvalidInputError(
            f"{folder} has {len(classes)} folders with images; at least 2 classes are needed, as in "
            f"{folder}/cat/1.png and {folder}/dog/1.png"
        )
    files = [
        (file, label)
        for part in parts
        for label, name in enumerate(classes)
        if (part / name).is_dir()
        for file in _images(part / name)
    ]
    empty = set(range(len(classes))) - {label for _, label in files}
    if empty:
        raise InvalidInputError(
            f"the class '{classes[min(empty)]}' in {folder} has no images; add some or remove it"
        )
    paths = [file for file, _ in files]
    y = EncodedColumn(np.array([label for _, label in files], np.int64), tuple(classes))
    x = decode_images(paths, [*map(str, paths)], resize)
    return build_dataset(f"{folder.resolve().name}/", x, y, preprocessing=image_preprocessing(x, resize))


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]


def _images(folder: Path) -> list[Path]:
    for path in _visible(folder):
        if path.is_dir() or path.suffix.lower() not in rows.SUFFIXES:
            kind = "a folder" if path.is_dir() else "no image by its name"
            raise InvalidInputError(
                f"{path} is {kind}; a class folder must hold only images ({' '.join(rows.SUFFIXES)}): "
                "move it away"
            )
    return _visible(folder)


_GREY = {"1", "L"}


def decode_images(
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
                raise InvalidInputError(
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


def _damaged(name: str, error: Exception) -> InvalidInputError:
    return InvalidInputError(f"cannot read the image {name}: {one_line(error)}; replace or remove it")


def image_preprocessing(pixels: npt.NDArray[np.uint8], resize: tuple[int, int] | None) -> Preprocessing:
    """What became of a user's images: pixels from -1 to 1, perhaps of another size."""
    return Preprocessing("images", pixels.shape[1:], scale=2 / 255, shift=-1.0, resized=resize is not None)
