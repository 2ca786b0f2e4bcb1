"""Arrays of the user: an .npz file with x, y and perhaps client, PFLlib's folder of them, or Python objects.

Also what all forms of a user's data share: `build_dataset`, and the encoding of labels and clients.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from feddbe.data import rows, safe_pickle
from feddbe.data.dataset import Dataset
from feddbe.data.files import check_zip, require_regular_file
from feddbe.data.split import Split
from feddbe.data.user.query import parse_query
from feddbe.errors import InvalidInputError, one_line, truncate

Array = npt.NDArray[Any]

_INTEGER = re.compile("[+-]?[0-9]+")
_MAX_WORDS, _MAX_CLASSES = 1 << 20, 1 << 10
"""Accepted in PFLlib's folders, even with part of a data set; more only with as many words, or samples."""


class EncodedColumn(NamedTuple):
    """A column of names as numbers from 0 on, and the names in that order."""

    numbers: npt.NDArray[np.int64]
    names: tuple[str, ...]

    @classmethod
    def encode(cls, values: Sequence[Any], ordered: Sequence[Any]) -> EncodedColumn:
        """Number these values by their positions in `ordered`, their distinct values."""
        positions = {value: position for position, value in enumerate(ordered)}
        return cls(np.array([positions[value] for value in values], np.int64), tuple(map(str, ordered)))


def build_dataset(
    name: str, x: Array, y: EncodedColumn, client: EncodedColumn | None = None, **more: Any
) -> Dataset:
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


def read_npz(path: Path, wanted: Collection[str] | None = None) -> tuple[dict[str, Array], list[str]]:
    """Read arrays of an .npz file.

    Args:
        path: The file.
        wanted: Names of the arrays to read if they are there; None: all of them.

    Returns:
        The arrays by name, and the names of all arrays in the file.

    Raises:
        BadInput: The file is damaged, pickled, or unpacks to far more than it holds.
    """
    require_regular_file(path)
    arrays = {}
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                raise InvalidInputError(f"{path} is not an .npz file; write one with numpy.savez")
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, path)
            members = {name.removesuffix(".npy"): name for name in archive.namelist()}
            for name in members if wanted is None else [name for name in members if name in wanted]:
                with archive.open(members[name]) as file:
                    if _read_npy_type(file).hasobject:
                        raise InvalidInputError(
                            f"cannot read {path}: it holds pickled Python objects, which are never read; "
                            "store plain arrays"
                        )
                with archive.open(members[name]) as file:
                    arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        raise InvalidInputError(f"there is no file {path}; give the path of an .npz file") from None
    except InvalidInputError:
        raise
    except Exception as error:  # damaged bytes make zipfile, zlib and numpy's header parser raise anything
        reason = truncate(" ".join(str(error).split()) or type(error).__name__, 500)
        raise InvalidInputError(f"cannot read {path}: {reason}; write it again with numpy.savez") from None
    return arrays, list(members)


def _read_npy_type(file: IO[bytes]) -> np.dtype[Any]:
    """Read the header of an array and return the array's type."""
    is_first_version = np.lib.format.read_magic(file) == (1, 0)
    formats = np.lib.format
    read = formats.read_array_header_1_0 if is_first_version else formats.read_array_header_2_0
    dtype: np.dtype[Any] = read(file)[2]
    return dtype


def load_npz(path: Path, words: int = 0) -> Dataset:
    """Load uint8 images, float numbers or word numbers `x`, labels `y` and, if it is there, `client`.

    `words` is the size of the vocabulary; the file may have it, too.
    """
    arrays, names = read_npz(path, ("x", "y", "client", "words"))
    return from_arrays(path.name, arrays, str(path), ", ".join(names), words)


def from_arrays(
    name: str, arrays: Mapping[str, Array], where: str, there: str = "", words: int = 0
) -> Dataset:
    """Return the data set of arrays under their names; `there` lists all names, for the error."""
    for needed in ("x", "y"):
        if needed not in arrays:
            raise InvalidInputError(
                f"{where} has no array '{needed}'; it has: {truncate(there) or 'nothing'}; needed are "
                "x and y, and client if there is one"
            )
    x = arrays["x"]
    channels_last = x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
    if channels_last:
        x = x.transpose(0, 3, 1, 2)
    known = np.asarray(arrays.get("words", 0))
    if x.dtype.kind in "iu" and x.dtype != np.uint8:
        words = words or (int(known) if known.shape == () and known.dtype.kind in "iu" else 0)
        x = _check_tokens(x, words, f"x in {where}")
    else:
        if words:
            raise InvalidInputError(
                f"?words={words}: x in {where} is {x.dtype}, no word numbers (int16, int32, int64)"
            )
        x = check_samples(x, f"x in {where}")
    y = encode_labels(arrays["y"], len(x), f"y in {where}")
    client = encode_clients(arrays["client"], len(x), f"client in {where}") if "client" in arrays else None
    note = "images were given with the channels last" if channels_last else ""
    if x.dtype == np.float32 and x.ndim == 3:
        note = f"samples are sequences of {x.shape[1]} steps (grey images would be (n, 1, height, width))"
    return build_dataset(name, x, y, client, note=note, tokens=words)


