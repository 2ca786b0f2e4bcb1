"""A user's folder of images by class: cat/1.png, dog/1.png, or the same in `train` and `test`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from feddbe.data.dataset import Dataset
from feddbe.data.files.images import decode, preprocessed
from feddbe.data.own.arrays import Numbered, made
from feddbe.data.rows import SUFFIXES
from feddbe.errors import BadInput

__all__ = ["load_folder"]


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
