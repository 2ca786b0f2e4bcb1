"""AG News: 127,600 news items in four classes, from the publisher's two CSV files.

A row is class (1 to 4), title, description; the text is title and description, joined by a space. The
vocabulary is that of both files, 98,635 words with `<unk>`, as in the published experiments. Smaller files of
the same form are accepted, and results are marked as those of a subset.
"""

from __future__ import annotations

import csv
import gzip
import lzma
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import TextIO
from zlib import error as ZlibError

import numpy as np
import torch

from feddbe.data.dataset import TEXT_LENGTH, Column, Dataset, Preprocessing, tokenize
from feddbe.data.files import NewArray, Publisher, load_cached, missing_data_error, search_folders
from feddbe.errors import InvalidInputError

publisher = Publisher(
    "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",
    {"train.csv": "md5:b1a00f826fdfbd249f79597b59e1dc12", "test.csv": "md5:d52ea96a97a2d943681189a97654912d"},
)
ROWS = (120_000, 7_600)
CLASSES = ("1", "2", "3", "4")
LABEL_NAMES = ("World", "Sports", "Business", "Sci/Tech")
_MAX_UNPACKED_BYTES = 100_000_000
"""Limit of an unpacked file; the publisher's have up to 29 MB."""
_READ_ERRORS = (OSError, EOFError, lzma.LZMAError, ZlibError, UnicodeDecodeError, csv.Error)


def _find_file(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}{suffix}" for suffix in ("", ".xz", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def find(data_dir: Path | None) -> list[Path]:
    """Return the two files, plain or compressed, in the first folder that has both; otherwise nothing."""
    for folder in search_folders("ag_news", data_dir):
        candidates = [_find_file(folder, name) for name in publisher.checksums]
        files = [path for path in candidates if path is not None]
        if len(files) == len(publisher.checksums):
            return files
    return []


def describe_location(data_dir: Path | None) -> str | None:
    """Return the folder of the files, with a note if they are a subset."""
    files = find(data_dir)
    if not files:
        return None
    try:
        note = _subset_note(*map(_count_lines, files))
    except _READ_ERRORS:
        note = "damaged"
    return f"{files[0].parent} ({note})" if note else str(files[0].parent)


def load(data_dir: Path | None) -> Dataset:
    """Return the training set, then the test set, in file order."""
    files = find(data_dir)
    if not files:
        raise missing_data_error(
            "AG News", "ag_news", data_dir, f"{' and '.join(publisher.checksums)} (plain, .xz or .gz)"
        )

    def build(new: NewArray) -> None:
        parts = [list(_read_rows(path)) for path in files]
        x, vocabulary = tokenize(text for part in parts for _, text in part)
        new("x", x.shape, np.int32)[:] = x
        new("y", (len(x),), np.int64)[:] = [label for part in parts for label, _ in part]
        new("sizes", (3,), np.int64)[:] = [*map(len, parts), len(vocabulary)]
        encoded = np.frombuffer("\n".join(vocabulary).encode(), np.uint8)
        new("vocabulary", encoded.shape, np.uint8)[:] = encoded

    cached = load_cached("ag_news", data_dir, f"words-{TEXT_LENGTH}-named", files, build)
    train, test, words = cached.arrays["sizes"].tolist()
    vocabulary = tuple(cached.arrays["vocabulary"].tobytes().decode().split("\n"))
    columns = (Column("title", mean=(0.0,)), Column("description", mean=(0.0,)))
    return Dataset(
        name="ag_news",
        x=torch.from_numpy(cached.arrays["x"]),
        y=torch.from_numpy(cached.arrays["y"]),
        classes=len(CLASSES),
        num_words=words,
        note=_subset_note(train, test),
        label_names=LABEL_NAMES,
        preprocessing=Preprocessing("texts", (TEXT_LENGTH,), columns, vocabulary=vocabulary, words=words),
        known_sha256=cached.sha256,
    )


def _subset_note(train: int, test: int) -> str:
    if (train, test) == ROWS:
        return ""
    return f"a subset: {train:,} of {ROWS[0]:,} training rows, {test:,} of {ROWS[1]:,} test rows"


def _open_file(path: Path) -> TextIO:
    """Open a plain or compressed file of at most `_MAX_UNPACKED_BYTES` bytes as text."""
    if path.suffix == ".xz":
        with lzma.open(path) as packed:
            content = packed.read(_MAX_UNPACKED_BYTES + 1)
    else:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MAX_UNPACKED_BYTES + 1)
    if len(content) > _MAX_UNPACKED_BYTES:
        raise OSError(f"it has more than the {_MAX_UNPACKED_BYTES} bytes that were expected")
    return StringIO(content.decode(), newline="")


def _count_lines(path: Path) -> int:
    """Return the number of rows without parsing them: the publisher writes one row per line."""
    with _open_file(path) as file:
        return sum(1 for _ in file)


def _read_rows(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over label (from 0) and text of each row."""
    number = 0
    try:
        with _open_file(path) as file:
            for number, row in enumerate(csv.reader(file), start=1):
                if len(row) < 2 or row[0] not in CLASSES:
                    raise InvalidInputError(
                        f"row {number} of {path} is '{','.join(row)[:40]}'; expected a class "
                        f"({', '.join(CLASSES)}), title and description"
                    )
                yield CLASSES.index(row[0]), " ".join(row[1:])
    except _READ_ERRORS as error:
        raise InvalidInputError(f"cannot read {path}: {error}; fetch the file again") from None
    if not number:
        raise InvalidInputError(f"{path} is empty; expected rows of class, title, description")
