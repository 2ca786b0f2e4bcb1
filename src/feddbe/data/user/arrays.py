"""User arrays: an .npz file with x, y and optionally client, a PFLlib folder, or Python objects.

Also functions that all forms of user data share: `build_dataset`, and the encoding of labels and clients.
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
from feddbe.errors import InvalidInputError, one_line, truncate

Array = npt.NDArray[Any]

_INTEGER = re.compile("[+-]?[0-9]+")
_MAX_WORDS, _MAX_CLASSES = 1 << 20, 1 << 10
"""Accepted numbers in a PFLlib folder, which may be a part of a data set; more need more words or samples."""


class EncodedColumn(NamedTuple):
    """A column of names as numbers from 0, and the names in that order."""

    numbers: npt.NDArray[np.int64]
    names: tuple[str, ...]

    @classmethod
    def encode(cls, values: Sequence[Any], ordered: Sequence[Any]) -> EncodedColumn:
        """Return the values as their positions in `ordered`, the list of distinct values."""
        positions = {value: position for position, value in enumerate(ordered)}
        return cls(np.array([positions[value] for value in values], np.int64), tuple(map(str, ordered)))


def build_dataset(
    name: str, x: Array, y: EncodedColumn, client: EncodedColumn | None = None, **fields: Any
) -> Dataset:
    """Return a data set of arrays; uint8 values are pixels, which are scaled to -1..1.

    Args:
        name: Name with its suffix, slash or prefix, so that a folder `har` does not get `har`'s defaults.
        x: Samples.
        y: Labels.
        client: Natural clients.
        fields: Further fields of the data set.
    """
    has_pixels = x.dtype == np.uint8
    if y.names[0] == "-1" and len(y.names) > 2:  # some data sets use -1 for samples without a label
        note = fields.get("note")
        fields["note"] = f"{note}; -1 is a class" if note else "-1 is a class"
    return Dataset(
        name=name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y.numbers),
        classes=len(y.names),
        scale=2 / 255 if has_pixels else 1.0,
        shift=-1.0 if has_pixels else 0.0,
        client=None if client is None else client.numbers,
        label_names=y.names,
        client_names=() if client is None else client.names,
        **fields,
    )


def read_npz(path: Path, names: Collection[str] | None = None) -> tuple[dict[str, Array], list[str]]:
    """Read arrays of an .npz file.

    Args:
        path: The file.
        names: Names of the arrays to read, if they exist; by default, all are read.

    Returns:
        The arrays by name, and the names of all arrays in the file.

    Raises:
        InvalidInputError: The file is damaged, contains pickles, or unpacks to far more than its size.
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
            for name in members:
                if names is not None and name not in names:
                    continue
                with archive.open(members[name]) as file:
                    if _read_npy_type(file).hasobject:
                        raise InvalidInputError(
                            f"cannot read {path}: it holds pickled Python objects, which are never read; "
                            "store plain arrays"
                        )
                with archive.open(members[name]) as file:
                    arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        raise InvalidInputError(f"{path} does not exist; give the path of an .npz file") from None
    except InvalidInputError:
        raise
    except Exception as error:  # with damaged bytes, zipfile, zlib and numpy raise any exception
        reason = truncate(" ".join(str(error).split()) or type(error).__name__, 500)
        raise InvalidInputError(f"cannot read {path}: {reason}; write it again with numpy.savez") from None
    return arrays, list(members)


def _read_npy_type(file: IO[bytes]) -> np.dtype[Any]:
    """Return the type in the header of an array."""
    is_first_version = np.lib.format.read_magic(file) == (1, 0)
    formats = np.lib.format
    read = formats.read_array_header_1_0 if is_first_version else formats.read_array_header_2_0
    dtype: np.dtype[Any] = read(file)[2]
    return dtype


