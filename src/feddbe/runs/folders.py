"""Where runs are: one folder each, numbered under `runs/` unless the user names one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from feddbe.errors import CorruptRunError, InvalidInputError, StoreError
from feddbe.paths import RUNS_DIR, expand_path
from feddbe.runs.store import FILE, RunStore


def slug(name: str) -> str:
    """A method's name as a folder's: fedavg+dbe(kappa=5) -> fedavg+dbe-kappa5, a/my.py:Own -> my-own."""
    name = re.sub(r"^(?:.*/)?([^/]*)\.py:", r"\1-", name)
    return re.sub(r"[^a-z0-9_+.-]", "", name.lower().replace("(", "-").replace(",", "-"))


def next_numbered(stem: str, root: Path = RUNS_DIR) -> Path:
    """A new folder `root/stem-N`, with the first N that is free."""
    number = 1
    while True:
        folder = root / f"{stem}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if not root.is_dir():  # a link to nowhere
                raise StoreError(f"cannot make the folder '{folder}': '{root}' is not a folder") from error
            number += 1
        except OSError as error:
            raise StoreError(f"cannot make the folder '{folder}': {error.strerror}") from error


def list_names(root: Path = RUNS_DIR) -> list[Path]:
    """The folders of all runs below `root`, by name."""
    return sorted(path.parent for path in root.rglob(FILE)) if root.is_dir() else []


def newest_run(
    wanted: Mapping[str, str], root: Path = RUNS_DIR, remark: Callable[[str], None] = lambda text: None
) -> Path:
    """Of the folders that hold one of the wanted runs, the one whose run was begun last.

    `wanted`: where in that folder a run is (`.` for the folder itself) -> its configuration's hash.
    `remark` is told of those that are damaged.
    """
    found = []
    for folder in list_names(root):
        try:
            store = RunStore.open(folder)
        except StoreError as error:  # not a run that could be continued
            if isinstance(error, CorruptRunError):
                remark(f"passed over: {error}")
            continue
        config_hash, begun = store.meta("config_hash"), store.meta("begun")
        store.close()
        for place, wanted_hash in wanted.items():
            if config_hash == wanted_hash and place in (".", folder.name):
                found.append((begun, folder if place == "." else folder.parent))
    if not found:
        raise InvalidInputError(
            f"--resume: no run with this configuration in '{root}'; start it without --resume"
        )
    return max(found)[1]


@contextmanager
def remove_if_empty(places: Sequence[Path], *, made: bool) -> Iterator[None]:
    """Runs are begun in these folders; if that fails, those that it made and left empty go away again.

    `made`: the folder that they are in, or the only one, was made for them already.
    """
    new = [folder for place in places for folder in (place, *place.parents) if made or not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in sorted(new, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        raise


def resolve_run(run: str) -> Path:
    """The folder that a person means: a path, or a name in `runs/`."""
    for folder in (expand_path(run), RUNS_DIR / run):
        if RunStore.is_run(folder):
            return folder
        if folder.name == FILE and folder.is_file():
            return folder.parent
    near = ", ".join(str(path) for path in list_names()[:8]) or f"none in {RUNS_DIR}/"
    raise InvalidInputError(f"'{run}' is not the folder of a run; runs here: {near}")


def resolve_runs(name: str) -> list[Path]:
    """The folder of the run that a person means, or those of all runs of a comparison in the order in which
    they began, which is the order in which they were typed."""
    for folder in (expand_path(name), RUNS_DIR / name):
        if not RunStore.is_run(folder) and (inside := [path.parent for path in folder.glob(f"*/{FILE}")]):
            return sorted(inside, key=lambda path: (_begun(path), path))
    return [resolve_run(name)]


def iterate_runs(names: Iterable[str]) -> list[Path]:
    """The folders of all runs that a person means, each once, in the order typed."""
    return list(dict.fromkeys(folder for name in names for folder in resolve_runs(name)))


def _begun(folder: Path) -> str:
    """When the run in this folder began; who cannot read it will be told when it is opened."""
    try:
        store = RunStore.open(folder)
    except StoreError:
        return ""
    try:
        return store.meta("begun") or ""
    finally:
        store.close()
