"""The command line as a process: what it prints where, Ctrl-C, kill -9 and a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.results.document import RunDocument
from tests.progress import without_progress

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

FEDDBE = [sys.executable, "-m", "feddbe"]
RUN = ["run", "fedavg+dbe", "--clients", "4", "--partition", "iid", "--rounds", "6", "--local-epochs", "2"]
PATIENCE = 60.0


def start(words: Sequence[str], folder: Path, **more: Any) -> subprocess.Popen[str]:
    """`feddbe ...` in this folder, in a process group of its own, as a shell would start it: with Ctrl-C not
    ignored, which it is for all that was started in the background."""
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(
        [*FEDDBE, *words],
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
        **{"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **pipes},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err and without_progress(err)


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.02)


def rounds_written(folder: Path) -> int:
    """Finished rounds of a run that another process is writing."""
    with contextlib.suppress(feddbe.FeddbeError):
        return len(feddbe.load(folder)["rounds"]) - 1
    return -1


def workers(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def alive(pid: int) -> bool:
    """Not gone, and not a zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("process")


@pytest.fixture(scope="module")
def whole(place: Path) -> RunDocument:
    """The run that nobody disturbs."""
    return in_this_process(place / "whole")


def in_this_process(folder: Path, *, resume: bool = False) -> RunDocument:
    """The same command as `RUN`."""
    options: dict[str, Any] = {"clients": 4, "partition": "iid", "rounds": 6, "local_epochs": 2}
    return feddbe.run("fedavg+dbe", **options, engine="serial", out=str(folder), resume=resume).document


def same(document: RunDocument, whole: RunDocument) -> None:
    """Equal bits, and equal numbers in every round but for the seconds."""
    assert document["server_sha256"] == whole["server_sha256"]
    assert document["clients_sha256"] == whole["clients_sha256"]
    mine, theirs = ([{**entry, "seconds": 0} for entry in run["rounds"]] for run in (document, whole))
    assert mine == theirs


@pytest.fixture
def in_the_middle(place: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Path, list[int]]]:
    """A run on two workers, caught after its second round: its process, its folder, its workers."""
    here = place / request.node.name
    here.mkdir()
    process, folder = (
        start([*RUN, "--engine", "pool(workers=2)"], here),
        here / "runs" / "digits-fedavg+dbe-1",
    )
    try:
        until(lambda: rounds_written(folder) >= 2, "two rounds")
        found = workers(process)
        assert len(found) == 2
        yield process, folder, found
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_ctrl_c(in_the_middle: tuple[Any, Path, list[int]], whole: RunDocument) -> None:
    """The last finished round is kept, no worker is left, and the very command that it names goes on."""
    process, folder, pids = in_the_middle
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    code, out, err = finish(process)
    assert (code, out, err.count("\n")) == (130, "", 1)
    until(lambda: not any(map(alive, pids)), "the workers to end")
    kept = feddbe.load(folder)
    assert 3 <= len(kept["rounds"]) < 7
    said = re.fullmatch(r"feddbe: stopped after round (\d+), which is kept; continue with: (.*)\n", err)
    assert said is not None
    assert int(said[1]) == kept["rounds"][-1]["round"]
    program, *words = shlex.split(said[2])
    assert program == "feddbe"
    assert "--resume" in words
    code, out, err = finish(start(words, folder.parents[1]))
    assert (code, err) == (0, "")
    same(feddbe.load(folder).document, whole)
    # without a terminal there is the table, the paths, and nothing else
    *table, curves, distribution, run = out.splitlines()
    name = "runs/digits-fedavg+dbe-1"
    assert [curves.split(), distribution.split(), run.split()] == [
        ["curves", f"{name}/curves.png"], ["data", f"{name}/data.png"], ["run", name],
    ]  # fmt: skip
    rows = [line.split()[0] for line in table if line.startswith(("fedavg+dbe", "majority"))]
    assert rows == ["fedavg+dbe", "majority"]
    assert "\x1b" not in out
    assert not any(line.endswith(" ") for line in table)


