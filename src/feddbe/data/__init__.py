"""Data sets by name, as in `har(layout=scrambled)`, or a user's own in one of several forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from feddbe.data import ag_news, cifar100, digits, fmnist, har, tiny_imagenet
from feddbe.data.dataset import Arrangement, Dataset
from feddbe.data.download import Progress
from feddbe.data.forms import FORMS, load_own
from feddbe.errors import unknown
from feddbe.options import grammar

__all__ = ["SOURCES", "Dataset", "Source", "find", "load"]


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
    options: type[Arrangement] = Arrangement

    def found(self, data_dir: Path | None) -> str | None:
        """Where the data is, in words; None if it is not there yet."""
        place = self.find(data_dir)
        return None if place is None else str(place)


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("digits", "1,797 grey digits of 8x8", lambda _: digits.load(), lambda _: "in scikit-learn"),
        Source("fmnist", "70,000 grey clothes of 28x28", fmnist.load, fmnist.find, fmnist.get),
        Source("cifar100", "60,000 colour images of 32x32", cifar100.load, cifar100.find, cifar100.get),
        Source(
            "tiny_imagenet",
            "100,000 colour images of 64x64",
            tiny_imagenet.load,
            tiny_imagenet.find,
            tiny_imagenet.get,
        ),
        Source("har", "10,299 sensor windows, 30 users", har.load, har.find, har.get, har.Layout),
        Source("ag_news", "127,600 news in 4 classes", ag_news.load, ag_news.found, ag_news.get),
    )
}


def find(text: str, defaults: grammar.Defaults | None = None) -> grammar.Named[Arrangement] | None:
    """The known data set that `text` names, with its options; None if that may be a user's own."""
    name = text.partition("(")[0].strip()
    if name not in SOURCES or (name != text and Path(text).expanduser().exists()):
        return None
    return grammar.find("data set", text, {s.name: s.options for s in SOURCES.values()}, defaults)


def load(name_or_path: str | Path, data_dir: Path | None = None) -> Dataset:
    """The data set of this name, or the user's own in this place."""
    wanted = str(name_or_path)
    if known := find(wanted):
        return known.options.arrange(SOURCES[known.name].load(data_dir))
    own = load_own(wanted)
    if own is None:
        raise unknown("data set", wanted.partition("(")[0], [*SOURCES, *FORMS])
    return own