def _check_tokens(x: Array, words: int, what: str) -> Array:
    """Return word numbers, if the user says that they are: a table of counts or codes looks the same."""
    if not words:
        raise InvalidInputError(
            f"{what} is {x.dtype}; accepted are uint8 (images, 0..255) and float32 (numbers as they are), "
            "and word numbers if you say so: ?words=SIZE_OF_THE_VOCABULARY, or an array 'words' beside x"
        )
    if x.ndim != 2 or not x.size:
        raise InvalidInputError(
            f"{what} has shape {x.shape}; word numbers must be (n, length), padded to one length"
        )
    for wrong in x[(x < 0) | (x >= words)][:1]:
        raise InvalidInputError(
            f"{what} has the word number {wrong}, with words = {words}; allowed: 0..{words - 1}"
        )
    return np.ascontiguousarray(x, np.int32)


def check_samples(x: Array, what: str) -> Array:
    """Return samples as uint8 or float32, checked; grey images (uint8) get an axis for their channel."""
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise InvalidInputError(
            f"{what} is {x.dtype}; accepted are uint8 (images, 0..255) and float32 (numbers as they are)"
        )
    if x.ndim < 2 or x.size == 0:
        raise InvalidInputError(
            f"{what} has shape {x.shape}; it needs at least one sample and one value per sample, "
            "e.g. (n, height, width) or (n, features)"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what does not fit float32 becomes inf and is named below
            x = x.astype(np.float32, copy=False)
        bad = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
        if bad.size:
            raise InvalidInputError(
                f"{what} has NaN or infinite values (as float32), first in row {bad[0]}, in {bad.size} "
                "rows; remove or replace them"
            )
        return np.ascontiguousarray(x)
    return np.ascontiguousarray(x[:, np.newaxis] if x.ndim == 3 else x)


def _check_length(values: Array, n: int, what: str) -> None:
    if values.shape != (n,):
        raise InvalidInputError(f"{what} has shape {values.shape}, but x has {n} samples; it must be ({n},)")


def encode_labels(y: Array, n: int, what: str) -> EncodedColumn:
    """Return the classes that occur, in sorted order: labels 1..3 are three classes."""
    _check_length(y, n, what)
    if y.dtype.kind not in "iufbUS":
        raise InvalidInputError(f"{what} is {y.dtype}; it must hold whole numbers or text")
    if y.dtype.kind == "f":
        broken = y[~(np.isfinite(y) & (y == np.trunc(y)))]
        if broken.size:
            raise InvalidInputError(f"{what} has the label {broken[0]}; labels must be whole numbers or text")
    distinct, numbers = np.unique(y, return_inverse=True)
    names = format_values(distinct)
    _check_classes(names, n, what)
    return EncodedColumn(numbers.astype(np.int64), names)


def encode_text_labels(labels: Sequence[str], what: str) -> EncodedColumn:
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
                raise InvalidInputError(
                    f"{what} has the label {truncate(label)}; labels must be whole numbers or text"
                )
        ordered = sorted(names, key=lambda name: (values[name], name))
    else:
        ordered = sorted(names)
    _check_classes(ordered, len(labels), what)
    return EncodedColumn.encode(labels, ordered)


def _number(text: str) -> int | float | None:
    """Return the number that a text is, an int wherever it is written as one; None: it is not a number."""
    if _INTEGER.fullmatch(text):
        with suppress(ValueError):  # thousands of digits
            return int(text)
    return rows.parse_number(text)


def _check_classes(names: Sequence[str], n: int, what: str) -> None:
    """Refuse the names of a single class, or of as many classes as there are rows."""
    if len(names) < 2:
        raise InvalidInputError(
            f"{what} has only the label '{truncate(names[0])}'; at least 2 classes are needed"
        )
    if len(names) == n > 2:
        raise InvalidInputError(f"{what} has another label in each of {n} rows; it must name their classes")


def encode_clients(client: Array, n: int, what: str) -> EncodedColumn:
    """Return clients from 0 on, in the order of their ids."""
    _check_length(client, n, what)
    if client.dtype.kind not in "iuUS":
        raise InvalidInputError(f"{what} is {client.dtype}; it must hold integers or strings, one per sample")
    distinct, numbers = np.unique(client, return_inverse=True)
    return EncodedColumn(numbers.astype(np.int64), format_values(distinct))


def format_values(values: Array) -> tuple[str, ...]:
    """Return these values as text; whole floats as integers."""
    if values.dtype.kind == "S":
        return tuple(value.decode("utf-8", "replace") for value in values.tolist())
    return tuple(str(int(value)) if values.dtype.kind == "f" else str(value) for value in values.tolist())


# --- PFLlib


def is_pfllib(folder: Path) -> bool:
    """Return whether PFLlib wrote this folder."""
    return (folder / "config.json").is_file() and any((folder / "train").glob("*.npz"))


def load_pfllib(folder: Path) -> Dataset:
    """Load all clients' train sets, then all test sets, with the split that they form."""
    clients, classes = _read_config(folder / "config.json")
    there = {*(folder / "train").glob("*.npz"), *(folder / "test").glob("*.npz")}
    known = range(min(clients, len(there) + 1))  # one that is not there is enough to say so
    files = [folder / part / f"{k}.npz" for part in ("train", "test") for k in known]
    if lacking := [file for file in files if file not in there]:
        raise InvalidInputError(f"there is no file {lacking[0]}, which config.json calls for")
    if extra := there - {*files}:
        raise InvalidInputError(f"{min(extra)} is no client's: config.json says num_clients = {clients}")
    parts = [_read_client_file(file) for file in files]
    shapes = {x.shape[1:]: file for (x, _), file in zip(parts, files, strict=True)}
    if len(shapes) > 1:
        (one, first), (other, second) = list(shapes.items())[:2]
        raise InvalidInputError(
            f"samples in {first} have shape {one}, in {second} {other}; they must be the same"
        )
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    tokens = int(x.max()) + 1 if x.dtype == np.int32 else 0
    if tokens > max(_MAX_WORDS, x.size):
        raise InvalidInputError(
            f"{folder} has the word number {tokens - 1}, but only {x.size} words; number them from 0"
        )
    if not tokens:
        x = check_samples(x, f"x in {folder}")
    y = _check_class_numbers(y, f"y in {folder}")
    highest = int(y.max())
    if classes and highest >= classes:
        raise InvalidInputError(
            f"{folder} has the label {highest}, but config.json says num_classes = {classes}"
        )
    if classes > max(_MAX_CLASSES, len(y)):
        raise InvalidInputError(
            f"{folder} has {len(y)} samples, but config.json says num_classes = {classes}"
        )
    ends = np.cumsum([len(labels) for _, labels in parts])[:-1]
    indices = np.split(np.arange(len(x)), ends)
    split = Split.from_arrays(indices[:clients], indices[clients:])
    names = tuple(map(str, range(classes or highest + 1)))
    return build_dataset(f"{folder.resolve().name}/", x, EncodedColumn(y, names), tokens=tokens, split=split)


def _check_class_numbers(y: Array, what: str) -> Array:
    """Return whole numbers from 0 on, as they are: a part of a data set may lack a class."""
    encode_labels(y, len(y), what)
    if y.dtype.kind not in "iuf" or y.min() < 0 or y.max() >= max(_MAX_CLASSES, len(y)):
        raise InvalidInputError(f"{what} must be whole numbers from 0 on, fewer than there are samples")
    return y.astype(np.int64)


def _read_config(path: Path) -> tuple[int, int]:
    """Return the numbers of clients and of classes; newer versions do not write the latter, it is 0."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        clients, classes = config["num_clients"], config.get("num_classes", 0)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidInputError(f"cannot use {path}: {type(error).__name__} {one_line(error)}") from None
    if type(clients) is not int or type(classes) is not int or clients < 1 or classes < 0:
        raise InvalidInputError(
            f"{path} has num_clients = {clients!r} and num_classes = {classes!r}; both must be whole numbers"
        )
    return clients, classes


def _read_client_file(path: Path) -> tuple[Array, Array]:
    """Return x and y of one file; texts as int32."""
    match _unpickle(path):
        case {"x": np.ndarray() as x, "y": np.ndarray() as y}:
            pass
        case _:
            raise InvalidInputError(
                f"{path} does not hold what PFLlib writes: a dict of arrays x and y in 'data'"
            )
    if x.dtype == object:
        x = _pad_texts(x, path)
    if y.shape != x.shape[:1] or not len(y):
        raise InvalidInputError(
            f"{path} has x of shape {x.shape} and y of shape {y.shape}; they must be as long as each other, "
            "and every client needs at least one sample to train and one to test"
        )
    return x, y


def _pad_texts(x: Array, path: Path) -> Array:
    """Return PFLlib's texts, pairs of a padded list of word numbers and its length, as word numbers."""
    try:
        texts = np.array([row[0] for row in x])
    except (ValueError, TypeError, IndexError):
        texts = np.empty(0)
    if texts.ndim != 2 or texts.dtype.kind != "i" or texts.min() < 0 or texts.max() >= 2**31:
        raise InvalidInputError(
            f"x in {path} is neither numbers nor texts of one length as PFLlib writes them"
        )
    return texts.astype(np.int32)


def _unpickle(path: Path) -> Any:
    """Return the content of 'data' in a file, without executing the pickle."""
    try:
        require_regular_file(path)
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, path)
            with archive.open("data.npy") as member:
                if not _read_npy_type(member).hasobject:
                    return None
                content = safe_pickle.load(member)
            return content.item() if isinstance(content, np.ndarray) and content.ndim == 0 else None
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None
    except Exception as error:  # damaged bytes make zipfile, zlib and numpy's header parser raise anything
        raise InvalidInputError(f"cannot read {path}: {one_line(error)}; let PFLlib write it again") from None


