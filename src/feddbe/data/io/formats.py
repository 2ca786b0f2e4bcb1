"""The IDX format of the MNIST family: two zero bytes, type, rank, big-endian sizes, then the values."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple
from zlib import error as ZlibError

import numpy as np
import numpy.typing as npt
import torch

from feddbe.data.dataset import Dataset
from feddbe.data.io import safe_pickle
from feddbe.data.io.archives import DAMAGE, damaged, members
from feddbe.data.io.cache import New
from feddbe.data.io.download import Progress, cache_folder, download
from feddbe.errors import BadInput

__all__ = ["Form", "decode", "file_of", "find_in", "get_files", "read_idx", "read_set"]

_UBYTE = b"\0\0\x08"


def read_idx(path: Path, limit: int) -> npt.NDArray[np.uint8]:
    """The (read-only) array of bytes in an IDX file, gzipped or not; every byte must be accounted for.

    More than `limit` bytes are not unpacked.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            raw = file.read(limit + 1)
    except (OSError, EOFError, ZlibError) as error:
        raise BadInput(f"cannot read {path}: {error}; fetch the file again") from None
    if len(raw) > limit:
        raise BadInput(f"{path} has more than the {limit} bytes that were expected; fetch the file again")
    rank = raw[3] if len(raw) > 3 else 0
    start = 4 + 4 * rank
    if not raw.startswith(_UBYTE) or rank == 0 or len(raw) < start:
        raise BadInput(
            f"{path} is not an IDX file of bytes: it starts with {raw[:4].hex() or 'nothing'}, expected "
            "000008 and the number of axes; fetch the file again"
        )
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", rank, offset=4))
    if len(raw) != start + prod(shape):
        raise BadInput(
            f"{path} has {len(raw)} bytes, but its header announces {shape}, which takes "
            f"{start + prod(shape)}; fetch the file again"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


_LIMIT = 100_000_000
"""Bytes of an unpacked file, generously: 60,000 images of 28x28 are 47 MB."""


def _file(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}.gz", folder / name)
    return next((path for path in candidates if path.is_file()), None)


def find_in(places: Iterable[Path], names: Iterable[str]) -> Path | None:
    """The first place that has all four files, gzipped or not."""
    return next((place for place in places if all(_file(place, name) for name in names)), None)


def read_set(
    folder: Path, name: str, counts: Sequence[int], other: str, label_names: tuple[str, ...]
) -> Dataset:
    """Train set then test set, in file order. `counts`: the images of each class as published, and `other`
    what to say of files that have others."""
    parts = [_pair(folder, part) for part in ("train", "t10k")]
    y = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    published = np.array_equal(np.bincount(y, minlength=10), counts)
    return Dataset(
        name=name,
        x=torch.from_numpy(np.concatenate([images for images, _ in parts])[:, np.newaxis]),
        y=torch.from_numpy(y),
        classes=10,
        scale=2 / 255,
        shift=-1.0,
        note="" if published else other,
        label_names=label_names,
    )


def _pair(folder: Path, part: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    paths = [_file(folder, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")]
    images, labels = (read_idx(path, _LIMIT) for path in paths if path)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise BadInput(
            f"{paths[0]} has shape {images.shape} and {paths[1]} {labels.shape}; "
            "expected (n, 28, 28) and (n,): fetch the four files again"
        )
    if labels.max(initial=0) > 9:
        raise BadInput(f"{paths[1]} has the label {labels.max()}, expected 0..9; fetch the four files again")
    return images, labels


def get_files(
    name: str, url: str, md5: dict[str, str], data_dir: Path | None, progress: Progress | None, again: bool
) -> Path:
    """Download the four files; what is already there and whole is kept."""
    folder = cache_folder(name, data_dir)
    for file, checksum in md5.items():
        download(f"{url}{file}.gz", folder / f"{file}.gz", f"md5:{checksum}", progress, again)
    return folder


_CIFAR_LIMIT = 500_000_000
"""Bytes of an unpacked archive, generously."""
_PIXELS = 3072

Images = tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]
"""(n, 3072) pixels, red plane first, and (n,) labels."""


class Form(NamedTuple):
    """How one of the sets is written."""

    sizes: Mapping[str, int]
    """Files, and images in each, in the order in which they are joined."""
    labels: int
    """Bytes of labels before the pixels; the last one is taken."""
    key: bytes
    """The name of the labels in the python version."""
    classes: int


def file_of(folder: Path, part: str) -> Path:
    """The file of one part, of either version."""
    path = next((path for path in (folder / f"{part}.bin", folder / part) if path.is_file()), None)
    if path is None:
        raise BadInput(f"{folder} has no file for the {part} set; fetch the archive again")
    return path


def decode(place: Path, form: Form, new: New) -> None:
    """Fill `x` and `y` from a folder or an archive, which is read only once."""
    total = sum(form.sizes.values())
    x, y = new("x", (total, 3, 32, 32), np.uint8), new("y", (total,), np.int64)
    starts = dict(zip(form.sizes, [0, *accumulate(form.sizes.values())], strict=False))
    found = set()
    try:
        for name, stream in _files(place, form):
            part = _part(name)
            binary = name.endswith(".bin")
            images, labels = _binary(stream, name, form) if binary else _python(stream, name, form)
            _check(part, images, labels, place, form)
            rows = slice(starts[part], starts[part] + form.sizes[part])
            x[rows], y[rows] = images.reshape(-1, 3, 32, 32), labels
            found.add(part)
    except DAMAGE as error:
        raise damaged(place, error) from None
    if lacking := [part for part in form.sizes if part not in found]:
        raise BadInput(f"{place} has no {' and no '.join(lacking)} set; fetch it again")


def _part(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".bin")


def _files(place: Path, form: Form) -> Iterator[tuple[str, IO[bytes]]]:
    """The files with their names, in the order of the archive."""
    if place.is_dir():
        for part in form.sizes:
            path = file_of(place, part)
            with path.open("rb") as file:
                yield str(path), file
        return
    for name, content in members(place, _CIFAR_LIMIT):
        if _part(name) in form.sizes:
            yield f"{place}:{name}", content


def _binary(stream: IO[bytes], name: str, form: Form) -> Images:
    width = form.labels + _PIXELS
    expected = width * form.sizes[_part(name)]
    content = np.frombuffer(stream.read(expected + 1), np.uint8)  # no more: the archive may lie
    if content.size != expected:
        found = "more" if content.size > expected else f"only {content.size}"
        raise BadInput(f"{name} has {found} bytes, expected {expected}; fetch the archive again")
    rows = content.reshape(-1, width)
    return rows[:, form.labels :], rows[:, form.labels - 1]


def _python(stream: IO[bytes], name: str, form: Form) -> Images:
    values = safe_pickle.load(stream, encoding="bytes")
    if not isinstance(values, dict) or not {b"data", form.key} <= set(values):
        raise BadInput(f"{name} has no data and {form.key.decode()}; fetch the archive again")
    return np.asarray(values[b"data"]), np.asarray(values[form.key])


def _check(
    part: str, images: npt.NDArray[np.uint8], labels: npt.NDArray[Any], place: Path, form: Form
) -> None:
    n, last = form.sizes[part], form.classes - 1
    if [images.shape, images.dtype.name, labels.shape] != [(n, _PIXELS), "uint8", (n,)]:
        raise BadInput(
            f"the {part} set in {place} has pixels {images.dtype}{images.shape} and labels {labels.shape}, "
            f"expected uint8({n}, {_PIXELS}) and ({n},); fetch it again"
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > last:
        raise BadInput(f"the {part} set in {place} has labels outside of 0..{last}; fetch it again")
