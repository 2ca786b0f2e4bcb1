"""User tables: CSV, Parquet and Hugging Face files and pandas frames, all read as pandas frames.

A table has a label column, optionally a client column, and columns of numbers, categories, texts or images.
Numbers are standardized, each column by its mean and deviation over the training rows
(`Dataset.fit_preprocessing`, after the split). With columns of very different size (age, income), plain SGD
makes no progress. For another scale, use an .npz file, whose values are not changed.

The query of user data, as in `FILE?label=target&client=user`, names the columns and their treatment.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from feddbe.data import rows
from feddbe.data.dataset import Column, Dataset, Preprocessing, tokenize
from feddbe.data.files import require_regular_file
from feddbe.data.user.arrays import (
    Array,
    EncodedColumn,
    build_dataset,
    encode_clients,
    encode_labels,
    encode_text_labels,
    format_values,
)
from feddbe.data.user.images import decode_images, image_preprocessing
from feddbe.errors import InvalidInputError, one_line, truncate, unknown_name

TABLE_KEYS = ("label", "client", "x", "drop", "image", "categories", "missing", "resize", "config")
FOLDER_KEYS = ("resize",)
NPZ_KEYS = ("words",)


@dataclass(frozen=True)
class DataQuery:
    """Parsed query; columns that are not named are recognized by their usual names."""

    label: str = ""
    client: str = ""
    x: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    """Columns that are not used."""
    image: str = ""
    """Column with images, or with paths of image files, which is the only input."""
    categories: tuple[str, ...] = ()
    """Categorical columns, which would otherwise be numbers or texts."""
    missing: str = ""
    """Treatment of missing values: `drop` the row, or use the `mean` of the training rows."""
    resize: tuple[int, int] | None = None
    """Width and height of all images."""
    words: int = 0
    """Size of the vocabulary, if an .npz file contains word numbers."""
    config: str = ""
    """Configuration of a data set on the Hugging Face hub, if it has several."""

    def check_keys(self, allowed: Iterable[str], location: str) -> None:
        """Raise an error for keys that this form of data does not use."""
        used = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        for key in used:
            if key not in allowed:
                keys = ", ".join(f"?{name}=" for name in allowed) or "nothing"
                raise InvalidInputError(
                    f"'?{key}=' does not apply to '{truncate(location)}'; allowed there: {keys}"
                )


def parse_query(text: str) -> DataQuery:
    """Parse a query such as `label=target&client=user&x=age,income`; names have %26 for & and %2C for ,."""
    values: dict[str, Any] = {}
    for item in filter(None, text.split("&")):
        key, _, value = item.partition("=")
        if key not in DataQuery.__dataclass_fields__:
            raise unknown_name("key after '?'", key, DataQuery.__dataclass_fields__)
        names = tuple(map(unquote, value.split(",")))
        values[key] = names if key in ("x", "drop", "categories") else unquote(value)
    if "missing" in values and values["missing"] not in ("drop", "mean"):
        raise unknown_name("value of ?missing=", values["missing"], ("drop", "mean"))
    if "resize" in values:
        values["resize"] = _parse_size(values["resize"])
    if "words" in values:
        if not values["words"].isdecimal() or int(values["words"]) < 2:
            raise InvalidInputError(
                f"?words={truncate(values['words'])}: it must be the size of the vocabulary, at least 2"
            )
        values["words"] = int(values["words"])
    return DataQuery(**values)


def _parse_size(text: str) -> tuple[int, int]:
    """Return width and height of a text such as 32 or 48x32."""
    sides = text.split("x")
    numbers = [int(side) for side in sides if side.isdecimal()]
    if len(numbers) != len(sides) or len(numbers) > 2 or not all(1 <= side <= 4096 for side in numbers):
        raise InvalidInputError(
            f"?resize={truncate(text)}: write a number of pixels, as in ?resize=32, or WIDTHxHEIGHT"
        )
    return numbers[0], numbers[-1]


LABEL_COLUMNS = ("label", "y")
_EXACT_INTEGER = 2**53
"""Largest integer up to which float64 represents all integers."""
_MAX_CATEGORIES = 100
"""Maximum number of distinct values of a categorical column."""
_WHOLE_NUMBER = re.compile("0|[1-9][0-9]*")


@dataclass(frozen=True)
class Table:
    """A pandas frame with facts about its origin, for errors and preprocessing."""

    origin: str
    frame: Any
    locate_row: Callable[[int], str] = field(default=lambda row: f"row {row}")
    """Function that describes the position of a row."""
    decimal_comma: bool = False
    """True if numbers may have a decimal comma."""
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the classes 0, 1, ... of label columns, if the file has them."""
    folder: Path = Path()
    """Folder from which paths of images start."""

    def __post_init__(self) -> None:
        if not len(self.frame):
            raise InvalidInputError(f"{self.origin} has no rows")
        if len(self.positions) < len(self.frame.columns):
            names = truncate(", ".join(map(str, self.frame.columns)))
            raise InvalidInputError(f"{self.origin} has two columns of one name; it has: {names}")

    @cached_property
    def positions(self) -> dict[str, int]:
        """Position of each column by name."""
        return {str(name): position for position, name in enumerate(self.frame.columns)}

    def read(self, name: str) -> Array:
        """Return a column as numbers, with nan for missing values, or as objects.

        Objects are str or None, or image files as bytes. If a column has missing values, integers that a
        float cannot represent exactly are str.
        """
        column = self.frame.iloc[:, self.positions[name]]
        arrow_type = getattr(column.dtype, "pyarrow_dtype", None)
        if arrow_type is not None and not _is_supported(arrow_type):
            raise InvalidInputError(
                f"column '{truncate(name)}' of {self.origin} holds {truncate(arrow_type)}; "
                "accepted are numbers, text and images: choose others with ?x=COLUMN,COLUMN"
            )
        kind = getattr(column.dtype, "kind", "O")
        is_missing = column.isna().to_numpy(bool)
        if kind in "iufb" and not is_missing.any():
            return np.asarray(column)
        too_large = kind in "iu" and bool((column.dropna().abs() > _EXACT_INTEGER).any())
        if kind in "iufb" and not too_large:
            return np.asarray(column.astype("float64"))
        values = np.empty(len(column), object)
        for row, value in enumerate(column):
            if not is_missing[row]:
                values[row] = value if isinstance(value, bytes) else str(value)
        return values

    def find_label_column(self, query: DataQuery) -> str:
        """Return the name of the label column."""
        for column in [query.label] if query.label else LABEL_COLUMNS:
            if column in self.positions:
                return column
        raise self.missing_column_error(query.label or LABEL_COLUMNS[0])

    def find_client_column(self, query: DataQuery) -> str:
        """Return the name of the client column, or an empty text."""
        return query.client or ("client" if "client" in self.positions else "")

    def missing_column_error(self, column: str) -> InvalidInputError:
        """Return the error for a column that the table does not have."""
        return InvalidInputError(
            f"{self.origin} has no column '{truncate(column)}'; "
            f"it has: {truncate(', '.join(self.positions))}; "
            "name yours as in 'FILE?label=target&client=user&x=age,income'"
        )


