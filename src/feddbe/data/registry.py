"""Registry of data sets: by name (`har(layout=scrambled)`), by path, or as Python objects.

A built-in data set is a module of `builtin/` and an entry of `BUILTIN_DATASETS`. The module is imported when
the data set is used, and has:

    find(data_dir)    Return the path of its files, a list of them, or None if they are missing. The folders
                      to search, in order, are `files.search_folders(name, data_dir)`.
    load(data_dir)    Return the `Dataset`: training set first, then test set, in the publisher's order. Raise
                      `files.missing_data_error(...)` if the files are missing. Use `files.load_cached` for
                      arrays that are slow to decode.

and optionally:

    publisher                     A `files.Publisher`: address and checksums, for `feddbe data get`.
    describe_location(data_dir)   Text that `feddbe data list` prints instead of `find`'s path.
    Options                       A subclass of `DatasetOptions`, as for `har(layout=scrambled)`.

A module with several data sets has objects with these attributes in a dictionary `DATASETS`, and the entries
of `BUILTIN_DATASETS` name the module. Files are not trusted: sizes are limited, nothing pickled is executed,
and damage results in an `InvalidInputError` of one line. Defaults of a data set (partition, number of
clients) are in `config/defaults.py`; without them, the general defaults apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddbe.config import parameters
from feddbe.data.dataset import Dataset, DatasetOptions
from feddbe.errors import InvalidInputError, unknown_name
from feddbe.paths import expand_path

if TYPE_CHECKING:
    from feddbe.config.options import Config
    from feddbe.data.files import Progress


@dataclass(frozen=True)
class BuiltinDataset:
    """A data set with a name, read by a module of `builtin`."""

    name: str
    description: str
    module: str = ""
    """Module with this data set in its `DATASETS`; by default, the module with the data set's name."""

    def load(self, data_dir: Path | None) -> Dataset:
        """Load the data set."""
        dataset: Dataset = self._reader.load(data_dir)
        return dataset

    def locate(self, data_dir: Path | None) -> str | None:
        """Return a description of the data's location, or None if it is not on this machine."""
        describe = getattr(self._reader, "describe_location", self._reader.find)
        location = describe(data_dir)
        return None if location is None else str(location)

    def checksum_status(self, data_dir: Path | None) -> str:
        """Return a text on the verification of the publisher's files; a damaged file is an error."""
        from feddbe.data.files import VERIFICATION_TEXTS, Verification, verify

        location = self._reader.find(data_dir)
        path = location[0] if isinstance(location, list) else Path(location)
        folder = path if path.is_dir() else path.parent
        files = {folder / name: checksum for name, checksum in self._reader.publisher.checksums.items()}
        verifications = [verify(file, checksum) for file, checksum in files.items() if file.is_file()]
        return VERIFICATION_TEXTS[max(verifications, default=Verification.NOT_PUBLISHED)]

    def download(self, data_dir: Path | None, progress: Progress | None = None, force: bool = False) -> None:
        """Download the publisher's files into the first data folder; intact files are kept unless `force`."""
        from feddbe.data.files import cache_folders

        self._reader.publisher.download(cache_folders(self.name, data_dir)[0], progress, force)

    @property
    def is_downloadable(self) -> bool:
        """True if the data set has files to download."""
        return hasattr(self._reader, "publisher")

    @property
    def options(self) -> type[DatasetOptions]:
        """Class of the data set's options: the reader's `Options`, if it has them."""
        return getattr(self._reader, "Options", DatasetOptions)

    @property
    def _reader(self) -> Any:
        module = import_module(f"feddbe.data.builtin.{self.module or self.name}")
        return module.DATASETS[self.name] if self.module else module