def test_sigterm_says_what_ctrl_c_says(in_the_middle: tuple[Any, Path, list[int]]) -> None:
    process, _, pids = in_the_middle
    process.terminate()
    code, out, err = finish(process)
    assert (code, out, err.count("\n")) == (130, "", 1)
    assert re.fullmatch(r"feddbe: stopped after round \d+, which is kept; continue with: .* --resume\n", err)
    until(lambda: not any(map(alive, pids)), "the workers to end")


SOON = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from feddbe.__main__ import main
class Clock:
    def find_spec(name, *_):
        if name == "feddbe.cli":  # the way in has begun
            threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGINT)).start()
sys.meta_path.insert(0, Clock)
sys.exit(main())
"""


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.1, 0.3, 0.8, 1.4])
def test_ctrl_c_before_it_has_begun(delay: float, tmp_path: Path) -> None:
    """While it imports itself, click, torch, or what comes after that."""
    child = [
        sys.executable,
        "-c",
        SOON.format(delay=delay),
        "run",
        "fedavg+dbe",
        "--rounds",
        "999",
        "--out",
        "r",
    ]
    done = subprocess.run(child, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    err = without_progress(done.stderr)
    assert (done.stdout, err.count("\n")) == ("", 1)
    assert err.startswith("feddbe: stopped")
    # Python itself ends by the signal, if the exception passed an exec() on its way
    assert done.returncode in (130, -signal.SIGINT)


def test_a_worker_that_is_stopped_does_not_outlive_a_kill(in_the_middle: tuple[Any, Path, list[int]]) -> None:
    process, _, pids = in_the_middle
    os.kill(pids[0], signal.SIGSTOP)
    process.kill()
    process.wait(PATIENCE)
    until(lambda: not any(map(alive, pids)), "the workers to end, the stopped one too")


def test_a_damaged_wal_costs_rounds_but_no_bits(
    in_the_middle: tuple[Any, Path, list[int]], whole: RunDocument
) -> None:
    """SQLite drops the damaged tail; the rounds in it are repeated."""
    process, folder, _ = in_the_middle
    process.kill()
    process.wait(PATIENCE)
    wal = folder / "run.sqlite-wal"
    content = bytearray(wal.read_bytes())
    content[len(content) // 2] ^= 1
    wal.write_bytes(content)
    words = [*RUN, "--engine", "serial", "--out", str(folder), "--resume"]
    assert finish(start(words, folder.parent))[0] == 0
    same(feddbe.load(folder).document, whole)


def test_kill_9_leaves_no_workers_and_a_run_that_goes_on(
    in_the_middle: tuple[Any, Path, list[int]], whole: RunDocument
) -> None:
    process, folder, pids = in_the_middle
    process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL
    until(lambda: not any(map(alive, pids)), "the workers to end by themselves")
    kept = len(feddbe.load(folder)["rounds"])
    assert 3 <= kept < 7
    same(in_this_process(folder, resume=True), whole)


def test_a_full_disk(place: Path, whole: RunDocument) -> None:
    """One line, and the rounds that were written before stay; with room again, the run goes on."""
    folder = place / "full"

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))

    words = [*RUN, "--engine", "serial", "--out", str(folder)]
    code, out, err = finish(start(words, place, preexec_fn=little_room))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "full" in err
    kept = feddbe.load(folder)
    assert 2 <= len(kept["rounds"]) < 7
    # the last entry is measured in the round after it, which did not come
    assert [{**e, "seconds": 0} for e in kept["rounds"][:-1]] == [
        {**e, "seconds": 0} for e in whole["rounds"][: len(kept["rounds"]) - 1]
    ]
    same(in_this_process(folder, resume=True), whole)


ACCURACY = {"weighted": float, "mean": float, "worst_tenth": float, "std": float}
ENTRY = {
    "round": int, "accuracy": dict, "moment": str, "before": dict, "adapted": type(None), "after": dict,
    "validation": type(None), "auc": float,
    "train_loss": float, "seconds": float, "bytes_up": int, "bytes_down": int,
    "metrics": dict,
}  # fmt: skip
DOCUMENT = {
    "method": str, "config": dict, "config_hash": str, "rounds": list, "best": dict, "last": dict,
    "deployed_moment": str, "test_samples": int, "majority_accuracy": float, "new_clients": type(None),
    "analyses": list, "bn_buffers": type(None), "note": str,
    "remarks": list, "trainers": list, "cost": dict, "server_sha256": str, "clients_sha256": dict,
    "label_names": list, "client_names": list, "shift_labels": list,
    "diverged": type(None), "peak_rss_mb": float, "begun": str, "versions": dict, "folder": str,
}  # fmt: skip


def kinds(found: dict[str, Any]) -> dict[str, type]:
    return {key: type(value) for key, value in found.items()}


def test_json_goes_to_standard_output_and_progress_to_the_terminal(tmp_path: Path) -> None:
    """Standard error is a terminal here; standard output is the document, key by key."""
    ours, theirs = pty.openpty()
    words = "run fedavg+dbe --rounds 2 --clients 3 --partition iid --eval-after --json --out r"
    process = start([*words.split(), "--engine", "pool(workers=2)"], tmp_path, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other side has closed it
        while more := os.read(ours, 4096):
            shown += more
    os.close(ours)
    code, out, _ = finish(process)
    assert code == 0

    document = json.loads(out)
    assert kinds(document) == DOCUMENT
    assert [entry["round"] for entry in document["rounds"]] == [0, 1, 2]
    assert kinds(document["rounds"][0]) == ENTRY
    assert kinds(document["rounds"][1]) == ENTRY
    assert kinds(document["rounds"][2]) == {**ENTRY, "after": type(None)}
    for entry in document["rounds"]:
        assert kinds(entry["accuracy"]) == ACCURACY
        assert entry["moment"] == "before"
    assert kinds(document["rounds"][1]["after"]) == ACCURACY
    assert document["last"] == document["rounds"][2]
    assert document["best"] in document["rounds"]
    assert document["config"]["rounds"] == 2
    assert document["config"]["method_options"]["mr"]["kappa"] == 1.0
    assert 0 < document["majority_accuracy"] < 1
    assert document["clients_sha256"].keys() == {"0", "1", "2"}
    for digest in (
        document["config_hash"],
        document["server_sha256"],
        *document["clients_sha256"].values(),
    ):
        assert re.fullmatch("[0-9a-f]{64}", digest)

    frames = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text) for text in re.split(r"[\r\n]+", shown.decode())]
    last = [frame for frame in frames if "2/2" in frame][-1]
    accuracy = 100 * document["last"]["accuracy"]["weighted"]
    pattern = r"fedavg\+dbe +\S+ 2/2 +{} % +\d+:\d\d:\d\d +\d\d:\d\d left".format(
        re.escape(f"{accuracy:.2f}")
    )
    assert re.fullmatch(pattern, last.strip())
    assert max(map(len, frames)) < 80


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["data", "--help"], ["rnu"]])
def test_nobody_waits_for_torch_to_be_told_how_to_use_it(words: list[str]) -> None:
    program = "import sys; from feddbe import cli; cli.main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("stream", [1, 2])
def test_a_stream_that_is_closed(stream: int, place: Path) -> None:
    """`feddbe runs >&-`: no trace of it either."""
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join([*FEDDBE, 'runs', 'nowhere'])} {stream}>&-"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert bool(done.stdout) == (stream == 2)


def test_a_run_goes_on_if_nobody_reads_how_it_goes(tmp_path: Path) -> None:
    """`feddbe run ... 2>&1 | head`, or a terminal that was closed."""
    ours, theirs = os.pipe()
    os.close(ours)
    words = "run fedavg --rounds 2 --clients 3 --partition iid --engine serial --out r"
    process = start(words.split(), tmp_path, stderr=theirs)
    os.close(theirs)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "last @2" in out


def test_a_reader_that_goes_away(place: Path, whole: RunDocument) -> None:
    """`feddbe show RUN | head`: no trace of it."""
    ours, theirs = os.pipe()
    os.close(ours)
    process = start(["show", "whole"], place, stdout=theirs)
    os.close(theirs)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