def load_csv(path: Path, query: DataQuery) -> Dataset:
    """Load a .csv or .tsv file whose first line names the columns.

    Python's csv module checks the number of cells in every line; pandas parses the numbers.
    """
    try:
        with rows.open_csv(path) as (names, delimiter, records):
            lines = np.fromiter((line for line, _ in records), np.int64)
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(f"cannot read {path} as CSV in UTF-8: {one_line(error)}") from None
    except ValueError as error:
        raise InvalidInputError(str(error)) from None
    if not len(lines):
        raise InvalidInputError(f"{path} has no rows; expected are a line of names, then one line a sample")
    frame = _read_frame(path, names, delimiter, query)
    table = Table(
        str(path),
        frame,
        lambda row: f"line {lines[row]}",
        decimal_comma=delimiter == ";",
        folder=path.parent,
    )
    return build_table_dataset(table, query, path.name)


def _read_frame(path: Path, names: Sequence[str], delimiter: str, query: DataQuery) -> Any:
    """Return a frame of numbers and texts in which every number equals Python's `float` of its text.

    Labels, clients and categories stay texts: 1 and 1.0 are two classes.
    """
    import pandas  # here: only tables need it

    options: dict[str, Any] = {
        "sep": delimiter, "names": names, "header": 0, "index_col": False, "encoding": "utf-8-sig",
        "keep_default_na": False, "na_values": [""], "low_memory": False,
    }  # fmt: skip
    if pandas.__version__.startswith(("2.", "3.0.")):  # later versions always parse exactly
        options["float_precision"] = "round_trip"
    if delimiter == ";":  # pandas accepts one decimal sign: that of the first row; other numbers stay texts
        first = pandas.read_csv(path, dtype=str, nrows=1, **options)
        options["decimal"] = "," if first.iloc[0].str.contains(",").any() else "."
    texts = {*LABEL_COLUMNS, "client", query.label, query.client, *query.categories}.intersection(names)
    frame = pandas.read_csv(path, dtype=dict.fromkeys(texts, str), **options)
    # pandas reads True as a boolean, and integers that are too large as objects: these are texts, too.
    others = [name for name, dtype in frame.dtypes.items() if dtype in (bool, object)]
    if others:
        frame[others] = pandas.read_csv(path, dtype=str, usecols=others, **options)[others]
    return frame


