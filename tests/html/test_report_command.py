"""The command `feddbe report`."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import pytest

from feddbe import cli
from tests.test_cli_process import finish, start


@pytest.fixture(autouse=True)
def _run_in_tmp_path(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").symlink_to(runs)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "path", "count"),
    [
        ("report s0", "runs/s0/report.html", 2),
        ("report runs/s1/fedavg", "runs/s1/fedavg/report.html", 1),
        ("report s0 s1/fedavg s0/fedavg -o all.html", "all.html", 3),
    ],
)
def test_command_prints_the_path_of_the_page(
    line: str, path: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(shlex.split(line)) == 0
    assert capsys.readouterr() == (f"report  {path}\n", "")
    assert f'"about":"{count} run' in Path(path).read_text(encoding="utf-8")
    Path(path).unlink()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("report", "missing argument"),
        ("report nowhere", "'nowhere' is not the folder of a run"),
        ("report s0 -o page.pdf", "unknown kind of report '.pdf'"),
        ("report s0 -o nowhere/x.html", "cannot write the report 'nowhere/x.html': No such file"),
        ("report s0 --port 80", "--port 80 has no effect without --live"),
        ("report s0 --live -o x.html", "--out x.html has no effect with --live"),
        ("report --live nowhere", "'nowhere' is not the folder of a run"),
        ("report --live s0 --port 70000", "port = 70000"),
        ("report --live s0 --port x", "'x' is not a valid integer"),
    ],
)
def test_errors_are_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_ctrl_c_stops_the_server() -> None:
    with start(["report", "--live", "runs"], Path()) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("report  http://127.0.0.1:")
        server.send_signal(signal.SIGINT)
        try:
            assert finish(server) == (0, "", "")
        finally:
            server.kill()
