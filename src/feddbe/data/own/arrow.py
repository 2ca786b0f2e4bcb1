"""Arrow tables, as Parquet files and Hugging Face data sets hold them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddbe.data.dataset import Dataset
from feddbe.data.own.arrays import EXACT, Array
from feddbe.data.own.table import Choice, Table, as_dataset
from feddbe.errors import BadInput, one_line, short

__all__ = ["arrow_table", "load_parquet", "pyarrow", "validated"]


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
