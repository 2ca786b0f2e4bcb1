"""Where runs are: one folder each, numbered under `runs/` unless the user names one."""

from __future__ import annotations

import re
from pathlib import Path

from feddbe.errors import BadInput, StoreError
from feddbe.store import FILE, Store

__all__ = ["RUNS", "find", "listing", "newest", "numbered", "slug"]

RUNS = Path("runs")


def slug(name: str) -> str:
    """A method's name as a folder's: fedavg+dbe(kappa=5) -> fedavg+dbe-kappa5."""
    return re.sub(r"[^a-z0-9_+.-]", "", name.lower().replace("(", "-").replace(",", "-"))


def numbered(stem: str, root: Path = RUNS) -> Path:
    """A new folder `root/stem-N`, with the first N that is free."""
    number = 1
    while True:
        folder = root / f"{stem}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise StoreError(f"cannot make the folder '{folder}': {error.strerror}") from error


def listing(root: Path = RUNS) -> list[Path]:
    """The folders of all runs below `root`, by name."""
    return sorted(path.parent for path in root.rglob(FILE)) if root.is_dir() else []


def newest(config_hash: str, root: Path = RUNS) -> Path:
    """The run with this configuration that was written last."""
    found = []
    for folder in listing(root):
        store = Store.open(folder)
        if store.meta("config_hash") == config_hash:
            found.append(((folder / FILE).stat().st_mtime_ns, folder))
        store.close()
    if not found:
        raise BadInput(f"--resume: no run with this configuration in '{root}'; start it without --resume")
    return max(found)[1]


def find(run: str) -> Path:
    """The folder that a person means: a path, or a name in `runs/`."""
    for folder in (Path(run).expanduser(), RUNS / run):
        if Store.is_run(folder):
            return folder
        if folder.name == FILE and folder.is_file():
            return folder.parent
    near = ", ".join(str(path) for path in listing()[:8]) or f"none in {RUNS}/"
    raise BadInput(f"'{run}' is not the folder of a run; runs here: {near}")
