"""A user's folder of images by class: cat/1.png, dog/1.png, or the same in `train` and `test`."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from feddbe.data.dataset import Dataset
from feddbe.data.io import safe_pickle
from feddbe.data.io.archives import check_zip
from feddbe.data.io.download import plain
from feddbe.data.io.images import decode, preprocessed
from feddbe.data.rows import SUFFIXES
from feddbe.data.split import Split
from feddbe.data.user.arrays import Array, Numbered, labels_of, made, samples_of
from feddbe.errors import BadInput, one_line


def load_folder(folder: Path, resize: tuple[int, int] | None = None) -> Dataset:
    """Classes and files in the order of their names, `train` before `test`; hidden files are left out.
    `resize`: width and height that all images are brought to."""
    parts = [folder]
    inside = _folders(folder)
    if folder / "train" in inside and _folders(folder / "train"):
        parts = [part for part in (folder / "train", folder / "test") if part in inside]
        if others := [part.name for part in inside if part not in parts]:
            raise BadInput(
                f"{folder} has train, and also {', '.join(others)}; read is only test: move it away"
            )
    classes = sorted({place.name for part in parts for place in _folders(part)})
    if len(classes) < 2:
        raise BadInput(
            f"{folder} has {len(classes)} folders with images; at least 2 classes are needed, as in "
            f"{folder}/cat/1.png and {folder}/dog/1.png"
        )
    files = [
        (file, label)
        for part in parts
        for label, name in enumerate(classes)
        if (part / name).is_dir()
        for file in _images(part / name)
    ]
    empty = set(range(len(classes))) - {label for _, label in files}
    if empty:
        raise BadInput(f"the class '{classes[min(empty)]}' in {folder} has no images; add some or remove it")
    paths = [file for file, _ in files]
    y = Numbered(np.array([label for _, label in files], np.int64), tuple(classes))
    x = decode(paths, [*map(str, paths)], resize)
    return made(f"{folder.resolve().name}/", x, y, preprocessing=preprocessed(x, resize))


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]


def _images(folder: Path) -> list[Path]:
    for path in _visible(folder):
        if path.is_dir() or path.suffix.lower() not in SUFFIXES:
            kind = "a folder" if path.is_dir() else "no image by its name"
            raise BadInput(
                f"{path} is {kind}; a class folder must hold only images ({' '.join(SUFFIXES)}): move it away"
            )
    return _visible(folder)


_WORDS, _CLASSES = 1 << 20, 1 << 10
"""So many are believed, even of a part of a data set; more only if there are as many words, or samples."""


def is_pfllib(folder: Path) -> bool:
    """Whether this looks like such a folder."""
    return (folder / "config.json").is_file() and any((folder / "train").glob("*.npz"))


def load_pfllib(folder: Path) -> Dataset:
    """All clients' train sets, then all test sets, and who holds which rows."""
    clients, classes = _config(folder / "config.json")
    there = {*(folder / "train").glob("*.npz"), *(folder / "test").glob("*.npz")}
    known = range(min(clients, len(there) + 1))  # one that is not there is enough to say so
    files = [folder / part / f"{k}.npz" for part in ("train", "test") for k in known]
    if lacking := [file for file in files if file not in there]:
        raise BadInput(f"there is no file {lacking[0]}, which config.json calls for")
    if extra := there - {*files}:
        raise BadInput(f"{min(extra)} is no client's: config.json says num_clients = {clients}")
    parts = [_part(file) for file in files]
    shapes = {x.shape[1:]: file for (x, _), file in zip(parts, files, strict=True)}
    if len(shapes) > 1:
        (one, first), (other, second) = list(shapes.items())[:2]
        raise BadInput(f"samples in {first} have shape {one}, in {second} {other}; they must be the same")
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    tokens = int(x.max()) + 1 if x.dtype == np.int32 else 0
    if tokens > max(_WORDS, x.size):
        raise BadInput(
            f"{folder} has the word number {tokens - 1}, but only {x.size} words; number them from 0"
        )
    if not tokens:
        x = samples_of(x, f"x in {folder}")
    y = _labels(y, f"y in {folder}")
    found = int(y.max()) + 1
    if found > (classes or found):
        raise BadInput(f"{folder} has the label {found - 1}, but config.json says num_classes = {classes}")
    if classes > max(_CLASSES, len(y)):
        raise BadInput(f"{folder} has {len(y)} samples, but config.json says num_classes = {classes}")
    ends = np.cumsum([len(labels) for _, labels in parts])[:-1]
    rows = np.split(np.arange(len(x)), ends)
    split = Split.of(rows[:clients], rows[clients:])
    names = tuple(map(str, range(classes or found)))
    return made(f"{folder.resolve().name}/", x, Numbered(y, names), tokens=tokens, split=split)


def _labels(y: Array, what: str) -> Array:
    """Whole numbers from 0 on, as they are: a part of a data set may lack a class."""
    labels_of(y, len(y), what)
    if y.dtype.kind not in "iuf" or y.min() < 0 or y.max() >= max(_CLASSES, len(y)):
        raise BadInput(f"{what} must be whole numbers from 0 on, fewer than there are samples")
    return y.astype(np.int64)


def _config(path: Path) -> tuple[int, int]:
    """Clients and classes; newer versions do not write the latter, then they are 0."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        clients, classes = config["num_clients"], config.get("num_classes", 0)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"cannot use {path}: {type(error).__name__} {one_line(error)}") from None
    if type(clients) is not int or type(classes) is not int or clients < 1 or classes < 0:
        raise BadInput(
            f"{path} has num_clients = {clients!r} and num_classes = {classes!r}; both must be whole numbers"
        )
    return clients, classes


def _part(path: Path) -> tuple[Array, Array]:
    """x and y of one file; texts as int32."""
    match _content(path):
        case {"x": np.ndarray() as x, "y": np.ndarray() as y}:
            pass
        case _:
            raise BadInput(f"{path} does not hold what PFLlib writes: a dict of arrays x and y in 'data'")
    if x.dtype == object:
        x = _texts(x, path)
    if y.shape != x.shape[:1] or not len(y):
        raise BadInput(
            f"{path} has x of shape {x.shape} and y of shape {y.shape}; they must be as long as each other, "
            "and every client needs at least one sample to train and one to test"
        )
    return x, y


def _texts(x: Array, path: Path) -> Array:
    """PFLlib's texts are pairs of a padded list of word numbers and its length."""
    try:
        texts = np.array([row[0] for row in x])
    except (ValueError, TypeError, IndexError):
        texts = np.empty(0)
    if texts.ndim != 2 or texts.dtype.kind != "i" or texts.min() < 0 or texts.max() >= 2**31:
        raise BadInput(f"x in {path} is neither numbers nor texts of one length as PFLlib writes them")
    return texts.astype(np.int32)


def _content(path: Path) -> Any:
    """What 'data' in a file holds, without executing the pickle."""
    try:
        plain(path)
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, path)
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as member:
            version = np.lib.format.read_magic(member)
            heads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            _, _, dtype = heads[version](member)
            if not dtype.hasobject:
                return None
            content = safe_pickle.load(member)
            return content.item() if isinstance(content, np.ndarray) and content.ndim == 0 else None
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except Exception as error:  # damaged bytes make zipfile, zlib and numpy's header parser raise anything
        raise BadInput(f"cannot read {path}: {one_line(error)}; let PFLlib write it again") from None
