"""Callbacks: hooks are called with the right values, and displays print them."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.callbacks.base import Callback, CallbackList
from feddbe.callbacks.display import (
    NotebookProgress,
    ProgressBars,
    ProgressLines,
    TimeEstimate,
    default_callback,
)
from feddbe.results.document import RoundResult

SMALL: dict[str, Any] = {
    "clients": 3, "partition": "iid", "model": "mlp", "engine": "serial", "trainer": "autograd",
}  # fmt: skip


class Diary(Callback):
    """Writes everything down."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.entries: list[RoundResult] = []

    def __enter__(self) -> Diary:
        self.events.append("enter")
        return self

    def __exit__(self, *error: object) -> None:
        self.events.append("exit")

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.events.append((name, done, rounds))

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self.events.append(done)

    def on_evaluation(self, result: RoundResult) -> None:
        self.entries.append(result)


def test_on_evaluation_is_called_once_per_round(tmp_path: Path) -> None:
    """Also for a resumed run: its first process trains the last round, its second evaluates it."""
    first, second = Diary(), Diary()
    options = {**SMALL, "out": str(tmp_path / "run"), "validation": 0.2}
    feddbe.run("fedavg+dbe", rounds=2, callback=first, **options)
    document = feddbe.run("fedavg+dbe", rounds=4, resume=True, callback=second, **options)
    assert first.events == ["enter", ("fedavg+dbe", 0, 2), 0, 1, 2, 2, "exit"]
    assert second.events == ["enter", ("fedavg+dbe", 2, 4), 3, 4, 4, "exit"]
    assert [entry["round"] for entry in first.entries] == [0, 1, 2]
    assert first.entries[:2] == document["rounds"][:2]
    assert second.entries == document["rounds"][2:]
    resumed = Diary()
    feddbe.run(resume=True, callback=resumed, out=options["out"])
    assert resumed.entries == []


def test_callback_is_left_on_errors(tmp_path: Path) -> None:
    diary = Diary()
    with pytest.raises(feddbe.InvalidInputError):
        feddbe.run("fedagv", callback=diary)
    with pytest.raises(feddbe.DivergenceError):
        feddbe.run("fedavg+prbm(prbm_lr=1e20)", rounds=1, callback=diary, out=str(tmp_path), **SMALL)
    assert diary.events[0] == "enter"
    assert [word for word in diary.events if word == "exit"] == ["exit"] * 2
    assert diary.events[-1] == "exit"


def test_callback_list_calls_in_order() -> None:
    diaries = [Diary(), Diary()]
    with CallbackList(diaries) as both:
        both.on_run_begin("a", Path(), 0, 3)
        both.on_round_end(1, 0.5)
    assert diaries[0].events == diaries[1].events == ["enter", ("a", 0, 3), 1, "exit"]


def test_round_line_has_evaluated_round_and_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten seconds a round: after 2 of the rounds 3, 4, 5 that are left one more is to come."""
    times = iter([100.0, 110.0, 120.0, 130.0, 131.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    pace = TimeEstimate("fedavg", 2, 5)
    assert pace.describe_round(3, 0.25) == "fedavg: round 3 of 5, 25.00 % in round 2, 0:00:10, 0:00:20 left"
    assert pace.describe_round(4, 0.5) == "fedavg: round 4 of 5, 50.00 % in round 3, 0:00:20, 0:00:10 left"
    assert pace.describe_round(5, 0.75) == "fedavg: round 5 of 5, 75.00 % in round 4, 0:00:30"
    assert pace.describe_round(5, 1.0) == "fedavg: round 5 of 5, 100.00 % in round 5, 0:00:31"


def test_step_line_has_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 of 3 is at 25 % after 20 s: 60 s of it are left, and 80 s of the last."""
    times = iter([100.0, 104.0, 105.0, 110.0, 124.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    pace = TimeEstimate("fedavg", 0, 3)
    assert pace.describe_round(1, None) == ""
    assert pace.describe_step(0.0) == "fedavg: 0% of step 2 of 3, 0:00:05", (
        "how long it takes is not known yet"
    )
    assert pace.describe_step(0.1) == "", "a line now and then is enough"
    assert pace.describe_step(0.25) == "fedavg: 25% of step 2 of 3, 0:00:24, about 0:02:20 left"


def test_no_line_before_the_first_accuracy() -> None:
    assert TimeEstimate("fedavg", 0, 5).describe_round(0, None) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_default_callback_shows_bars_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(default_callback()) is ProgressLines
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(default_callback(), ProgressBars)
    assert type(default_callback(quiet=True)) is Callback


def test_bars_can_be_reused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    for number in range(2):
        feddbe.run("fedavg", rounds=1, out=str(tmp_path / str(number)), **SMALL)
        assert "fedavg" in terminal.getvalue()
        terminal.truncate(0)


def test_a_script_without_a_terminal_prints_a_line_per_round(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    feddbe.run("fedavg", rounds=1, out=str(tmp_path / "lines"), **SMALL)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(", ")[0] for line in err.splitlines()] == ["fedavg: round 1 of 1"] * 2
    feddbe.run("fedavg", rounds=1, out=str(tmp_path / "quiet"), quiet=True, **SMALL)
    assert capsys.readouterr() == ("", "")


def test_notebook_line_is_updated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a kernel: a shell that has one, and a display that is updated."""
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    displayed: list[list[str]] = []

    class Handle:
        def __init__(self, first: object) -> None:
            displayed.append([repr(first)])
            self.lines = displayed[-1]

        def update(self, thing: object) -> None:
            self.lines.append(repr(thing))

    monkeypatch.setattr(display, "display", lambda thing, display_id: Handle(thing))
    monkeypatch.setattr("IPython.get_ipython", lambda: type("Shell", (), {"kernel": 1})())
    assert isinstance(default_callback(), NotebookProgress)
    feddbe.run("fedavg", rounds=1, out=str(tmp_path), **SMALL)
    (line,) = displayed
    assert line[0] == "fedavg: begins"
    assert line[-1].startswith("fedavg: round 1 of 1, ")
