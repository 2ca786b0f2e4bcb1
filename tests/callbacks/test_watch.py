"""Who is told of a run: what each of them makes of it, and that the right things are told."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.callbacks.base import Callback, CallbackList
from feddbe.callbacks.display import Bars, Lines, Notebook, TimeEstimate, default_callback
from feddbe.results.document import RoundResult

SMALL: dict[str, Any] = {
    "clients": 3, "partition": "iid", "model": "mlp", "engine": "serial", "trainer": "autograd",
}  # fmt: skip


class Diary(Callback):
    """Writes everything down."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.entries: list[RoundResult] = []

    def __enter__(self) -> Diary:
        self.said.append("enter")
        return self

    def __exit__(self, *error: object) -> None:
        self.said.append("exit")

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.said.append((name, done, rounds))

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self.said.append(done)

    def on_evaluation(self, result: RoundResult) -> None:
        self.entries.append(result)


def test_every_entry_is_told_once_as_the_document_has_it(tmp_path: Path) -> None:
    """Also of a run that is carried on: the entry between was begun by one and evaluated by the other."""
    first, second = Diary(), Diary()
    options = {**SMALL, "out": str(tmp_path / "run"), "validation": 0.2}
    feddbe.run("fedavg+dbe", rounds=2, callback=first, **options)
    document = feddbe.run("fedavg+dbe", rounds=4, resume=True, callback=second, **options)
    assert first.said == ["enter", ("fedavg+dbe", 0, 2), 0, 1, 2, 2, "exit"]
    assert second.said == ["enter", ("fedavg+dbe", 2, 4), 3, 4, 4, "exit"]
    assert [entry["round"] for entry in first.entries] == [0, 1, 2]
    assert first.entries[:2] == document["rounds"][:2]
    assert second.entries == document["rounds"][2:]
    again = Diary()
    feddbe.run(resume=True, callback=again, out=options["out"])
    assert again.entries == []


def test_it_is_left_whatever_happens(tmp_path: Path) -> None:
    diary = Diary()
    with pytest.raises(feddbe.InvalidInputError):
        feddbe.run("fedagv", callback=diary)
    with pytest.raises(feddbe.DivergenceError):
        feddbe.run("fedavg+prbm(prbm_lr=1e20)", rounds=1, callback=diary, out=str(tmp_path), **SMALL)
    assert diary.said[0] == "enter"
    assert [word for word in diary.said if word == "exit"] == ["exit"] * 2
    assert diary.said[-1] == "exit"


def test_several_are_told_in_their_order() -> None:
    diaries = [Diary(), Diary()]
    with CallbackList(diaries) as both:
        both.on_run_begin("a", Path(), 0, 3)
        both.on_round_end(1, 0.5)
    assert diaries[0].said == diaries[1].said == ["enter", ("a", 0, 3), 1, "exit"]


def test_the_pace_says_which_round_was_evaluated_and_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten seconds a round: after 2 of the rounds 3, 4, 5 that are left one more is to come."""
    now = iter([100.0, 110.0, 120.0, 130.0, 131.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    pace = TimeEstimate("fedavg", 2, 5)
    assert pace.round(3, 0.25) == "fedavg: round 3 of 5, 25.00 % in round 2, 0:00:10, 0:00:20 left"
    assert pace.round(4, 0.5) == "fedavg: round 4 of 5, 50.00 % in round 3, 0:00:20, 0:00:10 left"
    assert pace.round(5, 0.75) == "fedavg: round 5 of 5, 75.00 % in round 4, 0:00:30"
    assert pace.round(5, 1.0) == "fedavg: round 5 of 5, 100.00 % in round 5, 0:00:31"


def test_the_pace_tells_how_long_the_rest_of_a_measurement_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 of 3 is at 25 % after 20 s: 60 s of it are left, and 80 s of the last."""
    now = iter([100.0, 104.0, 105.0, 110.0, 124.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    pace = TimeEstimate("fedavg", 0, 3)
    assert pace.round(1, None) == ""
    assert pace.part(0.0) == "fedavg: 0% of step 2 of 3, 0:00:05", "how long it takes is not known yet"
    assert pace.part(0.1) == "", "a line now and then is enough"
    assert pace.part(0.25) == "fedavg: 25% of step 2 of 3, 0:00:24, about 0:02:20 left"


def test_nothing_is_said_before_something_is_known() -> None:
    assert TimeEstimate("fedavg", 0, 5).round(0, None) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_python_shows_bars_on_a_terminal_and_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(default_callback()) is Callback
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(default_callback(), Bars)
    assert type(default_callback(quiet=True)) is Callback


def test_bars_can_be_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    for number in range(2):
        feddbe.run("fedavg", rounds=1, out=str(tmp_path / str(number)), **SMALL)
        assert "fedavg" in terminal.getvalue()
        terminal.truncate(0)


def test_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    feddbe.run("fedavg", rounds=1, out=str(tmp_path), callback=Lines(), **SMALL)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(", ")[0] for line in err.splitlines()] == ["fedavg: round 1 of 1"] * 2


def test_a_notebook_has_a_line_that_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a kernel: a shell that has one, and a display that is updated."""
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    shown: list[list[str]] = []

    class Handle:
        def __init__(self, first: object) -> None:
            shown.append([repr(first)])
            self.lines = shown[-1]

        def update(self, thing: object) -> None:
            self.lines.append(repr(thing))

    monkeypatch.setattr(display, "display", lambda thing, display_id: Handle(thing))
    monkeypatch.setattr("IPython.get_ipython", lambda: type("Shell", (), {"kernel": 1})())
    assert isinstance(default_callback(), Notebook)
    feddbe.run("fedavg", rounds=1, out=str(tmp_path), **SMALL)
    (line,) = shown
    assert line[0] == "fedavg: begins"
    assert line[-1].startswith("fedavg: round 1 of 1, ")


def test_tensorboard_has_every_round(tmp_path: Path) -> None:
    """Read back from the event files, also of a run that is carried on."""
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, options = (
        feddbe.callbacks.TensorBoard(tmp_path / "board"),
        {**SMALL, "out": str(tmp_path / "both")},
    )
    feddbe.compare(["fedavg", "fedavg+mr"], rounds=1, callback=board, **options)
    documents = feddbe.compare(["fedavg", "fedavg+mr"], rounds=2, resume=True, callback=board, **options)
    for document in documents:
        events = EventAccumulator(str(tmp_path / "board" / "both" / document["method"]))
        events.Reload()
        for tag, reading in (("accuracy/weighted", "weighted"), ("accuracy/worst_tenth", "worst_tenth")):
            found = {event.step: event.value for event in events.Scalars(tag)}
            assert found == pytest.approx(dict(document.curve(reading)))
        losses = {event.step: event.value for event in events.Scalars("train_loss")}
        there = {e["round"]: e["train_loss"] for e in document["rounds"] if e["train_loss"] is not None}
        assert losses == pytest.approx(there)


def test_without_tensorboard_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(feddbe.InvalidInputError, match=r"pip install 'feddbe\[tensorboard\]'"):
        feddbe.callbacks.TensorBoard("board")
