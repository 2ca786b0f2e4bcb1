"""A Hugging Face data set: a folder that `save_to_disk` wrote, or a name on the hub.

All its splits are merged, train first, as everywhere here. A split whose labels are all -1 has none, by the
hub's custom, and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from feddbe.data.dataset import Dataset
from feddbe.data.files.places import plain
from feddbe.data.own.arrow import arrow_table, pyarrow, validated
from feddbe.data.own.table import Choice, as_dataset, label_column
from feddbe.errors import BadInput, one_line

__all__ = ["is_saved", "load_named", "load_saved"]


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def load_saved(folder: Path, choice: Choice) -> Dataset:
    """The data set in a folder; needs pyarrow, but not Hugging Face's library."""
    pa = pyarrow(str(folder))
    try:
        names = [""]
        if (folder / "dataset_dict.json").is_file():
            names = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        splits = {name: _saved(folder / name, pa) for name in names}
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise BadInput(f"cannot read the data set in {folder}: {one_line(error)}") from None
    return _merged(splits, choice, str(folder), f"{folder.resolve().name}/")


def _saved(folder: Path, pa: Any) -> Any:
    plain(folder / "state.json")
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    tables = []
    for about in state["_data_files"]:
        path = folder / Path(about["filename"]).name
        plain(path)
        with pa.memory_map(str(path)) as file:
            tables.append(validated(pa.ipc.open_stream(file).read_all()))
    return pa.concat_tables(tables)


def load_named(name: str, choice: Choice) -> Dataset:
    """The data set of this name, downloaded to the library's own cache if it is not there."""
    try:
        import datasets
    except ImportError:
        raise BadInput(
            f"hf:{name} needs the datasets library; install it with: pip install 'feddbe[hub]'"
        ) from None
    try:
        found = datasets.load_dataset(name, choice.config or None)
        splits = {split: validated(rows.with_format("arrow")[:]) for split, rows in found.items()}
    except Exception as error:  # network, names, files: the library raises all kinds
        raise BadInput(f"cannot load hf:{name}: {one_line(error)}") from None
    return _merged(splits, choice, f"hf:{name}", f"hf:{name}")


def _merged(splits: Mapping[str, Any], choice: Choice, where: str, name: str) -> Dataset:
    pa = pyarrow(where)
    kept = []
    for split, rows in sorted(splits.items(), key=lambda item: item[0] != "train"):
        if not rows.num_rows:
            continue
        part = arrow_table(rows, f"{where}, split {split}" if split else where)
        labels = part.read(label_column(part, choice))
        if labels.dtype == object or not np.all(labels == -1):
            kept.append(rows)
    if not kept:
        raise BadInput(f"{where} has no rows with labels")
    try:
        table = pa.concat_tables(kept)
    except pa.ArrowException as error:
        raise BadInput(f"the splits of {where} do not have the same columns: {one_line(error)}") from None
    return as_dataset(arrow_table(table, where), choice, name)
