"""MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and Tiny-ImageNet: their files, and readers of the formats.

MNIST and Fashion-MNIST are four IDX files each: two zero bytes, type, rank, big-endian sizes, values.
CIFAR-10 and CIFAR-100 are an archive, binary or pickled, or the folder in it, decoded once into a cache.
Tiny-ImageNet is a folder of JPEGs or a zip of it, decoded once into a cache of 1.23 GB. Only its training
folder has a folder per class. `val` is not used: the paper has 100,000 images.
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any
from zlib import error as ZlibError

import numpy as np
import numpy.typing as npt
import torch

from feddbe.data import safe_pickle
from feddbe.data.dataset import Dataset
from feddbe.data.files import (
    READ_ERRORS,
    CachedArrays,
    NewArray,
    Publisher,
    damaged_file_error,
    find_first_path,
    iterate_members,
    load_cached,
    missing_data_error,
    search_folders,
)
from feddbe.errors import InvalidInputError

ByteArray = npt.NDArray[np.uint8]

_MAX_IDX_BYTES = 100_000_000
"""Limit of an unpacked IDX file; 60,000 images of 28x28 are 47 MB."""
_MAX_CIFAR_BYTES = 500_000_000
"""Limit of an unpacked archive."""
_CIFAR_PIXELS = 3072
_MAX_JPEG_BYTES = 1_000_000
"""Limit of an image file."""


@dataclass(frozen=True)
class ImageDataset(ABC):
    """A published set of images, whose pixels are scaled to -1..1."""

    name: str
    title: str
    publisher: Publisher
    classes: int

    @abstractmethod
    def find(self, data_dir: Path | None) -> Path | None:
        """Return the first folder or archive with the data set, or None."""

    @abstractmethod
    def load(self, data_dir: Path | None) -> Dataset:
        """Return the training set, then the test set, in file order."""

    def build_dataset(
        self, cached: CachedArrays, label_names: tuple[str, ...] = (), note: str = ""
    ) -> Dataset:
        """Return the data set of pixels `x` and labels `y`."""
        return Dataset(
            name=self.name,
            x=torch.from_numpy(cached.arrays["x"]),
            y=torch.from_numpy(cached.arrays["y"]),
            classes=self.classes,
            label_names=label_names,
            scale=2 / 255,
            shift=-1.0,
            note=note,
            known_sha256=cached.sha256,
        )


@dataclass(frozen=True)
class IdxDataset(ImageDataset):
    """Gray images of 28x28 in ten classes, from four IDX files, gzipped or not."""

    label_names: tuple[str, ...]
    class_sizes: tuple[int, ...]
    """Published number of images of each class, in both sets together."""
    other_note: str
    """Note for files with other class sizes."""
    system_folder: Path | None = None
    """Folder in which an operating system's package installs the files."""
    system_hint: str = ""
    """Instruction to install that package."""

    def find(self, data_dir: Path | None) -> Path | None:
        """Return the first folder that has all four files, or None."""
        folders = search_folders(self.name, data_dir)
        if self.system_folder:
            folders.append(self.system_folder)
        for folder in folders:
            if all(_find_idx_file(folder, name) for name in self.publisher.checksums):
                return folder
        return None

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the training set, then the test set, in file order."""
        folder = self.find(data_dir)
        if folder is None:
            hints = [f"{self.system_hint} (installed in {self.system_folder})"] if self.system_folder else []
            files = f"the four files ({', '.join(self.publisher.checksums)})"
            raise missing_data_error(self.title, self.name, data_dir, files, *hints)
        parts = [_read_idx_pair(folder, part) for part in ("train", "t10k")]
        x = np.concatenate([images for images, _ in parts])[:, np.newaxis]
        y = np.concatenate([labels for _, labels in parts]).astype(np.int64)
        is_published = np.array_equal(np.bincount(y, minlength=self.classes), self.class_sizes)
        note = "" if is_published else self.other_note
        return self.build_dataset(CachedArrays({"x": x, "y": y}, {}), self.label_names, note)


@dataclass(frozen=True)
class CifarDataset(ImageDataset):
    """Color images of 32x32, from the binary or the python version, packed or not."""

    sizes: Mapping[str, int]
    """Number of images of each part, in the order in which parts are joined."""
    candidates: tuple[str, ...]
    """Paths to search in a folder, preferred first: a file of an unpacked version, or an archive."""
    label_bytes: int
    """Number of label bytes before the pixels in the binary version; the last one is the label."""
    label_key: bytes
    """Key of the labels in the python version."""
    label_names: tuple[str, ...] = ()

    def find(self, data_dir: Path | None) -> Path | None:
        """Return the first folder or archive of either version, or None."""
        path = find_first_path(self.name, data_dir, self.candidates)
        return path.parent if path and _part_name(path.name) in self.sizes else path

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the parts in the order of `sizes`, the test set last."""
        path = self.find(data_dir)
        if path is None:
            archives = " or ".join(name for name in self.candidates if name.endswith(".tar.gz"))
            raise missing_data_error(self.title, self.name, data_dir, archives)
        sources = [path] if path.is_file() else [_find_part_file(path, part) for part in self.sizes]
        arrays = load_cached(
            self.name, data_dir, "images", sources, lambda new: _decode_cifar(path, self, new)
        )
        return self.build_dataset(arrays, self.label_names)


