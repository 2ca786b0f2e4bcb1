"""A user's own data: which of the forms it has, and who reads it."""

from __future__ import annotations

from feddbe.data.dataset import Dataset
from feddbe.data.files.places import plain
from feddbe.data.own.arrays import load_npz
from feddbe.data.own.arrow import load_parquet
from feddbe.data.own.choice import FOLDER, NPZ, TABLE, chosen
from feddbe.data.own.folder import load_folder
from feddbe.data.own.huggingface import is_saved, load_named, load_saved
from feddbe.data.own.pfllib import is_pfllib, load_pfllib
from feddbe.data.own.table import load_csv
from feddbe.errors import BadInput
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
