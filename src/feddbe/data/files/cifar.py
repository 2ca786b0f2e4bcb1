"""The CIFAR sets in either of their publisher's forms, binary or python, unpacked or in the archive.

Both hold the same images in the same order. Pickles are read without executing anything in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feddbe.data.files import safe_pickle
from feddbe.data.files.archives import DAMAGE, damaged, members
from feddbe.data.files.cache import New
from feddbe.errors import BadInput

__all__ = ["Form", "decode", "file_of"]

_LIMIT = 500_000_000
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
    for name, content in members(place, _LIMIT):
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
