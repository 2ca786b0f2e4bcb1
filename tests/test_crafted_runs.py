"""Crafted run files and missing resources: every command succeeds or prints one line, in seconds."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import feddbe
from feddbe.callbacks.base import Callback
from feddbe.cli.main import main
from feddbe.cli.results import _list_study_runs
from feddbe.errors import CorruptRunError, FeddbeError, StoreError
from feddbe.reporting.html.live import _build_content
from feddbe.reporting.html.page import render
from feddbe.runs.folders import list_runs
from feddbe.runs.store import RUN_FILE, RunStore, _limited_steps
from feddbe.state import decode, encode
from feddbe.studies.study_record import RECORD_FILE, Purpose, SearchResult, read_record
from tests.crafted import ENDLESS, HOSTILE_TEXTS, RunFile, craft, craft_record, share_pages
from tests.waiting import PATIENCE

CASES = int(os.environ.get("FEDDBE_CASES", "30"))
ALL_COMMANDS = "FEDDBE_CASES" in os.environ
"""If False, each crafted file is read by two commands only, which differ between files."""
MAX_SECONDS = 12.0
"""Longest processor time of a command."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\ud800-\udfff]")


def _make_table_run(folder: Path) -> dict[str, str]:
    """Write a run of a table with named clients and classes, new clients and an analysis."""
    rows = [f"site{k % 4},{k % 3 + k % 7 / 9},{'rgb'[k % 3]},{'abc'[k * 7 % 3]}" for k in range(96)]
    (folder / "table.csv").write_text("\n".join(["client,age,color,label", *rows]))
    (folder / "new.csv").write_text("age,color\n1.0,r\n0.5,b\n")
    data = f"{folder / 'table.csv'}?label=label&client=client"
    feddbe.run(
        "fedavg+dbe", data=data, rounds=2, out=str(folder / "run"), engine="serial", new_clients=1,
        adapt_epochs=2, trainer="autograd", quiet=True,
    )  # fmt: skip
    feddbe.analyze(folder / "run", analyses="tsne", moment="before", samples=20, quiet=True)
    return {"data": data, "new": str(folder / "new.csv")}


def _make_image_run(folder: Path) -> dict[str, str]:
    """Write a run of images with shifts, uploads, validation data and analyses."""
    np.savez(folder / "new.npz", x=np.zeros((2, 8, 8), np.uint8))
    feddbe.run(
        "fedfomo", data="digits", clients=3, partition="iid", shift="rotate:30", model="mlp", rounds=2,
        validation=0.2, participation=0.7, out=str(folder / "run"), engine="serial", trainer="autograd",
        quiet=True,
    )  # fmt: skip
    analyses = "probe,discrepancy,tsne,confusion"
    feddbe.analyze(folder / "run", analyses=analyses, moment="before", samples=30, quick=True, quiet=True)
    return {"data": "digits", "new": str(folder / "new.npz")}


class Original(NamedTuple):
    """A run before it is changed."""

    folder: Path
    words: dict[str, str]
    """Values that commands need: its data, and a file with new rows."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Original:
    folder = tmp_path_factory.mktemp("table")
    words = _make_table_run(folder)
    return Original(folder / "run", words)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Original:
    folder = tmp_path_factory.mktemp("images")
    words = _make_image_run(folder)
    return Original(folder / "run", words)


@pytest.fixture
def run(whole: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole.folder, tmp_path / "a" / "run")
    return tmp_path / "a" / "run"


READING = [
    "runs a", "show a/run", "show a/run --json", "show a/run --clients", "show a/run --format csv", "show a",
    "verify a/run", "fairness a/run", "overhead a/run", "report a/run", "LOAD", "LIVE",
    "analyze a/run --analyses tsne --moment before --samples 20",
]  # fmt: skip
"""Commands that read a run, without its data; LOAD and LIVE are functions."""
REPLAYING = [
    "predict a/run --client 0 --data {new}", "run --resume --out a/run --rounds 3",
    "compare --resume --out a", "export a/run --client 0 --out e",
    "analyze a/run --analyses confusion --moment after --samples 25",
    "compare fedavg --data {data} --rounds 1 --seeds 1 {fast} --out a",
    "reproduce ablation --scale small --dry-run --out a",
    "tune fedavg+mr --data {data} --rounds 1 --trials 1 {fast} --out a",
]  # fmt: skip
"""Commands that rebuild the experiment of a run, or look for runs to reuse."""


class TooLong(BaseException):
    """A command that has used too much processor time."""


@contextmanager
def limited_time() -> Iterator[None]:
    """Stop a block after its processor time; one that blocks ends the test process, with a traceback."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    faulthandler.dump_traceback_later(15 * MAX_SECONDS, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
        faulthandler.cancel_dump_traceback_later()


