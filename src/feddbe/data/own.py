"""A user's own arrays: x, y and perhaps a client column in one .npz file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from feddbe.data.dataset import Dataset
from feddbe.errors import BadInput

__all__ = ["load_npz", "open_npz"]

Array = npt.NDArray[Any]


@contextmanager
def open_npz(path: Path) -> Iterator[Mapping[str, Array]]:
    """The arrays of an .npz file, read on demand; a damaged or pickled file becomes a one-line error.

    Only look arrays up inside the `with`: any other error there is taken for damage to the file.
    """
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                raise BadInput(f"{path} is not an .npz file; write one with numpy.savez")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                yield arrays
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}; give the path of an .npz file") from None
    except BadInput:
        raise
    except Exception as error:  # damaged bytes make zipfile, zlib and numpy's header parser raise anything
        reason = " ".join(str(error).split())
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
                raise BadInput(
                    f"{path} has no array '{name}'; it has: {', '.join(arrays) or 'nothing'}; needed are "
                    "x and y, and client if there is one"
                )
        x, y = np.asarray(arrays["x"]), np.asarray(arrays["y"])
        client = np.asarray(arrays["client"]) if "client" in arrays else None
    x = _samples(x, path)
    y = _labels(y, len(x), path)
    images = x.dtype == np.uint8
    return Dataset(
        name=path.name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        classes=int(y.max()) + 1,
        scale=2 / 255 if images else 1.0,
        shift=-1.0 if images else 0.0,
        client=None if client is None else _clients(client, len(x), path),
    )


def _samples(x: Array, path: Path) -> Array:
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise BadInput(
            f"x in {path} is {x.dtype}; accepted are uint8 (images, 0..255) and float32 (numbers as they are)"
        )
    if x.ndim < 2 or x.size == 0:
        raise BadInput(
            f"x in {path} has shape {x.shape}; it needs at least one sample and one value per sample, "
            "e.g. (n, height, width) or (n, features)"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what does not fit float32 becomes inf and is named below
            x = x.astype(np.float32, copy=False)
        bad = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
        if bad.size:
            raise BadInput(
                f"x in {path} has NaN or infinite values (as float32), first in row {bad[0]}, in {bad.size} "
                "rows; remove or replace them"
            )
    return np.ascontiguousarray(x[:, np.newaxis] if x.ndim == 3 else x)


def _column(values: Array, name: str, n: int, path: Path) -> None:
    if values.shape != (n,):
        raise BadInput(f"{name} in {path} has shape {values.shape}, but x has {n} samples; it must be ({n},)")


def _labels(y: Array, n: int, path: Path) -> npt.NDArray[np.int64]:
    _column(y, "y", n, path)
    if y.dtype.kind not in "iuf":
        raise BadInput(f"y in {path} is {y.dtype}; it must hold whole numbers 0, 1, 2, ...")
    if y.dtype.kind == "f":
        broken = y[~(np.isfinite(y) & (y == np.trunc(y)))]
        if broken.size:
            raise BadInput(
                f"y in {path} has the label {broken[0]}; labels must be whole numbers 0, 1, 2, ..."
            )
    lowest, highest = int(y.min()), int(y.max())
    if lowest < 0:
        raise BadInput(f"y in {path} has the label {lowest}; labels must not be negative: number them from 0")
    if lowest == highest:
        raise BadInput(f"y in {path} has only the label {lowest}; at least 2 classes are needed")
    if highest >= n:  # else one stray number would make a model of that many outputs
        raise BadInput(
            f"y in {path} has the label {highest}, but there are only {n} samples; "
            "number the classes 0, 1, 2, ... without gaps"
        )
    return y.astype(np.int64)


def _clients(client: Array, n: int, path: Path) -> npt.NDArray[np.int64]:
    _column(client, "client", n, path)
    if client.dtype.kind not in "iuUS":
        raise BadInput(
            f"client in {path} is {client.dtype}; it must hold integers or strings, one per sample"
        )
    return np.unique(client, return_inverse=True)[1].astype(np.int64)
