"""`feddbe run` and `feddbe compare`: output, divergence, resuming and the dry run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe import cli
from feddbe.results.document import RoundResult
from feddbe.runs.store import RunStore
from tests.cli.interrupts import OPTIONS, compare_interrupted
from tests.cli.shell import SMALL, Shell, list_tree
from tests.progress import PROGRESS_LINE, remove_progress


@pytest.mark.parametrize(
    ("command", "patterns"),
    [
        (
            f"run 'fedavg+mr(kappa=3)' {SMALL} --seed 5",
            [r"mr kappa 2\.0 in the run, 3\.0 now", "seed 0 in the run, 5 now"],
        ),
        (
            f"run fedavg {SMALL} --partition-seed 2 --resume",
            [r"method fedavg\+mr\(kappa=2\) in the run, fedavg now", "partition_seed 1 in the run, 2 now"],
        ),
        (f"run 'fedavg+mr(kappa=2)' {SMALL}", ["contains this run already", "--resume", "--out"]),
    ],
)
def test_existing_run_is_not_overwritten(
    command: str, patterns: list[str], shell: Shell, tmp_path: Path
) -> None:
    assert shell(f"run 'fedavg+mr(kappa=2)' --rounds 1 {SMALL} --out one").code == 0
    before = list_tree(tmp_path)
    code, out, err = shell(f"{command} --out one")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("feddbe: 'one' contains ")
    assert "rounds" not in err, "their number may differ"
    assert "method_options" not in err
    for pattern in patterns:
        assert re.search(pattern, err)
    assert list_tree(tmp_path) == before


DIVERGING_RUN = "run fedavg --lr 1e6 --rounds 3 --clients 3 --partition iid --engine serial --out diverging"


def test_divergence_error_names_client_round_and_value(shell: Shell) -> None:
    code, out, err = shell(DIVERGING_RUN)
    assert (code, err.count("\n")) == (3, 1)
    for word in ("fedavg", "client 0", "round 1", "nan", "feddbe show diverging"):
        assert word in err
    assert "(diverged in round 1)" in " ".join(out.split())
    document = shell.json("show diverging")
    assert [result["round"] for result in document["rounds"]] == [0]
    assert document["diverged"] == {"round": 1, "client": 0, "what": "loss", "value": "nan"}
    assert shell("show diverging").out.endswith("fedavg: diverged in round 1\n")
    assert shell.json("runs diverging")["runs"][0]["state"] == "diverged in round 1"


def test_resume_with_fewer_rounds_is_noted(shell: Shell) -> None:
    assert shell(f"run fedavg --rounds 2 {SMALL} --out longer").code == 0
    code, out, err = shell(f"run fedavg --rounds 1 {SMALL} --out longer --resume")
    assert (code, err) == (0, "feddbe: 'longer' has 2 rounds already, more than --rounds 1\n")
    assert "last @2" in out


def test_resume_repeats_the_diverged_round(shell: Shell) -> None:
    first = shell(DIVERGING_RUN)
    resumed = shell("run --resume --out diverging")
    assert (resumed.code, resumed.out) == (3, first.out)
    note, error = resumed.err.splitlines()
    assert note == "feddbe: fedavg diverged in round 1, which is tried once more"
    assert f"{error}\n" == first.err


def test_divergence_of_a_method_does_not_stop_the_comparison(shell: Shell) -> None:
    diverging = "fedavg+prbm(prbm_lr=1e20)"
    code, out, err = shell(f"compare '{diverging}' fedavg --rounds 2 {SMALL} --out both")
    assert out.count("best @2") == 1, "the result of fedavg"
    assert Path("both/curves.png").is_file()
    assert code == 3
    assert f"{diverging}: training diverged" in err
    runs = shell.json("show both")["runs"]
    assert [run["method"] for run in runs] == [diverging, "fedavg"], "in the order of the command"
    assert [run["diverged"] and run["diverged"]["round"] for run in runs] == [1, None]
    assert len(runs[0]["rounds"]) < 3
    assert len(runs[1]["rounds"]) == 3
    assert runs[1]["last"]["round"] == 2


def test_progress_is_a_line_per_round_without_a_terminal(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line has the accuracy of the previous round; a final line has the accuracy of the last round."""
    words = shlex.split(f"run fedavg+dbe --rounds 3 {SMALL} --json --out three")
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    lines = [match.groupdict() for match in PROGRESS_LINE.finditer(err)]
    assert remove_progress(err) == ""
    assert [(line["done"], line["rounds"], line["evaluated"]) for line in lines] == [
        ("1", "3", "0"), ("2", "3", "1"), ("3", "3", "2"), ("3", "3", "3"),
    ]  # fmt: skip
    accuracies = [result["accuracy"]["weighted"] for result in json.loads(out)["rounds"]]
    assert [line["accuracy"] for line in lines] == [f"{100 * accuracy:.2f}" for accuracy in accuracies]
    assert [line["left"] is None for line in lines] == [False, False, True, True]
    assert cli.main([*words[:-1], "quiet", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_run_resumes_from_its_folder_without_other_options(shell: Shell) -> None:
    shell(f"run 'fedavg+dbe(kappa=3)' --rounds 1 {SMALL} --lr 0.05 --seed 2 --json --out one")
    uninterrupted = shell.json(f"run 'fedavg+dbe(kappa=3)' --rounds 2 {SMALL} --lr 0.05 --seed 2 --out two")
    code, out, err = shell("run --resume --out one --rounds 2")
    assert (code, err) == (0, "")
    assert "fedavg+dbe" in out, "a table: --json of the first command is not stored"
    assert shell.json("show one")["server_sha256"] == uninterrupted["server_sha256"]
    code, out, err = shell("run --resume --out one --lr 0.5")
    assert (code, out) == (2, "")
    assert "'one' contains a run with another configuration (lr 0.05 in the run, 0.5 now)" in err
    assert "lr" in shell("run --resume --out one --dry-run").out


def test_run_prints_table_figures_and_folder(shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell(f"run fedavg+dbe --rounds 2 {SMALL}")
    assert (code, err) == (0, "")
    assert "majority class" in out
    *_, curves, distribution, run = out.splitlines()
    assert curves.split() == ["curves", "runs/digits-fedavg+dbe-1/curves.png"]
    assert distribution.split() == ["data", "runs/digits-fedavg+dbe-1/data.png"]
    assert run.split() == ["run", "runs/digits-fedavg+dbe-1"]
    for line in (curves, distribution):
        assert (tmp_path / line.split()[1]).read_bytes().startswith(b"\x89PNG")
    assert shell(f"run fedavg+dbe --rounds 0 {SMALL}").out.endswith("runs/digits-fedavg+dbe-2\n")


def test_compare_and_show_print_the_same_json(shell: Shell) -> None:
    document = shell.json(f"compare fedavg fedavg+dbe --rounds 1 {SMALL} --out pair")
    assert [run["method"] for run in document["runs"]] == ["fedavg", "fedavg+dbe"]
    assert document.keys() == {"runs"}
    for run in document["runs"]:
        assert run == shell.json(f"show '{run['folder']}'")
    assert document == shell.json("show pair")
    text = shell("show pair").out
    assert text.count("fedavg+dbe:") == 1
    assert "fedavg:" in text


def test_json_has_all_hashes_in_separate_lines(shell: Shell) -> None:
    """`diff <(... | grep sha256) <(... | grep sha256)` then compares all hashes."""
    code, out, _ = shell(f"run fedavg+dbe --rounds 1 {SMALL} --json")
    assert code == 0
    document = json.loads(out)
    hash_lines = "".join(line for line in out.splitlines() if "sha256" in line)
    assert len(document["clients_sha256"]) == 3
    for digest in (document["server_sha256"], *document["clients_sha256"].values()):
        assert digest in hash_lines


def test_options_override_files(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(
        'method = "fedavg+mr"\nclients = 3\npartition = "iid"\nmodel = "mlp"\nengine = "serial"\n'
        "rounds = 7\nlr = 0.2\nbatch-size = 9\npartition-seed = 3\n"
    )
    document = shell.json("run small.toml --lr 0.3 --eval cohort --rounds 1")
    expected = {"lr": 0.3, "rounds": 1, "batch_size": 9, "partition_seed": 3, "eval": "cohort", "clients": 3}
    assert {key: document["config"][key] for key in expected} == expected
    assert document["method"] == "fedavg+mr"
    assert len(document["rounds"]) == 2
    (tmp_path / "two.toml").write_text('method = ["fedavg", "fedavg+mr"]\n')
    runs = shell.json(f"compare two.toml --rounds 0 {SMALL}")["runs"]
    assert [run["method"] for run in runs] == ["fedavg", "fedavg+mr"]


def test_dry_run_prints_settings_with_origins_and_writes_nothing(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text('clients = 3\npartition = "iid"\nbatch-size = 9\n')
    before = list_tree(tmp_path)
    command = "compare 'fedavg+mr(kappa=3)' local small.toml --local-epochs 2 --model mlp --dry-run"
    code, out, err = shell(command)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "batch_size 9 small.toml", "local_epochs 2 given", "model mlp given", "rounds 40 data set digits",
        "participation 1 general default", "mr kappa 3 given", "lr 0.1 model mlp", "fedavg+mr(kappa=3)",
        "local",
    ):  # fmt: skip
        assert lines.count(line) == 1
    for start in ("estimate: ", "trained by compiled; ", "its round in ms: training "):
        assert sum(line.startswith(start) for line in lines) == 2
    assert max(map(len, out.splitlines())) <= 110
    previews = shell.json(command)["experiments"]
    assert [preview["method"] for preview in previews] == ["fedavg+mr(kappa=3)", "local"]
    assert previews[0]["settings"]["batch_size"] == {"value": 9, "from": "small.toml"}
    for preview in previews:
        assert preview["estimate"]["seconds"] > preview["estimate"]["seconds_per_round"] > 0
        assert preview["estimate"]["memory_mb"] > 50
    assert list_tree(tmp_path) == before
    single = shell.json("run local small.toml --model mlp --local-epochs 2 --dry-run")
    assert single["config_hash"] == previews[1]["config_hash"]


def without_seconds(results: list[RoundResult]) -> list[dict[str, Any]]:
    """Return the results of all rounds without their times."""
    return [{**result, "seconds": 0} for result in results]


def test_compare_resumes_each_method_from_its_last_round(shell: Shell) -> None:
    """The finished method is not repeated, the interrupted one is resumed, the missing one is run."""
    command = f"compare fedavg fedavg+mr fedavg+dbe --rounds 3 {SMALL}"
    uninterrupted = shell.json(f"{command} --out complete")["runs"]
    compare_interrupted(["fedavg", "fedavg+mr"], last_round=1)
    finished = feddbe.load_run("compare-digits-1/fedavg")
    separate = feddbe.run("fedavg", **OPTIONS)  # the same configuration outside of the comparison
    mark_as_newest(Path(separate["folder"]))
    resumed = shell.json(f"{command} --resume")["runs"]
    assert [Path(run["folder"]).parent for run in resumed] == [Path("runs/compare-digits-1")] * 3
    assert resumed[0]["rounds"] == finished["rounds"], "with the same seconds"
    for run, expected in zip(resumed, uninterrupted, strict=True):
        assert without_seconds(run["rounds"]) == without_seconds(expected["rounds"])
        assert run["server_sha256"] == expected["server_sha256"]
        assert run["clients_sha256"] == expected["clients_sha256"]


def mark_as_newest(folder: Path) -> None:
    """Set the start of a run to a late date; tests are faster than the clock's resolution."""
    store = RunStore.open(folder)
    store.set_meta("begun", "2999-01-01T00:00:00+00:00")
    store.close()


def test_resume_without_folder_resumes_the_newest_run(shell: Shell) -> None:
    for _ in range(2):
        shell(f"run fedavg --rounds 1 {SMALL}")
    mark_as_newest(Path("runs/digits-fedavg-1"))
    document = shell.json(f"run fedavg --rounds 2 {SMALL} --resume")
    assert document["folder"] == "runs/digits-fedavg-1"
    assert len(document["rounds"]) == 3
    assert document["config"]["rounds"] == 2