def load_parquet(path: Path, query: DataQuery) -> Dataset:
    """Load a .parquet file."""
    pyarrow = _import_pyarrow(str(path))
    from pyarrow import parquet

    try:
        content = _validate(parquet.read_table(path, partitioning=None))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise InvalidInputError(f"cannot read {path}: {one_line(error)}") from None
    table = replace(_table_from_arrow(content, str(path)), folder=path.parent)
    return build_table_dataset(table, query, path.name)


def load_frame(frame: Any, query: DataQuery) -> Dataset:
    """Load a pandas frame like a table in a file."""
    return build_table_dataset(Table("the frame", frame), query, "frame")


def is_hugging_face_folder(folder: Path) -> bool:
    """Return True if Hugging Face's `save_to_disk` wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def load_hugging_face_folder(folder: Path, query: DataQuery) -> Dataset:
    """Load a folder that `save_to_disk` wrote; needs pyarrow, but not Hugging Face's library."""
    pyarrow = _import_pyarrow(str(folder))
    try:
        names = [""]
        if (folder / "dataset_dict.json").is_file():
            names = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        splits = {name: _read_arrow_files(folder / name) for name in names}
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise InvalidInputError(f"cannot read the data set in {folder}: {one_line(error)}") from None
    return _load_splits(splits, query, str(folder), f"{folder.resolve().name}/")


def load_from_hub(name: str, query: DataQuery) -> Dataset:
    """Load a data set by name from the Hugging Face hub, or from its library's cache."""
    try:
        import datasets
    except ImportError:
        raise InvalidInputError(
            f"hf:{name} needs the datasets library; install it with: pip install 'feddbe[hub]'"
        ) from None
    try:
        loaded = datasets.load_dataset(name, query.config or None)
        splits = {split: _validate(part.with_format("arrow")[:]) for split, part in loaded.items()}
    except Exception as error:  # network, names, files: the library raises any exception
        raise InvalidInputError(f"cannot load hf:{name}: {one_line(error)}") from None
    return _load_splits(splits, query, f"hf:{name}", f"hf:{name}")


