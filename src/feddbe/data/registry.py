"""Data sets by name, as in `har(layout=scrambled)`, or a user's own in one of several forms; who reads them
is imported when one is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddbe.config import spec
from feddbe.data.dataset import Arrangement, Dataset
from feddbe.errors import unknown
from feddbe.paths import expand

if TYPE_CHECKING:
    from feddbe.data.io.download import Progress


@dataclass(frozen=True)
class Source:
    """One data set that is known by name: who reads it is a module of `builtin`."""

    name: str
    description: str
    module: str = ""
    """The module that has this set and others in its `DATASETS`; none: the module of this name."""

    def load(self, data_dir: Path | None) -> Dataset:
        """All of it."""
        dataset: Dataset = self._reader.load(data_dir)
        return dataset

    def found(self, data_dir: Path | None) -> str | None:
        """Where the data is, in words; None if it is not there yet."""
        place = getattr(self._reader, "found", self._reader.find)(data_dir)
        return None if place is None else str(place)

    def verified(self, data_dir: Path | None) -> str:
        """What is known of the publisher's files that are there, in words; one that is damaged raises."""
        from feddbe.data.io.download import VERIFICATION_TEXTS, Verification, verify

        place = self._reader.find(data_dir)
        first = place[0] if isinstance(place, list) else Path(place)
        folder = first if first.is_dir() else first.parent
        files = {folder / name: checksum for name, checksum in self._reader.sums().items()}
        verifications = [verify(path, checksum) for path, checksum in files.items() if path.is_file()]
        return VERIFICATION_TEXTS[max(verifications, default=Verification.NOT_PUBLISHED)]

    @property
    def get(self) -> Callable[[Path | None, Progress | None, bool], Path] | None:
        """Downloads it and tells where it is now; None if there is nothing to download."""
        return getattr(self._reader, "get", None)

    @property
    def options(self) -> type[Arrangement]:
        """What can be chosen of it, as in `har(layout=scrambled)`: the reader's `Layout`, if it has one."""
        return getattr(self._reader, "Layout", Arrangement)

    @property
    def _reader(self) -> Any:
        module = import_module(f"feddbe.data.builtin.{self.module or self.name}")
        return module.DATASETS[self.name] if self.module else module


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("digits", "1,797 grey digits of 8x8"),
        Source("mnist", "70,000 grey digits of 28x28", module="images"),
        Source("fmnist", "70,000 grey clothes of 28x28", module="images"),
        Source("cifar10", "60,000 colour images of 32x32", module="images"),
        Source("cifar100", "60,000 colour images of 32x32", module="images"),
        Source("tiny_imagenet", "100,000 colour images of 64x64"),
        Source("har", "10,299 sensor windows, 30 users"),
        Source("ag_news", "127,600 news in 4 classes"),
    )
}


def find(text: str, defaults: spec.Defaults | None = None) -> spec.Named[Arrangement] | None:
    """The known data set that `text` names, with its options; None if that may be a user's own."""
    name = text.partition("(")[0].strip()
    if name not in SOURCES or (name != text and expand(text).exists()):
        return None
    return spec.find("data set", text, {name: SOURCES[name].options}, defaults)


def load(name_or_path: str | Path, data_dir: Path | None = None) -> Dataset:
    """The data set of this name, or the user's own in this place."""
    wanted = str(name_or_path)
    if known := find(wanted):
        return known.options.arrange(SOURCES[known.name].load(data_dir))
    from feddbe.data.user.sources import FORMS, load_own

    own = load_own(wanted)
    if own is None:
        raise unknown("data set", wanted.partition("(")[0], [*SOURCES, *FORMS])
    return own


def in_memory(data: Any) -> Dataset | None:
    """The data set that somebody gave as a Python object; None if it is a name or a path, or nothing."""
    if data is None or isinstance(data, str | Path):
        return None
    from feddbe.data.user.sources import from_object

    return from_object(data)
