"""Crafted run files and missing resources: every command succeeds or prints one line, in seconds."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import feddbe
from feddbe.cli.main import main
from feddbe.errors import CorruptRunError, FeddbeError, StoreError
from feddbe.reporting.html.live import _build_content
from feddbe.runs.store import RUN_FILE, RunStore
from feddbe.state import decode, encode
from tests.crafted import HOSTILE_TEXTS, RunFile, craft

CASES = int(os.environ.get("FEDDBE_CASES", "30"))
MAX_SECONDS = 12.0
"""Longest processor time of a command."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\ud800-\udfff]")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of a table with named clients and classes, new clients and analyses."""
    folder = tmp_path_factory.mktemp("whole")
    rows = [f"site{k % 4},{k % 3 + k % 7 / 9},{'rgb'[k % 3]},{'abc'[k * 7 % 3]}" for k in range(96)]
    (folder / "table.csv").write_text("\n".join(["client,age,color,label", *rows]))
    (folder / "new.csv").write_text("age,color\n1.0,r\n0.5,b\n")
    data = f"{folder / 'table.csv'}?label=label&client=client"
    feddbe.run(
        "fedavg+dbe", data=data, rounds=2, out=str(folder / "run"), engine="serial", new_clients=1,
        adapt_epochs=2, trainer="autograd", quiet=True,
    )  # fmt: skip
    feddbe.analyze(folder / "run", analyses="tsne", moment="before", samples=20, quiet=True)
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a copy of the run; a command that never ends stops the test process, with a traceback."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole / "run", tmp_path / "a" / "run")
    faulthandler.dump_traceback_later(180, exit=True)
    yield tmp_path / "a" / "run"
    faulthandler.cancel_dump_traceback_later()


READING = [
    "runs a", "show a/run", "show a/run --json", "show a/run --clients", "show a/run --format csv",
    "verify a/run", "fairness a/run", "overhead a/run", "report a/run", "LOAD",
    "analyze a/run --analyses tsne --moment before --samples 20",
]  # fmt: skip
"""Commands that read a run, without its data."""
REPLAYING = [
    "predict a/run --client 0 --data {new}", "run --resume --out a/run --rounds 3",
    "compare --resume --out a", "export a/run --client 0 --out e",
    "compare fedavg --data {data} --rounds 1 --seeds 1 --engine serial --out a",
    "reproduce ablation --scale small --dry-run --out a",
    "tune fedavg+mr --data {data} --rounds 1 --trials 1 --engine serial --out a",
]  # fmt: skip
"""Commands that rebuild the experiment of a run, or look for runs to reuse."""


def execute(command: str, run: Path, whole: Path, capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Execute a command; an exception, a traceback, control characters or a long time fail the test."""
    capfd.readouterr()
    data = f"{whole / 'table.csv'}?label=label&client=client"
    words = [word.format(new=whole / "new.csv", data=data) for word in command.split()]
    started = time.process_time()
    if command == "LOAD":
        code = 0
        with suppress(FeddbeError):
            feddbe.load(run)
    else:
        code = main(words)
    seconds = time.process_time() - started
    out, err = capfd.readouterr()
    assert seconds < MAX_SECONDS, command
    assert code in (0, 2, 3), command
    assert "Traceback" not in err, command
    assert not _CONTROLS.search(out), command
    assert not _CONTROLS.search(err.replace("\r", "")), command
    if code == 2 and command != "LOAD":
        assert [line for line in err.splitlines() if line.startswith("feddbe: ")], command
    return out, err


