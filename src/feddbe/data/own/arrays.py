"""A user's own arrays: x, y and perhaps a client column in one .npz file; and what all forms share."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from feddbe.data.dataset import Dataset
from feddbe.data.files.archives import check_zip
from feddbe.data.files.places import plain
from feddbe.errors import BadInput, short

__all__ = ["Array", "clients_of", "labels_of", "load_npz", "made", "open_npz", "samples_of"]

Array = npt.NDArray[Any]


def made(name: str, x: Array, y: Array, classes: int, client: Array | None = None, **more: Any) -> Dataset:
    """Arrays as a data set; uint8 is taken for pixels, which a model gets as -1..1.

    `name` keeps its suffix, slash or prefix: a folder `har` must not get the defaults of the known set.
    """
    pixels = x.dtype == np.uint8
    return Dataset(
        name=name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        classes=classes,
        scale=2 / 255 if pixels else 1.0,
        shift=-1.0 if pixels else 0.0,
        client=client,
        **more,
    )


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
            with np.load(file, allow_pickle=False) as arrays:
                yield arrays
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}; give the path of an .npz file") from None
    except BadInput:
        raise
    except Exception as error:  # damaged bytes make zipfile, zlib and numpy's header parser raise anything
        reason = short(" ".join(str(error).split()), 500)
        if "Object arrays" in reason:
            reason = "it holds pickled Python objects, which are never read; store plain arrays"
        else:
            reason = f"{reason or type(error).__name__}; write it again with numpy.savez"
        raise BadInput(f"cannot read {path}: {reason}") from None


def load_npz(path: Path) -> Dataset:
    """The data set in a user's file: uint8 images or float numbers `x`, labels `y`, optional `client`."""
    with open_npz(path) as arrays:
        for name in ("x", "y"):
            if name not in arrays:
                there = short(", ".join(arrays)) or "nothing"
                raise BadInput(
                    f"{path} has no array '{name}'; it has: {there}; needed are "
                    "x and y, and client if there is one"
                )
        x, y = np.asarray(arrays["x"]), np.asarray(arrays["y"])
        client = np.asarray(arrays["client"]) if "client" in arrays else None
    channels_last = x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
    if channels_last:
        x = x.transpose(0, 3, 1, 2)
    x = samples_of(x, f"x in {path}")
    y, classes = labels_of(y, len(x), f"y in {path}")
    client = None if client is None else clients_of(client, len(x), f"client in {path}")
    note = "images were given with the channels last" if channels_last else ""
    return made(path.name, x, y, classes, client, note=note)


def samples_of(x: Array, what: str) -> Array:
    """Samples as uint8 or float32, checked; grey images get an axis for their channel."""
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
    return np.ascontiguousarray(x[:, np.newaxis] if x.ndim == 3 else x)


def _column(values: Array, n: int, what: str) -> None:
    if values.shape != (n,):
        raise BadInput(f"{what} has shape {values.shape}, but x has {n} samples; it must be ({n},)")


def labels_of(y: Array, n: int, what: str) -> tuple[npt.NDArray[np.int64], int]:
    """Labels from 0 on and how many classes there are; text is numbered in sorted order."""
    _column(y, n, what)
    if y.dtype.kind in "US":
        names, y = np.unique(y, return_inverse=True)
        if len(names) < 2:
            raise BadInput(f"{what} has only the label '{short(names[0])}'; at least 2 classes are needed")
        return y.astype(np.int64), len(names)
    if y.dtype.kind not in "iuf":
        raise BadInput(f"{what} is {y.dtype}; it must hold whole numbers 0, 1, 2, ... or text")
    if y.dtype.kind == "f":
        broken = y[~(np.isfinite(y) & (y == np.trunc(y)))]
        if broken.size:
            raise BadInput(f"{what} has the label {broken[0]}; labels must be whole numbers 0, 1, 2, ...")
    lowest, highest = int(y.min()), int(y.max())
    if lowest < 0:
        raise BadInput(f"{what} has the label {lowest}; labels must not be negative: number them from 0")
    if lowest == highest:
        raise BadInput(f"{what} has only the label {lowest}; at least 2 classes are needed")
    if highest >= n:  # else one stray number would make a model of that many outputs
        raise BadInput(
            f"{what} has the label {highest}, but there are only {n} samples; "
            "number the classes 0, 1, 2, ... without gaps"
        )
    return y.astype(np.int64), highest + 1


def clients_of(client: Array, n: int, what: str) -> npt.NDArray[np.int64]:
    """Clients from 0 on, in the order of their ids."""
    _column(client, n, what)
    if client.dtype.kind not in "iuUS":
        raise BadInput(f"{what} is {client.dtype}; it must hold integers or strings, one per sample")
    return np.unique(client, return_inverse=True)[1].astype(np.int64)