def _import_pyarrow(needed_by: str) -> Any:
    try:
        import pyarrow  # here: its import is slow
    except ImportError:
        raise InvalidInputError(
            f"{needed_by} needs pyarrow; install it with: pip install 'feddbe[table]'"
        ) from None
    return pyarrow


def _read_arrow_files(folder: Path) -> Any:
    import pyarrow

    require_regular_file(folder / "state.json")
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    parts = []
    for data_file in state["_data_files"]:
        path = folder / Path(data_file["filename"]).name
        require_regular_file(path)
        with pyarrow.memory_map(str(path)) as file:
            parts.append(_validate(pyarrow.ipc.open_stream(file).read_all()))
    return pyarrow.concat_tables(parts)


def _load_splits(splits: Mapping[str, Any], query: DataQuery, where: str, name: str) -> Dataset:
    """Load the splits with labels, the training split first."""
    pyarrow = _import_pyarrow(where)
    labeled = []
    for split, part in sorted(splits.items(), key=lambda item: item[0] != "train"):
        if not part.num_rows:
            continue
        table = _table_from_arrow(part, f"{where}, split {split}" if split else where)
        labels = table.read(table.find_label_column(query))
        if labels.dtype == object or not np.all(labels == -1):
            labeled.append(part)
    if not labeled:
        raise InvalidInputError(f"{where} has no rows with labels")
    try:
        joined = pyarrow.concat_tables(labeled)
    except pyarrow.ArrowException as error:
        raise InvalidInputError(
            f"the splits of {where} do not have the same columns: {one_line(error)}"
        ) from None
    return build_table_dataset(_table_from_arrow(joined, where), query, name)


def _validate(content: Any) -> Any:
    """Return the Arrow table if its offsets are inside of its values and its text is UTF-8.

    Arrow trusts files, and a damaged offset would be read outside of its memory.
    """
    content.validate(full=True)
    return content


def _table_from_arrow(content: Any, where: str) -> Table:
    """Return an Arrow table as a frame with Arrow's types: integers with missing values stay integers."""
    import pandas
    import pyarrow

    columns = []
    for column in content.columns:
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pyarrow.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
            chunks = [chunk.field("bytes") for chunk in column.chunks]  # the hub's images
            column = pyarrow.chunked_array(chunks, column.type.field("bytes").type)
        columns.append(column)
    plain_table = pyarrow.table(columns, names=content.column_names)
    frame = plain_table.to_pandas(types_mapper=pandas.ArrowDtype)
    return Table(where, frame, class_names=_hub_class_names(content))


def _is_supported(arrow_type: Any) -> bool:
    from pyarrow import types

    checks = (
        types.is_boolean, types.is_integer, types.is_floating, types.is_string, types.is_large_string,
        types.is_binary,
    )  # fmt: skip
    return any(check(arrow_type) for check in checks)


def _hub_class_names(content: Any) -> dict[str, Sequence[str]]:
    """Return the names of classes that Hugging Face's library writes into its tables."""
    try:
        features = json.loads(content.schema.metadata[b"huggingface"])["info"]["features"]
        names = {
            name: feature["names"] for name, feature in features.items() if feature["_type"] == "ClassLabel"
        }
        return {name: list(map(str, classes)) for name, classes in names.items()}
    except (KeyError, TypeError, ValueError):  # written by another program or version
        return {}


# --- from columns to a data set


@dataclass(frozen=True)
class Feature:
    """A column of inputs."""

    name: str
    kind: Literal["number", "category", "text", "image"]
    values: Array
    """Numbers with nan, or objects with None."""
    missing: npt.NDArray[np.bool_]

    def keep(self, mask: Array) -> Feature:
        """Return the rows where `mask` is true."""
        return replace(self, values=self.values[mask], missing=self.missing[mask])


class Inputs(NamedTuple):
    """Inputs of all features; those of a table are raw until they are fitted."""

    x: Array
    preprocessing: Preprocessing
    note: str = ""


