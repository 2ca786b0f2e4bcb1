"""Folders of runs: names, numbers, and lookup by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from feddbe.errors import InvalidInputError, StoreError
from feddbe.runs import folders
from feddbe.runs.store import RUN_FILE, RunStore
from tests.crafted import RunFile


def make(folder: Path, config_hash: str = "", begun: str = "") -> Path:
    """A run that has begun."""
    RunStore.create(folder, {"config_hash": config_hash, "begun": begun}, {}).close()
    return folder


# --- names


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("fedavg", "fedavg"),
        ("fedavg+dbe", "fedavg+dbe"),
        ("fedavg+dbe(kappa=5)", "fedavg+dbe-kappa5"),
        ("FedAvg + DBE(kappa=0.5, mu=1e-3)", "fedavg+dbe-kappa0.5-mu1e-3"),
        ("fedavg+mr(init_mean=exact)", "fedavg+mr-init_meanexact"),
        ("../x y/é:*", "..xy"),
    ],
)
def test_slug_of_method_names(name: str, slug: str) -> None:
    assert folders.slug(name) == slug


def test_different_methods_have_different_slugs() -> None:
    names = ["fedavg", "fedavg+mr", "fedavg+mr(kappa=5)", "fedavg+mr(kappa=0.5)", "fedavg+mr(mu=0.5)"]
    assert len({folders.slug(name) for name in names}) == len(names)


# --- numbers


def test_first_unused_number_is_used(tmp_path: Path) -> None:
    root = tmp_path / "a" / "runs"
    assert [folders.create_numbered("x", root).name for _ in range(3)] == ["x-1", "x-2", "x-3"]
    (root / "x-2").rmdir()
    (root / "x-4").write_text("a file is in the way too")
    assert [folders.create_numbered("x", root).name for _ in range(2)] == ["x-2", "x-5"]
    assert folders.create_numbered("y", root) == root / "y-1"
    assert (root / "y-1").is_dir()


def test_numbered_folders_are_unique_across_threads(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(lambda _: folders.create_numbered("x", tmp_path / "runs"), range(40)))
    assert sorted(created) == sorted(tmp_path / "runs" / f"x-{k}" for k in range(1, 41))


def test_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"^cannot create the folder '.*/file/x-1': Not a directory$"):
        folders.create_numbered("x", tmp_path / "file")


# --- listing


def test_runs_are_listed_by_name(tmp_path: Path) -> None:
    created = [make(tmp_path / name) for name in ("b-1", "compare-1/fedavg", "compare-1/fedavg+dbe", "a-1")]
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert folders.list_runs(tmp_path) == sorted(created)
    assert folders.list_runs(tmp_path / "compare-1") == created[1:3]
    assert folders.list_runs(tmp_path / "nowhere") == []


# --- the one that is meant


@pytest.fixture
def working_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_is_resolved_by_path_or_name(working_dir: Path) -> None:
    make(working_dir / "runs" / "digits-fedavg-1")
    make(working_dir / "elsewhere")
    named = Path("runs/digits-fedavg-1")
    assert folders.resolve_run("digits-fedavg-1") == named
    assert folders.resolve_run("runs/digits-fedavg-1") == named
    assert folders.resolve_run(f"runs/digits-fedavg-1/{RUN_FILE}") == named
    assert folders.resolve_run(str(working_dir / "elsewhere")) == working_dir / "elsewhere"


def test_home_folder_is_expanded(working_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(make(working_dir / "home" / "run").parent))
    assert folders.resolve_run("~/run") == working_dir / "home" / "run"


def test_path_takes_precedence_over_name(working_dir: Path) -> None:
    make(working_dir / "runs" / "x")
    assert folders.resolve_run("x") == Path("runs/x")
    make(working_dir / "x")
    assert folders.resolve_run("x") == Path("x")


def test_unknown_run_error_lists_existing_runs(working_dir: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"^'x' is not the folder of a run; existing runs: none in runs/$"
    ):
        folders.resolve_run("x")
    for k in range(1, 10):
        make(working_dir / "runs" / f"a-{k}")
    (working_dir / "runs" / "x").mkdir()
    names = ", ".join(f"runs/a-{k}" for k in range(1, 9))
    with pytest.raises(InvalidInputError) as caught:
        folders.resolve_run("x")
    assert str(caught.value) == (
        f"'x' is not the folder of a run; existing runs: {names}; `feddbe runs` lists runs and studies"
    )


def test_comparison_resolves_to_all_runs(working_dir: Path) -> None:
    both = [make(working_dir / "runs" / "compare-1" / name) for name in ("fedavg", "fedavg+dbe")]
    assert folders.resolve_runs("compare-1") == [Path("runs/compare-1") / run.name for run in both]
    assert folders.resolve_runs(str(working_dir / "runs" / "compare-1")) == both
    assert folders.resolve_runs("compare-1/fedavg") == [Path("runs/compare-1/fedavg")]
    with pytest.raises(InvalidInputError, match="'nothing' is not the folder of a run"):
        folders.resolve_runs("nothing")


# --- the one to continue


def test_newest_run_with_this_configuration(tmp_path: Path) -> None:
    """Newest is what was begun last, whatever its name."""
    make(tmp_path / "a-1", "mine", "2024-01-02T10:00:00+00:00")
    make(tmp_path / "a-2", "mine", "2024-01-03T09:00:00+00:00")
    make(tmp_path / "a-3", "mine", "2024-01-01T23:00:00+00:00")
    make(tmp_path / "a-4", "other", "2024-02-01T00:00:00+00:00")
    assert folders.find_newest({".": "mine"}, tmp_path) == tmp_path / "a-2"
    assert folders.find_newest({".": "other"}, tmp_path) == tmp_path / "a-4"


def test_run_without_its_start_is_the_oldest(tmp_path: Path) -> None:
    make(tmp_path / "a-1", "mine", "2024-01-01T10:00:00+00:00")
    make(tmp_path / "a-2", "mine")
    file = RunFile(tmp_path / "a-2")
    file.db.execute("DELETE FROM meta WHERE key = 'begun'")
    file.db.close()
    assert folders.find_newest({".": "mine"}, tmp_path) == tmp_path / "a-1"


def test_newest_comparison(tmp_path: Path) -> None:
    """It needs only one of the wanted runs, under its own name: the others may not have begun."""
    make(tmp_path / "compare-1" / "fedavg", "F", "2024-01-01")
    make(tmp_path / "compare-1" / "fedavg+dbe", "D", "2024-01-01")
    make(tmp_path / "compare-2" / "fedavg", "F", "2024-01-02")
    make(tmp_path / "compare-3" / "renamed", "F", "2024-01-03")
    config_hashes = {"fedavg": "F", "fedavg+dbe": "D"}
    assert folders.find_newest(config_hashes, tmp_path) == tmp_path / "compare-2"
    assert folders.find_newest({"fedavg+dbe": "D"}, tmp_path) == tmp_path / "compare-1"


@pytest.mark.parametrize("config_hashes", [{".": "other"}, {"fedavg": "mine"}])
def test_nothing_to_resume(tmp_path: Path, config_hashes: dict[str, Any]) -> None:
    make(tmp_path / "a-1", "mine")
    message = f"--resume: no run with this configuration in '{tmp_path}'; start it without --resume"
    with pytest.raises(InvalidInputError) as caught:
        folders.find_newest(config_hashes, tmp_path)
    assert str(caught.value) == message


def test_corrupt_run_is_skipped(tmp_path: Path) -> None:
    make(tmp_path / "a-1", "mine")
    (tmp_path / "a-2").mkdir()
    (tmp_path / "a-2" / RUN_FILE).write_bytes(b"not a database" * 100)
    (tmp_path / "a-3").mkdir()
    (tmp_path / "a-3" / RUN_FILE).write_bytes(b"")
    assert folders.find_newest({".": "mine"}, tmp_path) == tmp_path / "a-1"


# --- nothing half-written


@pytest.mark.parametrize("root_is_new", [True, False])
def test_empty_folders_of_a_failed_start_are_removed(tmp_path: Path, root_is_new: bool) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_text("")
    output_dirs = [tmp_path / "compare-1" / name for name in ("fedavg", "fedavg+dbe")]
    if root_is_new:
        output_dirs[0].parent.mkdir()

    def fails() -> None:
        with folders.remove_if_empty(output_dirs, root_is_new=root_is_new):
            for output_dir in output_dirs:
                output_dir.mkdir(parents=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "other"]


def test_folders_of_a_started_run_are_kept(tmp_path: Path) -> None:
    output_dirs = [tmp_path / "compare-1" / name for name in ("fedavg", "fedavg+dbe")]

    def fails() -> None:
        with folders.remove_if_empty(output_dirs, root_is_new=False):
            make(output_dirs[0])
            output_dirs[1].mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert folders.list_runs(tmp_path) == output_dirs[:1]
    assert not output_dirs[1].exists()
    with folders.remove_if_empty([tmp_path / "fine"], root_is_new=False):
        (tmp_path / "fine").mkdir()
    assert (tmp_path / "fine").is_dir()
