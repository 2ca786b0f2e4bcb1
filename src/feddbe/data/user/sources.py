"""A user's own data: which of the forms it has, and who reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from feddbe.data.dataset import Dataset
from feddbe.data.io.download import plain
from feddbe.data.user.arrays import EXACT, Array, load_npz, of_arrays
from feddbe.data.user.arrow import is_saved, load_named, load_parquet, load_saved
from feddbe.data.user.folders import is_pfllib, load_folder, load_pfllib
from feddbe.data.user.query import FOLDER, NPZ, TABLE, Choice, chosen
from feddbe.data.user.tables import Table, as_dataset, load_csv
from feddbe.errors import BadInput, one_line, short
from feddbe.paths import expand

FORMS = ("FILE.npz", "FILE.csv", "FILE.parquet", "FOLDER", "hf:NAME")


def load_own(wanted: str) -> Dataset | None:
    """The data set at this path or name, of which `?label=...` may choose columns; None if it is no form."""
    place, _, query = wanted.partition("?")
    path = expand(place)
    kind, folder = path.suffix, path.is_dir()
    choice = chosen(query)
    plain(path)
    saved = folder and is_saved(path)
    table = place.startswith("hf:") or saved or kind in (".csv", ".tsv", ".parquet")
    images = folder and not saved and not is_pfllib(path)
    choice.only(TABLE if table else FOLDER if images else NPZ if kind == ".npz" else (), place)
    if place.startswith("hf:"):
        return load_named(place.removeprefix("hf:"), choice)
    if saved:
        return load_saved(path, choice)
    if kind in (".csv", ".tsv"):
        return load_csv(path, choice)
    if kind == ".parquet":
        return load_parquet(path, choice)
    if kind == ".npz":
        return load_npz(path, choice.words)
    if folder:
        return load_folder(path, choice.resize) if images else load_pfllib(path)
    if len(path.parts) > 1:
        raise BadInput(f"there is no file or folder {path}; accepted are {', '.join(FORMS)}")
    return None


_FORMS = (
    "a name or path, a feddbe.Dataset, (x, y), (x, y, client), {'x': ..., 'y': ..., 'words': ...}, a pandas "
    "frame, (frame, 'label=COLUMN&client=COLUMN'), or a torch Dataset of pairs (x, y)"
)


def from_object(data: Any) -> Dataset:
    """The data set that somebody holds in memory."""
    if isinstance(data, Dataset):
        return data
    if _is_frame(data):
        return _frame(data, Choice())
    if isinstance(data, Mapping):
        arrays = {str(name): _array(values, str(name)) for name, values in data.items()}
        return of_arrays("arrays", arrays, "data", ", ".join(arrays))
    if isinstance(data, tuple) and len(data) == 2 and _is_frame(data[0]) and isinstance(data[1], str):
        return _frame(data[0], chosen(data[1].removeprefix("?")))
    if isinstance(data, tuple) and len(data) in (2, 3):
        arrays = {name: _array(part, name) for name, part in zip(("x", "y", "client"), data, strict=False)}
        return of_arrays("arrays", arrays, "data", ", ".join(arrays))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list | tuple | str):
        return _samples(data)
    raise BadInput(f"data is a {type(data).__name__}; accepted are {_FORMS}")


def _is_frame(data: Any) -> bool:
    """Without importing pandas for who does not use it."""
    return hasattr(data, "columns") and hasattr(data, "iloc")


def _array(values: Any, name: str) -> Array:
    """Of a tensor, an array, a series or a list."""
    try:
        found = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadInput(f"'{name}' in data is no array: {one_line(error)}") from None
    if found.dtype == object:
        texts = [str(value) for value in found.ravel()] if found.ndim == 1 else None
        if texts is None or not all(isinstance(value, str) for value in found):
            raise BadInput(f"'{name}' in data holds Python objects; give numbers or text of one shape")
        found = np.array(texts)
    return found


def _samples(data: Any) -> Dataset:
    """All samples of a torch Dataset: (x, y) or (x, y, client) each."""
    columns: list[list[Any]] = []
    for at in range(len(data)):
        sample = data[at]
        if not isinstance(sample, tuple | list) or len(sample) not in (2, 3):
            raise BadInput(f"sample {at} of data is a {type(sample).__name__}, not (x, y) or (x, y, client)")
        columns = columns or [[] for _ in sample]
        for column, value in zip(columns, sample, strict=False):
            column.append(_array(value, "x"))
    if not columns:
        raise BadInput("data has no samples")
    shapes = {x.shape for x in columns[0]}
    if len(shapes) > 1:
        one, other = sorted(shapes)[:2]
        raise BadInput(f"samples of data have shapes {one} and {other}; bring them to one (a transform)")
    arrays = {name: np.stack(part) for name, part in zip(("x", "y", "client"), columns, strict=False)}
    return of_arrays("samples", arrays, "data", ", ".join(arrays))


def _frame(frame: Any, choice: Choice) -> Dataset:
    """A pandas frame, as a table in a file would be."""
    if not len(frame):
        raise BadInput("the frame has no rows")
    names = [str(name) for name in frame.columns]
    if len({*names}) < len(names):
        raise BadInput(f"the frame has two columns of one name; it has: {short(', '.join(names))}")

    def read(name: str) -> Array:
        column = frame.iloc[:, names.index(name)]
        kind = getattr(column.dtype, "kind", "O")
        if kind in "iufb" and not column.isna().any():
            return np.asarray(column)
        too_large = kind in "iu" and bool((column.dropna().abs() > EXACT).any())
        if kind in "iufb" and not too_large:
            return np.asarray(column.astype("float64"))
        found = np.empty(len(column), object)
        found[:] = [None if gap else str(v) for v, gap in zip(column, column.isna(), strict=True)]
        return found

    return as_dataset(Table("the frame", names, read), choice, "frame")