def build_table_dataset(table: Table, query: DataQuery, name: str) -> Dataset:
    """Return a table as a data set.

    Args:
        table: The table.
        query: Label, client and input columns, and their treatment.
        name: Name of the data set.

    Raises:
        InvalidInputError: A column is missing, or its values cannot be used.
    """
    label, client = table.find_label_column(query), table.find_client_column(query)
    for column in (*filter(None, [client, query.image]), *query.x, *query.categories, *query.drop):
        if column not in table.positions:
            raise table.missing_column_error(column)
    inputs = query.x or tuple(filter(None, [query.image]))
    if not inputs:
        inputs = tuple(column for column in table.positions if column not in (label, client))
    inputs = tuple(column for column in inputs if column not in query.drop)
    if not inputs:
        both = f"'{truncate(label)}' and '{truncate(client)}'" if client else f"'{truncate(label)}'"
        raise InvalidInputError(f"{table.origin} has no column next to {both}")
    features = _classify_columns({column: table.read(column) for column in inputs}, query, table)
    targets = {column: table.read(column) for column in filter(None, [label, client])}
    doubtful = _find_doubtful_columns(features)  # before rows are dropped
    mask = _select_rows(targets, features, query, table)
    if mask is not None:
        features = [feature.keep(mask) for feature in features]
        targets = {column: values[mask] for column, values in targets.items()}
    titles = {column: f"column '{truncate(column)}' of {table.origin}" for column in targets}
    y = _encode_labels(targets[label], titles[label], table.class_names.get(label, ()))
    clients = _encode_clients(targets[client], titles[client]) if client else None
    x, preprocessing, note = _join_features(features, query, table)
    notes = [note]
    if doubtful:
        advice = truncate(",".join(name for names in doubtful.values() for name in names))
        notes.append(f"{_describe_doubts(doubtful)}: ?drop={advice} leaves columns out")
    if mask is not None and not mask.all():
        notes.append(f"{int((~mask).sum()):,} of {len(mask):,} rows were left out: values are missing")
    return build_dataset(
        name,
        x,
        y,
        clients,
        num_words=preprocessing.words,
        preprocessing=preprocessing,
        note="; ".join(filter(None, notes)),
    )


_FILLING = {
    "number": ", ?missing=mean takes the column's mean",
    "category": ", ?missing=mean takes the column's frequencies; ?categories=COLUMN makes NA a category",
    "text": ", ?missing=mean takes an empty text",
}
"""Remedies for a missing value, by the kind of its column."""


def _select_rows(
    targets: Mapping[str, Array], features: Sequence[Feature], query: DataQuery, table: Table
) -> Array | None:
    """Return a mask of the rows to keep, or None for all.

    Raises:
        InvalidInputError: A value is missing, and the query has no treatment for it.
    """
    masks = {name: find_missing(values) for name, values in targets.items()}
    masks |= {feature.name: feature.missing for feature in features}
    kinds = {feature.name: feature.kind for feature in features}
    missing = {name: mask for name, mask in masks.items() if mask.any()}
    if query.missing == "drop":
        incomplete = np.logical_or.reduce([*missing.values(), np.zeros(len(features[0].missing), bool)])
        if incomplete.all():
            raise InvalidInputError(
                f"{table.origin} has no row without a missing value; leave out columns: ?drop=COLUMN,COLUMN"
            )
        return np.asarray(~incomplete)
    without_mean = {*targets, *(feature.name for feature in features if feature.kind == "image")}
    for name, mask in missing.items():
        if name in without_mean or query.missing != "mean":
            remedy = "?missing=drop leaves such rows out"
            remedy += "" if name in without_mean else _FILLING[kinds[name]]
            count = f" and in {mask.sum() - 1:,} more" if mask.sum() > 1 else ""
            row = table.locate_row(int(np.flatnonzero(mask)[0]))
            raise InvalidInputError(
                f"column '{truncate(name)}' of {table.origin} has no value in {row}{count}; "
                f"fill it in, or {remedy}"
            )
    return None


