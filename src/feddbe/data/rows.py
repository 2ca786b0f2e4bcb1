"""Conversion of raw rows to inputs: CSV cells, categories, texts and images.

This file needs only Python and numpy (and Pillow for images), nothing of feddbe. `feddbe export` copies it
next to a model, so that new rows are encoded like the training rows. Errors are `ValueError`s of one line.
`preprocessing` is the dictionary in `preprocessing.json`.
"""

from __future__ import annotations

import csv
import io
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Columns = Mapping[str, Sequence[Any]]
LocateRow = Callable[[int], str]
"""Describes the position of a row in its file."""

DELIMITERS = ",;\t|"
MISSING = {"", "na", "n/a", "nan", "null", "?"}
"""Texts, in lower case, that stand for a missing value."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
"""Image formats that are read, recognized by content: Pillow passes others (EPS) to external programs."""
HIGH_DEPTH_MODES = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits per channel, whose values would be clipped."""
MAX_PIXELS = 1 << 24
MAX_UNPACKED_BYTES = 1 << 28
MAX_COMPRESSION_RATIO = 100
_DELIMITER_LINES = 20
"""Lines from which the delimiter is detected."""
_SEPARATE_WORDS = {mark: f" {mark} " for mark in "'.,()!?"}
_WORD_RULES = str.maketrans(_SEPARATE_WORDS | {";": " ", ":": " "})


def detect_delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter that gives these lines the same, highest number of columns; by default a comma."""
    delimiter, columns = ",", 1
    for candidate in DELIMITERS:
        try:
            widths = {len(cells) for cells in csv.reader(lines, delimiter=candidate) if cells}
        except csv.Error:  # a line without it can be longer than the longest allowed cell
            continue
        if len(widths) == 1 and max(widths) > columns:
            delimiter, columns = candidate, max(widths)
    if columns == 1 and lines:  # rows differ in length, which is reported with the most frequent delimiter
        return max(DELIMITERS, key=lines[0].count)
    return delimiter


@contextmanager
def open_csv(path: Path) -> Iterator[tuple[list[str], str, Iterator[tuple[int, list[str]]]]]:
    """Open a CSV file: column names, delimiter, and an iterator of line numbers with their cells.

    Empty lines are skipped. A quoted row may have several lines; it is numbered by the last one.

    Raises:
        ValueError: Two columns have the same name, or a row has another number of cells than the first line.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        start = "".join(islice(file, _DELIMITER_LINES))
    delimiter = "\t" if path.suffix == ".tsv" else detect_delimiter(_complete_lines(start))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        names = next(reader, [])
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"{path} has two columns of one name, '{duplicate[:100]}'; name each column once"
            )

        def read_records() -> Iterator[tuple[int, list[str]]]:
            for cells in filter(None, reader):
                if len(cells) != len(names):
                    raise ValueError(
                        f"line {reader.line_num} of {path} has {len(cells)} values, its first {len(names)}"
                    )
                yield reader.line_num, cells

        yield names, delimiter, read_records()


def _complete_lines(start: str) -> list[str]:
    """Return the lines of a file's start, without a quoted row that is cut off."""
    if start.count('"') % 2:
        start = start[: start.rindex('"')].rpartition("\n")[0]
    return start.splitlines()


def is_missing(value: Any) -> bool:
    """Return True for None and for a text such as NA."""
    return value is None or (isinstance(value, str) and value.strip().lower() in MISSING)


def parse_number(value: Any, decimal_comma: bool = False) -> float | None:
    """Return a cell as a number: nan if it is missing, None if it is not a number.

    Args:
        value: Text, or None.
        decimal_comma: Accept 3,5 as well as 3.5.
    """
    if value is None:
        return math.nan
    if not isinstance(value, str):
        return None
    text = value.strip()
    if text.lower() in MISSING:
        return math.nan
    if decimal_comma and "." not in text and text.count(",") == 1:
        text = text.replace(",", ".")
    try:
        return float(text)
    except ValueError:
        return None


# --- tables


def encode_one_hot(values: Sequence[Any], categories: Sequence[str]) -> tuple[npt.NDArray[np.float64], Array]:
    """Return (n, categories) inputs with 1 at each row's category, and the indices of unknown categories.

    Rows with a missing value are nan.
    """
    missing, unknown = -1, -2
    positions = {name: position for position, name in enumerate(categories)}
    encoded = np.array(
        [positions.get(str(value), missing if is_missing(value) else unknown) for value in values], np.int64
    )
    inputs = np.zeros((len(values), len(categories)))
    known = np.flatnonzero(encoded >= 0)
    inputs[known, encoded[known]] = 1
    inputs[encoded == missing] = np.nan
    return inputs, np.flatnonzero(encoded == unknown)


