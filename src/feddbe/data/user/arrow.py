"""Arrow tables, as Parquet files and Hugging Face data sets hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddbe.data.dataset import Dataset
from feddbe.data.io.download import plain
from feddbe.data.user.arrays import EXACT, Array
from feddbe.data.user.query import Choice
from feddbe.data.user.tables import Table, as_dataset, label_column
from feddbe.errors import BadInput, one_line, short


def pyarrow(needed_by: str) -> Any:
    """The library, which not everybody needs."""
    try:
        import pyarrow  # here: its import takes long
    except ImportError:
        raise BadInput(f"{needed_by} needs pyarrow; install it with: pip install 'feddbe[table]'") from None
    return pyarrow


def load_parquet(path: Path, choice: Choice) -> Dataset:
    """The data set in a .parquet file."""
    pa = pyarrow(str(path))
    from pyarrow import parquet

    try:
        table = validated(parquet.read_table(path, partitioning=None))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadInput(f"cannot read {path}: {one_line(error)}") from None
    return as_dataset(arrow_table(table, str(path)), choice, path.name)


def validated(table: Any) -> Any:
    """The table, if its offsets lie inside its values and its text is UTF-8: Arrow itself trusts a file, and
    follows a damaged offset out of memory."""
    table.validate(full=True)
    return table


def arrow_table(table: Any, where: str) -> Table:
    """An Arrow table; text, numbers and images as the Hugging Face hub stores them can be read."""
    pa = pyarrow(where)
    if not table.num_rows:
        raise BadInput(f"{where} has no rows")

    def read(name: str) -> Array:
        column, kind = table.column(name), table.schema.field(name).type
        if pa.types.is_dictionary(kind):
            column, kind = column.cast(kind.value_type), kind.value_type
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:  # the hub's images
            column = pa.chunked_array([chunk.field("bytes") for chunk in column.chunks])
            kind = column.type
        types = pa.types
        if types.is_integer(kind) and column.null_count and not _fits_float(column):
            column, kind = column.cast(pa.string()), pa.string()
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            return np.asarray(column.cast(pa.float64(), safe=False) if column.null_count else column)
        if any(is_kind(kind) for is_kind in (types.is_string, types.is_large_string, types.is_binary)):
            values = np.empty(len(column), object)
            values[:] = column.to_pylist()
            return values
        raise BadInput(
            f"column '{short(name)}' of {where} holds {short(kind)}; accepted are numbers, text and "
            "images: choose others with ?x=COLUMN,COLUMN"
        )

    return Table(where, table.column_names, read, labels=_class_labels(table))


def _fits_float(column: Any) -> bool:
    """Whether float64 holds these integers exactly."""
    from pyarrow import compute

    bounds = compute.min_max(column).as_py()
    return all(value is None or abs(value) <= EXACT for value in bounds.values())


def _class_labels(table: Any) -> dict[str, Sequence[str]]:
    """The names of classes that Hugging Face's library writes beside its tables."""
    try:
        features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
        labels = {name: about["names"] for name, about in features.items() if about["_type"] == "ClassLabel"}
        return {name: list(map(str, names)) for name, names in labels.items()}
    except (KeyError, TypeError, ValueError):  # from elsewhere, or of another version
        return {}


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
