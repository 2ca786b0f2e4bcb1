"""`feddbe runs`, `show` and `verify`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

import feddbe
from feddbe.runs.store import RUN_FILE, RunStore
from tests.cli.interrupts import OPTIONS, InterruptAtStart, compare_interrupted
from tests.cli.shell import SMALL, Shell


def test_show_prints_results_in_every_format(shell: Shell) -> None:
    shell(f"compare fedavg+dbe fedavg --rounds 1 {SMALL} --out both")
    shell(f"run fedavg --rounds 1 {SMALL} --seed 1 --out other")
    rows = list(csv.DictReader(io.StringIO(shell("show other both --format csv").out)))
    labels = ["fedavg, seed 1", "fedavg+dbe", "fedavg, seed 0"]
    assert [row["run"] for row in rows] == labels, "in the order of the command"
    documents = shell.json("show other both")["runs"]
    for row, document in zip(rows, documents, strict=True):
        assert float(row["best_weighted"]) == document["best"]["accuracy"]["weighted"]
        assert row["folder"] == document["folder"]
    assert json.loads(shell("show other both --format json").out)[1]["method"] == "fedavg+dbe"
    assert "| fedavg | 2 | " in shell("show other both --format markdown").out, "two seeds"
    percent = f"{100 * documents[1]['best']['accuracy']['worst_tenth']:.2f}"
    assert f" | {percent} | " in shell("show both --format markdown").out
    assert f" & {percent} & " in shell("show both --format latex").out


def test_show_clients_prints_accuracy_and_name_of_each_client(shell: Shell) -> None:
    shell(f"compare fedavg+dbe fedavg --rounds 1 {SMALL} --out both")
    rows = list(csv.DictReader(io.StringIO(shell("show both --clients --format csv").out)))
    assert [(row["method"], row["client"]) for row in rows] == [
        (method, str(client)) for method in ("fedavg+dbe", "fedavg") for client in range(3)
    ]
    assert shell.json("show both --clients")["clients"][2]["best"] == float(rows[2]["best"])
    assert f"{100 * float(rows[2]['best']):.2f}" in shell("show both --clients").out
    markdown = shell("show both/fedavg --clients --format markdown").out
    assert markdown.startswith("| client | test samples | best @")
    names = ["Ulm", "Köln", "Jena"]
    store = RunStore.open(Path("both/fedavg"))
    store.set_meta("client_names", names)
    store.close()
    assert [row["name"] for row in shell.json("show both/fedavg --clients")["clients"]] == names
    assert "Köln" in shell("show both/fedavg --clients").out


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_show_draws_curves_in_the_format_of_the_suffix(shell: Shell, suffix: str, start: bytes) -> None:
    shell(f"run fedavg --rounds 1 {SMALL} --out one")
    assert shell(f"show one --plot curves.{suffix}").out.endswith(f"curves  curves.{suffix}\n")
    assert Path(f"curves.{suffix}").read_bytes().startswith(start)


def test_show_uses_the_last_evaluated_round_of_an_interrupted_run(shell: Shell) -> None:
    compare_interrupted(["fedavg"], last_round=2, out="stopped")
    document = shell.json("show stopped")
    assert [result["accuracy"] is None for result in document["rounds"]] == [False, False, True]
    assert document["last"]["round"] == 1
    assert "last @1" in shell("show stopped").out
    (row,) = shell.json("runs stopped")["runs"]
    assert (row["name"], row["rounds"], row["state"]) == ("fedavg", 2, "3 requested")
    assert "3 requested" in shell("runs stopped").out
    resumed = shell.json(f"run fedavg --rounds 3 {SMALL} --out stopped/fedavg --resume")
    assert [result["accuracy"] is None for result in resumed["rounds"]] == [False] * 4
    assert shell.json("runs stopped")["runs"][0]["state"] == "done"


def test_extended_run_is_not_done_if_it_stops_at_once(shell: Shell) -> None:
    shell(f"run fedavg --rounds 1 {SMALL} --out longer")
    with pytest.raises(KeyboardInterrupt):
        feddbe.run("fedavg", **OPTIONS, out="longer", resume=True, callback=InterruptAtStart())
    (row,) = shell.json("runs longer")["runs"]
    assert (row["rounds"], row["state"]) == (1, "3 requested")


def test_run_without_patience_left_is_done(shell: Shell) -> None:
    document = shell.json(f"run fedavg --rounds 60 --patience 1 --lr 0.0001 {SMALL} --out early")
    assert len(document["rounds"]) < 61
    assert shell.json("runs early")["runs"][0]["state"] == "done"


def test_runs_lists_unreadable_and_corrupt_folders(shell: Shell, tmp_path: Path) -> None:
    shell(f"run fedavg --rounds 1 {SMALL} --out runs/good")
    for name, content in {"empty": b"", "garbage": b"not a database" * 500, "half": None}.items():
        (tmp_path / "runs" / name).mkdir()
        if content is not None:
            (tmp_path / "runs" / name / RUN_FILE).write_bytes(content)
    states = {row["name"]: row["state"] for row in shell.json("runs")["runs"]}
    assert states == {"good": "done", "empty": "unreadable", "garbage": "damaged"}
    code, out, _ = shell("runs")
    assert code == 0
    assert "garbage" in out
    code, _, err = shell("show garbage")
    assert (code, err.count("\n")) == (2, 1)
    assert "garbage" in err


def test_resume_reports_corrupt_folders(shell: Shell, tmp_path: Path) -> None:
    shell(f"run fedavg --rounds 1 {SMALL} --out runs/good")
    (tmp_path / "runs" / "garbage").mkdir()
    (tmp_path / "runs" / "garbage" / RUN_FILE).write_bytes(b"not a database" * 500)
    code, out, err = shell(f"run fedavg --rounds 1 {SMALL} --resume --json")
    assert (code, json.loads(out)["folder"]) == (0, "runs/good")
    assert err.startswith("feddbe: skipped: 'runs/garbage/run.sqlite' is damaged (file is not a database)")
    assert err.count("\n") == 1


def test_runs_of_an_empty_folder_and_of_a_single_run(shell: Shell) -> None:
    assert shell("runs").out == "no runs in runs/; start one with: feddbe run fedavg+dbe\n"
    shell(f"run fedavg --rounds 0 {SMALL} --out single")
    assert shell.json("runs single")["runs"][0]["name"] == "single"


def test_verify_prints_the_round_or_the_damage(shell: Shell) -> None:
    shell(f"run fedavg --rounds 2 {SMALL} --out runs/good")
    assert shell("verify good") == (0, "runs/good: intact; resumes from round 2\n", "")
    (result,) = shell.json("verify good")["runs"]
    assert result.keys() == {"folder", "intact", "round", "parts"}
    assert (result["folder"], result["intact"], result["round"]) == ("runs/good", True, 2)
    assert result["parts"] == dict.fromkeys(["meta", "SQLite", "rows", "states", "rounds", "model"], "intact")
    file = Path("runs/good") / RUN_FILE
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    code, out, err = shell("verify good")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("feddbe: 'runs/good/run.sqlite' is damaged (")
    assert "intact" not in err
    assert shell("verify good --json").code == 2


def test_verify_compares_the_server_state_with_the_model(shell: Shell) -> None:
    shell(f"run fedavg --rounds 1 {SMALL} --out one")
    store = RunStore.open(Path("one"))
    server = store.server_state()
    server.pop("fc.bias")
    store.write_server_state("last", server, 1)
    store.close()
    code, _, err = shell("verify one")
    assert (code, err.count("\n")) == (2, 1)
    assert "belongs to another model: expected 'fc.bias'" in err