def standardize(
    columns: Sequence[Mapping[str, Any]], raw: npt.NDArray[np.float64]
) -> npt.NDArray[np.float32]:
    """Return (value - mean) / deviation for numbers, 0 or 1 for categories, and the mean if missing."""
    mean = np.concatenate([np.atleast_1d(column["mean"]) for column in columns])
    widths = [len(column["mean"]) for column in columns]
    deviation = np.repeat([column["deviation"] for column in columns], widths)
    is_category = np.repeat([bool(column["categories"]) for column in columns], widths)
    center = np.where(is_category, 0.0, mean)
    filled = np.where(np.isnan(raw), mean, raw)
    with np.errstate(over="ignore"):  # callers report values that do not fit float32
        inputs: npt.NDArray[np.float32] = ((filled - center) / deviation).astype(np.float32)
    return inputs


def encode_table(
    preprocessing: Mapping[str, Any], table: Columns, locate_row: LocateRow
) -> npt.NDArray[np.float32]:
    """Return new rows of a table as inputs."""
    parts = []
    names = [column["name"] for column in preprocessing["columns"]]
    for column in preprocessing["columns"]:
        name = column["name"]
        values = _get_column(table, name, names)
        if column["categories"]:
            part, unknown = encode_one_hot(values, column["categories"])
            for row in unknown[:1]:
                raise ValueError(
                    f"'{name}' is '{values[row]}' in {locate_row(int(row))}, which no training row had; "
                    f"known: {', '.join(column['categories'])}"
                )
        else:
            part = _parse_column(values, name, locate_row, preprocessing["comma"])[:, np.newaxis]
        missing = np.flatnonzero(np.isnan(part).any(axis=1))
        if len(missing) and preprocessing["missing"] != "mean":
            raise ValueError(
                f"'{name}' has no value in {locate_row(int(missing[0]))}; "
                "fill it in (a run with ?missing=mean does)"
            )
        parts.append(part)
    inputs = standardize(preprocessing["columns"], np.concatenate(parts, axis=1))
    for row in np.flatnonzero(~np.isfinite(inputs).all(axis=1))[:1]:
        raise ValueError(f"{locate_row(int(row))} has a number that is too large to compute with")
    return inputs


def _get_column(table: Columns, name: str, required: Sequence[str]) -> Sequence[Any]:
    if name not in table:
        raise ValueError(f"column '{name}' is missing; the model takes {', '.join(required)}")
    return table[name]


def _parse_column(
    values: Sequence[Any], name: str, locate_row: LocateRow, decimal_comma: bool
) -> npt.NDArray[np.float64]:
    numbers = [parse_number(value, decimal_comma) for value in values]
    for row, number in enumerate(numbers):
        if number is None or math.isinf(number):
            raise ValueError(f"'{name}' is '{values[row]}' in {locate_row(row)}; it must be a number")
    return np.array(numbers, np.float64)


# --- texts


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case.

    ' . , ( ) ! ? are separate words, " is deleted, and ; : <br /> and white space separate words.
    """
    # the quotes first: the characters around a deleted quote are joined
    return text.lower().replace('"', "").replace("<br />", " ").translate(_WORD_RULES).split()


def encode_texts(preprocessing: Mapping[str, Any], texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return texts as rows of word numbers, truncated or padded with 0, which is also the unknown word."""
    vocabulary = {word: number for number, word in enumerate(preprocessing["vocabulary"])}
    length = preprocessing["shape"][0]
    x = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        numbers = [vocabulary.get(word, 0) for word in split_words(text)][:length]
        x[row, : len(numbers)] = numbers
    return x


# --- images