# --- Python objects

_OBJECT_FORMS = (
    "a name or path, a feddbe.Dataset, (x, y), (x, y, client), {'x': ..., 'y': ..., 'words': ...}, a pandas "
    "frame, (frame, 'label=COLUMN&client=COLUMN'), or a torch Dataset of pairs (x, y)"
)


def from_object(data: Any) -> Dataset:
    """Return the data set that a Python object holds."""
    if isinstance(data, Dataset):
        return data
    frame, query = data, ""
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], str):
        frame, query = data
    if hasattr(frame, "columns") and hasattr(frame, "iloc"):
        from feddbe.data.user.tables import load_frame

        return load_frame(frame, parse_query(query.removeprefix("?")))
    if isinstance(data, tuple) and len(data) in (2, 3):
        data = dict(zip(("x", "y", "client"), data, strict=False))
    if isinstance(data, Mapping):
        arrays = {str(name): _as_array(values, str(name)) for name, values in data.items()}
        return from_arrays("arrays", arrays, "data", ", ".join(arrays))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list | tuple | str):
        return _from_torch_dataset(data)
    raise InvalidInputError(f"data is a {type(data).__name__}; accepted are {_OBJECT_FORMS}")


def _as_array(values: Any, name: str) -> Array:
    """Return a tensor, an array, a series or a list as an array of numbers or text."""
    try:
        array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidInputError(f"'{name}' in data is no array: {one_line(error)}") from None
    if array.dtype == object:
        if array.ndim != 1 or not all(isinstance(value, str) for value in array):
            raise InvalidInputError(
                f"'{name}' in data holds Python objects; give numbers or text of one shape"
            )
        array = np.array(array.tolist())
    return array


def _from_torch_dataset(data: Any) -> Dataset:
    """Return all samples of a torch Dataset: (x, y) or (x, y, client) each."""
    columns: list[list[Any]] = []
    for row in range(len(data)):
        sample = data[row]
        if not isinstance(sample, tuple | list) or len(sample) not in (2, 3):
            raise InvalidInputError(
                f"sample {row} of data is a {type(sample).__name__}, not (x, y) or (x, y, client)"
            )
        columns = columns or [[] for _ in sample]
        for column, value in zip(columns, sample, strict=False):
            column.append(_as_array(value, "x"))
    if not columns:
        raise InvalidInputError("data has no samples")
    shapes = sorted({x.shape for x in columns[0]})
    if len(shapes) > 1:
        raise InvalidInputError(
            f"samples of data have shapes {shapes[0]} and {shapes[1]}; bring them to one (a transform)"
        )
    arrays = {name: np.stack(part) for name, part in zip(("x", "y", "client"), columns, strict=False)}
    return from_arrays("samples", arrays, "data", ", ".join(arrays))
