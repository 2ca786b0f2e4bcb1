"""Studies are remembered: each has its own table a day later, and runs may be shared."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import feddbe
from feddbe.errors import InvalidInputError, StoreError
from feddbe.studies.study_record import (
    RECORD_FILE,
    Purpose,
    SearchResult,
    StoredTrial,
    StudyRecord,
    find_studies,
    open_study,
    read_record,
)  # fmt: skip
from tests.studies.conftest import Shell

SMALL = "--clients 3 --partition iid --model mlp --rounds 2 --metrics accuracy"
OPTIONS: dict[str, Any] = {
    "clients": 3, "partition": "iid", "model": "mlp", "rounds": 2, "metrics": "accuracy",
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feddbe.studies.runner.available_cores", lambda: 1)


def printed_table(text: str) -> str:
    """Return the first paragraph, which is the table and its note."""
    return text.split("\n\n")[0]


def test_studies_in_one_folder_keep_their_own_tables(shell: Shell) -> None:
    commands = {
        "comparison-1": f"compare fedavg fedavg+dbe --seeds 2 {SMALL}",
        "sweep-1": f"run fedavg --lr 0.01,0.1 --seeds 2 {SMALL}",
        "comparison-2": f"compare fedavg fedavg+dbe --seeds 2 --validation 0.2 {SMALL}",
    }
    tables = {}
    for name, command in commands.items():
        code, out, _ = shell(command)
        assert code == 0
        assert out.splitlines()[-2:] == [
            f"curves  runs/study-digits/{name}/curves.png",
            f"study   runs/study-digits/{name}",
        ]
        tables[name] = printed_table(out)
    assert len(set(tables.values())) == 3
    for name, table in tables.items():
        for word in (name, f"study-digits/{name}", f"runs/study-digits/{name}"):
            code, out, err = shell(f"show {word}")
            assert (code, err) == (0, "")
            assert printed_table(out) == table
    listed = shell("show study-digits").out
    names = [line.split()[0] for line in listed.splitlines() if "fedavg" in line]
    assert names == ["comparison-1", "comparison-2", "sweep-1"]
    assert "show one with: feddbe show runs/study-digits/comparison-1" in listed
    code, _, err = shell("fairness study-digits")
    assert code == 2
    assert "'study-digits' has 3 studies; name one of runs/study-digits/comparison-1" in err


def test_shown_sweep_has_test_accuracies_of_chosen_values_only(shell: Shell) -> None:
    shell(f"run fedavg --lr 0.001,0.1 {SMALL} --out pool")
    for format_ in ("csv", "json", "markdown"):
        chosen, other = sorted(
            feddbe.load_study("pool").summary().to_dict("records"), key=lambda row: not row["chosen"]
        )
        assert chosen["best"] > 0
        assert other["best"] != other["best"], "it is not a number"
        assert (
            str(round(100 * feddbe.load_study("pool")[0]["best"]["accuracy"]["weighted"], 2))
            not in shell(f"show pool --format {format_}").out
        )
    assert chosen["difference"] is None, "to an experiment that is not chosen"
    sweep = feddbe.load_study("pool")
    assert repr(sweep) == f"<Sweep of 2 runs, chosen: {[sweep[1]]}>"
    assert [run["best"] for run in feddbe.list_runs("pool")] == [None, None]
    assert [len(read(sweep)) for read in (feddbe.fairness, feddbe.overhead)] == [1, 1]
    clients = shell("show pool --clients").out
    assert "lr 0.1" not in clients.splitlines()[0] or "lr 0.001" not in clients.splitlines()[0]
    assert "lr 0.001" not in shell("overhead pool").out
    page = Path("page.html")
    assert shell(f"report pool -o {page}").code == 0
    content = json.loads(page.read_text().split('id="content">')[1].split("</script>")[0])
    assert content["about"] == "1 run"
    assert content["sections"][0]["title"] == "Sweeps"
    code, _, err = shell("report --live pool")
    assert (code, "whose values are chosen at its end" in err) == (2, True)


def test_repeated_command_finds_its_study(shell: Shell) -> None:
    shell(f"compare fedavg ditto --seeds 2 {SMALL} --out pool")
    before = read_record(Path("pool/comparison-1"))
    shell(f"compare fedavg ditto --seeds 0,1 {SMALL} --quiet --out pool")
    assert find_studies("pool") == [Path("pool/comparison-1")]
    shell(f"compare ditto fedavg --seeds 2 {SMALL} --out pool")
    assert [path.name for path in find_studies("pool")] == ["comparison-1", "comparison-2"]
    assert before.baseline == "fedavg"
    assert read_record(Path("pool/comparison-2")).baseline == "ditto"
    assert {run.config_hash for run in before.runs} == {
        run.config_hash for run in read_record(Path("pool/comparison-2")).runs
    }


def test_named_study_can_be_extended_but_not_replaced(shell: Shell) -> None:
    assert shell(f"run fedavg --seeds 2 {SMALL} --out pool --name main").code == 0
    assert shell(f"run fedavg --seeds 3 {SMALL} --out pool --name main").code == 0
    assert read_record(Path("pool/main")).seeds == (0, 1, 2)
    code, _, err = shell(f"run ditto --seeds 2 {SMALL} --out pool --name main")
    assert code == 2
    assert "'pool/main' is another study: comparison of fedavg, seeds 0, 1, 2; choose another --name" in err
    for name in ("../up", "", "a/b"):
        code, _, err = shell(f"run fedavg --seeds 2 {SMALL} --out pool --name '{name}'")
        assert code == 2
        assert "allowed: letters, digits" in err
    code, _, err = shell(f"run fedavg {SMALL} --name alone")
    assert code == 2
    assert "name = alone; this is one run" in err


def test_longer_runs_count_cut_to_the_rounds_of_the_study(shell: Shell) -> None:
    table = printed_table(shell(f"compare fedavg ditto --seeds 2 {SMALL} --out pool --name short").out)
    shell(f"compare fedavg ditto --seeds 2 {SMALL.replace('--rounds 2', '--rounds 3')} --out pool")
    assert printed_table(shell("show pool/short").out) == table
    assert [len(run["rounds"]) for run in feddbe.load_study("pool/short")] == [3] * 4
    assert [len(run["rounds"]) for run in feddbe.load_study("pool/comparison-1")] == [4] * 4


def test_python_and_command_line_have_the_same_numbers(shell: Shell) -> None:
    """Also in a study that is shorter than its runs."""
    shell(f"compare local fedavg --seeds 2 {SMALL} --out pool --name short")
    shell(f"compare local fedavg --seeds 2 {SMALL.replace('--rounds 2', '--rounds 3')} --out pool")
    study = feddbe.load_study("pool/short")
    for runs in ("pool/short", study):
        fairness = json.loads(json.dumps(feddbe.fairness(runs)))
        assert fairness == json.loads(shell("fairness pool/short --json").out)["runs"]
        overhead = json.loads(json.dumps(feddbe.overhead(runs)))
        assert overhead == json.loads(shell("overhead pool/short --json").out)["runs"]
    assert [run["round"] for run in fairness] == [2] * 4
    means = [mean(run["spread"]["mean"] for run in fairness[start : start + 2]) for start in (0, 2)]
    assert means == pytest.approx(list(study.summary()["mean"])), "the table over seeds has the same round"
    printed = shell("show pool/short --format csv").out
    assert study.to_pandas().to_csv(index=False) == printed
    assert feddbe.list_runs("pool") == json.loads(shell("runs pool --json").out)["runs"]


def test_fine_tuned_run_that_became_longer_is_named(shell: Shell) -> None:
    shell(f"run fedavg+ft --seeds 2 {SMALL} --out pool --name short")
    feddbe.run(resume=True, out=str(next(Path("pool").glob("*seed0*"))), rounds=3)
    code, _, err = shell("show pool/short")
    assert (code, len(err.splitlines())) == (0, 1)
    assert "it has 3 rounds, and fine-tuning or new clients followed the last one, not round 2" in err


def test_plain_comparison_is_a_study_of_its_folder(shell: Shell) -> None:
    table = printed_table(shell(f"compare ditto fedavg {SMALL} --out both").out)
    assert printed_table(shell("show both").out) == table
    assert shell(f"compare ditto fedavg moon {SMALL} --out both --resume").code == 0
    assert [run["method"] for run in feddbe.load_study("both")] == ["ditto", "fedavg", "moon"]
    other = shell(f"compare fedavg+dbe {SMALL} --out both")
    assert other.out.splitlines()[-1] == "run     both/comparison-1"
    assert [run["method"] for run in feddbe.load_study("both/comparison-1")] == ["fedavg+dbe"]
    _, out, err = shell("show both")
    assert err == "feddbe: further studies: both/comparison-1\n"
    assert "fedavg+dbe" not in out
    assert shell(f"compare fedavg ditto {SMALL} --name mine").code == 0
    assert [run["folder"] for run in feddbe.load_study("mine")] == ["runs/mine/fedavg", "runs/mine/ditto"]


def test_resumed_comparison_has_the_new_rounds(shell: Shell) -> None:
    shell(f"compare ditto fedavg {SMALL} --out both")
    table = printed_table(shell("compare --resume --out both --rounds 3").out)
    assert printed_table(shell("show both").out) == table
    assert [len(run["rounds"]) for run in feddbe.load_study("both")] == [4, 4]


def test_missing_and_changed_runs_are_named(shell: Shell) -> None:
    shell(f"compare fedavg ditto --seeds 2 {SMALL} --out pool")
    first, second, *_ = (Path(run["folder"]) for run in feddbe.load_study("pool"))
    shutil.rmtree(first)
    shutil.rmtree(second)
    feddbe.run("moon", **OPTIONS, out=str(second))
    code, out, err = shell("show pool")
    assert code == 0
    prefix = "feddbe: study 'pool/comparison-1': run"
    assert err.splitlines() == [
        f"{prefix} '{first}' is missing; repeat the command, or restore the folder",
        f"{prefix} '{second}' was changed: it has another configuration; repeat the command",
    ]
    assert "moon" not in out
    reported = shell("report pool")
    assert (reported.code, reported.err) == (0, err)
    with pytest.warns(UserWarning, match="is missing|was changed"):
        assert [run["method"] for run in feddbe.load_study("pool")] == ["ditto", "ditto"]
    for run in read_record(Path("pool/comparison-1")).runs:
        shutil.rmtree(Path("pool/comparison-1") / run.folder, ignore_errors=True)
    with pytest.raises(StoreError, match="no run of the study can be shown"):
        feddbe.load("pool")


def test_loaded_study_is_what_compare_returned(shell: Shell) -> None:
    runs = feddbe.compare(["fedavg", "ditto"], seeds=2, out="pool", **OPTIONS)
    sweep = feddbe.compare(["fedavg"], lr=[0.01, 0.1], out="pool", name="rates", **OPTIONS)
    loaded = feddbe.load_study("pool/comparison-1")
    assert type(loaded) is type(feddbe.load("pool/comparison-1")) is feddbe.Runs
    assert loaded._repr_html_() == runs._repr_html_()
    assert [run["config_hash"] for run in loaded] == [run["config_hash"] for run in runs]
    rates = feddbe.load("pool/rates")
    assert isinstance(rates, feddbe.Sweep)
    assert rates._repr_html_() == sweep._repr_html_()
    assert type(feddbe.load(runs[0]["folder"])) is type(feddbe.load_run(runs[0]["folder"])) is feddbe.Run
    frame = loaded.to_pandas()
    assert list(frame["method"]) == ["fedavg", "fedavg", "ditto", "ditto"]
    assert list(frame["best_weighted"]) == [run["best"]["accuracy"]["weighted"] for run in runs]
    summary = loaded.summary()
    assert list(summary["name"]) == ["fedavg", "ditto"]
    assert summary["best"][0] == pytest.approx(frame["best_weighted"][:2].mean())
    assert list(rates.summary()["chosen"]) == [False, True]
    assert list(rates.to_pandas()["lr"]) == [0.1]


def test_loading_the_other_kind_is_one_line(shell: Shell) -> None:
    feddbe.compare(["fedavg", "ditto"], seeds=2, name="pair", **OPTIONS)
    with pytest.raises(InvalidInputError, match="'pair' is not the folder of a run; existing runs: runs/"):
        feddbe.load_run("pair")
    run_folder = feddbe.load_study("pair")[0]["folder"]
    with pytest.raises(
        InvalidInputError, match=r"is not the folder of a study; existing studies: runs/study-digits/pair$"
    ):
        feddbe.load_study(run_folder)


def test_runs_lists_studies(shell: Shell) -> None:
    shell(f"compare fedavg ditto --seeds 2 {SMALL}")
    assert "study-digits/comparison-1  comparison  fedavg, ditto    0 1" in shell("runs").out
    (study,) = json.loads(shell("runs --json").out)["studies"]
    assert (study["purpose"], study["seeds"], study["runs"]) == ("comparison", "0 1", 4)


def test_runs_lists_studies_in_a_narrow_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell(f"compare fedavg ditto --seeds 2 {SMALL}")
    monkeypatch.setenv("COLUMNS", "40")
    listed = shell("runs").out
    assert "study-digits/comparison-1\n  comparison, fedavg, ditto, seeds 0 1," in listed


def test_another_moment_does_not_choose_other_values(shell: Shell) -> None:
    """Two choices of one sweep would show the test accuracies of two values."""
    shell(f"run fedavg --lr 0.01,0.1 --seeds 2 {SMALL} --name rates")
    study = feddbe.load_study("rates")
    assert isinstance(study, feddbe.Sweep)
    assert [run["config"]["lr"] for run in study.chosen] == [0.1, 0.1]
    runs_after = json.loads(shell("show rates --moment after --json").out)["runs"]
    assert [run["config"]["lr"] for run in runs_after] == [0.1, 0.1]
    assert runs_after[0]["last"]["moment"] == "after"
    assert "chosen" not in shell("show rates --moment after").out.split("\n")[0]


def test_clients_and_curves_of_a_sweep_are_those_of_chosen_values(shell: Shell) -> None:
    shell(f"run fedavg --lr 0.01,0.1 --seeds 2 {SMALL} --name rates")
    clients = json.loads(shell("show rates --clients --json").out)["clients"]
    assert {client["run"] for client in clients} == {"fedavg, seed 0", "fedavg, seed 1"}
    assert "fedavg (2 seeds)" in shell("show rates").out, "without a value, because one is drawn"


def test_damaged_record_does_not_hide_the_others(shell: Shell) -> None:
    shell(f"compare fedavg ditto --seeds 2 {SMALL} --name good")
    Path("runs/study-digits/bad").mkdir()
    Path("runs/study-digits/bad/study.json").write_text("{")
    assert "damaged" in shell("runs").out
    assert shell("show good").code == 0
    assert shell(f"compare fedavg ditto --seeds 2 {SMALL}").code == 0
    code, _, err = shell("show bad")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "'runs/study-digits/bad/study.json' is not a study's record" in err


def test_commands_take_a_study(shell: Shell) -> None:
    shell(f"compare fedavg ditto --seeds 2 {SMALL} --out pool")
    assert shell("fairness pool").out.splitlines()[-1] == "fairness  pool/comparison-1/fairness.png"
    assert shell("verify pool").out.count("intact; resumes from round 2") == 4
    assert shell("report pool").out == "report  pool/comparison-1/report.html\n"
    code, out, _ = shell("analyze pool --analyses probe --moment before")
    assert (code, out.count("fedavg")) == (0, 2)


def test_search_is_shown_again(shell: Shell) -> None:
    pytest.importorskip("optuna")
    code, out, _ = shell(f"tune fedavg --space lr=0.01,0.1 --trials 2 {SMALL} --out search")
    assert code == 0
    output = shell("show search")
    assert (output.code, output.err) == (0, "")
    assert output.out.splitlines() == out.splitlines()[:-1], "all but the path of the figure"
    record = read_record(Path("search"))
    assert (record.purpose, record.validation, len(record.runs)) == (Purpose.TUNING, 0.2, 2)
    assert shell(f"tune fedavg --space lr=0.01,0.1 --trials 2 {SMALL} --out search").out == out
    assert len(feddbe.load("search")) == 2


def test_table_of_the_paper_is_shown_again(shell: Shell) -> None:
    only = "--only FedAvg/FMNIST --only FedAvg+DBE/FMNIST"
    code, out, _ = shell(f"reproduce practical --scale small --rounds 2 {only} --out paper")
    assert code == 0
    output = shell("show paper")
    assert (output.code, output.out, output.err) == (0, out, "")
    shell("reproduce practical --scale small --rounds 1 --only FedAvg/FMNIST --out paper")
    assert [path.name for path in find_studies("paper")] == ["practical-1", "practical-2"]
    assert shell("show paper/practical-1").out == out
    page = feddbe.report("paper/practical-1").read_text()
    assert page.count('"title":"The paper\'s tables"') == 1
    assert [run["method"] for run in feddbe.load_study("paper/practical-1")] == ["fedavg", "fedavg+dbe"]


RECORD = StudyRecord("x", Purpose.SWEEP, ("fedavg",), {"lr": [1, 2]}, (0,), (), "fedavg", 0.2, ())
TRIAL: StoredTrial = {"values": {"kappa": 1}, "accuracy": 0.5, "note": ""}
RESULT: SearchResult = {
    "space": {"kappa": [1, 2]}, "trials": [TRIAL], "published": {"kappa": 1}, "is_fine_tuned": False,
}  # fmt: skip
DAMAGES: list[tuple[Any, str]] = [
    ("{", "Input data was truncated"),
    ('{"options": {"a": ' + "[" * 100_000, "maximum recursion depth exceeded"),
    ("[]", "Expected `object`, got `array`"),
    ({"purpose": "fun"}, "Invalid enum value 'fun'"),
    ({"seeds": ["0"]}, "Expected `int`, got `str`"),
    ({"seeds": [10**400]}, "Expected `int` <= 4611686018427387904"),
    ({"methods": []}, "Expected `array` of length >= 1"),
    ({"validation": float("nan")}, "JSON is malformed"),
    ({"options": 3}, "Expected `object`, got `int`"),
    ({"result": RESULT | {"trials": []}}, "Expected `array` of length >= 1"),
    ({"result": RESULT | {"trials": [TRIAL | {"accuracy": "x"}]}}, "Expected `float | null`, got `str`"),
    ({"runs": [{"folder": "/etc", "config_hash": "", "rounds": 1}]}, "unexpected folder '/etc'"),
    ({"runs": [{"folder": "../../x", "config_hash": "", "rounds": 1}]}, "unexpected folder '../../x'"),
    ({"runs": [{"folder": "\0", "config_hash": "", "rounds": 1}]}, "unexpected folder '?'"),
    ({"runs": [{"folder": "x", "config_hash": ""}]}, "missing required field `rounds`"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGES)
def test_damaged_record_is_one_line(damage: Any, problem: str, tmp_path: Path) -> None:
    text = damage if isinstance(damage, str) else json.dumps(json.loads(RECORD.to_json()) | damage)
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(StoreError) as raised:
        open_study(tmp_path)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_record_survives_its_text() -> None:
    record = replace(RECORD, result=RESULT)
    assert StudyRecord.from_json(record.to_json(), Path("study.json")) == record


@pytest.mark.parametrize(
    "result", [RESULT | {"trials": [TRIAL | {"values": {}}]}, RESULT | {"published": {}}]
)
def test_trials_that_do_not_fit_the_search_are_one_line(
    result: SearchResult, shell: Shell, tmp_path: Path
) -> None:
    record = replace(RECORD, purpose=Purpose.TUNING, options={}, result=RESULT)
    (tmp_path / RECORD_FILE).write_text(record.to_json())
    assert shell(f"show {tmp_path}").code == 0
    (tmp_path / RECORD_FILE).write_text(replace(record, result=result).to_json())
    output = shell(f"show {tmp_path}")
    assert (output.code, output.out) == (2, "")
    assert output.err.endswith("has trials that do not fit its search; repeat the command\n")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"trials": 10**9}, "allowed: a whole number from 1 to 1000"),
        ({"only": [5]}, "Expected `str`, got `int`"),
        ({"rounds": "x"}, "Expected `int | null`, got `str`"),
    ],
)
def test_request_that_is_not_of_the_paper_is_one_line(
    change: dict[str, Any], problem: str, shell: Shell, tmp_path: Path
) -> None:
    options = {"name": "practical", "trials": 1, "rounds": 1, "data": None, "small": True, **change}
    record = replace(RECORD, purpose=Purpose.PAPER_TABLE, options=options)
    (tmp_path / RECORD_FILE).write_text(record.to_json())
    output = shell(f"show {tmp_path}")
    assert output.code == 2
    (line,) = output.err.splitlines()
    assert "does not name a table of the paper" in line
    assert problem in line


def test_folder_of_a_study_with_a_digit_that_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "\u00b2").mkdir()
    (tmp_path / "\u00b2" / RECORD_FILE).write_text(RECORD.to_json())
    assert find_studies(str(tmp_path)) == [tmp_path / "\u00b2"]


def test_pipe_in_place_of_a_record(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / RECORD_FILE)
    with pytest.raises(StoreError, match=r"study.json': it is not a plain file"):
        read_record(tmp_path)