def encode_images(preprocessing: Mapping[str, Any], files: Sequence[Path]) -> npt.NDArray[np.float32]:
    """Return image files as inputs; other sizes are resized only if the training images were."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("images need Pillow; install it with: pip install pillow") from None
    channels, height, width = preprocessing["shape"]
    x = np.empty((len(files), channels, height, width), np.float32)
    for row, path in enumerate(files):
        try:
            with open_image(path) as opened:
                image = opened.convert("L" if channels == 1 else "RGB")
        except Exception as error:  # with damaged bytes, Pillow's readers raise any exception
            raise ValueError(f"cannot read the image {path}: {error}; replace or remove it") from None
        if image.size != (width, height):
            if not preprocessing["resized"]:
                size = f"{image.width}x{image.height}"
                raise ValueError(f"{path} is {size}; the model takes {width}x{height} pixels")
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        values = np.asarray(image)
        x[row] = values[np.newaxis] if values.ndim == 2 else values.transpose(2, 0, 1)
    return x * np.float32(preprocessing["scale"]) + np.float32(preprocessing["shift"])


def open_image(file: Path | bytes) -> Any:
    """Open an image of a known format, size and depth; only its header is read."""
    from PIL import Image

    if isinstance(file, Path) and file.exists() and not file.is_file():
        raise OSError("it is not a plain file")
    image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=IMAGE_FORMATS)
    width, height, mode = image.width, image.height, image.mode
    if width * height > MAX_PIXELS or mode.startswith(HIGH_DEPTH_MODES):
        image.close()
        limit = f"at most {MAX_PIXELS} of 8 bits a channel are read"
        raise OSError(f"it has {width}x{height} pixels of mode '{mode}', {limit}")
    return image


def read_rows(preprocessing: Mapping[str, Any], path: Path) -> Array:
    """Return the rows of a file, or of a folder of images, as inputs of a model.

    Args:
        preprocessing: The content of `preprocessing.json`.
        path: A .csv, .tsv, .txt, .npz or image file, or a folder of images.

    Raises:
        ValueError: The rows cannot be read, or do not fit the model.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe blocks, a device has no end
        raise ValueError(f"{path} is neither a file nor a folder; data is read from these only")
    kind = preprocessing["kind"]
    if kind == "images" and path.suffix != ".npz":
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = [file for file in files if file == path or file.suffix.lower() in IMAGE_SUFFIXES]
        if not files:
            raise ValueError(f"{path} has no images ({' '.join(IMAGE_SUFFIXES)})")
        return encode_images(preprocessing, files)
    if path.suffix == ".npz" and kind != "table":
        return _read_arrays(preprocessing, path)
    if kind not in ("table", "texts"):
        raise ValueError(
            f"the model takes arrays of shape {tuple(preprocessing['shape'])}; give an .npz with x"
        )
    if path.suffix.lower() not in (".csv", ".tsv", ".txt"):
        raise ValueError(f"{path} is not a .csv or .tsv file; write the new rows as one")
    try:
        with open_csv(path) as (names, _, records):
            lines, cells = [*zip(*records, strict=True)] or ((), ())
    except csv.Error as error:
        raise ValueError(f"cannot read {path} as CSV: {error}") from None
    if not cells:
        raise ValueError(f"{path} has no rows")
    table = dict(zip(names, zip(*cells, strict=True), strict=True))
    try:
        if kind == "table":
            return encode_table(preprocessing, table, lambda row: f"line {lines[row]}")
        required = [column["name"] for column in preprocessing["columns"]]
        columns = [_get_column(table, name, required) for name in required]
        texts = [["" if is_missing(cell) else cell for cell in column] for column in columns]
        return encode_texts(preprocessing, [" ".join(cells) for cells in zip(*texts, strict=True)])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_arrays(preprocessing: Mapping[str, Any], path: Path) -> Array:
    """Return `x` of an .npz file as inputs; its axes and types may be those of the training data's file."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_unpacked_size(archive, path)
        with np.load(path, allow_pickle=False) as arrays:
            x = np.asarray(arrays["x"]) if "x" in arrays else None
    except Exception as error:  # with damaged bytes, zipfile, zlib and numpy raise any exception
        raise ValueError(f"cannot read {path}: {error}; write it with numpy.savez") from None
    if x is None:
        raise ValueError(f"{path} has no array 'x'")
    shape = tuple(preprocessing["shape"])
    if x.ndim == 4 and x.shape[1:] != shape and (x.shape[3], *x.shape[1:3]) == shape:
        x = x.transpose(0, 3, 1, 2)
    if (1, *x.shape[1:]) == shape:
        x = x[:, np.newaxis]
    if x.shape[1:] != shape or not x.size:
        raise ValueError(f"x in {path} has shape {x.shape}; the model takes samples of shape {shape}")
    words = preprocessing["words"]
    if words:
        if x.dtype.kind not in "iu" or x.min() < 0 or x.max() >= words:
            raise ValueError(f"x in {path} must hold word numbers 0..{words - 1}")
        return x.astype(np.int64)
    scale, shift = preprocessing["scale"], preprocessing["shift"]
    if x.dtype == np.uint8:
        return x.astype(np.float32) * np.float32(scale) + np.float32(shift)
    needs_pixels = preprocessing["kind"] == "images" or (scale, shift) != (1.0, 0.0)
    if needs_pixels or x.dtype.kind != "f":
        expected = "uint8" if needs_pixels else "float32"
        raise ValueError(f"x in {path} is {x.dtype}; the model takes {expected}")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    for row in np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))[:1]:
        raise ValueError(f"x in {path} has NaN or infinite values (as float32) in row {row}; replace them")
    return x


def replace_controls(text: str) -> str:
    """Return a text with control characters, which could change a terminal, replaced by ?."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def check_unpacked_size(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise ValueError if a zip file would unpack to far more bytes than it has."""
    packed = path.stat().st_size
    unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > max(MAX_UNPACKED_BYTES, MAX_COMPRESSION_RATIO * packed):
        raise ValueError(
            f"{path} has {packed} bytes and would unpack to {unpacked}; write it without compression"
        )
