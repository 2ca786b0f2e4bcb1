"""What a page is made from: runs, read from their files, with the names and colours that they have on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from feddbe.results.document import RunDocument, labels
from feddbe.results.groups import groups, names
from feddbe.runs import per_client, summary
from feddbe.runs.store import Store

__all__ = ["Source", "Sources", "read"]

_ABOUT = ("begun", "versions", "machine", "git_commit")


@dataclass(frozen=True)
class Source:
    """One run."""

    document: RunDocument
    labels: list[list[int]] | None
    """Samples of each label, by client; None: of too many clients to look at."""
    about: dict[str, Any]
    """When, where and with what it was begun."""

    @property
    def folder(self) -> Path:
        return Path(self.document["folder"])

    @cached_property
    def accuracies(self) -> dict[int, float]:
        """Each client's in the best round."""
        return per_client.accuracies(self.folder, self.document["best"])


@dataclass(frozen=True)
class Sources:
    """The runs of a page."""

    runs: tuple[Source, ...]
    names: tuple[str, ...]
    """Of each, told apart by its folder where the settings are the same."""
    colours: dict[str, int]
    """By a run's folder: runs of one experiment that are drawn as one line have the same."""

    @classmethod
    def of(cls, runs: Sequence[Source]) -> Sources:
        documents = [run.document for run in runs]
        drawn = groups(documents) + [[d] for d in documents if not any(e["accuracy"] for e in d["rounds"])]
        colours = {d["folder"]: index for index, group in enumerate(drawn) for d in group}
        return cls(tuple(runs), tuple(_unique(labels(documents), documents)), colours)

    @property
    def documents(self) -> list[RunDocument]:
        return [run.document for run in self.runs]

    def name(self, document: RunDocument) -> str:
        return self.names[[d["folder"] for d in self.documents].index(document["folder"])]

    def called(self, found: Sequence[Sequence[RunDocument]]) -> list[str]:
        """A name for each group, told apart as those of runs are."""
        return _unique(names(found), [group[0] for group in found])


def _unique(plain: Sequence[str], documents: Sequence[RunDocument]) -> list[str]:
    return [
        f"{name} [{document['folder']}]" if plain.count(name) > 1 else name
        for name, document in zip(plain, documents, strict=True)
    ]


def read(folders: Iterable[Path]) -> Sources:
    """All of these runs, each as it is at one moment, which may be while it goes on."""
    return Sources.of([_read(folder) for folder in dict.fromkeys(folders)])


def _read(folder: Path) -> Source:
    store = Store.open(folder)
    try:
        store.hold()
        about = {key: store.meta(key) for key in _ABOUT}
        return Source(summary.document(store, hashes=False), store.meta("labels"), about)
    finally:
        store.close()
