"""A user's own data: which of the forms it has, and who reads it."""

from __future__ import annotations

from feddbe.data.dataset import Dataset
from feddbe.data.files.places import plain
from feddbe.data.own.arrays import load_npz
from feddbe.data.own.arrow import load_parquet
from feddbe.data.own.folder import load_folder
from feddbe.data.own.huggingface import is_saved, load_named, load_saved
from feddbe.data.own.pfllib import is_pfllib, load_pfllib
from feddbe.data.own.table import Choice, chosen, load_csv
from feddbe.errors import BadInput, short
from feddbe.paths import expand

__all__ = ["FORMS", "load_own"]

FORMS = ("FILE.npz", "FILE.csv", "FILE.parquet", "FOLDER", "hf:NAME")


def load_own(wanted: str) -> Dataset | None:
    """The data set at this path or name, of which `?label=...` may choose columns; None if it is no form."""
    place, _, query = wanted.partition("?")
    path = expand(place)
    kind, folder = path.suffix, path.is_dir()
    choice = chosen(query)
    plain(path)
    if place.startswith("hf:"):
        return load_named(place.removeprefix("hf:"), choice)
    if folder and is_saved(path):
        return load_saved(path, choice)
    if kind in (".csv", ".tsv"):
        return load_csv(path, choice)
    if kind == ".parquet":
        return load_parquet(path, choice)
    if choice != Choice():
        raise BadInput(f"'?{short(query)}' chooses columns, but '{place}' has none; leave it out")
    if kind == ".npz":
        return load_npz(path)
    if folder:
        return load_pfllib(path) if is_pfllib(path) else load_folder(path)
    if len(path.parts) > 1:
        raise BadInput(f"there is no file or folder {path}; accepted are {', '.join(FORMS)}")
    return None
