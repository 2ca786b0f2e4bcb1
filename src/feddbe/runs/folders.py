"""Folders of runs: one folder per run, numbered under `runs/` unless the user names one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from feddbe.errors import CorruptRunError, InvalidInputError, StoreError
from feddbe.paths import RUNS_DIR, expand_path
from feddbe.runs.store import RUN_FILE, RunStore


def slug(name: str) -> str:
    """Return a method's folder name: fedavg+dbe(kappa=5) -> fedavg+dbe-kappa5, a/my.py:Own -> my-own."""
    name = re.sub(r"^(?:.*/)?([^/]*)\.py:", r"\1-", name)
    return re.sub(r"[^a-z0-9_+.-]", "", name.lower().replace("(", "-").replace(",", "-"))


def create_numbered(stem: str, root: Path = RUNS_DIR) -> Path:
    """Create the folder `root/stem-N` with the first unused N and return its path."""
    number = 1
    while True:
        folder = root / f"{stem}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if not root.is_dir():  # a broken link
                raise StoreError(f"cannot create the folder '{folder}': '{root}' is not a folder") from error
            number += 1
        except OSError as error:
            raise StoreError(f"cannot create the folder '{folder}': {error.strerror}") from error


def list_runs(root: Path = RUNS_DIR) -> list[Path]:
    """Return the folders of all runs below `root`, sorted by name."""
    return sorted(path.parent for path in root.rglob(RUN_FILE)) if root.is_dir() else []


def find_newest(
    config_hashes: Mapping[str, str],
    root: Path = RUNS_DIR,
    on_message: Callable[[str], None] = lambda text: None,
) -> Path:
    """Return the folder with the newest of the requested runs.

    Args:
        config_hashes: Configuration hash of each run, by its subfolder; `.` is the folder itself.
        root: Folder that is searched.
        on_message: Called with a message for each corrupt run.

    Raises:
        InvalidInputError: No run below `root` has one of the hashes.
    """
    candidates = []
    for run_folder in list_runs(root):
        try:
            store = RunStore.open(run_folder)
        except StoreError as error:  # this run could not be resumed
            if isinstance(error, CorruptRunError):
                on_message(f"skipped: {error}")
            continue
        run_hash = store.meta("config_hash")
        begun = store.meta("begun") or ""
        store.close()
        for subfolder, config_hash in config_hashes.items():
            if run_hash == config_hash and subfolder in (".", run_folder.name):
                folder = run_folder if subfolder == "." else run_folder.parent
                candidates.append((begun, folder))
    if not candidates:
        raise InvalidInputError(
            f"--resume: no run with this configuration in '{root}'; start it without --resume"
        )
    return max(candidates)[1]


@contextmanager
def remove_if_empty(output_dirs: Sequence[Path], *, root_is_new: bool) -> Iterator[None]:
    """Remove new folders that are still empty if the block fails.

    Args:
        output_dirs: Folders in which runs are started.
        root_is_new: True if their parent, or the only folder, was created for them already.
    """
    new_folders = []
    for output_dir in output_dirs:
        for folder in (output_dir, *output_dir.parents):
            if root_is_new or not folder.exists():
                new_folders.append(folder)
    try:
        yield
    except BaseException:
        for folder in sorted(new_folders, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        raise


def resolve_run(name: str) -> Path:
    """Return the folder of a run by its path or its name in `runs/`."""
    for folder in (expand_path(name), RUNS_DIR / name):
        if RunStore.is_run(folder):
            return folder
        if folder.name == RUN_FILE and folder.is_file():
            return folder.parent
    runs = [str(path) for path in list_runs()]
    existing = (
        f"{', '.join(runs[:8])}; `feddbe runs` lists runs and studies" if runs else f"none in {RUNS_DIR}/"
    )
    raise InvalidInputError(f"'{name}' is not the folder of a run; existing runs: {existing}")


def resolve_runs(name: str) -> list[Path]:
    """Return the folder of a run, or the folders of all runs of a comparison in the order of their start."""
    for folder in (expand_path(name), RUNS_DIR / name):
        run_folders = [path.parent for path in folder.glob(f"*/{RUN_FILE}")]
        if run_folders and not RunStore.is_run(folder):
            return sorted(run_folders, key=lambda path: (_read_start(path), path))
    return [resolve_run(name)]


def _read_start(folder: Path) -> str:
    """Return the time at which a run began; empty if its file cannot be read, which is reported later."""
    try:
        store = RunStore.open(folder)
    except StoreError:
        return ""
    try:
        return store.meta("begun") or ""
    finally:
        store.close()
