"""The command line as a process: streams, Ctrl-C, SIGTERM, kill -9 and a full disk."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import feddbe
from feddbe.results.document import RoundResult, RunDocument
from tests.progress import remove_progress
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FEDDBE = [sys.executable, "-m", "feddbe"]
RUN = ["run", "fedavg+dbe", "--clients", "4", "--partition", "iid", "--rounds", "6", "--local-epochs", "2"]


def start(words: Sequence[str], folder: Path, **options: Any) -> subprocess.Popen[str]:
    """Start `feddbe ...` in a folder and a new process group."""
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [*FEDDBE, *words],
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
        **{**defaults, **options},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process and return its exit code and output, without progress lines."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err and remove_progress(err)


def count_stored_rounds(folder: Path) -> int:
    """Return the number of finished rounds of a run in progress; -1 if it cannot be read yet."""
    with contextlib.suppress(feddbe.FeddbeError):
        return len(feddbe.load_run(folder)["rounds"]) - 1
    return -1


def find_workers(process: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of a process's children."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def is_alive(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pids: Sequence[int]) -> None:
    """Wait until no worker is alive."""
    wait_until(lambda: not any(map(is_alive, pids)), "end of all workers")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("process")


@pytest.fixture(scope="module")
def uninterrupted(root: Path) -> RunDocument:
    """Return the document of `RUN` without an interruption."""
    return run_in_this_process(root / "uninterrupted")


def run_in_this_process(folder: Path, *, resume: bool = False) -> RunDocument:
    """Return the document of `RUN`, executed in this process."""
    options: dict[str, Any] = {"clients": 4, "partition": "iid", "rounds": 6, "local_epochs": 2}
    return feddbe.run("fedavg+dbe", **options, engine="serial", out=str(folder), resume=resume).document


def without_seconds(rounds: Sequence[RoundResult]) -> list[dict[str, Any]]:
    """Return the results of rounds without their times."""
    return [{**result, "seconds": 0} for result in rounds]


def assert_identical(document: RunDocument, expected: RunDocument) -> None:
    """Assert that states are equal bit by bit, and all numbers of every round except seconds."""
    assert document["server_sha256"] == expected["server_sha256"]
    assert document["clients_sha256"] == expected["clients_sha256"]
    assert without_seconds(document["rounds"]) == without_seconds(expected["rounds"])


class RunningProcess(NamedTuple):
    """A run in another process."""

    process: Any
    folder: Path
    workers: list[int]


@pytest.fixture
def running(root: Path, request: pytest.FixtureRequest) -> Iterator[RunningProcess]:
    """Yield `RUN` with two workers, after its second round."""
    parent = root / request.node.name
    parent.mkdir()
    process = start([*RUN, "--engine", "pool(workers=2)"], parent)
    folder = parent / "runs" / "digits-fedavg+dbe-1"
    try:
        wait_until(lambda: count_stored_rounds(folder) >= 2, "two rounds")
        pids = find_workers(process)
        assert len(pids) == 2
        yield RunningProcess(process, folder, pids)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_ctrl_c_prints_the_command_that_resumes(running: RunningProcess, uninterrupted: RunDocument) -> None:
    """The last finished round is kept, no worker is left, and the printed command resumes the run."""
    process, folder, pids = running
    os.killpg(process.pid, signal.SIGINT)  # also to the workers, as by a terminal
    code, out, err = finish(process)
    assert (code, out, err.count("\n")) == (130, "", 1)
    wait_for_end(pids)
    stored = feddbe.load_run(folder)
    assert 3 <= len(stored["rounds"]) < 7
    match = re.fullmatch(r"feddbe: stopped after round (\d+), which is kept; continue with: (.*)\n", err)
    assert match is not None
    assert int(match[1]) == stored["rounds"][-1]["round"]
    program, *words = shlex.split(match[2])
    assert program == "feddbe"
    assert "--resume" in words
    code, out, err = finish(start(words, folder.parents[1]))
    assert (code, err) == (0, "")
    assert_identical(feddbe.load_run(folder).document, uninterrupted)
    # without a terminal, only the table and the paths are printed
    *table, curves, distribution, run = out.splitlines()
    name = "runs/digits-fedavg+dbe-1"
    assert [curves.split(), distribution.split(), run.split()] == [
        ["curves", f"{name}/curves.png"], ["data", f"{name}/data.png"], ["run", name],
    ]  # fmt: skip
    rows = [line.split()[0] for line in table if line.startswith(("fedavg+dbe", "majority"))]
    assert rows == ["fedavg+dbe", "majority"]
    assert "\x1b" not in out
    assert not any(line.endswith(" ") for line in table)


def test_sigterm_ends_a_run_like_ctrl_c(running: RunningProcess) -> None:
    running.process.terminate()
    code, out, err = finish(running.process)
    assert (code, out, err.count("\n")) == (130, "", 1)
    assert re.fullmatch(r"feddbe: stopped after round \d+, which is kept; continue with: .* --resume\n", err)
    wait_for_end(running.workers)


INTERRUPTED_START = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from feddbe.__main__ import main
class Clock:
    def find_spec(name, *_):
        if name == "feddbe.cli":  # main has begun
            threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGINT)).start()
sys.meta_path.insert(0, Clock)
sys.exit(main())
"""


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.1, 0.3, 0.8, 1.4])
def test_ctrl_c_during_start_prints_one_line(delay: float, tmp_path: Path) -> None:
    """The signal arrives while feddbe, click or torch is imported, or shortly after."""
    words = ["run", "fedavg+dbe", "--rounds", "999", "--out", "r"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_START.format(delay=delay), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    err = remove_progress(done.stderr)
    assert (done.stdout, err.count("\n")) == ("", 1)
    assert err.startswith("feddbe: stopped")
    # Python ends by the signal if the exception passed through exec()
    assert done.returncode in (130, -signal.SIGINT)


def test_stopped_worker_ends_after_kill_of_its_parent(running: RunningProcess) -> None:
    os.kill(running.workers[0], signal.SIGSTOP)
    running.process.kill()
    running.process.wait(PATIENCE)
    wait_for_end(running.workers)


def test_resume_with_damaged_wal_is_bit_exact(running: RunningProcess, uninterrupted: RunDocument) -> None:
    """SQLite drops the damaged end of the log; the rounds in it are repeated."""
    running.process.kill()
    running.process.wait(PATIENCE)
    wal = running.folder / "run.sqlite-wal"
    content = bytearray(wal.read_bytes())
    content[len(content) // 2] ^= 1
    wal.write_bytes(content)
    words = [*RUN, "--engine", "serial", "--out", str(running.folder), "--resume"]
    assert finish(start(words, running.folder.parent))[0] == 0
    assert_identical(feddbe.load_run(running.folder).document, uninterrupted)


def test_kill_9_ends_workers_and_resume_is_bit_exact(
    running: RunningProcess, uninterrupted: RunDocument
) -> None:
    running.process.kill()
    assert running.process.wait(PATIENCE) == -signal.SIGKILL
    wait_for_end(running.workers)
    assert 3 <= len(feddbe.load_run(running.folder)["rounds"]) < 7
    assert_identical(run_in_this_process(running.folder, resume=True), uninterrupted)


def test_full_disk_prints_one_line_and_resume_is_bit_exact(root: Path, uninterrupted: RunDocument) -> None:
    """Rounds that were written before are kept."""
    folder = root / "full"

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))

    words = [*RUN, "--engine", "serial", "--out", str(folder)]
    code, out, err = finish(start(words, root, preexec_fn=limit_file_size))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "full" in err
    rounds = feddbe.load_run(folder)["rounds"]
    assert 2 <= len(rounds) < 7
    complete = len(rounds) - 1  # the last round is evaluated in the round after it, which is missing
    assert without_seconds(rounds[:complete]) == without_seconds(uninterrupted["rounds"][:complete])
    assert_identical(run_in_this_process(folder, resume=True), uninterrupted)