def load_npz(path: Path, words: int = 0) -> Dataset:
    """Load an .npz file with images, numbers or word numbers `x`, labels `y` and optionally `client`.

    Args:
        path: The file.
        words: Size of the vocabulary of word numbers; by default, the array `words` of the file.
    """
    arrays, names = read_npz(path, ("x", "y", "client", "words"))
    return load_arrays(path.name, arrays, str(path), ", ".join(names), words)


def load_arrays(
    name: str, arrays: Mapping[str, Array], origin: str, available: str = "", words: int = 0
) -> Dataset:
    """Return the data set of named arrays.

    Args:
        name: Name of the data set.
        arrays: `x`, `y`, and optionally `client` and `words`.
        origin: Origin of the arrays, for errors.
        available: Names of all arrays, for errors.
        words: Size of the vocabulary of word numbers; by default, the array `words`.
    """
    for required in ("x", "y"):
        if required not in arrays:
            raise InvalidInputError(
                f"{origin} has no array '{required}'; it has: {truncate(available) or 'nothing'}; "
                "needed are x and y, and client if there is one"
            )
    x = arrays["x"]
    is_image_batch = x.dtype == np.uint8 and x.ndim == 4
    is_channels_last = is_image_batch and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
    if is_channels_last:
        x = x.transpose(0, 3, 1, 2)
    stored_words = np.asarray(arrays.get("words", 0))
    if x.dtype.kind in "iu" and x.dtype != np.uint8:
        if not words and stored_words.shape == () and stored_words.dtype.kind in "iu":
            words = int(stored_words)
        x = _check_tokens(x, words, f"x in {origin}")
    else:
        if words:
            raise InvalidInputError(
                f"?words={words}: x in {origin} is {x.dtype}; word numbers are int16, int32 or int64"
            )
        x = check_samples(x, f"x in {origin}")
    y = encode_labels(arrays["y"], len(x), f"y in {origin}")
    client = None
    if "client" in arrays:
        client = encode_clients(arrays["client"], len(x), f"client in {origin}")
    note = "images were given with the channels last" if is_channels_last else ""
    if x.dtype == np.float32 and x.ndim == 3:
        note = f"samples are sequences of {x.shape[1]} steps (gray images would be (n, 1, height, width))"
    return build_dataset(name, x, y, client, note=note, num_words=words)