def call(command: str, words: dict[str, str]) -> int:
    """Execute a command on the run in `a/run`, and return its exit code."""
    if command == "LOAD":
        with suppress(FeddbeError):
            run = feddbe.load_run("a/run")
            repr(run)
            run._repr_html_()
            run.to_pandas()
            run.clients()
        return 0
    if command == "LIVE":
        content = _build_content(list_runs(Path("a")))
        render(content, live=True)
        return 0 if content["sections"] else 2
    if command == "STUDY":
        with suppress(FeddbeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each run that is missing
            study = feddbe.load_study("s")
            repr(study)
            study.summary()
        return 0
    if command == "SERVE":
        with suppress(FeddbeError):
            render(_build_content(_list_study_runs("s") or []), live=True)
        return 0
    fast = "--model mlp --engine serial --trainer autograd"
    return main([word.format(**words) for word in command.replace("{fast}", fast).split()])


FOLDER_COMMANDS = ("runs a", "show a", "LIVE")
"""Commands that continue without a run that they cannot read, because the folder has another one."""


def execute(command: str, words: dict[str, str], capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Execute a command; an exception, a traceback, control characters or a long time fail the test."""
    capfd.readouterr()
    with limited_time():
        code = call(command, words)
    out, err = capfd.readouterr()
    assert code in ((0,) if command in FOLDER_COMMANDS else (0, 2, 3)), command
    assert "Traceback" not in err, command
    assert not _CONTROLS.search(out), command
    assert not _CONTROLS.search(err.replace("\r", "")), command
    if code == 2:
        assert [line for line in err.splitlines() if line.startswith("feddbe: ")], command
    return out, err


@pytest.mark.parametrize("seed", range(CASES))
def test_commands_on_crafted_runs(
    seed: int, run: Path, whole: Original, images: Original, capfd: pytest.CaptureFixture[str]
) -> None:
    original = images if seed % 3 == 2 else whole
    shutil.copyfile(original.folder / RUN_FILE, run / RUN_FILE)
    description = craft(run, seed)
    content = (run / RUN_FILE).read_bytes()
    first = seed % len(READING)
    commands = [READING[first], READING[first - 4]]
    if seed % 5 == 0:
        commands.append(REPLAYING[seed // 5 % len(REPLAYING)])
    problems = []
    for command in [*READING, *REPLAYING] if ALL_COMMANDS else commands:
        shutil.rmtree(run.parent)
        shutil.copytree(original.folder, run.parent / "whole")
        run.mkdir()
        (run / RUN_FILE).write_bytes(content)
        try:
            execute(command, original.words, capfd)
        except (Exception, TooLong) as error:
            problems.append(f"{command}: {type(error).__name__} {error}"[:300])
    assert problems == [], description


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a record for each purpose, each with its runs."""
    root = tmp_path_factory.mktemp("studies")
    options: dict[str, Any] = {
        "clients": 3, "partition": "iid", "model": "mlp", "rounds": 1, "engine": "serial", "quiet": True,
        "trainer": "autograd",
    }  # fmt: skip
    feddbe.compare(["fedavg", "fedavg+dbe"], out=str(root / "comparison"), **options)
    fast = "--clients 3 --partition iid --model mlp --rounds 1 --engine serial --trainer autograd --quiet"
    assert main(["run", "fedavg", "--lr", "0.01,0.1", *fast.split(), "--out", str(root / "sweep")]) == 0
    record = read_record(root / "comparison")
    result: SearchResult = {
        "space": {"kappa": [1, 50]}, "published": {"kappa": 50}, "is_fine_tuned": False,
        "trials": [{"values": {"kappa": k}, "accuracy": k / 100, "note": f"{k}"} for k in (50, 1)],
    }  # fmt: skip
    paper = {"name": "ablation", "trials": 1, "rounds": None, "only": [], "data": None, "small": True}
    changes: dict[str, dict[str, Any]] = {
        "tuning": {"purpose": Purpose.TUNING, "methods": ("fedavg+dbe",), "result": result},
        "paper": {"purpose": Purpose.PAPER_TABLE, "options": paper},
    }
    for name, change in changes.items():
        shutil.copytree(root / "comparison", root / name)
        (root / name / RECORD_FILE).write_text(replace(record, **change).to_json())
    return root


STUDY_COMMANDS = [
    "runs s", "show s", "show s --json", "show s --clients", "show s --format csv", "report s", "verify s",
    "fairness s", "overhead s", "analyze s --analyses tsne --moment before --samples 20", "STUDY", "SERVE",
    "compare --resume --out s",
]  # fmt: skip
"""Commands that read the record of a study; STUDY and SERVE are functions."""


@pytest.mark.parametrize("seed", range(CASES))
def test_commands_on_crafted_records(
    seed: int,
    studies: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    purpose = ("comparison", "sweep", "tuning", "paper")[seed % 4]
    shutil.copytree(studies / purpose, "s")
    (path,) = Path("s").rglob(RECORD_FILE)  # that of a sweep is in a subfolder
    description = craft_record(path, seed)
    record = path.read_bytes()
    first = seed // 4 % len(STUDY_COMMANDS)
    commands = [STUDY_COMMANDS[first], STUDY_COMMANDS[first - 4]]
    problems = []
    for command in STUDY_COMMANDS if ALL_COMMANDS else commands:
        shutil.rmtree("s")
        shutil.copytree(studies / purpose, "s")
        path.write_bytes(record)
        try:
            execute(command, {}, capfd)
        except (Exception, TooLong) as error:
            problems.append(f"{command}: {type(error).__name__} {error}"[:300])
    assert problems == [], f"{purpose}: {description}"


@pytest.mark.parametrize("purpose", ["comparison", "sweep", "tuning"])
def test_unchanged_study(
    purpose: str,
    studies: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(studies / purpose, "s")
    for command in STUDY_COMMANDS:
        _, err = execute(command, {}, capfd)
        assert "feddbe: " not in err


@pytest.mark.parametrize("command", [*READING, *REPLAYING[:3]])
def test_unchanged_run(command: str, run: Path, whole: Original, capfd: pytest.CaptureFixture[str]) -> None:
    """The commands of the other tests succeed on the run itself, and read it entirely."""
    out, err = execute(command, whole.words, capfd)
    assert "feddbe: " not in err
    assert "damaged" not in out


def _set(key: str, text: str) -> Callable[[RunFile], None]:
    return lambda file: file.set_meta(key, text)


def _set_record(name: str, field: int, value: object) -> Callable[[RunFile], None]:
    def change(file: RunFile) -> None:
        old = next(record for record in file.records() if record[1] == -1 and record[3] == name)
        new = list(old[:6])
        new[field] = value
        file.replace_record(old, new)

    return change


def _change_tables(statements: str) -> Callable[[RunFile], None]:
    def change(file: RunFile) -> None:
        file.db.executescript(statements)

    return change


def _drop_entry(file: RunFile) -> None:
    for kind, client, round_, _ in file.states():
        if kind in ("private", "PRIVATE"):
            file.set_state(kind, client, round_, encode({"other": torch.zeros(1)}))


_VIEW = f"""DROP TABLE rows; CREATE VIEW rows AS {ENDLESS}
SELECT i AS round, -1 AS client, 'round' AS moment, 'seconds' AS name, 1.0 AS value, 1.0 AS weight, 0 AS crc
FROM n WHERE i < 0"""
_DIVERGED = {"round": 3, "client": 0, "what": "loss", "value": "inf"}
CAUSES: dict[str, tuple[Callable[[RunFile], None], str]] = {
    "type": (_set("remarks", "5"), "its metadata: remarks: Expected `array`, got `int`"),
    "missing key": (_set("new_clients", '{"round": 2}'), "new_clients: Object missing required field"),
    "not JSON": (_set("config", "{"), "its metadata: config"),
    "digits": (_set("majority_accuracy", "1" * 5000), "majority_accuracy: Integer value out of range"),
    "nesting": (_set("versions", "[" * 100_000), "its metadata: versions: "),
    "surrogate": (_set("note", '"\\ud800"'), "its metadata: note"),
    "NaN": (_set("peak_rss_mb", "NaN"), "its metadata: peak_rss_mb"),
    "ragged": (_set("labels", "[[1], [1, 2]]"), "labels: its rows differ in length"),
    "client names": (_set("client_names", '["x"]'), "client_names: got 1 names; expected 4"),
    "class names": (_set("label_names", '["x"]'), "label_names: got 1 names; expected 3"),
    "divergence": (
        _set("diverged", json.dumps(_DIVERGED | {"value": "x"})),
        "diverged: Expected `str` matching",
    ),
    "diverged client": (_set("diverged", json.dumps(_DIVERGED | {"client": 9})), "diverged: got client 9"),
    "infinite": (_set_record("accuracy", 4, float("inf")), "all clients: after accuracy"),
    "text": (_set_record("accuracy", 4, "x"), "all clients: after accuracy"),
    "statistic": (_set_record("accuracy/std", 3, "accuracy/x"), "have their records"),
    "round": (_set_record("seconds", 0, 10**12), "records up to round 1000000000000"),
    "round text": (_set_record("seconds", 0, "x"), "records up to round x"),
    "not UTF-8": (
        _change_tables("UPDATE rows SET name = CAST(x'ff' AS TEXT) WHERE name = 'accuracy/std'"),
        "Could not decode to UTF-8 column 'name'",
    ),
    "column": (_change_tables("ALTER TABLE rows ADD COLUMN extra"), "its tables"),
    "view": (_change_tables(_VIEW), "its tables"),
    "trigger": (_change_tables("CREATE TRIGGER t AFTER DELETE ON rows BEGIN SELECT 1; END"), "its tables"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_one_line_that_names_it(cause: str, run: Path) -> None:
    change, text = CAUSES[cause]
    file = RunFile(run)
    change(file)
    file.db.close()
    with pytest.raises(CorruptRunError) as caught:
        feddbe.load(run)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert main(["verify", str(run)]) == 2
    assert main(["runs", str(run.parent)]) == 0


@pytest.mark.parametrize(
    "reading",
    ["count:x:1", "count:1", "count:1:2:3", "count:0:10", "count:-1:2", "recall:x", "recall:" + "9" * 5000],
)
def test_confusion_matrix_with_other_labels(reading: str, run: Path, images: Original) -> None:
    shutil.copyfile(images.folder / RUN_FILE, run / RUN_FILE)
    file = RunFile(run)
    _set_record("confusion@logits/count:0:0", 3, f"confusion@logits/{reading}")(file)
    file.db.close()
    with pytest.raises(CorruptRunError, match="records of 2/before/confusion@logits: the value '"):
        feddbe.load(run)
    assert main(["report", str(run)]) == 2


@pytest.mark.parametrize(("field", "value"), [("analysis", "x"), ("on", "x"), ("moment", "x/y")])
def test_settings_of_an_analysis_that_do_not_exist(field: str, value: str, run: Path) -> None:
    file = RunFile(run)
    analyses = {
        key: {**description, field: value, "samples": 20}
        for key, description in file.meta("analyses").items()
    }
    file.set_meta("analyses", json.dumps(analyses))
    file.db.close()
    with pytest.raises(CorruptRunError, match="its metadata: analyses: "):
        feddbe.load(run)
    assert main(["report", str(run)]) == 2


def test_analysis_without_its_records_is_reported(run: Path, images: Original) -> None:
    shutil.copyfile(images.folder / RUN_FILE, run / RUN_FILE)
    file = RunFile(run)
    file.db.execute("DELETE FROM rows WHERE instr(name, '@')")
    file.db.close()
    for command in ("report", "show"):
        assert main([command, str(run)]) == 0


def test_page_that_is_used_more_than_once(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One leaf is read some hundred million times."""
    file = RunFile(run)
    assert "is used" in share_pages(file)
    with limited_time(), closing(RunStore.open(run)) as store:
        with pytest.raises(CorruptRunError, match="its tables use a page more than once"):
            store.check_records()
        assert main(["verify", str(run)]) == 2
    assert "2nd reference to page" in capfd.readouterr().err


def test_query_is_interrupted(run: Path) -> None:
    """A signal that arrives during a query is not reported as damage."""
    with (run / RUN_FILE).open("ab") as file:
        file.truncate(2**40)  # so that the query does not reach its limit
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with (
            closing(sqlite3.connect(":memory:")) as db,
            pytest.raises(KeyboardInterrupt),
            _limited_steps(db, run),
        ):
            db.execute(f"{ENDLESS} SELECT max(i) FROM n")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"receipt x y", b"receipt \xff", b"receipt 1 2 3"])
def test_bytes_that_are_not_a_state(content: bytes, run: Path) -> None:
    with pytest.raises(CorruptRunError):
        decode(content)
    file = RunFile(run)
    file.set_state("last", -1, 2, content)
    file.db.close()
    with pytest.raises(CorruptRunError, match="the state 'last'"):
        feddbe.load(run)
    assert main(["verify", str(run)]) == 2


@pytest.mark.parametrize("round_", ["text", 1.5])
def test_round_of_a_state_that_is_not_whole(round_: object, run: Path) -> None:
    file = RunFile(run)
    kind, client, _, state = next(state for state in file.states() if state[0] == "private")
    file.set_state(kind, client, round_, state)
    file.db.close()
    with closing(RunStore.open(run)) as store, pytest.raises(CorruptRunError, match=f"round {round_}"):
        store.round_of(kind, client)


def test_state_without_an_entry_of_the_method(
    run: Path, whole: Original, capfd: pytest.CaptureFixture[str]
) -> None:
    file = RunFile(run)
    _drop_entry(file)
    file.db.close()
    for command in REPLAYING[:2]:
        _, err = execute(command, whole.words, capfd)
        assert "does not fit fedavg: expected 'prbm' of (64,) torch.float32, got none" in err


def test_a_run_that_cannot_be_read_is_listed_and_the_others_are_shown(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, run.parent / "other")
    file = RunFile(run.parent / "other")
    file.set_meta("remarks", "5")
    file.db.close()
    for command in ("show", "fairness", "overhead", "report"):
        assert main([command, str(run.parent)]) == 0
        assert "other/run.sqlite' is damaged (its metadata: remarks" in capfd.readouterr().err
    assert main(["runs", str(run.parent)]) == 0
    assert "damaged" in capfd.readouterr().out
    content = _build_content([run, run.parent / "other"])
    assert [text[-100:] for text in content["failed"]] == [content["failed"][0][-100:]]
    assert content["sections"]


def test_names_are_printed_without_control_characters(
    run: Path, whole: Original, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = [text for text in HOSTILE_TEXTS if _CONTROLS.search(text)]
    file = RunFile(run)
    file.set_meta("remarks", json.dumps(texts))
    file.set_meta("note", json.dumps(texts[0]))
    file.set_meta("client_names", json.dumps([f"{text}{n}" for n, text in enumerate(texts[:4])]))
    file.set_meta("config", json.dumps(file.meta("config") | {"method": f"fedavg{texts[0]}"}))
    file.db.close()
    for command in ("runs a", "show a/run", "show a/run --clients", "show a/run --format markdown",
                    "fairness a/run", "overhead a/run", "verify a/run"):  # fmt: skip
        out, _ = execute(command, whole.words, capfd)
        assert out


def test_exported_script_prints_names_without_control_characters(run: Path, whole: Original) -> None:
    assert main(["export", str(run), "--client", "0", "--out", "e"]) == 0
    preprocessing = json.loads(Path("e/preprocessing.json").read_text())
    Path("e/preprocessing.json").write_text(json.dumps(preprocessing | {"labels": ["\x1b[2J"] * 3}))
    Path("bad.csv").write_text("age,color\n1,\x1b[2J\n")
    for file in (whole.words["new"], "bad.csv"):
        score = [sys.executable, "e/score.py", str(file)]
        result = subprocess.run(score, capture_output=True, text=True, check=False)
        assert "?" in result.stdout + result.stderr
        assert "\x1b" not in result.stdout + result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_pipe_in_place_of_an_auxiliary_file(suffix: str, run: Path) -> None:
    os.mkfifo(f"{run / RUN_FILE}{suffix}")
    with pytest.raises(StoreError, match=f"{suffix}' is not a plain file; remove it"):
        RunStore.open(run)


def test_log_of_empty_space(run: Path) -> None:
    header = bytes.fromhex("377f0682002de218") + (4096).to_bytes(4, "big") + bytes(20)
    with (run / f"{RUN_FILE}-wal").open("wb") as log:
        log.write(header)
        log.truncate(2**40)
    with pytest.raises(StoreError, match="has 1099511627776 bytes, nearly all of them empty space"):
        RunStore.open(run)


_NO_LOCKS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#define WITHOUT_LOCKS(name) int name(int fd, int command, ...) { \
    va_list list; va_start(list, command); void *value = va_arg(list, void *); va_end(list); \
    if (command == F_SETLK || command == F_SETLKW) { errno = ENOLCK; return -1; } \
    int (*original)(int, int, ...) = dlsym(RTLD_NEXT, #name); return original(fd, command, value); }
WITHOUT_LOCKS(fcntl)
WITHOUT_LOCKS(fcntl64)
int flock(int fd, int operation) { errno = ENOLCK; return -1; }
"""
"""A library that replaces locks by the error of a file system without them."""


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc here, which compiles the missing locks")
@pytest.mark.parametrize("words", ["verify {run}", "run --resume --rounds 3 --out {run}"])
def test_missing_locks_are_named(words: str, run: Path) -> None:
    Path("locks.c").write_text(_NO_LOCKS)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "locks.so", "locks.c", "-ldl"], check=True)
    command = [sys.executable, "-m", "feddbe", *words.format(run=run).split()]
    environment = {**os.environ, "LD_PRELOAD": str(Path("locks.so").absolute())}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "No locks available" in line


def _execute_limited(run: Path, limit: int, value: int, *words: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"import resource, sys; resource.setrlimit({limit}, ({value}, {value})); "
        f"from feddbe.__main__ import main; sys.argv = {['feddbe', *words]!r}; sys.exit(main())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(run.parent)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )


def test_complete_run_is_read_where_nothing_can_be_written(run: Path) -> None:
    """A process whose files are limited to 4 kB, so that SQLite cannot create its own, as on a full disk."""
    result = _execute_limited(run, resource.RLIMIT_FSIZE, 4096, "verify", str(run))
    assert (result.returncode, result.stderr) == (0, "")
    assert "intact; resumes from round 2" in result.stdout
    result = _execute_limited(run, resource.RLIMIT_FSIZE, 4096, "run", "--resume", "--out", str(run))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["run fedavg", "tune fedavg+mr --trials 1"])
def test_new_run_where_nothing_can_be_written_names_the_disk(command: str, tmp_path: Path) -> None:
    """The file does not exist yet, which is not the cause."""
    options = "--data digits --clients 3 --partition iid --model mlp --rounds 1 --out x"
    words = [*command.split(), *options.split()]
    if "tune" in command:
        pytest.importorskip("optuna", reason="the extra tune is not installed")
    words[-1] = str(tmp_path / "x")
    result = _execute_limited(tmp_path, resource.RLIMIT_FSIZE, 2000, *words)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert re.search("cannot use the run in '.*x': .*disk|cannot use '.*tune.sqlite': .*disk", line), line


@pytest.mark.parametrize(
    ("limit", "value", "text"),
    [
        (resource.RLIMIT_AS, 300 * 2**20, "not enough memory: the limit is 300 MB (ulimit -v)"),
        (resource.RLIMIT_AS, 700 * 2**20, "not enough memory: the limit is 700 MB (ulimit -v)"),
        (resource.RLIMIT_NOFILE, 9, "too many open files: the limit is 9 (ulimit -n)"),
        (resource.RLIMIT_NOFILE, 12, "too many open files: the limit is 12 (ulimit -n)"),
    ],
)
def test_missing_resource_is_named(limit: int, value: int, text: str, tmp_path: Path) -> None:
    options = "--clients 20 --partition iid --rounds 1 --engine pool(workers=2) --out x"
    result = _execute_limited(tmp_path, limit, value, "run", "fedavg", *options.split())
    assert result.returncode == 2, result.stderr
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_descriptors_are_named_when_a_run_is_read(run: Path) -> None:
    result = _execute_limited(run, resource.RLIMIT_NOFILE, 5, "verify", str(run))
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"feddbe: cannot use the run in '{run}': Too many open files; what was there is intact"
    ]


def test_two_processes_that_start_one_run(tmp_path: Path) -> None:
    """One of them runs; the other one says so, and the file is the run of one of them."""
    options = "--clients 3 --partition iid --model mlp --engine serial --trainer autograd --rounds 3 --quiet"
    command = [sys.executable, "-m", "feddbe", "run", "fedavg", *options.split(), "--out", "x"]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 2]
    (error,) = outputs[codes.index(2)][1].splitlines()
    assert re.search("is in use by another process|contains this run already", error)
    assert len(feddbe.load_run(tmp_path / "x")["rounds"]) == 4
    assert main(["verify", str(tmp_path / "x")]) == 0


class SecondProcess(Callback):
    """Callback that starts a run in the same folder after the first round, and waits for its end."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.results: list[subprocess.CompletedProcess[str]] = []

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        if not self.results:
            command = [sys.executable, "-m", "feddbe", *self.words]
            self.results.append(subprocess.run(command, capture_output=True, text=True, check=False))


@pytest.mark.parametrize("resume", [False, True])
def test_process_that_meets_a_run_in_progress(resume: bool, tmp_path: Path) -> None:
    """The second process says so and changes nothing: the first run has the same bits as without it."""
    options: dict[str, Any] = {
        "clients": 3, "partition": "iid", "model": "mlp", "rounds": 3, "engine": "serial", "quiet": True,
        "trainer": "autograd",
    }  # fmt: skip
    undisturbed = feddbe.run("fedavg", out=str(tmp_path / "undisturbed"), **options)
    folder = str(tmp_path / "shared")
    words = ["run", "--resume", "--out", folder]
    if not resume:
        fast = "--clients 3 --partition iid --model mlp --rounds 3 --engine serial --trainer autograd"
        words = ["run", "fedavg", *fast.split(), "--out", folder]
    second = SecondProcess(words)
    shared = feddbe.run("fedavg", out=folder, callback=second, **options)
    (result,) = second.results
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"feddbe: '{folder}' ")
    assert shared["server_sha256"] == undisturbed["server_sha256"]
    assert main(["verify", folder]) == 0


def test_name_of_a_client_with_nul(run: Path, whole: Original) -> None:
    file = RunFile(run)
    file.set_meta("client_names", json.dumps(["a\0b", "..", "x" * 300, "/"]))
    file.db.close()
    for client, folder in (("0", "run-client-a_b"), ("1", "run-client-..")):
        assert main(["export", str(run), "--client", client]) == 0
        assert (Path(folder) / "score.py").is_file()
    assert main(["export", str(run), "--client", "2"]) == 2
    assert len(feddbe.predict(run, "a\0b", whole.words["new"])["rows"]) == 2
