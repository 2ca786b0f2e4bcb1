"""Raw rows as numbers: CSV cells, categories, texts and images.

This file needs Python and numpy only (Pillow for images) and nothing of feddbe: `feddbe export` puts a copy
of it beside a model, so that new rows go the way that the training rows went. What goes wrong is a
`ValueError` of one line. `about` is the dictionary that `preprocessing.json` holds.
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
Place = Callable[[int], str]

DELIMITERS = ",;\t|"
MISSING = {"", "na", "n/a", "nan", "null", "?"}
"""What stands for a number that is not there, in small letters."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
"""Image formats that are read, by content: Pillow hands some others (EPS) to another program."""
DEEP = ("I", "F")
"""First letters of the modes with more than eight bits a channel, whose values would be cut off."""
PIXELS, UNPACKED, RATIO = 1 << 24, 1 << 28, 100
"""At most: pixels of an image, bytes that a zip file unpacks to, or times what it holds."""
_LOOKED_AT = 20
_APART = {mark: f" {mark} " for mark in "'.,()!?"}
_RULES = str.maketrans(_APART | {";": " ", ":": " "})


def delimiter(lines: Sequence[str]) -> str:
    """The one that parts these first lines into most columns, as many in each; a comma if none does."""
    found = ",", 1
    for mark in DELIMITERS:
        try:
            widths = {len(row) for row in csv.reader(lines, delimiter=mark) if row}
        except csv.Error:  # a line without it can be longer than a cell may be
            continue
        if len(widths) == 1 and (width := widths.pop()) > found[1]:
            found = mark, width
    if found[1] == 1 and lines:  # rows that differ will be named: by the delimiter that the first has most of
        return max(DELIMITERS, key=lines[0].count)
    return found[0]


@contextmanager
def open_csv(path: Path) -> Iterator[tuple[list[str], str, Iterator[tuple[int, list[str]]]]]:
    """Open a CSV file: names of the columns, the delimiter, and an iterator of line numbers with their cells.

    Empty lines are passed over. A row in quotes may take several lines; its last one counts.

    Raises:
        ValueError: Two columns have the same name, or a row has another number of cells than the first line.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        start = "".join(islice(file, _LOOKED_AT))
    mark = "\t" if path.suffix == ".tsv" else delimiter(_whole(start))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=mark)
        names = next(reader, [])
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path} has two columns of one name, '{twice[:100]}'; name each column once")

        def records() -> Iterator[tuple[int, list[str]]]:
            for cells in filter(None, reader):
                if len(cells) != len(names):
                    raise ValueError(
                        f"line {reader.line_num} of {path} has {len(cells)} values, its first {len(names)}"
                    )
                yield reader.line_num, cells

        yield names, mark, records()


def _whole(start: str) -> list[str]:
    """The lines of a beginning, less what is in a quotation that it cuts off."""
    if start.count('"') % 2:
        start = start[: start.rindex('"')].rpartition("\n")[0]
    return start.splitlines()


def parse_number(value: Any, comma: bool = False) -> float | None:
    """A cell as a number: nan if it is missing, None if it is something else. `comma`: 3,5 is one, too."""
    if value is None:
        return math.nan
    if not isinstance(value, str):
        return None
    text = value.strip()
    if text.lower() in MISSING:
        return math.nan
    if comma and "." not in text and text.count(",") == 1:
        text = text.replace(",", ".")
    try:
        return float(text)
    except ValueError:
        return None


# --- tables


def one_hot(values: Sequence[Any], categories: Sequence[str]) -> tuple[npt.NDArray[np.float64], Array]:
    """(n, categories) 1 at each row's category, nan where there is none; and the rows of unknown ones."""
    place = {name: k for k, name in enumerate(categories)}
    at = np.array([-1 if v is None or v == "" else place.get(str(v), -2) for v in values], np.int64)
    found = np.zeros((len(values), len(categories)))
    known = np.flatnonzero(at >= 0)
    found[known, at[known]] = 1
    found[at == -1] = np.nan
    return found, np.flatnonzero(at == -2)