@dataclass(frozen=True)
class TinyImageNet(ImageDataset):
    """JPEGs in `train/CLASS/images`, classes and files in the order of their names."""

    images_per_class: int
    side: int

    def find(self, data_dir: Path | None) -> Path | None:
        """Return the first folder `tiny-imagenet-200` or zip, or None."""
        (archive,) = self.publisher.checksums
        folder = archive.removesuffix(".zip")
        path = find_first_path(
            self.name, data_dir, [f"{folder}/train", f"{folder}/wnids.txt", "wnids.txt", archive]
        )
        return path.parent if path and path.name != archive else path

    def load(self, data_dir: Path | None) -> Dataset:
        """Return the training folder, class by class."""
        path = self.find(data_dir)
        if path is None:
            (archive,) = self.publisher.checksums
            files = f"{archive} or the folder {archive.removesuffix('.zip')}"
            raise missing_data_error(self.title, self.name, data_dir, files)
        sources = [path] if path.is_file() else _class_folders(path)
        arrays = load_cached(
            self.name, data_dir, "images", sources, lambda new: _decode_jpegs(path, self, new)
        )
        return self.build_dataset(arrays)


DATASETS: dict[str, ImageDataset] = {
    dataset.name: dataset
    for dataset in (
        IdxDataset(
            name="mnist",
            title="MNIST",
            publisher=Publisher(
                # torchvision's mirror: the publisher's own address no longer responds.
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                {
                    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
                    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
                    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
                },
            ),
            classes=10,
            label_names=tuple("0123456789"),
            class_sizes=(6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958),
            other_note="not MNIST as published, by the number of each digit (Fashion-MNIST's files?)",
        ),
        IdxDataset(
            name="fmnist",
            title="Fashion-MNIST",
            publisher=Publisher(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                {
                    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
                    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
                    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
                },
            ),
            classes=10,
            label_names=(
                "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
                "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
            ),
            class_sizes=(7000,) * 10,
            other_note="not Fashion-MNIST as published, 7,000 of each class (MNIST's files?)",
            system_folder=Path("/usr/share/datasets/fashion-mnist"),
            system_hint="install the Debian package dataset-fashion-mnist",
        ),
        CifarDataset(
            name="cifar10",
            title="CIFAR-10",
            publisher=Publisher(
                "https://www.cs.toronto.edu/~kriz/",
                {"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"},
            ),
            sizes={**{f"data_batch_{k}": 10_000 for k in range(1, 6)}, "test_batch": 10_000},
            candidates=(
                "cifar-10-batches-bin/test_batch.bin", "test_batch.bin", "cifar-10-binary.tar.gz",
                "cifar-10-batches-py/test_batch", "test_batch", "cifar-10-python.tar.gz",
            ),
            classes=10,
            label_bytes=1,
            label_key=b"labels",
            label_names=(
                "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
            ),
        ),
        CifarDataset(
            name="cifar100",
            title="CIFAR-100",
            publisher=Publisher(
                "https://www.cs.toronto.edu/~kriz/",
                {"cifar-100-binary.tar.gz": "md5:03b5dce01913d631647c71ecec9e9cb8"},
            ),
            sizes={"train": 50_000, "test": 10_000},
            # The python version's files are called train and test, so only its own folder is searched.
            candidates=(
                "cifar-100-binary/test.bin", "test.bin", "cifar-100-binary.tar.gz",
                "cifar-100-python/test", "cifar-100-python.tar.gz",
            ),
            classes=100,
            label_bytes=2,  # coarse label, fine label
            label_key=b"fine_labels",
        ),
        TinyImageNet(
            name="tiny_imagenet",
            title="Tiny-ImageNet",
            publisher=Publisher(
                "http://cs231n.stanford.edu/",
                {"tiny-imagenet-200.zip": "md5:90528d7ca1a48142e341f4ef8d21d0de"},
            ),
            classes=200,
            images_per_class=500,
            side=64,
        ),
    )
}  # fmt: skip


