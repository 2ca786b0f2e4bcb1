"""Records of studies: which runs belong together, for which purpose, and how values were chosen.

A record is a file, `study.json`, next to the study's figures. It names runs and does not contain them, so
that studies can share runs. A run is identified by its configuration's hash, and cut to the study's rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from feddbe.errors import InvalidInputError, StoreError, one_line, truncate
from feddbe.paths import RUNS_DIR, expand_path, read_text_file
from feddbe.reporting.build_tables import chosen_runs
from feddbe.reporting.matplotlib_backend import replace_file
from feddbe.results.document import RunDocument, follows_last_round, last_round, truncate_run
from feddbe.runs import folders
from feddbe.runs.build_document import load_document
from feddbe.runs.metadata import Count, Setting, Share, Whole
from feddbe.runs.store import RunStore, make_folder

RECORD_FILE = "study.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+.-]*")


class Purpose(StrEnum):
    """The question that a study answers."""

    COMPARISON = "comparison"
    SWEEP = "sweep"
    TUNING = "tuning"
    PAPER_TABLE = "paper table"


@dataclass(frozen=True)
class StudyRun:
    """A run of a study."""

    folder: str
    """Path relative to the record's folder, with slashes."""
    config_hash: str
    rounds: Count
    """Number of rounds to which the run is cut."""
    patience: Whole | None = None


class StoredTrial(TypedDict):
    """A trial of a search, see `studies.tune.Trial`."""

    values: dict[str, Setting]
    accuracy: Share | None
    note: str


class SearchResult(TypedDict):
    """Result of a search, see `studies.tune.TuneResult`."""

    space: dict[str, list[Setting]]
    trials: Annotated[list[StoredTrial], Meta(min_length=1)]
    published: dict[str, Setting]
    is_fine_tuned: bool