def _encode_labels(values: Array, what: str, class_names: Sequence[str]) -> EncodedColumn:
    """Return labels of any type as numbers from 0, in sorted order."""
    if values.dtype != object:
        labels = encode_labels(values, len(values), what)
    elif _are_images(values):
        raise InvalidInputError(f"{what} holds images; labels must be whole numbers or text")
    else:
        labels = encode_text_labels(values.tolist(), what)
    if class_names and all(name.isdecimal() and int(name) < len(class_names) for name in labels.names):
        return EncodedColumn(labels.numbers, tuple(class_names[int(name)] for name in labels.names))
    return labels


def _encode_clients(values: Array, what: str) -> EncodedColumn:
    """Return clients as numbers in the order of their names or, if all are whole numbers, of their values."""
    if values.dtype != object:
        is_whole = values.dtype.kind == "f" and np.array_equal(values, np.trunc(values))
        return encode_clients(values.astype(np.int64) if is_whole else values, len(values), what)
    names = {*values.tolist()}
    are_numbers = all(isinstance(name, str) and _WHOLE_NUMBER.fullmatch(name) for name in names)
    ordered = sorted(names, key=lambda name: (len(name), name)) if are_numbers else sorted(names, key=str)
    return EncodedColumn.encode(values.tolist(), ordered)


def find_missing(values: Array) -> npt.NDArray[np.bool_]:
    """Return a mask of missing values: nan, None, an empty cell, or a text such as NA."""
    if values.dtype != object:
        return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
    return np.array([rows.is_missing(value) for value in values], bool)


def _are_images(values: Array) -> bool:
    if values.dtype != object:
        return False
    first = next((value for value in values if value is not None), None)
    return isinstance(first, bytes)


def _are_image_paths(values: Array) -> bool:
    """Return True if all texts of a column end like the names of image files."""
    if values.dtype != object:
        return False
    texts = [value for value in values if not rows.is_missing(value)]
    return bool(texts) and all(str(text).lower().endswith(rows.IMAGE_SUFFIXES) for text in texts)


def _classify_columns(columns: Mapping[str, Array], query: DataQuery, table: Table) -> list[Feature]:
    """Return the columns with their kinds; texts in a table with numbers are categories."""
    features = [_classify_column(name, values, query, table) for name, values in columns.items()]
    if not {feature.kind for feature in features} & {"number", "category"}:
        return features
    texts = [feature for feature in features if feature.kind == "text"]
    free_texts = [feature for feature in texts if not _can_be_category(feature)]
    if free_texts:
        names = [feature.name for feature in free_texts]
        others = [feature.name for feature in features if feature.name not in names]
        example = truncate(str(free_texts[0].values[0])[:20])
        distinct = len({*free_texts[0].values.tolist()} - {""})
        doubts = _describe_doubts(_find_doubtful_columns(free_texts))
        hint = f"; {doubts}" if doubts else ""
        raise InvalidInputError(
            f"{table.origin} has numbers or categories in {_quote(others)} but text in {_quote(names)} "
            f"({distinct} different in {len(free_texts[0].values)} rows, as '{example}'){hint}; "
            f"leave columns out: ?drop={truncate(','.join(names))}, "
            f"or use the text only: ?x={truncate(','.join(names))}"
        )
    for position, feature in enumerate(features):
        if feature.kind == "text":
            features[position] = replace(feature, kind="category", missing=find_missing(feature.values))
    return features


