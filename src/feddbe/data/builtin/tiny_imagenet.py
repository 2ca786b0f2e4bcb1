"""Tiny-ImageNet: 100,000 colour images of 64x64 in two hundred classes, from the publisher's folder or zip.

Only the training folder has labelled images by class: `val` is one folder of all classes and is left out, as
the paper's count of 100,000 says. Classes and files are in the order of their names. The JPEGs are decoded
once into a cache of 1.23 GB; the zip need not be unpacked.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from feddbe.data.dataset import Dataset
from feddbe.data.io.archives import DAMAGE, damaged
from feddbe.data.io.cache import New, cached
from feddbe.data.io.download import Progress, cache_folder, download, find_first, missing
from feddbe.data.io.images import images_of
from feddbe.errors import BadInput

URL = "http://cs231n.stanford.edu/"
ARCHIVE = "tiny-imagenet-200.zip"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
CLASSES, EACH = 200, 500
SIDE = 64
_LIMIT = 1_000_000
"""Bytes of an image file, generously."""

Read = Callable[[str], bytes]


def find(data_dir: Path | None) -> Path | None:
    """The first folder `tiny-imagenet-200`, or zip."""
    place = find_first(
        "tiny_imagenet",
        data_dir,
        ["tiny-imagenet-200/train", "tiny-imagenet-200/wnids.txt", "wnids.txt", ARCHIVE],
    )
    return place.parent if place and place.name != ARCHIVE else place


def load(data_dir: Path | None) -> Dataset:
    """The training folder, class by class."""
    place = find(data_dir)
    if place is None:
        raise missing(
            "Tiny-ImageNet", "tiny_imagenet", data_dir, f"{ARCHIVE} or the folder tiny-imagenet-200"
        )
    found = cached("tiny_imagenet", data_dir, "images", _sources(place), lambda new: _decode(place, new))
    return images_of(found, "tiny_imagenet", CLASSES)


def sums() -> dict[str, str | None]:
    """The publisher's file and its sum."""
    return {ARCHIVE: f"md5:{MD5}"}


def get(data_dir: Path | None, progress: Progress | None = None, again: bool = False) -> Path:
    """Download the zip, 248 MB."""
    target = cache_folder("tiny_imagenet", data_dir) / ARCHIVE
    download(f"{URL}{ARCHIVE}", target, f"md5:{MD5}", progress, again)
    return target


def _sources(place: Path) -> list[Path]:
    """Of a folder the 200 folders of images: their times change when a file comes or goes."""
    if place.is_file():
        return [place]
    return sorted(path for path in (place / "train").glob("*/images") if path.is_dir())


def _decode(place: Path, new: New) -> None:
    try:
        if place.is_dir():
            names = [str(path) for folder in _sources(place) for path in folder.iterdir()]
            _fill(_by_class(names, place), lambda name: Path(name).read_bytes(), new)
        else:
            with zipfile.ZipFile(place) as archive:  # its reads from several threads do not mix
                train = [info for info in archive.infolist() if "/train/" in info.filename]
                names = [info.filename for info in train if info.file_size <= _LIMIT]
                _fill(_by_class(names, place), archive.read, new)
    except DAMAGE as error:
        raise damaged(place, error) from None


def _by_class(names: Sequence[str], place: Path) -> list[list[str]]:
    """The images of each class, `.../train/CLASS/images/FILE.JPEG`, classes and files sorted by name."""
    classes: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(Path(name).as_posix())
        if path.suffix.lower() in (".jpeg", ".jpg") and path.parent.name == "images":
            classes.setdefault(path.parent.parent.name, []).append(name)
    wrong = [f"{len(files)} images in {name}" for name, files in classes.items() if len(files) != EACH]
    if len(classes) != CLASSES or wrong:
        found = ", ".join([f"{len(classes)} classes", *wrong[:1]])
        raise BadInput(f"{place} has {found}; expected {CLASSES} classes of {EACH} images: fetch it again")
    return [classes[name] for name in sorted(classes)]


def _fill(classes: Sequence[Sequence[str]], read: Read, new: New) -> None:
    x = new("x", (CLASSES * EACH, 3, SIDE, SIDE), np.uint8)
    y = new("y", (CLASSES * EACH,), np.int64)
    y[:] = np.repeat(np.arange(CLASSES), EACH)

    def one(k: int) -> None:
        for row, name in enumerate(classes[k], k * EACH):
            x[row] = _image(read(name), name)

    # Threads, not processes: the decoder works outside of Python's lock, and nothing has to be sent.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for k, _ in enumerate(threads.map(one, range(CLASSES)), 1):
            if k % max(1, CLASSES // 10) == 0:
                print(f"feddbe: decoding Tiny-ImageNet, once: {100 * k // CLASSES} %", file=sys.stderr)


def _image(content: bytes, name: str) -> npt.NDArray[np.uint8]:
    """(3, 64, 64); a few of the JPEGs are grey."""
    from PIL import Image, UnidentifiedImageError  # here: only this needs it

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            if image.size != (SIDE, SIDE):  # before it is decoded: a head can claim anything
                raise BadInput(f"{name} is {image.width}x{image.height}, expected {SIDE}x{SIDE}")
            pixels = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, Image.DecompressionBombError, *DAMAGE) as error:
        raise BadInput(f"cannot decode {name}: {error}; fetch the images again") from None
    return pixels.transpose(2, 0, 1)
