"""User images, in memory or in a folder with one subfolder per class, decoded to one uint8 array."""

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


def load_image_folder(folder: Path, resize: tuple[int, int] | None = None) -> Dataset:
    """Load images from `FOLDER/CLASS`, from `FOLDER/train/CLASS` and `FOLDER/test/CLASS`, or by client.

    In `FOLDER/CLIENT/CLASS` the first folders are natural clients. Clients, classes and files are in the
    order of their names, `train` before `test`; hidden files are ignored.

    Args:
        folder: The folder.
        resize: Width and height of all images; by default, all must have the same size.

    Raises:
        InvalidInputError: The folder has another structure, or an image cannot be read.
    """
    parts = [folder]
    subfolders = _list_folders(folder)
    if folder / "train" in subfolders and _list_folders(folder / "train"):
        parts = [part for part in (folder / "train", folder / "test") if part in subfolders]
        others = [subfolder.name for subfolder in subfolders if subfolder not in parts]
        if others:
            raise InvalidInputError(
                f"{folder} has train and unexpected folders ({', '.join(others)}); "
                "only train and test are read: move the others away"
            )
    has_clients = parts == [folder] and bool(subfolders) and all(map(_list_folders, subfolders))
    if has_clients:
        parts = subfolders
    classes = sorted({class_folder.name for part in parts for class_folder in _list_folders(part)})
    if not classes:
        raise InvalidInputError(
            f"{folder} has no folders with images; expected one for each class, as in "
            f"{folder}/cat/1.png and {folder}/dog/1.png"
        )
    files = [
        (file, label, number)
        for number, part in enumerate(parts)
        for label, name in enumerate(classes)
        if (part / name).is_dir()
        for file in _list_images(part / name)
    ]
    empty = set(range(len(classes))) - {label for _, label, _ in files}
    if empty:
        raise InvalidInputError(
            f"the class '{classes[min(empty)]}' in {folder} has no images; add some or remove it"
        )
    paths = [file for file, _, _ in files]
    y = EncodedColumn(np.array([label for _, label, _ in files], np.int64), tuple(classes))
    x = decode_images(paths, [*map(str, paths)], resize)
    clients = None
    if has_clients:
        names = [parts[number].name for _, _, number in files]
        clients = EncodedColumn.encode(names, sorted({*names}))
    return build_dataset(
        f"{folder.resolve().name}/", x, y, clients, preprocessing=image_preprocessing(x, resize)
    )


def _list_visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _list_folders(folder: Path) -> list[Path]:
    return [path for path in _list_visible(folder) if path.is_dir()]


def _list_images(folder: Path) -> list[Path]:
    for path in _list_visible(folder):
        if path.is_dir() or path.suffix.lower() not in rows.IMAGE_SUFFIXES:
            kind = "a folder" if path.is_dir() else "not named like an image"
            raise InvalidInputError(
                f"{path} is {kind}; a class folder must hold only images ({' '.join(rows.IMAGE_SUFFIXES)}): "
                "move it away"
            )
    return _list_visible(folder)


_GRAY_MODES = {"1", "L"}


def decode_images(
    files: Sequence[Path | bytes], names: Sequence[str], resize: tuple[int, int] | None = None
) -> npt.NDArray[np.uint8]:
    """Return (n, channels, height, width) pixels: one channel if all images are gray, otherwise three.

    Sizes are checked in the files' headers before anything is decoded.

    Args:
        files: Images as paths or bytes.
        names: Their names in errors.
        resize: Width and height of all images; by default, all must have the same size.

    Raises:
        InvalidInputError: An image cannot be read, or has another size.
    """
    with ThreadPoolExecutor() as threads:  # Pillow releases Python's lock while it decodes
        headers = [*threads.map(_read_size_and_mode, files, names)]
        size = resize or headers[0][0]
        for (other, _), name in zip(headers, names, strict=True):
            if other != size and not resize:
                raise InvalidInputError(
                    f"{name} is {other[0]}x{other[1]}, but {names[0]} is {size[0]}x{size[1]}; "
                    f"all images must have the same size: ?resize={min(*size, *other)} resizes them"
                )
        mode = "L" if all(mode in _GRAY_MODES for _, mode in headers) else "RGB"
        pixels = np.empty((len(files), len(mode), size[1], size[0]), np.uint8)

        def fill(row: int) -> None:
            pixels[row] = _decode_image(files[row], names[row], mode, size)

        for _ in threads.map(fill, range(len(files))):
            pass
    return pixels


def _read_size_and_mode(file: Path | bytes, name: str) -> tuple[tuple[int, int], str]:
    try:
        with rows.open_image(file) as image:
            return image.size, image.mode
    except Exception as error:  # with damaged bytes, Pillow's readers raise any exception
        raise _damaged_image_error(name, error) from None


def _decode_image(file: Path | bytes, name: str, mode: str, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    try:
        with rows.open_image(file) as opened:
            image = opened.convert(mode)
        if image.size != size:
            image = image.resize(size, Image.Resampling.BILINEAR)
        values = np.asarray(image)
    except Exception as error:
        raise _damaged_image_error(name, error) from None
    return values[np.newaxis] if values.ndim == 2 else values.transpose(2, 0, 1)


def _damaged_image_error(name: str, error: Exception) -> InvalidInputError:
    return InvalidInputError(f"cannot read the image {name}: {one_line(error)}; replace or remove it")


def image_preprocessing(pixels: npt.NDArray[np.uint8], resize: tuple[int, int] | None) -> Preprocessing:
    """Return the preprocessing of user images: pixels are scaled to -1..1, and images perhaps resized."""
    return Preprocessing("images", pixels.shape[1:], scale=2 / 255, shift=-1.0, resized=resize is not None)