@dataclass(frozen=True)
class StudyRecord:
    """A study: its runs, and the request that they answer."""

    name: str
    purpose: Purpose
    methods: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Methods as the user wrote them."""
    options: Mapping[str, Any]
    """Options as the user wrote them; of a paper table, those of `feddbe reproduce`."""
    seeds: tuple[Whole, ...]
    partition_seeds: tuple[Whole, ...]
    """Seeds of the partition; empty if the study does not vary it."""
    baseline: str
    """The method that others are compared with: the first one."""
    validation: Share | None
    """Share of the training data on which values or rounds were chosen; None if nothing was held out."""
    runs: tuple[StudyRun, ...]
    """Runs in the order of the table."""
    result: SearchResult | None = None
    """Result of a search; None for other studies, whose results are in their runs."""
    begun: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def content_hash(self) -> str:
        """Hash of the purpose and of the runs by content: equal for commands that print the same table.

        Tables of the paper may have equal runs, so their options count, too.
        """
        runs = [(run.config_hash, run.rounds, run.patience) for run in self.runs]
        options = self.options if self.purpose is Purpose.PAPER_TABLE else {}
        content = json.dumps([self.purpose, runs, options], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    def extends(self, other: StudyRecord) -> bool:
        """Return True if this is the other study, perhaps with more methods, values, seeds or rounds."""
        rounds = {run.config_hash: run.rounds for run in self.runs}
        is_longer = all(rounds.get(run.config_hash, -1) >= run.rounds for run in other.runs)
        return self.purpose == other.purpose and is_longer

    def to_json(self) -> str:
        """Return the record as text, one line for each key and run."""
        return json.dumps(asdict(self), indent=1, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str, source: Path) -> StudyRecord:
        """Return the record in a text.

        Args:
            text: The text.
            source: File of the text, for the error message.

        Raises:
            StoreError: The text is not a record.
        """
        try:
            record = msgspec.json.decode(text, type=cls)
            for run in record.runs:
                _check_folder(run.folder)
        except (ValueError, RecursionError) as error:
            raise StoreError(
                f"'{source}' is not a study's record ({one_line(error)}); restore it, or remove it and "
                "repeat the command"
            ) from error
        return record


def _check_folder(name: str) -> None:
    """Raise an error unless a run's folder is in the record's folder or next to it."""
    folder = PurePosixPath(name)
    if folder.is_absolute() or ".." in folder.parts[1:] or "\0" in name:
        raise ValueError(f"unexpected folder '{truncate(name)}'")


def check_name(name: str) -> str:
    """Return the name of a study, or raise an error if it cannot be the name of a folder."""
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"name = '{truncate(name)}'; allowed: letters, digits and _ + . - after a letter or digit"
        )
    return name


def as_study_run(document: RunDocument) -> StudyRun:
    """Return a run as part of a study that shows all rounds of the document; `folder` is its path."""
    config = document["config"]
    stored_rounds = document["rounds"][-1]["round"] if document["rounds"] else 0
    rounds = max(config.get("rounds") or 0, stored_rounds)
    return StudyRun(document["folder"], document["config_hash"], rounds, config.get("patience"))


def save_record(record: StudyRecord, root: Path, *, stem: str = "", name: str | None = None) -> Path:
    """Write a record below `root` and return its folder.

    Args:
        record: The study; the folders of its runs are paths, which are made relative.
        root: Folder of the runs.
        stem: Without a name, the study is in `root/stem-N`: the one with equal content, or a new one. Without
            a stem, it is in `root` itself, unless other studies are there.
        name: Name given by the user. The study is in `root/name`, which it may extend.

    Raises:
        InvalidInputError: The name is not valid, or is that of another study.
    """
    if not stem and _is_free(root, record):
        folder = root
    elif name is not None:
        folder = root / check_name(name)
        if RunStore.is_run(folder):
            raise InvalidInputError(f"'{folder}' is a run; choose another --name")
        if not _may_replace(folder, record):
            raise InvalidInputError(
                f"'{folder}' is another study: {describe_request(read_record(folder))}; choose another --name"
            )
    else:
        equal = (path for path in nested_studies(root) if _has_content(path, record))
        folder = next(equal, None) or folders.create_numbered(stem or record.purpose, root)
    make_folder(folder)
    runs = tuple(replace(run, folder=_relative(Path(run.folder), folder)) for run in record.runs)
    study_name = name or (expand_path(folder).resolve().name if folder == root else folder.name)
    with replace_file(folder / RECORD_FILE, "record of the study") as scratch:
        scratch.write_text(replace(record, name=study_name, runs=runs).to_json(), encoding="utf-8")
    return folder


def _relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path, start)).as_posix()


def _is_free(root: Path, record: StudyRecord) -> bool:
    """Return True if the folder of the runs has no study, or has one that this study extends."""
    if (root / RECORD_FILE).exists():
        return _may_replace(root, record)
    return not nested_studies(root)


def _may_replace(folder: Path, record: StudyRecord) -> bool:
    return not (folder / RECORD_FILE).exists() or record.extends(read_record(folder))


def _has_content(folder: Path, record: StudyRecord) -> bool:
    try:
        return read_record(folder).content_hash == record.content_hash
    except StoreError:  # a damaged record; the study gets another folder
        return False


def read_record(folder: Path) -> StudyRecord:
    """Return the record in a study's folder."""
    path = folder / RECORD_FILE
    try:
        text = read_text_file(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise StoreError(f"cannot read '{path}': {reason}") from error
    return StudyRecord.from_json(text, path)


def list_studies(folder: Path) -> list[Path]:
    """Return the folder if it is a study, otherwise the studies in its subfolders."""
    return [folder] if (folder / RECORD_FILE).is_file() else nested_studies(folder)


def nested_studies(folder: Path) -> list[Path]:
    """Return the studies in the subfolders of a folder, in order of their names."""
    paths = (path.parent for path in folder.glob(f"*/{RECORD_FILE}"))
    return sorted(paths, key=_sort_key)


def _sort_key(path: Path) -> list[tuple[int, str]]:
    """Return a sort key by which sweep-10 comes after sweep-9."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", path.name)]


def all_studies() -> list[Path]:
    """Return the folders of all studies below `runs/`."""
    return [path.parent for path in sorted(RUNS_DIR.rglob(RECORD_FILE))]


def runs_of_sweeps(root: Path) -> list[Path]:
    """Return the folders below `root` of runs that only sweeps contain; a damaged record is skipped."""
    in_sweep: dict[Path, bool] = {}
    for path in root.rglob(RECORD_FILE):
        with suppress(StoreError):
            study = read_record(path.parent)
            for run in study.runs:
                folder = _run_folder(run, path.parent)
                in_sweep[folder] = study.purpose is Purpose.SWEEP and in_sweep.get(folder, True)
    return [
        folder for folder, is_only_sweep in in_sweep.items() if is_only_sweep and folder.is_relative_to(root)
    ]


def find_studies(name: str) -> list[Path]:
    """Return the folders of the studies that a name means; none if it means runs.

    Args:
        name: The folder of a study or of several studies, its name in `runs/`, or the name of a study.
    """
    for folder in (expand_path(name), RUNS_DIR / name):
        if RunStore.is_run(folder):
            return []
        studies = list_studies(folder)
        if studies or folder.is_dir():
            return studies
    if not _NAME.fullmatch(name):
        return []
    return [folder for folder in all_studies() if _has_name(folder, name)]


def _has_name(folder: Path, name: str) -> bool:
    try:
        return read_record(folder).name == name
    except StoreError:  # a damaged record; it is reported if its folder has the name
        return folder.name == name


def find_study(name: str) -> Path | None:
    """Return the folder of the study that a name means; None if it means runs.

    Raises:
        InvalidInputError: The name means several studies.
    """
    studies = find_studies(name)
    if len(studies) > 1:
        existing = ", ".join(map(str, studies[:8]))
        raise InvalidInputError(f"'{name}' has {len(studies)} studies; name one of {existing}")
    return studies[0] if studies else None


@dataclass(frozen=True)
class Study:
    """A record, and its runs as they are stored now."""

    record: StudyRecord
    folder: Path
    documents: tuple[RunDocument, ...]
    """The runs, cut to the study's rounds, in the order of the table."""
    problems: tuple[str, ...]
    """A line for each run that is missing or was changed."""

    @property
    def shown_documents(self) -> list[RunDocument]:
        """The runs whose test accuracies may be shown: of a sweep, those of the chosen values."""
        if self.record.purpose is Purpose.SWEEP:
            return chosen_runs(self.documents)
        return list(self.documents)


def open_study(folder: Path, *, hashes: bool = False) -> Study:
    """Return the study in a folder, with its runs.

    Args:
        folder: The folder with the record.
        hashes: Compute the hashes of the runs' states.

    Raises:
        StoreError: The record cannot be read, or none of its runs exists.
    """
    record = read_record(folder)
    documents = []
    problems = []
    for run in record.runs:
        try:
            documents.append(_open_run(run, folder, hashes=hashes))
        except StoreError as error:
            problems.append(f"study '{folder}': {error}")
    if record.runs and not documents:
        raise StoreError(f"{problems[0]}; no run of the study can be shown")
    return Study(record, folder, tuple(documents), tuple(problems))


def _run_folder(run: StudyRun, study_folder: Path) -> Path:
    return Path(os.path.normpath(study_folder / run.folder))


def _open_run(run: StudyRun, study_folder: Path, *, hashes: bool) -> RunDocument:
    """Return the document of a run, cut to the study's rounds.

    Raises:
        StoreError: The run is missing, damaged or another one, or has results that a longer run replaced.
    """
    folder = _run_folder(run, study_folder)
    if not RunStore.is_run(folder):
        raise StoreError(f"run '{folder}' is missing; repeat the command, or restore the folder")
    stored = load_document(folder, hashes=hashes)
    if stored["config_hash"] != run.config_hash:
        raise StoreError(f"run '{folder}' was changed: it has another configuration; repeat the command")
    document = truncate_run(stored, run.rounds, run.patience)
    if follows_last_round(stored) and len(document["rounds"]) < len(stored["rounds"]):
        raise StoreError(
            f"run '{folder}' was changed: it has {last_round(stored)} rounds, and fine-tuning or new clients "
            f"followed the last one, not round {run.rounds}"
        )
    return document


def load_documents(
    names: Iterable[str], on_problem: Callable[[str], None], *, hashes: bool = False
) -> list[RunDocument]:
    """Return the documents of all named runs, comparisons and studies, each run once.

    Args:
        names: Folders, or names in `runs/`. Of a sweep, the runs with the chosen values are returned.
        on_problem: Called with a line for each run that cannot be read, is missing or was changed.
        hashes: Compute the hashes of the runs' states.
    """
    documents: dict[str, RunDocument] = {}
    for name in names:
        study_folder = find_study(name)
        if study_folder is None:
            named = _load_runs(folders.resolve_runs(name), on_problem, hashes=hashes)
        else:
            study = open_study(study_folder, hashes=hashes)
            named = study.shown_documents
            for problem in study.problems:
                on_problem(problem)
        for document in named:
            documents.setdefault(document["folder"], document)
    return list(documents.values())


def _load_runs(
    run_folders: Sequence[Path], on_problem: Callable[[str], None], *, hashes: bool
) -> list[RunDocument]:
    """Return the documents of the runs that can be read; at least one must be."""
    documents = []
    errors = []
    for folder in run_folders:
        try:
            documents.append(load_document(folder, hashes=hashes))
        except StoreError as error:
            errors.append(error)
    if not documents:
        raise errors[0]
    for problem in errors:
        on_problem(str(problem))
    return documents


def find_run_folders(name: str) -> list[Path]:
    """Return the folders of a named run, or of all runs of a comparison or study."""
    study_folder = find_study(name)
    if study_folder is None:
        return folders.resolve_runs(name)
    return [_run_folder(run, study_folder) for run in read_record(study_folder).runs]


def output_folder(name: str) -> Path:
    """Return the folder of figures and reports of a named run, comparison or study."""
    study_folder = find_study(name)
    if study_folder is not None:
        return study_folder
    run_folders = folders.resolve_runs(name)
    return run_folders[0] if len(run_folders) == 1 else run_folders[0].parent


def describe_request(record: StudyRecord) -> str:
    """Return purpose, methods and seeds, as in `comparison of fedavg, ditto, seeds 0, 1`."""
    seeds = f", seeds {', '.join(map(str, record.seeds))}" if record.seeds else ""
    return f"{record.purpose} of {', '.join(record.methods)}{seeds}"