@pytest.mark.parametrize("seed", range(CASES))
def test_commands_on_crafted_runs(
    seed: int, run: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    craft(run, seed)
    content = (run / RUN_FILE).read_bytes()
    first = seed % len(READING)
    commands = [READING[first], READING[first - 4]]
    if seed % 5 == 0:
        commands.append(REPLAYING[seed // 5 % len(REPLAYING)])
    for command in commands:
        for path in run.iterdir():
            path.unlink()
        (run / RUN_FILE).write_bytes(content)
        execute(command, run, whole, capfd)


@pytest.mark.parametrize("command", [*READING, *REPLAYING[:3]])
def test_unchanged_run(command: str, run: Path, whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The commands of the other tests succeed on the run itself, and read it entirely."""
    out, err = execute(command, run, whole, capfd)
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


_VIEW = """DROP TABLE rows; CREATE VIEW rows AS
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
SELECT i AS round, -1 AS client, 'round' AS moment, 'seconds' AS name, 1.0 AS value, 1.0 AS weight, 0 AS crc
FROM n WHERE i < 0"""
CAUSES: dict[str, tuple[Callable[[RunFile], None], str]] = {
    "type": (_set("remarks", "5"), "its metadata: remarks: Expected `array`, got `int`"),
    "missing key": (_set("new_clients", '{"round": 2}'), "new_clients: Object missing required field"),
    "not JSON": (_set("config", "{"), "its metadata: config"),
    "digits": (_set("majority_accuracy", "1" * 5000), "majority_accuracy: Integer value out of range"),
    "nesting": (_set("versions", "[" * 100_000), "its metadata: versions: "),
    "surrogate": (_set("note", '"\\ud800"'), "its metadata: note"),
    "NaN": (_set("peak_rss_mb", "NaN"), "its metadata: peak_rss_mb"),
    "ragged": (_set("labels", "[[1], [1, 2]]"), "labels: its rows differ in length"),
    "infinite": (_set_record("accuracy", 4, float("inf")), "all clients: after accuracy"),
    "text": (_set_record("accuracy", 4, "x"), "all clients: after accuracy"),
    "statistic": (_set_record("accuracy/std", 3, "accuracy/x"), "have their records"),
    "round": (_set_record("seconds", 0, 10**12), "records up to round 1000000000000"),
    "round text": (_set_record("seconds", 0, "x"), "records up to round x"),
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


def test_state_without_an_entry_of_the_method(
    run: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = RunFile(run)
    _drop_entry(file)
    file.db.close()
    for command in REPLAYING[:2]:
        _, err = execute(command, run, whole, capfd)
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
    run: Path, whole: Path, capfd: pytest.CaptureFixture[str]
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
        out, _ = execute(command, run, whole, capfd)
        assert out


def test_exported_script_prints_names_without_control_characters(run: Path, whole: Path) -> None:
    assert main(["export", str(run), "--client", "0", "--out", "e"]) == 0
    preprocessing = json.loads(Path("e/preprocessing.json").read_text())
    Path("e/preprocessing.json").write_text(json.dumps(preprocessing | {"labels": ["\x1b[2J"] * 3}))
    Path("bad.csv").write_text("age,color\n1,\x1b[2J\n")
    for file in (whole / "new.csv", "bad.csv"):
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


@pytest.mark.parametrize(
    ("limit", "value", "text"),
    [
        (resource.RLIMIT_AS, 300 * 2**20, "not enough memory: the limit is 300 MB (ulimit -v)"),
        (resource.RLIMIT_AS, 700 * 2**20, "not enough memory: the limit is 700 MB (ulimit -v)"),
        (resource.RLIMIT_NOFILE, 9, "too many open files: the limit is 9 (ulimit -n)"),
    ],
)
def test_missing_resource_is_named(limit: int, value: int, text: str, tmp_path: Path) -> None:
    words = ("run", "fedavg", "--clients", "3", "--partition", "iid", "--rounds", "1", "--out", "x")
    result = _execute_limited(tmp_path, limit, value, *words)
    assert result.returncode == 2, result.stderr
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_two_processes_that_start_one_run(tmp_path: Path) -> None:
    """One of them runs; the other one says so, and the file is the run of one of them."""
    options = "--clients 3 --partition iid --model mlp --engine serial --trainer autograd --rounds 3 --quiet"
    command = [sys.executable, "-m", "feddbe", "run", "fedavg", *options.split(), "--out", "x"]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 2]
    (error,) = outputs[codes.index(2)][1].splitlines()
    assert re.search("is in use by another process|contains this run already", error)
    assert len(feddbe.load(tmp_path / "x")["rounds"]) == 4
    assert main(["verify", str(tmp_path / "x")]) == 0
