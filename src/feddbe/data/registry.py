"""Data sets by name (`har(layout=scrambled)`), by path, or as Python objects.

A data set that is known by name is a module of `builtin/` and an entry of `SOURCES`. The module is imported
when the data set is used, and has:

    find(data_dir)    Where its files are: a path, a list of files, or None if they are not there. The
                      folders to search, in order, are `files.folders(name, data_dir)`.
    load(data_dir)    The `Dataset`: training set first, then test set, in the publisher's order. If the
                      files are not there, `raise files.missing(...)`, which says where to put them. What
                      takes long to decode goes through `cache.cached`.

and, if they apply:

    publisher         A `files.Publisher`: address and checksums of the files, for `feddbe data get`.
    found(data_dir)   What `feddbe data list` shows instead of `find`'s path.
    Layout            A subclass of `Arrangement`: options of the data set, as in `har(layout=scrambled)`.

A module with several data sets has objects with these attributes in a dictionary `DATASETS` instead, and the
entry of `SOURCES` names the module. What is read is not trusted: sizes are limited, nothing pickled is
executed, and damage becomes a `BadInput` of one line. Defaults of a data set (partition, number of clients)
are in `config/defaults.py`; without them, the general defaults apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddbe.config import parameters
from feddbe.data.dataset import Arrangement, Dataset
from feddbe.errors import InvalidInputError, unknown_name
from feddbe.paths import expand_path

if TYPE_CHECKING:
    from feddbe.data.files import Progress


@dataclass(frozen=True)
class BuiltinDataset:
    """A data set that is known by name, read by a module of `builtin`."""

    name: str
    description: str
    module: str = ""
    """The module that has this data set in its `DATASETS`; empty: the module of the data set's name."""

    def load(self, data_dir: Path | None) -> Dataset:
        """Load all of it."""
        dataset: Dataset = self._reader.load(data_dir)
        return dataset

    def locate(self, data_dir: Path | None) -> str | None:
        """Describe where the data is; None if it is not there yet."""
        place = getattr(self._reader, "describe_location", self._reader.find)(data_dir)
        return None if place is None else str(place)

    def checksum_status(self, data_dir: Path | None) -> str:
        """Describe how far the publisher's files that are there are verified; a damaged one raises."""
        from feddbe.data.files import VERIFICATION_TEXTS, Verification, verify

        place = self._reader.find(data_dir)
        first = place[0] if isinstance(place, list) else Path(place)
        folder = first if first.is_dir() else first.parent
        files = {folder / name: checksum for name, checksum in self._reader.publisher.checksums.items()}
        verifications = [verify(path, checksum) for path, checksum in files.items() if path.is_file()]
        return VERIFICATION_TEXTS[max(verifications, default=Verification.NOT_PUBLISHED)]

    def download(self, data_dir: Path | None, progress: Progress | None = None, again: bool = False) -> None:
        """Download the publisher's files into the first folder for data; intact ones only if `again`."""
        from feddbe.data.files import cache_folders

        self._reader.publisher.download(cache_folders(self.name, data_dir)[0], progress, again)

    @property
    def is_downloadable(self) -> bool:
        """Whether there are files to download."""
        return hasattr(self._reader, "publisher")

    @property
    def options(self) -> type[Arrangement]:
        """The class of its options, as in `har(layout=scrambled)`: the reader's `Layout`, if it has one."""
        return getattr(self._reader, "Layout", Arrangement)

    @property
    def _reader(self) -> Any:
        module = import_module(f"feddbe.data.builtin.{self.module or self.name}")
        return module.DATASETS[self.name] if self.module else module


BUILTIN_DATASETS: dict[str, BuiltinDataset] = {
    source.name: source
    for source in (
        BuiltinDataset("digits", "1,797 grey digits of 8x8"),
        BuiltinDataset("mnist", "70,000 grey digits of 28x28", module="images"),
        BuiltinDataset("fmnist", "70,000 grey clothes of 28x28", module="images"),
        BuiltinDataset("cifar10", "60,000 colour images of 32x32", module="images"),
        BuiltinDataset("cifar100", "60,000 colour images of 32x32", module="images"),
        BuiltinDataset("tiny_imagenet", "100,000 colour images of 64x64", module="images"),
        BuiltinDataset("har", "10,299 sensor windows, 30 users"),
        BuiltinDataset("ag_news", "127,600 news in 4 classes"),
    )
}
USER_FORMS = ("FILE.npz", "FILE.csv", "FILE.parquet", "FOLDER", "hf:NAME")


def find_dataset(
    text: str, defaults: parameters.Defaults | None = None
) -> parameters.ParsedName[Arrangement] | None:
    """Return the known data set that `text` names, with its options; None if that may be a user's own."""
    name = text.partition("(")[0].strip()
    if name not in BUILTIN_DATASETS or (name != text and expand_path(text).exists()):
        return None
    return parameters.find_class("data set", text, {name: BUILTIN_DATASETS[name].options}, defaults)


def load_dataset(name_or_path: str | Path, data_dir: Path | None = None) -> Dataset:
    """Load the data set of this name, or the user's own at this path."""
    wanted = str(name_or_path)
    if known := find_dataset(wanted):
        return known.options.arrange(BUILTIN_DATASETS[known.name].load(data_dir))
    dataset = _load_user_data(wanted)
    if dataset is None:
        raise unknown_name("data set", wanted.partition("(")[0], [*BUILTIN_DATASETS, *USER_FORMS])
    return dataset


def _load_user_data(wanted: str) -> Dataset | None:
    """Load the user's data at `PATH?QUERY`; None if it has none of the forms."""
    from feddbe.data.files import require_regular_file
    from feddbe.data.user import arrays, images, query, tables

    place, _, text = wanted.partition("?")
    path = expand_path(place)
    choice = query.parse_query(text)
    require_regular_file(path)
    if place.startswith("hf:"):
        choice.require_keys(query.TABLE_KEYS, place)
        return tables.load_from_hub(place.removeprefix("hf:"), choice)
    if path.is_dir():
        if tables.is_hugging_face_folder(path):
            choice.require_keys(query.TABLE_KEYS, place)
            return tables.load_hugging_face_folder(path, choice)
        if arrays.is_pfllib(path):
            choice.require_keys((), place)
            return arrays.load_pfllib(path)
        choice.require_keys(query.FOLDER_KEYS, place)
        return images.load_folder(path, choice.resize)
    if path.suffix in (".csv", ".tsv", ".parquet"):
        choice.require_keys(query.TABLE_KEYS, place)
        load_table = tables.load_parquet if path.suffix == ".parquet" else tables.load_csv
        return load_table(path, choice)
    choice.require_keys(query.NPZ_KEYS if path.suffix == ".npz" else (), place)
    if path.suffix == ".npz":
        return arrays.load_npz(path, choice.words)
    if len(path.parts) > 1:
        raise InvalidInputError(f"there is no file or folder {path}; accepted are {', '.join(USER_FORMS)}")
    return None


def is_in_memory(data: Any) -> Dataset | None:
    """Return the data set that a Python object holds; None if it is a name or a path, or nothing."""
    if data is None or isinstance(data, str | Path):
        return None
    from feddbe.data.user.arrays import from_object

    return from_object(data)