BUILTIN_DATASETS: dict[str, BuiltinDataset] = {
    dataset.name: dataset
    for dataset in (
        BuiltinDataset("digits", "1,797 gray digits of 8x8"),
        BuiltinDataset("mnist", "70,000 gray digits of 28x28", module="images"),
        BuiltinDataset("fmnist", "70,000 gray clothes of 28x28", module="images"),
        BuiltinDataset("cifar10", "60,000 color images of 32x32", module="images"),
        BuiltinDataset("cifar100", "60,000 color images of 32x32", module="images"),
        BuiltinDataset("tiny_imagenet", "100,000 color images of 64x64", module="images"),
        BuiltinDataset("har", "10,299 sensor windows, 30 users"),
        BuiltinDataset("ag_news", "127,600 news in 4 classes"),
    )
}
USER_FORMS = ("FILE.npz", "FILE.csv", "FILE.parquet", "FOLDER", "hf:NAME", "federation:DIR")
REMOTE_DATA = {"federation:": "feddbe.federation.server"}
"""Data whose rows other machines hold, by prefix: a module with `load(config)`, which returns a `Dataset`."""


def is_remote(text: str) -> bool:
    """Return True if `text` names data whose rows other machines hold."""
    return text.startswith(tuple(REMOTE_DATA))


def load_remote(config: Config) -> Dataset:
    """Load a description of rows on other machines; `config` has the data, and the run if it is resumed."""
    module = next(name for prefix, name in REMOTE_DATA.items() if config.data.startswith(prefix))
    dataset: Dataset = import_module(module).load(config)
    return dataset


def find_builtin_dataset(
    text: str, defaults: parameters.Defaults | None = None
) -> parameters.ParsedName[DatasetOptions] | None:
    """Return the built-in data set that `text` names, with its options; None if it may be user data."""
    name = text.partition("(")[0].strip()
    if name not in BUILTIN_DATASETS or (name != text and expand_path(text).exists()):
        return None
    return parameters.find_class("data set", text, {name: BUILTIN_DATASETS[name].options}, defaults)


def load_dataset(name_or_path: str | Path, data_dir: Path | None = None) -> Dataset:
    """Load a built-in data set by name, or user data by path.

    Args:
        name_or_path: A name such as `har(layout=scrambled)`, or `PATH?QUERY`.
        data_dir: First folder to search for a built-in data set.

    Raises:
        DataMissingError: The files of a built-in data set are not on this machine.
        InvalidInputError: The name is unknown, or the data cannot be read.
    """
    text = str(name_or_path)
    builtin = find_builtin_dataset(text)
    if builtin:
        return builtin.options.apply(BUILTIN_DATASETS[builtin.name].load(data_dir))
    dataset = _load_user_data(text)
    if dataset is None:
        raise unknown_name("data set", text.partition("(")[0], [*BUILTIN_DATASETS, *USER_FORMS])
    return dataset


def _load_user_data(text: str) -> Dataset | None:
    """Load the user's data at `PATH?QUERY`; return None if the path has none of the forms."""
    from feddbe.data.files import require_regular_file
    from feddbe.data.user import arrays, images, tables
    from feddbe.data.user.tables import FOLDER_KEYS, NPZ_KEYS, TABLE_KEYS, parse_query

    location, _, query_text = text.partition("?")
    path = expand_path(location)
    query = parse_query(query_text)
    require_regular_file(path)
    if location.startswith("hf:"):
        query.check_keys(TABLE_KEYS, location)
        return tables.load_from_hub(location.removeprefix("hf:"), query)
    if path.is_dir():
        if tables.is_hugging_face_folder(path):
            query.check_keys(TABLE_KEYS, location)
            return tables.load_hugging_face_folder(path, query)
        if arrays.is_pfllib_folder(path):
            query.check_keys((), location)
            return arrays.load_pfllib_folder(path)
        query.check_keys(FOLDER_KEYS, location)
        return images.load_image_folder(path, query.resize)
    if path.suffix in (".csv", ".tsv", ".parquet"):
        query.check_keys(TABLE_KEYS, location)
        load_table = tables.load_parquet if path.suffix == ".parquet" else tables.load_csv
        return load_table(path, query)
    if path.suffix == ".npz":
        query.check_keys(NPZ_KEYS, location)
        return arrays.load_npz(path, query.words)
    query.check_keys((), location)
    if len(path.parts) > 1:
        raise InvalidInputError(f"{path} does not exist; accepted are {', '.join(USER_FORMS)}")
    return None


def dataset_from_object(data: Any) -> Dataset | None:
    """Return the data set that a Python object contains, or None for a name, a path or None."""
    if data is None or isinstance(data, str | Path):
        return None
    from feddbe.data.user.arrays import load_object

    return load_object(data)