def read_idx(path: Path, limit: int) -> ByteArray:
    """Return the array of bytes in an IDX file, read-only.

    Args:
        path: The file; gzip is recognized by content.
        limit: Maximum number of unpacked bytes.

    Raises:
        InvalidInputError: The file cannot be read, or is not an IDX file of bytes.
    """
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_gzip else path.open("rb") as file:
            raw = file.read(limit + 1)
    except (OSError, EOFError, ZlibError) as error:
        raise InvalidInputError(f"cannot read {path}: {error}; fetch the file again") from None
    if len(raw) > limit:
        raise InvalidInputError(
            f"{path} has more than the {limit} bytes that were expected; fetch the file again"
        )
    rank = raw[3] if len(raw) > 3 else 0
    start = 4 + 4 * rank
    if not raw.startswith(b"\0\0\x08") or rank == 0 or len(raw) < start:
        raise InvalidInputError(
            f"{path} is not an IDX file of bytes: it starts with {raw[:4].hex() or 'nothing'}, expected "
            "000008 and the number of axes; fetch the file again"
        )
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", rank, offset=4))
    if len(raw) != start + prod(shape):
        raise InvalidInputError(
            f"{path} has {len(raw)} bytes, but its header announces {shape}, which takes "
            f"{start + prod(shape)}; fetch the file again"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _find_idx_file(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, folder / name.removesuffix(".gz"))
    return next((path for path in candidates if path.is_file()), None)


def _read_idx_pair(folder: Path, part: str) -> tuple[ByteArray, ByteArray]:
    """Return images and labels of one part."""
    paths = [_find_idx_file(folder, f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1")]
    images, labels = (read_idx(path, _MAX_IDX_BYTES) for path in paths if path)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise InvalidInputError(
            f"{paths[0]} has shape {images.shape} and {paths[1]} {labels.shape}; "
            "expected (n, 28, 28) and (n,): fetch the four files again"
        )
    if labels.max(initial=0) > 9:
        raise InvalidInputError(
            f"{paths[1]} has the label {labels.max()}, expected 0..9; fetch the four files again"
        )
    return images, labels


def _part_name(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".bin")


def _find_part_file(folder: Path, part: str) -> Path:
    """Return the file of one part, of either version."""
    path = next((path for path in (folder / f"{part}.bin", folder / part) if path.is_file()), None)
    if path is None:
        raise InvalidInputError(f"{folder} has no file for the {part} set; fetch the archive again")
    return path


def _decode_cifar(path: Path, dataset: CifarDataset, new: NewArray) -> None:
    """Fill `x` and `y` from a folder or an archive, which is read only once."""
    total = sum(dataset.sizes.values())
    x, y = new("x", (total, 3, 32, 32), np.uint8), new("y", (total,), np.int64)
    starts = dict(zip(dataset.sizes, [0, *accumulate(dataset.sizes.values())], strict=False))
    missing_parts = dict.fromkeys(dataset.sizes)
    try:
        for name, stream in _iterate_cifar_files(path, dataset):
            part = _part_name(name)
            read = _read_binary if name.endswith(".bin") else _read_python
            images, labels = read(stream, name, dataset)
            _check_part(part, images, labels, path, dataset)
            rows = slice(starts[part], starts[part] + dataset.sizes[part])
            x[rows], y[rows] = images.reshape(-1, 3, 32, 32), labels
            missing_parts.pop(part, None)
    except READ_ERRORS as error:
        raise damaged_file_error(path, error) from None
    if missing_parts:
        raise InvalidInputError(f"{path} has no {' and no '.join(missing_parts)} set; fetch it again")


def _iterate_cifar_files(path: Path, dataset: CifarDataset) -> Iterator[tuple[str, IO[bytes]]]:
    """Iterate over the names and files of the parts, in the order of the archive."""
    if path.is_dir():
        for part in dataset.sizes:
            part_path = _find_part_file(path, part)
            with part_path.open("rb") as file:
                yield str(part_path), file
        return
    for name, content in iterate_members(path, _MAX_CIFAR_BYTES):
        if _part_name(name) in dataset.sizes:
            yield f"{path}:{name}", content


def _read_binary(stream: IO[bytes], name: str, dataset: CifarDataset) -> tuple[ByteArray, ByteArray]:
    """Return (n, 3072) pixels, red plane first, and (n,) labels of the binary version."""
    width = dataset.label_bytes + _CIFAR_PIXELS
    expected = width * dataset.sizes[_part_name(name)]
    content = np.frombuffer(
        stream.read(expected + 1), np.uint8
    )  # limited: the size in the archive may be wrong
    if content.size != expected:
        size = "more" if content.size > expected else f"only {content.size}"
        raise InvalidInputError(f"{name} has {size} bytes, expected {expected}; fetch the archive again")
    rows = content.reshape(-1, width)
    return rows[:, dataset.label_bytes :], rows[:, dataset.label_bytes - 1]


def _read_python(stream: IO[bytes], name: str, dataset: CifarDataset) -> tuple[ByteArray, npt.NDArray[Any]]:
    """Return pixels and labels of the python version; types and shapes are not checked yet."""
    values = safe_pickle.load(stream, encoding="bytes")
    if not isinstance(values, dict) or not {b"data", dataset.label_key} <= set(values):
        raise InvalidInputError(
            f"{name} has no data and {dataset.label_key.decode()}; fetch the archive again"
        )
    return np.asarray(values[b"data"]), np.asarray(values[dataset.label_key])


def _check_part(
    part: str, images: ByteArray, labels: npt.NDArray[Any], path: Path, dataset: CifarDataset
) -> None:
    n, last = dataset.sizes[part], dataset.classes - 1
    if [images.shape, images.dtype.name, labels.shape] != [(n, _CIFAR_PIXELS), "uint8", (n,)]:
        raise InvalidInputError(
            f"the {part} set in {path} has pixels {images.dtype}{images.shape} and labels {labels.shape}, "
            f"expected uint8({n}, {_CIFAR_PIXELS}) and ({n},); fetch it again"
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > last:
        raise InvalidInputError(f"the {part} set in {path} has labels outside of 0..{last}; fetch it again")


def _class_folders(folder: Path) -> list[Path]:
    """Return the folders of images, whose times change when a file is added or removed."""
    return sorted(path for path in (folder / "train").glob("*/images") if path.is_dir())


def _decode_jpegs(path: Path, dataset: TinyImageNet, new: NewArray) -> None:
    try:
        if path.is_dir():
            names = [str(file) for folder in _class_folders(path) for file in folder.iterdir()]
            _fill_pixels(
                _group_by_class(names, path, dataset), lambda name: Path(name).read_bytes(), dataset, new
            )
        else:
            with zipfile.ZipFile(path) as archive:  # it can be read by several threads
                train = [info for info in archive.infolist() if "/train/" in info.filename]
                names = [info.filename for info in train if info.file_size <= _MAX_JPEG_BYTES]
                _fill_pixels(_group_by_class(names, path, dataset), archive.read, dataset, new)
    except READ_ERRORS as error:
        raise damaged_file_error(path, error) from None


def _group_by_class(names: Sequence[str], path: Path, dataset: TinyImageNet) -> list[list[str]]:
    """Return the images `.../train/CLASS/images/FILE.JPEG` by class; classes and files are sorted by name."""
    classes: dict[str, list[str]] = {}
    for name in sorted(names):
        file = PurePosixPath(Path(name).as_posix())
        if file.suffix.lower() in (".jpeg", ".jpg") and file.parent.name == "images":
            classes.setdefault(file.parent.parent.name, []).append(name)
    expected = dataset.images_per_class
    wrong = [f"{len(files)} images in {name}" for name, files in classes.items() if len(files) != expected]
    if len(classes) != dataset.classes or wrong:
        count = ", ".join([f"{len(classes)} classes", *wrong[:1]])
        raise InvalidInputError(
            f"{path} has {count}; expected {dataset.classes} classes of {expected} images: fetch it again"
        )
    return [classes[name] for name in sorted(classes)]


def _fill_pixels(
    classes: Sequence[Sequence[str]], read: Callable[[str], bytes], dataset: TinyImageNet, new: NewArray
) -> None:
    total = dataset.classes * dataset.images_per_class
    x = new("x", (total, 3, dataset.side, dataset.side), np.uint8)
    y = new("y", (total,), np.int64)
    y[:] = np.repeat(np.arange(dataset.classes), dataset.images_per_class)

    def fill_class(label: int) -> None:
        for row, name in enumerate(classes[label], label * dataset.images_per_class):
            x[row] = _decode_jpeg(read(name), name, dataset.side)

    # Threads, not processes: the decoder releases Python's lock, and nothing has to be sent.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for k, _ in enumerate(threads.map(fill_class, range(dataset.classes)), 1):
            if k % max(1, dataset.classes // 10) == 0:
                print(
                    f"feddbe: decoding Tiny-ImageNet (once): {100 * k // dataset.classes} %", file=sys.stderr
                )


def _decode_jpeg(content: bytes, name: str, side: int) -> npt.NDArray[np.uint8]:
    """Return (3, side, side) pixels; a few of the JPEGs are gray."""
    from PIL import Image, UnidentifiedImageError  # here: only this function needs it

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            if image.size != (side, side):  # before it is decoded: headers are not trusted
                raise InvalidInputError(f"{name} is {image.width}x{image.height}, expected {side}x{side}")
            pixels = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, Image.DecompressionBombError, *READ_ERRORS) as error:
        raise InvalidInputError(f"cannot decode {name}: {error}; fetch the images again") from None
    return pixels.transpose(2, 0, 1)