ACCURACY_TYPES = {"weighted": float, "mean": float, "worst_tenth": float, "std": float}
ROUND_TYPES = {
    "round": int, "accuracy": dict, "moment": str, "before": dict, "adapted": type(None), "after": dict,
    "validation": type(None), "auc": float,
    "train_loss": float, "seconds": float, "bytes_up": int, "bytes_down": int,
    "metrics": dict,
}  # fmt: skip
DOCUMENT_TYPES = {
    "method": str, "config": dict, "config_hash": str, "rounds": list, "best": dict, "last": dict,
    "deployed_moment": str, "test_samples": int,
    "majority_accuracy": float, "new_clients": type(None), "analyses": list, "bn_buffers": type(None),
    "note": str, "remarks": list, "trainers": list, "cost": dict, "server_sha256": str,
    "clients_sha256": dict, "label_names": list, "client_names": list, "shift_labels": list,
    "diverged": type(None), "peak_rss_mb": float, "begun": str, "versions": dict, "folder": str,
}  # fmt: skip


def value_types(document: dict[str, Any]) -> dict[str, type]:
    """Return the type of each value."""
    return {key: type(value) for key, value in document.items()}


def test_json_is_on_stdout_and_progress_on_the_terminal(tmp_path: Path) -> None:
    """Standard error is a terminal; standard output is a document with these keys and types."""
    terminal, child_end = pty.openpty()
    words = "run fedavg+dbe --rounds 2 --clients 3 --partition iid --eval-after --json --out r"
    process = start([*words.split(), "--engine", "pool(workers=2)"], tmp_path, stderr=child_end)
    os.close(child_end)
    written = b""
    with contextlib.suppress(OSError):  # EIO: the process has closed its end
        while chunk := os.read(terminal, 4096):
            written += chunk
    os.close(terminal)
    code, out, _ = finish(process)
    assert code == 0

    document = json.loads(out)
    assert value_types(document) == DOCUMENT_TYPES
    assert [result["round"] for result in document["rounds"]] == [0, 1, 2]
    assert value_types(document["rounds"][0]) == ROUND_TYPES
    assert value_types(document["rounds"][1]) == ROUND_TYPES
    assert value_types(document["rounds"][2]) == {**ROUND_TYPES, "after": type(None)}
    for result in document["rounds"]:
        assert value_types(result["accuracy"]) == ACCURACY_TYPES
        assert result["moment"] == "before"
    assert value_types(document["rounds"][1]["after"]) == ACCURACY_TYPES
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

    frames = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text) for text in re.split(r"[\r\n]+", written.decode())]
    last = [frame for frame in frames if "2/2" in frame][-1]
    accuracy = 100 * document["last"]["accuracy"]["weighted"]
    pattern = r"fedavg\+dbe +\S+ 2/2 +{} % +\d+:\d\d:\d\d +\d\d:\d\d left".format(
        re.escape(f"{accuracy:.2f}")
    )
    assert re.fullmatch(pattern, last.strip())
    assert max(map(len, frames)) < 80


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["data", "--help"], ["rnu"]])
def test_help_and_usage_errors_do_not_import_torch(words: list[str]) -> None:
    program = "import sys; from feddbe import cli; cli.main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("stream", [1, 2])
def test_closed_stream_is_ignored(stream: int, root: Path) -> None:
    """`feddbe runs >&-` prints no traceback."""
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join([*FEDDBE, 'runs', 'nowhere'])} {stream}>&-"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, remove_progress(done.stderr)) == (0, "")
    assert bool(done.stdout) == (stream == 2)


def test_run_continues_if_stderr_is_not_read(tmp_path: Path) -> None:
    """As in `feddbe run ... 2>&1 | head`, or after a terminal was closed."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = "run fedavg --rounds 2 --clients 3 --partition iid --engine serial --out r"
    process = start(words.split(), tmp_path, stderr=write_end)
    os.close(write_end)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "last @2" in out


def test_stdout_that_is_not_read_is_ignored(root: Path, uninterrupted: RunDocument) -> None:
    """`feddbe show RUN | head` prints no traceback."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = start(["show", "uninterrupted"], root, stdout=write_end)
    os.close(write_end)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