def _classify_column(name: str, values: Array, query: DataQuery, table: Table) -> Feature:
    if name in query.categories:  # here NA is a name
        names = _format_categories(values)
        is_empty = np.array([value is None or not str(value).strip() for value in names], bool)
        return Feature(name, "category", names, is_empty)
    if _are_images(values):
        return Feature(name, "image", values, find_missing(values))
    if name == query.image and values.dtype != object:
        raise InvalidInputError(
            f"?image={truncate(name)}: the column of {table.origin} has numbers; expected paths of images"
        )
    if name == query.image or _are_image_paths(values):
        missing = find_missing(values)
        paths = np.empty(len(values), object)
        for row in np.flatnonzero(~missing):
            paths[row] = table.folder / values[row]
        return Feature(name, "image", paths, missing)
    numbers = _parse_numbers(values, table.decimal_comma)
    invalid: list[int] = []
    if isinstance(numbers, list):
        invalid = [row for row, number in enumerate(numbers) if number is None]
    if not invalid:
        exact = np.array(numbers, np.float64)
        _check_numbers(name, exact, table)
        return Feature(name, "number", exact, np.isnan(exact))
    if sum(number is not None and not math.isnan(number) for number in numbers) > len(invalid):
        value, position = truncate(str(values[invalid[0]])[:20]), table.locate_row(invalid[0])
        raise InvalidInputError(
            f"column '{truncate(name)}' of {table.origin} has numbers, but '{value}' in {position}; "
            f"correct it (empty, if it is missing), or ?categories={truncate(name)} if they are names"
        )
    missing = find_missing(values)
    texts = np.where(missing, "", values)
    is_empty = np.array([value is None or not value.strip() for value in values], bool)
    return Feature(name, "text", texts, missing & ~is_empty)  # NA is missing, an empty text is a text


def _parse_numbers(values: Array, comma: bool) -> npt.NDArray[np.float64] | list[float | None]:
    """Return a column as numbers: nan for a missing value, None for a cell that is not a number."""
    try:
        return values.astype(np.float64)  # fast, but fails if a value is missing
    except (ValueError, TypeError):
        return [rows.parse_number(value, comma) for value in values]


def _check_numbers(name: str, values: npt.NDArray[np.float64], table: Table) -> None:
    if np.isnan(values).all():
        raise InvalidInputError(
            f"column '{truncate(name)}' of {table.origin} has no values; leave it out: ?drop={truncate(name)}"
        )
    infinite = np.flatnonzero(np.isinf(values))
    if infinite.size:
        value, position = values[infinite[0]], table.locate_row(int(infinite[0]))
        raise InvalidInputError(
            f"column '{truncate(name)}' of {table.origin} is {value} in {position}; replace it"
        )
    with np.errstate(over="ignore"):
        if not np.isfinite(values[~np.isnan(values)].std()):
            raise InvalidInputError(
                f"column '{truncate(name)}' of {table.origin} has values too large to compute with"
            )


def _format_categories(values: Array) -> Array:
    """Return a column as names; whole numbers are written without a fraction."""
    if values.dtype == object:
        return values
    missing = find_missing(values)
    present = values[~missing]
    names = np.empty(len(values), object)
    are_whole = len(present) > 0 and bool((present == np.trunc(present)).all())
    names[~missing] = format_values(present) if are_whole else [*map(str, present.tolist())]
    return names