def _check_tokens(x: Array, words: int, what: str) -> Array:
    """Return `x` as word numbers, which the user must declare: counts or codes look the same."""
    if not words:
        raise InvalidInputError(
            f"{what} is {x.dtype}; accepted are uint8 (images, 0..255) and float32 (numbers as they are), "
            "and word numbers with ?words=SIZE_OF_THE_VOCABULARY, or with an array 'words' next to x"
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
    """Return samples as uint8 or float32, checked; gray images (uint8) get a channel axis."""
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
        with np.errstate(over="ignore"):  # values that do not fit float32 become inf and are reported below
            x = x.astype(np.float32, copy=False)
        invalid = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
        if invalid.size:
            raise InvalidInputError(
                f"{what} has NaN or infinite values (as float32), first in row {invalid[0]}, "
                f"in {invalid.size} rows; remove or replace them"
            )
        return np.ascontiguousarray(x)
    return np.ascontiguousarray(x[:, np.newaxis] if x.ndim == 3 else x)


def _check_length(values: Array, n: int, what: str) -> None:
    if values.shape != (n,):
        raise InvalidInputError(f"{what} has shape {values.shape}, but x has {n} samples; it must be ({n},)")


def encode_labels(y: Array, n: int, what: str) -> EncodedColumn:
    """Return the labels as numbers of the classes that occur, in sorted order: 1..3 are three classes."""
    _check_length(y, n, what)
    if y.dtype.kind not in "iufbUS":
        raise InvalidInputError(f"{what} is {y.dtype}; it must hold whole numbers or text")
    if y.dtype.kind == "f":
        invalid = y[~(np.isfinite(y) & (y == np.trunc(y)))]
        if invalid.size:
            raise InvalidInputError(
                f"{what} has the label {invalid[0]}; labels must be whole numbers or text"
            )
    distinct, numbers = np.unique(y, return_inverse=True)
    names = format_values(distinct)
    _check_classes(names, n, what)
    return EncodedColumn(numbers.astype(np.int64), names)


def encode_text_labels(labels: Sequence[str], what: str) -> EncodedColumn:
    """Return the labels as numbers of classes; different texts, as "1" and "01", are different classes.

    If all labels are numbers, classes are sorted by value; integers of any length are exact.

    Raises:
        InvalidInputError: All labels are numbers and one is not whole, or they do not name classes.
    """
    names = {*labels}
    values = {name: _parse_number(name) for name in names}
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


def _parse_number(text: str) -> int | float | None:
    """Return a text as a number, an int if it is written as one; None if it is not a number."""
    if _INTEGER.fullmatch(text):
        with suppress(ValueError):  # thousands of digits
            return int(text)
    return rows.parse_number(text)


def _check_classes(names: Sequence[str], n: int, what: str) -> None:
    """Raise an error for as many classes as rows."""
    if len(names) == n > 2:
        raise InvalidInputError(f"{what} has another label in each of {n} rows; it must name their classes")


def encode_clients(client: Array, n: int, what: str) -> EncodedColumn:
    """Return the clients as numbers from 0, in the order of their ids."""
    _check_length(client, n, what)
    if client.dtype.kind not in "iuUS":
        raise InvalidInputError(f"{what} is {client.dtype}; it must hold integers or strings, one per sample")
    distinct, numbers = np.unique(client, return_inverse=True)
    return EncodedColumn(numbers.astype(np.int64), format_values(distinct))


def format_values(values: Array) -> tuple[str, ...]:
    """Return the values as text; floats are written as integers."""
    if values.dtype.kind == "S":
        return tuple(value.decode("utf-8", "replace") for value in values.tolist())
    return tuple(str(int(value)) if values.dtype.kind == "f" else str(value) for value in values.tolist())


# --- PFLlib


def is_pfllib_folder(folder: Path) -> bool:
    """Return True if PFLlib wrote this folder."""
    return (folder / "config.json").is_file() and any((folder / "train").glob("*.npz"))


def load_pfllib_folder(folder: Path) -> Dataset:
    """Load all clients' training sets, then all test sets, with the split that they form."""
    clients, classes = _read_config(folder / "config.json")
    existing = {*(folder / "train").glob("*.npz"), *(folder / "test").glob("*.npz")}
    # config.json is not trusted: one missing file is enough for the error
    numbers = range(min(clients, len(existing) + 1))
    files = [folder / part / f"{k}.npz" for part in ("train", "test") for k in numbers]
    missing = [file for file in files if file not in existing]
    if missing:
        raise InvalidInputError(f"{missing[0]} does not exist, but config.json says num_clients = {clients}")
    extra = existing - {*files}
    if extra:
        raise InvalidInputError(
            f"{min(extra)} belongs to no client: config.json says num_clients = {clients}"
        )
    parts = [_read_client_file(file) for file in files]
    file_by_shape = {x.shape[1:]: file for (x, _), file in zip(parts, files, strict=True)}
    if len(file_by_shape) > 1:
        (shape, file), (other_shape, other_file) = list(file_by_shape.items())[:2]
        raise InvalidInputError(
            f"samples in {file} have shape {shape}, in {other_file} {other_shape}; they must be the same"
        )
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    words = int(x.max()) + 1 if x.dtype == np.int32 else 0
    if words > max(_MAX_WORDS, x.size):
        raise InvalidInputError(
            f"{folder} has the word number {words - 1}, but only {x.size} words; number them from 0"
        )
    if not words:
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
    return build_dataset(
        f"{folder.resolve().name}/", x, EncodedColumn(y, names), num_words=words, split=split
    )


def _check_class_numbers(y: Array, what: str) -> Array:
    """Return labels that are whole numbers from 0, unchanged: a part of a data set may lack a class."""
    encode_labels(y, len(y), what)
    if y.dtype.kind not in "iuf" or y.min() < 0 or y.max() >= max(_MAX_CLASSES, len(y)):
        raise InvalidInputError(f"{what} must be whole numbers from 0 on, fewer than there are samples")
    return y.astype(np.int64)


def _read_config(path: Path) -> tuple[int, int]:
    """Return the numbers of clients and of classes; the latter is 0 if the file does not have it."""
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
    """Return x and y of one file; texts are int32."""
    match _unpickle(path):
        case {"x": np.ndarray() as x, "y": np.ndarray() as y}:
            pass
        case _:
            raise InvalidInputError(
                f"{path} does not contain what PFLlib writes: a dict of arrays x and y in 'data'"
            )
    if x.dtype == object:
        x = _stack_texts(x, path)
    if y.shape != x.shape[:1] or not len(y):
        raise InvalidInputError(
            f"{path} has x of shape {x.shape} and y of shape {y.shape}; they must have the same length, "
            "and every client needs at least one sample to train and one to test"
        )
    return x, y


def _stack_texts(x: Array, path: Path) -> Array:
    """Return the word numbers of PFLlib's texts, which are pairs of a padded list and its length."""
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
    except Exception as error:  # with damaged bytes, zipfile, zlib and numpy raise any exception
        raise InvalidInputError(f"cannot read {path}: {one_line(error)}; let PFLlib write it again") from None


# --- Python objects

_OBJECT_FORMS = (
    "a name or path, a feddbe.Dataset, (x, y), (x, y, client), {'x': ..., 'y': ..., 'words': ...}, a pandas "
    "frame, (frame, 'label=COLUMN&client=COLUMN'), or a torch Dataset of pairs (x, y)"
)


def load_object(data: Any) -> Dataset:
    """Return the data set that a Python object contains.

    Args:
        data: A `Dataset`, arrays, a pandas frame or a torch data set; see `_OBJECT_FORMS`.

    Raises:
        InvalidInputError: The object has none of these forms, or its values cannot be used.
    """
    if isinstance(data, Dataset):
        return data
    frame, query = data, ""
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], str):
        frame, query = data
    if hasattr(frame, "columns") and hasattr(frame, "iloc"):
        from feddbe.data.user.tables import load_frame, parse_query

        return load_frame(frame, parse_query(query.removeprefix("?")))
    if isinstance(data, tuple) and len(data) in (2, 3):
        data = dict(zip(("x", "y", "client"), data, strict=False))
    if isinstance(data, Mapping):
        arrays = {str(name): _as_array(values, str(name)) for name, values in data.items()}
        return load_arrays("arrays", arrays, "data", ", ".join(arrays))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list | tuple | str):
        return _from_torch_dataset(data)
    raise InvalidInputError(f"data is a {type(data).__name__}; accepted are {_OBJECT_FORMS}")


def _as_array(values: Any, name: str) -> Array:
    """Return a tensor, array, series or list as an array of numbers or text."""
    try:
        array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidInputError(f"'{name}' in data is not an array: {one_line(error)}") from None
    if array.dtype == object:
        if array.ndim != 1 or not all(isinstance(value, str) for value in array):
            raise InvalidInputError(
                f"'{name}' in data holds Python objects; give numbers or text of one shape"
            )
        array = np.array(array.tolist())
    return array


def _from_torch_dataset(data: Any) -> Dataset:
    """Return the data set of a torch Dataset, whose samples are (x, y) or (x, y, client)."""
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
            f"samples of data have shapes {shapes[0]} and {shapes[1]}; make them equal with a transform"
        )
    arrays = {name: np.stack(part) for name, part in zip(("x", "y", "client"), columns, strict=False)}
    return load_arrays("samples", arrays, "data", ", ".join(arrays))
