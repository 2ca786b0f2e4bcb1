"""AG News: 127,600 news items in four classes, from the publisher's two CSV files.

A row is class (1 to 4), title, description; the text is title and description with a space between. The
vocabulary is that of both files, 98,635 words with `<unk>`, as in the published experiments. Smaller files of
the same form are taken too, and said to be a subset wherever the data is named.
"""

from __future__ import annotations

import csv
import gzip
import lzma
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from feddbe.data.cache import New, cached
from feddbe.data.dataset import Dataset
from feddbe.data.download import Progress, cache_folder, download, folders
from feddbe.data.text import LENGTH, tokenize
from feddbe.errors import BadInput

__all__ = ["find", "found", "get", "load"]

URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
MD5 = {"train.csv": "b1a00f826fdfbd249f79597b59e1dc12", "test.csv": "d52ea96a97a2d943681189a97654912d"}
ROWS = (120_000, 7_600)
CLASSES = 4
_OPENERS: dict[str, Any] = {"": open, ".xz": lzma.open, ".gz": gzip.open}
_DAMAGED = (OSError, EOFError, lzma.LZMAError, gzip.zlib.error, UnicodeDecodeError, csv.Error)  # type: ignore[attr-defined]


def _files(folder: Path) -> list[Path]:
    """The two files in this folder, plain or compressed; fewer if one is missing."""
    choices = [[folder / f"{name}{ending}" for ending in _OPENERS] for name in MD5]
    return [next(path for path in paths if path.is_file()) for paths in choices if any(map(Path.is_file, paths))]


def find(data_dir: Path | None) -> Path | None:
    """The first place that has both files."""
    places = folders("ag_news", data_dir)
    return next((place for place in places if len(_files(place)) == len(MD5)), None)


def found(data_dir: Path | None) -> str | None:
    """Where the files are, and whether they are all of it."""
    folder = find(data_dir)
    if folder is None:
        return None
    note = _note(*(_lines(path, path.stat().st_mtime_ns) for path in _files(folder)))
    return f"{folder} ({note})" if note else str(folder)


def load(data_dir: Path | None) -> Dataset:
    """Train set then test set, in file order."""
    folder = find(data_dir)
    if folder is None:
        raise BadInput(
            f"AG News is in none of {', '.join(map(str, folders('ag_news', data_dir)))}; "
            f"run 'feddbe data get ag_news', or put {' and '.join(MD5)} (plain, .xz or .gz) "
            f"into {cache_folder('ag_news', data_dir)}"
        )
    files = _files(folder)

    def build(new: New) -> None:
        rows = [[*_rows(path)] for path in files]
        x, vocabulary = tokenize(text for part in rows for _, text in part)
        new("x", x.shape, np.int32)[:] = x
        new("y", (len(x),), np.int64)[:] = [label for part in rows for label, _ in part]
        new("sizes", (3,), np.int64)[:] = [*map(len, rows), len(vocabulary)]

    kept = cached("ag_news", data_dir, f"words-{LENGTH}", files, build)
    train, test, words = kept.arrays["sizes"].tolist()
    return Dataset(
        name="ag_news",
        x=torch.from_numpy(kept.arrays["x"]),
        y=torch.from_numpy(kept.arrays["y"]),
        classes=CLASSES,
        tokens=words,
        note=_note(train, test),
        known_sha256=kept.sha256,
    )


def get(data_dir: Path | None, progress: Progress | None = None) -> Path:
    """Download the two files; what is already there and whole is kept."""
    folder = cache_folder("ag_news", data_dir)
    for name, md5 in MD5.items():
        download(URL + name, folder / name, f"md5:{md5}", progress)
    return folder


def _note(train: int, test: int) -> str:
    if (train, test) == ROWS:
        return ""
    return f"a subset: {train:,} of {ROWS[0]:,} training rows, {test:,} of {ROWS[1]:,} test rows"


def _rows(path: Path) -> Iterator[tuple[int, str]]:
    """Label from 0, and text, of each row."""
    try:
        with _OPENERS[path.suffix.replace(".csv", "")](path, "rt", encoding="utf-8", newline="") as file:
            number = 0
            for number, row in enumerate(csv.reader(file), start=1):
                if len(row) < 2 or row[0] not in {str(c) for c in range(1, CLASSES + 1)}:
                    shown = ",".join(row)[:40]
                    raise BadInput(
                        f"row {number} of {path} is '{shown}'; expected class 1 to {CLASSES}, title, description"
                    )
                yield int(row[0]) - 1, " ".join(row[1:])
            if not number:
                raise BadInput(f"{path} is empty; expected rows of class, title, description")
    except _DAMAGED as error:
        raise BadInput(f"cannot read {path}: {error}; fetch the file again") from None


@cache
def _lines(path: Path, changed: int) -> int:
    """Rows of a file without parsing it: the publisher writes one to a line."""
    file: IO[bytes]
    try:
        with _OPENERS[path.suffix.replace(".csv", "")](path, "rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except _DAMAGED:
        return 0  # to load it says what is wrong