def _can_be_category(text: Feature) -> bool:
    """Return True if a text column has few enough distinct values."""
    distinct = {*text.values.tolist()} - {""}
    return len(distinct) <= min(_MAX_CATEGORIES, max(1, len(text.values) // 2))


_DATE = re.compile(r"(\d{4}([-/.]\d{1,2}){2}|(\d{1,2}[-/.]){2}\d{2,4})([T ]\d{1,2}:\d{2}.*)?")
"""A day, in any order of year, month and day, optionally with a time."""
_MIN_IDENTIFIERS = 20
"""Rows from which distinct values in every row are noticed."""


def _find_doubtful_columns(features: Sequence[Feature]) -> dict[str, list[str]]:
    """Return columns that say little about new rows, by what they have: dates or identifiers."""
    dates = [feature.name for feature in features if _has_dates(feature)]
    identifiers = [
        feature.name for feature in features if _has_identifiers(feature) and feature.name not in dates
    ]
    columns = {"dates": dates, "another value in each row, like an identifier": identifiers}
    return {content: names for content, names in columns.items() if names}


def _describe_doubts(doubtful: Mapping[str, Sequence[str]]) -> str:
    return " and ".join(f"{_quote(names)} has {content}" for content, names in doubtful.items())


def _has_dates(feature: Feature) -> bool:
    if feature.kind not in ("text", "category"):
        return False
    texts = [str(value) for value in feature.values[~feature.missing]]
    return bool(texts) and all(_DATE.fullmatch(text.strip()) for text in texts)


def _has_identifiers(feature: Feature) -> bool:
    """Return True for words that differ in each row, and for whole numbers that are consecutive or rise."""
    values = feature.values[~feature.missing].tolist()
    if feature.kind == "image" or len(values) < _MIN_IDENTIFIERS or len({*values}) < len(values):
        return False
    if feature.kind == "number":
        is_rising = values == sorted(values) and all(float(value).is_integer() for value in values)
        return is_rising or bool(max(values) - min(values) == len(values) - 1)
    return all(len(str(value).split()) == 1 for value in values)


def _join_features(features: Sequence[Feature], query: DataQuery, table: Table) -> Inputs:
    """Return the inputs of all features, which must be one image, texts, or numbers and categories."""
    image = next((feature for feature in features if feature.kind == "image"), None)
    if image is not None:
        others = [feature.name for feature in features if feature.name != image.name]
        if others:
            raise InvalidInputError(
                f"{table.origin} has images in '{truncate(image.name)}' next to {_quote(others)}; "
                f"use the images only: ?image={truncate(image.name)}, "
                f"or the others: ?drop={truncate(image.name)}"
            )
        names = [f"in {table.locate_row(row)} of {table.origin}" for row in range(len(image.values))]
        pixels = decode_images(image.values.tolist(), names, query.resize)
        return Inputs(pixels, image_preprocessing(pixels, query.resize))
    if query.resize:
        raise InvalidInputError(f"?resize= is for images; {table.origin} has none")
    if features[0].kind == "text":
        return _join_texts(features, table)
    encoded = [_encode_feature(feature) for feature in features]
    x = np.concatenate([values for values, _ in encoded], axis=1)
    columns = tuple(column for _, column in encoded)
    kinds = [f"{truncate(column.name)} ({len(column.categories)})" for column in columns if column.categories]
    note = f"one input for each category of {truncate(', '.join(kinds))}" if kinds else ""
    preprocessing = Preprocessing(
        "table", x.shape[1:], columns, missing=query.missing, comma=table.decimal_comma
    )
    return Inputs(x, preprocessing, note)


def _encode_feature(feature: Feature) -> tuple[npt.NDArray[np.float64], Column]:
    """Return the raw inputs of a number or category, and its column."""
    if feature.kind == "number":
        return feature.values[:, np.newaxis], Column(feature.name)
    categories = tuple(sorted({str(value) for value in feature.values[~feature.missing]}))
    return rows.encode_one_hot(feature.values.tolist(), categories)[0], Column(feature.name, categories)


def _join_texts(features: Sequence[Feature], table: Table) -> Inputs:
    names = [feature.name for feature in features]
    x, vocabulary = tokenize(map(" ".join, zip(*(feature.values for feature in features), strict=True)))
    if len(vocabulary) < 2:
        raise InvalidInputError(f"the text in {truncate(', '.join(names))} of {table.origin} has no words")
    longest = int(np.flatnonzero(x.any(0))[-1]) + 1
    x = np.ascontiguousarray(x[:, :longest])
    preprocessing = Preprocessing(
        "texts", x.shape[1:], tuple(Column(name, mean=(0.0,)) for name in names),
        vocabulary=tuple(vocabulary), words=len(vocabulary),
    )  # fmt: skip
    return Inputs(x, preprocessing)


def _quote(names: Sequence[str]) -> str:
    return truncate(", ".join(f"'{name}'" for name in names))