def scale_values(
    columns: Sequence[Mapping[str, Any]], raw: npt.NDArray[np.float64]
) -> npt.NDArray[np.float32]:
    """A number is (value - mean) / deviation, a category's 0 or 1 stays; what is missing becomes the mean."""
    mean = np.concatenate([np.atleast_1d(column["mean"]) for column in columns])
    shift = np.concatenate(
        [np.zeros(len(c["mean"])) if c["categories"] else np.array(c["mean"]) for c in columns]
    )
    deviation = np.concatenate([np.full(len(column["mean"]), column["deviation"]) for column in columns])
    filled: npt.NDArray[np.float64] = np.where(np.isnan(raw), mean, raw)
    with np.errstate(over="ignore"):  # the caller says what does not fit float32
        found: npt.NDArray[np.float32] = ((filled - shift) / deviation).astype(np.float32)
    return found


def encode_table(about: Mapping[str, Any], table: Columns, place: Place) -> npt.NDArray[np.float32]:
    """New rows of a table as inputs; `place` is where a row is, in words."""
    parts = []
    for column in about["columns"]:
        name = column["name"]
        values = _column(table, name, [c["name"] for c in about["columns"]])
        if column["categories"]:
            part, unknown = one_hot(values, column["categories"])
            for row in unknown[:1]:
                raise ValueError(
                    f"'{name}' is '{values[row]}' in {place(int(row))}, which no training row had; known: "
                    + ", ".join(column["categories"])
                )
        else:
            part = _numbers(values, name, place, about["comma"])[:, np.newaxis]
        gaps = np.flatnonzero(np.isnan(part).any(axis=1))
        if len(gaps) and about["missing"] != "mean":
            raise ValueError(
                f"'{name}' has no value in {place(int(gaps[0]))}; fill it in (a run with ?missing=mean does)"
            )
        parts.append(part)
    found = scale_values(about["columns"], np.concatenate(parts, axis=1))
    for row in np.flatnonzero(~np.isfinite(found).all(axis=1))[:1]:
        raise ValueError(f"{place(int(row))} has a number that is too large to compute with")
    return found


def _column(table: Columns, name: str, needed: Sequence[str]) -> Sequence[Any]:
    if name not in table:
        raise ValueError(f"there is no column '{name}'; the model takes {', '.join(needed)}")
    return table[name]


def _numbers(values: Sequence[Any], name: str, place: Place, comma: bool) -> npt.NDArray[np.float64]:
    found = [parse_number(value, comma) for value in values]
    for row, value in enumerate(found):
        if value is None or math.isinf(value):
            raise ValueError(f"'{name}' is '{values[row]}' in {place(row)}; it must be a number")
    return np.array(found, np.float64)


# --- texts


def split_words(text: str) -> list[str]:
    """Lower case; ' . , ( ) ! ? are words of their own, " goes, ; : <br /> and white space part words."""
    # the quotes first: what stands around a deleted one grows together
    return text.lower().replace('"', "").replace("<br />", " ").translate(_RULES).split()


def encode_texts(about: Mapping[str, Any], texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """Texts as rows of word numbers, cut or padded with 0, which is also the unknown word."""
    numbers = {word: k for k, word in enumerate(about["vocabulary"])}
    length = about["shape"][0]
    x = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        found = [numbers.get(word, 0) for word in split_words(text)][:length]
        x[row, : len(found)] = found
    return x


# --- images


def encode_images(about: Mapping[str, Any], files: Sequence[Path]) -> npt.NDArray[np.float32]:
    """Image files as inputs; only a model whose images were resized takes other sizes than its own."""
    from PIL import Image

    channels, height, width = about["shape"]
    x = np.empty((len(files), channels, height, width), np.float32)
    for row, path in enumerate(files):
        try:
            with open_image(path) as opened:
                image = opened.convert("L" if channels == 1 else "RGB")
        except Exception as error:  # damaged bytes make Pillow's many readers raise anything
            raise ValueError(f"cannot read the image {path}: {error}; replace or remove it") from None
        if image.size != (width, height):
            if not about["resized"]:
                size = f"{image.width}x{image.height}"
                raise ValueError(f"{path} is {size}; the model takes {width}x{height} pixels")
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        values = np.asarray(image)
        x[row] = values[np.newaxis] if values.ndim == 2 else values.transpose(2, 0, 1)
    return x * np.float32(about["scale"]) + np.float32(about["shift"])


def open_image(file: Path | bytes) -> Any:
    """Open an image of a known format, size and depth; only its head is read yet."""
    from PIL import Image

    if isinstance(file, Path) and file.exists() and not file.is_file():
        raise OSError("it is not a plain file")
    image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS)
    width, height, mode = image.width, image.height, image.mode
    if width * height > PIXELS or mode.startswith(DEEP):
        image.close()
        most = f"at most {PIXELS} of 8 bits a channel are read"
        raise OSError(f"it has {width}x{height} pixels of mode '{mode}', {most}")
    return image


