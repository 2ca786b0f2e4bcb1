"""Seeds and sweeps on the command line: executed runs, reused runs and messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe.simulation import loop
from tests.studies.conftest import Shell

SMALL = "--clients 3 --partition iid --model mlp --rounds 1 --metrics accuracy"
OPTIONS: dict[str, Any] = {
    "clients": 3, "partition": "iid", "model": "mlp", "rounds": 1, "metrics": "accuracy",
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feddbe.studies.runner.available_cores", lambda: 1)


def test_seeds_are_run_once_and_shown_together(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = shell(f"compare fedavg fedavg+dbe --seeds 2 {SMALL} --out study")
    assert code == 0
    assert len([line for line in err.splitlines() if " of 4: " in line]) == 4
    assert Path("study/comparison-1/curves.png").is_file()
    rows = [line.split() for line in out.splitlines() if line.startswith("fedavg")]
    assert [row[:2] for row in rows[:2]] == [["fedavg", "2"], ["fedavg+dbe", "2"]]
    single = feddbe.run("fedavg+dbe", **OPTIONS, seed=1, out="alone")
    (run_folder,) = Path("study").glob("digits-fedavg+dbe-seed1-*")
    assert feddbe.load_run(run_folder)["server_sha256"] == single["server_sha256"]
    assert shell("show study").out.split("\n\n")[0] == out.split("\n\n")[0]

    def refuse(*_: object) -> None:
        raise AssertionError("it was run again")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_experiment", refuse)
        repeated = shell(f"compare fedavg fedavg+dbe --seeds 0,1 {SMALL} --out study")
        assert repeated == (0, out, "")
    code, _, err = shell(f"compare fedavg fedavg+dbe --seeds 3 {SMALL} --out study")
    assert (code, len([line for line in err.splitlines() if " of 2: " in line])) == (0, 2)


def test_existing_runs_are_truncated_to_the_requested_rounds(shell: Shell) -> None:
    """FedAvg has three rounds in one folder and one in the other; the tables are the same."""
    shell(f"run fedavg --seeds 2 {SMALL.replace('--rounds 1', '--rounds 3')} --out study")
    study, fresh = (
        shell(f"compare fedavg fedavg+dbe --seeds 2 {SMALL} --out {folder} --name both").out
        for folder in ("study", "fresh")
    )
    assert study.replace("study/both", "fresh/both") == fresh
    everything = " ".join(shell(f"show {' '.join(map(str, Path('study').glob('digits-*')))}").out.split())
    assert "Not judged, unequal rounds: " in everything


def test_resumed_comparison_is_truncated_to_the_requested_rounds(tmp_path: Path) -> None:
    longer = feddbe.run("fedavg", **{**OPTIONS, "rounds": 3}, out=str(tmp_path / "fedavg"))
    runs = feddbe.compare(["fedavg", "ditto"], **OPTIONS, out=str(tmp_path), resume=True)
    assert [len(run["rounds"]) for run in runs] == [2, 2]
    assert runs[0]["last"] == longer["rounds"][1]


def test_sweep_chooses_on_validation_data_and_notes_it(shell: Shell) -> None:
    command = f"compare fedavg 'fedavg+mr(kappa=0,1)' --lr 0.01,0.1 {SMALL} --out grid"
    code, out, err = shell(command)
    assert code == 0
    assert err.splitlines()[0] == ("feddbe: values are chosen on held-out training data: --validation 0.2")
    result = json.loads(shell(f"{command} --json").out)
    table = result["table"]
    assert [row["name"] for row in table] == [
        f"{name}, lr {lr}"
        for name in ("fedavg", "fedavg+mr(kappa=0)", "fedavg+mr(kappa=1)")
        for lr in (0.01, 0.1)
    ]
    assert {run["config"]["validation"] for run in result["runs"]} == {0.2}
    for rows in (table[:2], table[2:]):
        best = max(rows, key=lambda row: row["validation"])
        assert [row["name"] for row in rows if row["chosen"]] == [best["name"]]
        tested = [row["name"] for row in rows if row["best"] is not None]
        assert tested == [best["name"]], "test data of the other runs is not used"
    assert out.count("*") == 2


def test_partitions_are_repetitions_of_every_seed(shell: Shell) -> None:
    options: dict[str, Any] = OPTIONS | {"seeds": 2, "partition_seeds": 3, "out": "study"}
    runs = feddbe.compare(["fedavg", "ditto"], **options)
    assert type(runs) is feddbe.Runs, "there is nothing to choose"
    trials = [(run["config"]["partition_seed"], run["config"]["seed"]) for run in runs]
    assert trials == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)] * 2
    single_run = feddbe.run("fedavg", **OPTIONS, partition_seed=3, seed=1, out="alone")
    assert single_run["server_sha256"] == feddbe.load_run(runs[5]["folder"])["server_sha256"]
    code, out, _ = shell(f"run fedavg --partition-seeds 2,3 {SMALL} --out study --dry-run")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["exists", "exists"]


def test_partition_seeds_that_change_nothing_are_an_error(tmp_path: Path) -> None:
    """Rows of an own split are the same for every seed: two equal runs would count as two repetitions."""
    import numpy as np
    import torch

    y = torch.arange(90) % 3
    split = feddbe.partition(y.numpy(), "iid", clients=3)
    dataset = feddbe.Dataset("clouds", torch.randn(90, 4), y, 3, split=split)
    options: dict[str, Any] = {"model": "mlp", "rounds": 1, "out": str(tmp_path), "partition_seeds": [1, 2]}
    with pytest.raises(feddbe.InvalidInputError, match="all give the same clients"):
        feddbe.compare(["fedavg"], data=dataset, **options)
    natural = feddbe.Dataset("clouds", torch.randn(90, 4), y, 3, client=np.repeat(np.arange(3), 30))
    assert len(feddbe.compare(["fedavg"], data=natural, **options)) == 2, "other test rows of each client"


def test_list_in_a_file_is_a_sweep(shell: Shell) -> None:
    Path("sweep.toml").write_text(
        'method = "fedavg"\nlr = [0.05, 0.1]\nseeds = [3, 4]\nclients = 3\npartition = "iid"\n'
        'model = "mlp"\nrounds = 1\nvalidation = 0.3\n'
    )
    code, out, err = shell("run sweep.toml --dry-run")
    assert (code, err) == (0, "")
    assert [line.split("  ")[0] for line in out.splitlines()] == ["to run"] * 4
    assert "lr 0.05" in out
    assert "runs/study-digits/digits-fedavg-seed4-" in out
    assert not Path("runs").exists()


def test_diverged_run_is_marked(shell: Shell) -> None:
    code, out, err = shell(f"compare fedavg 'fedavg+prbm(prbm_lr=1e20)' --seeds 2 {SMALL} --out study")
    assert code == 3
    assert "Diverged, and excluded from means: fedavg+prbm(prbm_lr=1e20), seed 0;" in " ".join(out.split())
    assert "0 of 2" in out
    assert err.count("diverged in round 1; see feddbe show study/") == 2
    assert shell(f"compare fedavg 'fedavg+prbm(prbm_lr=1e20)' --seeds 2 {SMALL} --out study").code == 3


MISTAKES = {
    "run fedavg --seed 0 --seed 1": ["--seed is given 2 times", "several seeds are --seeds 0,1,2"],
    "run fedavg --lr 1 --lr 2": ["--lr is given 2 times; give it once"],
    "run fedavg --json --json": ["--json is given 2 times"],
    "run fedavg --seed 0,1": ["seed = 0,1; several seeds are --seeds 0,1,2"],
    "run fedavg --seeds none": ["seeds = none; allowed: a number of seeds"],
    "run fedavg moon --seeds 2": ["run takes one method, not 2; compare takes several"],
    "run fedavg --partition-seed 1,2": ["partition_seed = 1,2; several seeds are --partition-seeds 1,2,3"],
    "run fedavg --partition-seeds 2 --partition-seed 3": ["partition_seed = 3 and partition_seeds = 2"],
    "run fedavg --partition-seeds 2 --split s.npz": ["the file is one partition: give one of them"],
    "run fedavg --partition-seeds 0": ["partition_seeds = 0; allowed: a number of seeds, as in 5"],
    "compare fedavg fedavg --seeds 2": ["the same method twice"],
    "compare --seeds 2": ["no method given"],
    "compare fedavg moonn --seeds 2": ["unknown method 'moonn'", "did you mean 'moon'?"],
    "run fedavg --lr 0.1,fast": ["lr = 'fast'", "a number > 0"],
    "run fedavg --lr 0.1,0.2 --validation 0": ["validation = 0; values are never chosen on test data"],
    "run fedavg --lr 0.1,0.2 --validation 0.1,0.2": ["values are never chosen on test data"],
    "run 'fedavg+dbe(kappa=1,much)'": ["kappa = 'much'"],
    "run fedavg --rounds 1,2": ["rounds = '1,2'", "a whole number >= 0"],
}


@pytest.mark.parametrize("line", MISTAKES)
def test_invalid_input_is_one_line_and_nothing_is_written(line: str, shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell(line)
    assert (code, out) == (2, "")
    message = err.splitlines()[-1]
    assert len(err.splitlines()) == 1 + err.count("values are chosen on")
    for words in MISTAKES[line]:
        assert words in message
    assert list(tmp_path.iterdir()) == []


def test_sweep_from_python_with_user_data_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mechanism; a file or a name is not needed."""
    import torch
    from torch import nn

    monkeypatch.setattr("feddbe.studies.runner.available_cores", lambda: 1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    x = torch.randn(90, 4, generator=generator) + 3 * torch.eye(4)[y]
    options: dict[str, Any] = {
        "data": feddbe.Dataset("clouds", x, y, 3), "model": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)),
        "clients": 3, "partition": "iid", "rounds": 1, "lr": 0.1, "out": str(tmp_path),
    }  # fmt: skip
    runs = feddbe.compare(["fedavg"], seeds=[0, 5], **options)
    assert [run["config"]["seed"] for run in runs] == [0, 5]
    assert "95 % interval" in runs._repr_html_()
    frame = feddbe.compare([feddbe.FedAvg()], **{**options, "data": (x, y), "lr": [1e-6, 0.1], "rounds": 5})
    assert isinstance(frame, feddbe.Sweep)
    assert [run["config"]["lr"] for run in frame] == [1e-6, 0.1]
    assert [run["config"]["lr"] for run in frame.chosen] == [0.1]
    assert frame._repr_html_().count("<tr>") == 3
    with pytest.raises(feddbe.InvalidInputError, match="this is one run"):
        feddbe.run("fedavg", seeds=2)  # type: ignore[call-arg]
