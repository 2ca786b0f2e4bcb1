"""A user's own arrays: x, y and perhaps a client column in one .npz file; and what all forms share."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.npyio import NpzFile

from feddbe.data import rows
from feddbe.data.dataset import Dataset
from feddbe.data.io.archives import check_zip
from feddbe.data.io.download import plain
from feddbe.errors import BadInput, short

Array = npt.NDArray[Any]

EXACT = 2**53
"""float64 holds all integers up to this one."""
_INTEGER = re.compile("[+-]?[0-9]+")


class Numbered(NamedTuple):
    """A column of names as numbers from 0 on, and the names in that order."""

    numbers: npt.NDArray[np.int64]
    names: tuple[str, ...]


def made(name: str, x: Array, y: Numbered, client: Numbered | None = None, **more: Any) -> Dataset:
    """Arrays as a data set; uint8 is taken for pixels, which a model gets as -1..1.

    `name` keeps its suffix, slash or prefix: a folder `har` must not get the defaults of the known set.
    """
    pixels = x.dtype == np.uint8
    if y.names[0] == "-1" and len(y.names) > 2:  # where others write -1 for a row without a label
        note = more.get("note")
        more["note"] = f"{note}; -1 is a class" if note else "-1 is a class"
    return Dataset(
        name=name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y.numbers),
        classes=len(y.names),
        scale=2 / 255 if pixels else 1.0,
        shift=-1.0 if pixels else 0.0,
        client=None if client is None else client.numbers,
        label_names=y.names,
        client_names=() if client is None else client.names,
        **more,
    )


class _PickledArrayError(Exception):
    """An array of Python objects was looked up."""


class _PlainNpz(NpzFile):
    """An .npz file of which pickled arrays are recognized by their headers, before numpy refuses them."""

    def __getitem__(self, key: str) -> Array:
        assert self.zip is not None
        member = key if key in self.zip.namelist() else f"{key}.npy"
        with self.zip.open(member) as file:
            version = np.lib.format.read_magic(file)
            is_old = version == (1, 0)
            read_header = (
                np.lib.format.read_array_header_1_0 if is_old else np.lib.format.read_array_header_2_0
            )
            if read_header(file)[2].hasobject:
                raise _PickledArrayError
        return super().__getitem__(key)


@contextmanager
def open_npz(path: Path) -> Iterator[Mapping[str, Array]]:
    """The arrays of an .npz file, read on demand; a damaged or pickled file becomes a one-line error.

    Only look arrays up inside the `with`: any other error there is taken for damage to the file.
    """
    plain(path)
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                raise BadInput(f"{path} is not an .npz file; write one with numpy.savez")
            file.seek(0)
            with zipfile.ZipFile(file) as archive:
                check_zip(archive, path)
            file.seek(0)
            with _PlainNpz(file, allow_pickle=False) as arrays:
                yield arrays
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}; give the path of an .npz file") from None
    except _PickledArrayError:
        raise BadInput(
            f"cannot read {path}: it holds pickled Python objects, which are never read; store plain arrays"
        ) from None
    except BadInput:
        raise
    except Exception as error:  # damaged bytes make zipfile, zlib and numpy's header parser raise anything
        reason = short(" ".join(str(error).split()) or type(error).__name__, 500)
        raise BadInput(f"cannot read {path}: {reason}; write it again with numpy.savez") from None


def load_npz(path: Path, words: int = 0) -> Dataset:
    """The data set in a user's file: uint8 images, float numbers or word numbers `x`, labels `y`, optional
    `client`; `words` is the size of the vocabulary, which the file may have, too."""
    with open_npz(path) as arrays:
        found = {name: np.asarray(arrays[name]) for name in ("x", "y", "client", "words") if name in arrays}
        there = ", ".join(arrays)
    return of_arrays(path.name, found, str(path), there, words)


def of_arrays(name: str, arrays: Mapping[str, Array], where: str, there: str = "", words: int = 0) -> Dataset:
    """The data set of arrays under their names; `there`: all the names, for who misses one."""
    for needed in ("x", "y"):
        if needed not in arrays:
            raise BadInput(
                f"{where} has no array '{needed}'; it has: {short(there) or 'nothing'}; needed are "
                "x and y, and client if there is one"
            )
    x = arrays["x"]
    channels_last = x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
    if channels_last:
        x = x.transpose(0, 3, 1, 2)
    known = np.asarray(arrays.get("words", 0))
    if x.dtype.kind in "iu" and x.dtype != np.uint8:
        words = words or (int(known) if known.shape == () and known.dtype.kind in "iu" else 0)
        x = _tokens(x, words, f"x in {where}")
    else:
        if words:
            raise BadInput(
                f"?words={words}: x in {where} is {x.dtype}, no word numbers (int16, int32, int64)"
            )
        x = samples_of(x, f"x in {where}")
    y = labels_of(arrays["y"], len(x), f"y in {where}")
    client = clients_of(arrays["client"], len(x), f"client in {where}") if "client" in arrays else None
    note = "images were given with the channels last" if channels_last else ""
    if x.dtype == np.float32 and x.ndim == 3:
        note = f"samples are sequences of {x.shape[1]} steps (grey images would be (n, 1, height, width))"
    return made(name, x, y, client, note=note, tokens=words)


def _tokens(x: Array, words: int, what: str) -> Array:
    """Word numbers, if somebody said that they are: a table of counts or codes looks the same."""
    if not words:
        raise BadInput(
            f"{what} is {x.dtype}; accepted are uint8 (images, 0..255) and float32 (numbers as they are), "
            "and word numbers if you say so: ?words=SIZE_OF_THE_VOCABULARY, or an array 'words' beside x"
        )
    if x.ndim != 2 or not x.size:
        raise BadInput(f"{what} has shape {x.shape}; word numbers must be (n, length), padded to one length")
    for wrong in x[(x < 0) | (x >= words)][:1]:
        raise BadInput(f"{what} has the word number {wrong}, with words = {words}; allowed: 0..{words - 1}")
    return np.ascontiguousarray(x, np.int32)


def samples_of(x: Array, what: str) -> Array:
    """Samples as uint8 or float32, checked; grey images (uint8) get an axis for their channel."""
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise BadInput(
            f"{what} is {x.dtype}; accepted are uint8 (images, 0..255) and float32 (numbers as they are)"
        )
    if x.ndim < 2 or x.size == 0:
        raise BadInput(
            f"{what} has shape {x.shape}; it needs at least one sample and one value per sample, "
            "e.g. (n, height, width) or (n, features)"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what does not fit float32 becomes inf and is named below
            x = x.astype(np.float32, copy=False)
        bad = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
        if bad.size:
            raise BadInput(
                f"{what} has NaN or infinite values (as float32), first in row {bad[0]}, in {bad.size} "
                "rows; remove or replace them"
            )
        return np.ascontiguousarray(x)
    return np.ascontiguousarray(x[:, np.newaxis] if x.ndim == 3 else x)


def _column(values: Array, n: int, what: str) -> None:
    if values.shape != (n,):
        raise BadInput(f"{what} has shape {values.shape}, but x has {n} samples; it must be ({n},)")


def labels_of(y: Array, n: int, what: str) -> Numbered:
    """The classes that there are, in sorted order: labels 1..3 are three classes."""
    _column(y, n, what)
    if y.dtype.kind not in "iufbUS":
        raise BadInput(f"{what} is {y.dtype}; it must hold whole numbers or text")
    if y.dtype.kind == "f":
        broken = y[~(np.isfinite(y) & (y == np.trunc(y)))]
        if broken.size:
            raise BadInput(f"{what} has the label {broken[0]}; labels must be whole numbers or text")
    found, numbers = np.unique(y, return_inverse=True)
    names = names_of(found)
    _check_classes(names, n, what)
    return Numbered(numbers.astype(np.int64), names)


def labels_of_text(labels: Sequence[str], what: str) -> Numbered:
    """Return classes that differ wherever the text does: "1", "01" and "1.0" are three.

    If all labels are numbers, their order is that of the values; integers of any length are exact.

    Raises:
        BadInput: If all labels are numbers and one is not whole, or if they do not name classes.
    """
    names = {*labels}
    values = {name: _number(name) for name in names}
    if all(value is not None for value in values.values()):
        for label in labels:
            value = values[label]
            if isinstance(value, float) and not value.is_integer():
                raise BadInput(f"{what} has the label {short(label)}; labels must be whole numbers or text")
        ordered = sorted(names, key=lambda name: (values[name], name))
    else:
        ordered = sorted(names)
    _check_classes(ordered, len(labels), what)
    place = {name: number for number, name in enumerate(ordered)}
    return Numbered(np.array([place[label] for label in labels], np.int64), tuple(ordered))


def _number(text: str) -> int | float | None:
    """Return the number that a text is, an int wherever it is written as one; None: it is not a number."""
    if _INTEGER.fullmatch(text):
        with suppress(ValueError):  # thousands of digits
            return int(text)
    return rows.number(text)


def _check_classes(names: Sequence[str], n: int, what: str) -> None:
    """Refuse the names of a single class, or of as many classes as there are rows."""
    if len(names) < 2:
        raise BadInput(f"{what} has only the label '{short(names[0])}'; at least 2 classes are needed")
    if len(names) == n > 2:
        raise BadInput(f"{what} has another label in each of {n} rows; it must name their classes")


def clients_of(client: Array, n: int, what: str) -> Numbered:
    """Clients from 0 on, in the order of their ids."""
    _column(client, n, what)
    if client.dtype.kind not in "iuUS":
        raise BadInput(f"{what} is {client.dtype}; it must hold integers or strings, one per sample")
    found, numbers = np.unique(client, return_inverse=True)
    return Numbered(numbers.astype(np.int64), names_of(found))


def names_of(found: Array) -> tuple[str, ...]:
    """How people write these values."""
    if found.dtype.kind == "S":
        return tuple(value.decode("utf-8", "replace") for value in found.tolist())
    values = found.tolist()
    return tuple(map(str, map(int, values) if found.dtype.kind == "f" else values))