def read_rows(about: Mapping[str, Any], path: Path) -> Array:
    """The inputs in a file or a folder of images, ready for the model."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe waits for ever, a device has no end
        raise ValueError(f"{path} is neither a file nor a folder; data is read from these only")
    if about["kind"] == "images" and path.suffix != ".npz":
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = [file for file in files if file == path or file.suffix.lower() in SUFFIXES]
        if not files:
            raise ValueError(f"{path} has no images ({' '.join(SUFFIXES)})")
        return encode_images(about, files)
    if path.suffix == ".npz" and about["kind"] != "table":
        return _arrays(about, path)
    if about["kind"] not in ("table", "texts"):
        raise ValueError(f"the model takes arrays of shape {tuple(about['shape'])}; give an .npz with x")
    if path.suffix.lower() not in (".csv", ".tsv", ".txt"):
        raise ValueError(f"{path} is no .csv or .tsv file; write the new rows as one")
    try:
        with open_csv(path) as (names, _, records):
            lines, cells = [*zip(*records, strict=True)] or ((), ())
    except csv.Error as error:
        raise ValueError(f"cannot read {path} as CSV: {error}") from None
    if not cells:
        raise ValueError(f"{path} has no rows")
    table = dict(zip(names, zip(*cells, strict=True), strict=True))
    try:
        if about["kind"] == "table":
            return encode_table(about, table, lambda row: f"line {lines[row]}")
        wanted = [column["name"] for column in about["columns"]]
        columns = [_column(table, name, wanted) for name in wanted]
        return encode_texts(about, [" ".join(cells) for cells in zip(*columns, strict=True)])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _arrays(about: Mapping[str, Any], path: Path) -> Array:
    """`x` of an .npz, in the form in which the training data was given."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_unpacked(archive, path)
        with np.load(path, allow_pickle=False) as arrays:
            x = np.asarray(arrays["x"]) if "x" in arrays else None
    except Exception as error:  # damaged bytes make zipfile, zlib and numpy's header parser raise anything
        raise ValueError(f"cannot read {path}: {error}; write it with numpy.savez") from None
    if x is None:
        raise ValueError(f"{path} has no array 'x'")
    shape = tuple(about["shape"])
    if x.ndim == 4 and x.shape[1:] != shape and (x.shape[3], *x.shape[1:3]) == shape:
        x = x.transpose(0, 3, 1, 2)
    if (1, *x.shape[1:]) == shape:
        x = x[:, np.newaxis]
    if x.shape[1:] != shape or not x.size:
        raise ValueError(f"x in {path} has shape {x.shape}; the model takes samples of shape {shape}")
    if about["words"]:
        if x.dtype.kind not in "iu" or x.min() < 0 or x.max() >= about["words"]:
            raise ValueError(f"x in {path} must hold word numbers 0..{about['words'] - 1}")
        return x.astype(np.int64)
    if x.dtype == np.uint8:
        return x.astype(np.float32) * np.float32(about["scale"]) + np.float32(about["shift"])
    pixels = about["kind"] == "images" or (about["scale"], about["shift"]) != (1.0, 0.0)
    if pixels or x.dtype.kind != "f":
        raise ValueError(f"x in {path} is {x.dtype}; the model takes {'uint8' if pixels else 'float32'}")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    for row in np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))[:1]:
        raise ValueError(f"x in {path} has NaN or infinite values (as float32) in row {row}; replace them")
    return x


def check_unpacked(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse a zip file that would unpack to much more than it holds."""
    size, held = sum(info.file_size for info in archive.infolist()), path.stat().st_size
    if size > max(UNPACKED, RATIO * held):
        raise ValueError(f"{path} has {held} bytes and would unpack to {size}; write it without compression")
