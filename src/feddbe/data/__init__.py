"""Data sets by name, or a user's own in one of several forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from feddbe.data import digits, fmnist
from feddbe.data.arrow import load_parquet
from feddbe.data.dataset import Dataset
from feddbe.data.download import Progress
from feddbe.data.folder import load_folder
from feddbe.data.hub import is_saved, load_named, load_saved
from feddbe.data.own import load_npz
from feddbe.data.pfllib import is_pfllib, load_pfllib
from feddbe.data.table import Choice, chosen, load_csv
from feddbe.errors import BadInput, unknown

__all__ = ["FORMS", "SOURCES", "Dataset", "Source", "load"]


@dataclass(frozen=True)
class Source:
    """One data set that is known by name."""

    name: str
    description: str
    load: Callable[[Path | None], Dataset]
    find: Callable[[Path | None], Path | str | None]
    """Where the data is, if it is there."""
    get: Callable[[Path | None, Progress | None], Path] | None = None
    """Downloads it and tells where it is now; None if there is nothing to download."""

    def found(self, data_dir: Path | None) -> str | None:
        """Where the data is, in words; None if it is not there yet."""
        place = self.find(data_dir)
        return None if place is None else str(place)


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("digits", "1,797 grey digits of 8x8", lambda _: digits.load(), lambda _: "in scikit-learn"),
        Source("fmnist", "70,000 grey clothes of 28x28", fmnist.load, fmnist.find, fmnist.get),
    )
}


FORMS = ("FILE.npz", "FILE.csv", "FILE.parquet", "FOLDER", "hf:NAME")
"""What a user's own data can be; docs/reference.md says more."""


def load(name_or_path: str | Path, data_dir: Path | None = None) -> Dataset:
    """The data set of this name, or the user's own in this place; `?label=...` after it names columns."""
    wanted = str(name_or_path)
    if wanted in SOURCES:
        return SOURCES[wanted].load(data_dir)
    place, _, query = wanted.partition("?")
    choice, path = chosen(query), Path(place).expanduser()
    if place.startswith("hf:"):
        return load_named(place.removeprefix("hf:"), choice)
    if path.suffix in (".csv", ".tsv"):
        return load_csv(path, choice)
    if path.suffix == ".parquet":
        return load_parquet(path, choice)
    if path.is_dir() and is_saved(path):
        return load_saved(path, choice)
    if choice != Choice():
        raise BadInput(f"'?{query}' names columns, which '{place}' does not have; leave it out")
    if path.suffix == ".npz":
        return load_npz(path)
    if path.is_dir():
        return load_pfllib(path) if is_pfllib(path) else load_folder(path)
    raise unknown("data set", wanted, [*SOURCES, *FORMS])
