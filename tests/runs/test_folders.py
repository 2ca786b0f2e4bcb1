"""Folders of runs: names, numbers, and which one is meant."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from feddbe.errors import InvalidInputError, StoreError
from feddbe.runs import folders
from feddbe.runs.store import FILE, RunStore


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
def test_a_methods_name_as_a_folders(name: str, slug: str) -> None:
    assert folders.slug(name) == slug


def test_methods_that_differ_have_folders_that_differ() -> None:
    names = ["fedavg", "fedavg+mr", "fedavg+mr(kappa=5)", "fedavg+mr(kappa=0.5)", "fedavg+mr(mu=0.5)"]
    assert len({folders.slug(name) for name in names}) == len(names)


# --- numbers


def test_the_first_number_that_is_free(tmp_path: Path) -> None:
    root = tmp_path / "a" / "runs"
    assert [folders.next_numbered("x", root).name for _ in range(3)] == ["x-1", "x-2", "x-3"]
    (root / "x-2").rmdir()
    (root / "x-4").write_text("a file is in the way too")
    assert [folders.next_numbered("x", root).name for _ in range(2)] == ["x-2", "x-5"]
    assert folders.next_numbered("y", root) == root / "y-1"
    assert (root / "y-1").is_dir()


def test_no_two_get_the_same_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: folders.next_numbered("x", tmp_path / "runs"), range(40)))
    assert sorted(made) == sorted(tmp_path / "runs" / f"x-{k}" for k in range(1, 41))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"^cannot make the folder '.*/file/x-1': Not a directory$"):
        folders.next_numbered("x", tmp_path / "file")


# --- listing


def test_all_runs_below_a_folder_by_name(tmp_path: Path) -> None:
    made = [make(tmp_path / name) for name in ("b-1", "compare-1/fedavg", "compare-1/fedavg+dbe", "a-1")]
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert folders.list_names(tmp_path) == sorted(made)
    assert folders.list_names(tmp_path / "compare-1") == made[1:3]
    assert folders.list_names(tmp_path / "nowhere") == []


# --- the one that is meant


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_path_or_a_name(here: Path) -> None:
    make(here / "runs" / "digits-fedavg-1")
    make(here / "elsewhere")
    named = Path("runs/digits-fedavg-1")
    assert folders.resolve_run("digits-fedavg-1") == named
    assert folders.resolve_run("runs/digits-fedavg-1") == named
    assert folders.resolve_run(f"runs/digits-fedavg-1/{FILE}") == named
    assert folders.resolve_run(str(here / "elsewhere")) == here / "elsewhere"


def test_the_home_folder_is_understood(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(make(here / "home" / "run").parent))
    assert folders.resolve_run("~/run") == here / "home" / "run"


def test_a_path_wins_over_a_name(here: Path) -> None:
    make(here / "runs" / "x")
    assert folders.resolve_run("x") == Path("runs/x")
    make(here / "x")
    assert folders.resolve_run("x") == Path("x")


def test_what_is_no_run_is_answered_with_those_that_are(here: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"^'x' is not the folder of a run; runs here: none in runs/$"
    ):
        folders.resolve_run("x")
    for k in range(1, 10):
        make(here / "runs" / f"a-{k}")
    (here / "runs" / "x").mkdir()
    shown = ", ".join(f"runs/a-{k}" for k in range(1, 9))
    with pytest.raises(InvalidInputError) as caught:
        folders.resolve_run("x")
    assert str(caught.value) == f"'x' is not the folder of a run; runs here: {shown}"


def test_a_comparison_is_all_its_runs(here: Path) -> None:
    both = [make(here / "runs" / "compare-1" / name) for name in ("fedavg", "fedavg+dbe")]
    assert folders.resolve_runs("compare-1") == [Path("runs/compare-1") / run.name for run in both]
    assert folders.resolve_runs(str(here / "runs" / "compare-1")) == both
    assert folders.resolve_runs("compare-1/fedavg") == [Path("runs/compare-1/fedavg")]
    with pytest.raises(InvalidInputError, match="'nothing' is not the folder of a run"):
        folders.resolve_runs("nothing")


# --- the one to continue


def test_the_newest_with_this_configuration(tmp_path: Path) -> None:
    """Newest is what was begun last, whatever its name."""
    make(tmp_path / "a-1", "mine", "2024-01-02T10:00:00+00:00")
    make(tmp_path / "a-2", "mine", "2024-01-03T09:00:00+00:00")
    make(tmp_path / "a-3", "mine", "2024-01-01T23:00:00+00:00")
    make(tmp_path / "a-4", "other", "2024-02-01T00:00:00+00:00")
    assert folders.newest_run({".": "mine"}, tmp_path) == tmp_path / "a-2"
    assert folders.newest_run({".": "other"}, tmp_path) == tmp_path / "a-4"


def test_the_newest_comparison(tmp_path: Path) -> None:
    """It needs only one of the wanted runs, under its own name: the others may not have begun."""
    make(tmp_path / "compare-1" / "fedavg", "F", "2024-01-01")
    make(tmp_path / "compare-1" / "fedavg+dbe", "D", "2024-01-01")
    make(tmp_path / "compare-2" / "fedavg", "F", "2024-01-02")
    make(tmp_path / "compare-3" / "renamed", "F", "2024-01-03")
    wanted = {"fedavg": "F", "fedavg+dbe": "D"}
    assert folders.newest_run(wanted, tmp_path) == tmp_path / "compare-2"
    assert folders.newest_run({"fedavg+dbe": "D"}, tmp_path) == tmp_path / "compare-1"


@pytest.mark.parametrize("wanted", [{".": "other"}, {"fedavg": "mine"}])
def test_nothing_to_continue(tmp_path: Path, wanted: dict[str, Any]) -> None:
    make(tmp_path / "a-1", "mine")
    message = f"--resume: no run with this configuration in '{tmp_path}'; start it without --resume"
    with pytest.raises(InvalidInputError) as caught:
        folders.newest_run(wanted, tmp_path)
    assert str(caught.value) == message


def test_a_broken_run_is_passed_over(tmp_path: Path) -> None:
    make(tmp_path / "a-1", "mine")
    (tmp_path / "a-2").mkdir()
    (tmp_path / "a-2" / FILE).write_bytes(b"not a database" * 100)
    (tmp_path / "a-3").mkdir()
    (tmp_path / "a-3" / FILE).write_bytes(b"")
    assert folders.newest_run({".": "mine"}, tmp_path) == tmp_path / "a-1"


# --- nothing half-written


@pytest.mark.parametrize("made", [True, False])
def test_folders_of_a_run_that_did_not_begin_go_away(tmp_path: Path, made: bool) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_text("")
    places = [tmp_path / "compare-1" / name for name in ("fedavg", "fedavg+dbe")]
    if made:
        places[0].parent.mkdir()

    def fails() -> None:
        with folders.remove_if_empty(places, made=made):
            for place in places:
                place.mkdir(parents=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "other"]


def test_folders_of_a_run_that_began_stay(tmp_path: Path) -> None:
    places = [tmp_path / "compare-1" / name for name in ("fedavg", "fedavg+dbe")]

    def fails() -> None:
        with folders.remove_if_empty(places, made=False):
            make(places[0])
            places[1].mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert folders.list_names(tmp_path) == places[:1]
    assert not places[1].exists()
    with folders.remove_if_empty([tmp_path / "fine"], made=False):
        (tmp_path / "fine").mkdir()
    assert (tmp_path / "fine").is_dir()
