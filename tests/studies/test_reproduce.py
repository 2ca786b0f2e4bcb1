"""Tables of the paper computed from runs: recognition, sharing, marks and verdicts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import feddbe
from feddbe.errors import DataMissingError, InvalidInputError
from feddbe.reporting.paper_table import PaperTable, paper_table, render_paper_table
from feddbe.results.document import RunDocument
from feddbe.runs.experiment import Experiment
from feddbe.studies import paper, reproduce, runner
from feddbe.studies.paper import PaperStudy, load_study
from feddbe.studies.reproduce import draw_study
from feddbe.studies.runner import PlannedRun, RunSpec
from tests.documents import document
from tests.studies.conftest import Shell


@cache
def any_experiment() -> Experiment:
    """What is asked of it: the published stopping rule."""
    options = {"data": "digits", "partition": "iid", "clients": 2, "rounds": 2000, "patience": 100}
    (planned,) = runner.plan_runs([RunSpec("fedavg", options)], Path("nowhere"))
    assert planned.experiment
    return planned.experiment


def by_hand(study: PaperStudy, curves: Callable[[RunSpec], RunDocument | None]) -> reproduce.Plans:
    """Plans whose runs are written by hand; the folders are not there."""
    cells = reproduce.study_specs([study])
    return {cell: PlannedRun(cell, any_experiment(), Path(str(cell)), curves(cell)) for cell in cells}


def text_of(table: PaperTable, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(paper_table(table))
    return captured.get()


def test_table_has_values_differences_and_verdicts() -> None:
    """FedAvg has 85, 86, 87 % in its trials, +DBE ten points more with a spread of 0.1 around that: the
    paired difference is 10 ± 4.303 * 0.1 / sqrt(3) = 10 ± 0.25."""
    study = load_study("practical").select(["fedavg*/fmnist", "ditto/fmnist"])

    def curve(spec: RunSpec) -> RunDocument | None:
        gains = {"fedavg": 0.0, "fedavg+dbe": 0.10 + 0.001 * (spec.seed - 1)}
        if spec.method not in gains:
            return None
        return document(spec.method, [0.1, 0.85 + 0.01 * spec.seed + gains[spec.method]], seed=spec.seed)

    table = reproduce.compare_with_paper(study, by_hand(study, curve))
    plain, dbe, ditto = (table.find_cell(row, "FMNIST") for row in ("FedAvg", "FedAvg+DBE", "Ditto"))
    assert plain
    assert ditto
    assert dbe
    assert plain.ours
    assert plain.ours.format() == "86.00 ± 2.48"
    assert plain.difference == pytest.approx(0.15)
    assert plain.marks == ("1 round of up to 2000",)
    assert (ditto.ours, ditto.status) == (None, "not run")
    text = text_of(table, 120)
    assert "86.00 ± 2.48 a" in text
    assert re.search(r"85\.85 +\+0\.15", text)
    assert "not run" in text
    assert "FedAvg+DBE against FedAvg, FMNIST, before local training: +10.00 ± 0.25" in " ".join(text.split())
    assert "a: 1 round of up to 2000." in text


def test_both_moments_are_shown_and_compared_with_fedavg_at_the_same_moment() -> None:
    """DBE adds 10 points before local training and 1 after it; after it, FedAvg has the paper's number."""
    study = load_study("practical", trials=1).select(["fedavg*/fmnist", "fedbabu/fmnist"])
    accuracies = {"fedavg": (0.70, 0.8585), "fedavg+dbe": (0.80, 0.8685), "fedbabu": (0.60, 0.80)}

    def curve(spec: RunSpec) -> RunDocument:
        before, after = accuracies[spec.method]
        run = document(spec.method, [0.1, before])
        assert run["last"]
        run["last"]["after"] = {"weighted": after, "mean": after, "worst_tenth": after, "std": 0.0}
        if spec.method == "fedbabu":
            run["last"]["adapted"] = {"weighted": 0.9, "mean": 0.9, "worst_tenth": 0.9, "std": 0.0}
        return run

    table = reproduce.compare_with_paper(study, by_hand(study, curve))
    markdown = render_paper_table(table, "markdown")
    assert "| FedAvg | before 70.00 a; after 85.85; paper 85.85, -15.85 |" in markdown
    assert "| FedAvg+DBE | before 80.00 (+10.00) a; after 86.85 (+1.00); paper 97.69, -17.69 |" in markdown
    assert "| FedBABU | adapted 90.00 a; after 80.00 (-5.85); paper 97.46, -7.46 |" in markdown
    assert "Within 1 point of the paper: 0 of 3 cells before local training (or adapted), 1 of 3" in markdown
    assert "FedAvg+DBE against FedAvg, FMNIST, after local training: +1.00" in markdown


def gains_of(study: PaperStudy, gains: list[float], trials: int = 3, *, held_out: bool) -> str:
    """The notes of a table in which FedAvg+DBE has these differences to FedAvg."""

    def curve(spec: RunSpec) -> RunDocument | None:
        gain = gains[spec.seed] if "dbe" in spec.method else 0.0
        run = document(spec.method, [0.1, 0.8 + gain])
        for entry in run["rounds"] if held_out else ():
            entry["validation"] = entry["accuracy"]
        return run if spec.seed < trials else None

    return " ".join(reproduce.compare_with_paper(study, by_hand(study, curve)).notes)


def test_verdicts_use_the_rule_of_all_tables() -> None:
    study = load_study("practical").select(["fedavg*/fmnist"])

    def notes(*gains: float) -> str:
        return gains_of(study, list(gains), held_out=True)

    assert notes(0.05, 0.051, 0.049).startswith(
        "Better: FedAvg+DBE against FedAvg, FMNIST, before local training: +5.00"
    )
    assert notes(-0.05, -0.051, -0.049).startswith("Worse: FedAvg+DBE")
    assert notes(0.05, 0.0, 0.01).startswith("No verdict (not significant): FedAvg+DBE")
    assert notes(0.05, 0.05, 0.05).startswith("No verdict (not significant): FedAvg+DBE")


def test_published_best_rounds_have_no_verdict() -> None:
    """The paper's protocol chooses them on test data."""
    study = load_study("practical").select(["fedavg*/fmnist"])
    words = (
        "No verdict (best rounds chosen on test data): FedAvg+DBE against FedAvg, FMNIST, before local "
        "training: +5.00 ± 0.25."
    )
    assert gains_of(study, [0.05, 0.051, 0.049], held_out=False).startswith(words)
    two = gains_of(study, [0.05, 0.051, 0.049], trials=2, held_out=True)
    assert two.startswith("No verdict (fewer than 3 pairs): FedAvg+DBE")


def test_trials_of_unequal_rounds_are_not_compared() -> None:
    study = load_study("practical").select(["fedavg*/fmnist"])

    def curve(spec: RunSpec) -> RunDocument:
        return document(spec.method, [0.1, 0.8 + 0.01 * spec.seed] + [0.9] * ("dbe" in spec.method))

    table = reproduce.compare_with_paper(study, by_hand(study, curve))
    assert not any("FedAvg+DBE against FedAvg" in note for note in table.notes)


def test_derived_columns_are_paired_with_the_plain_method() -> None:
    study = load_study("personalized-mr").select(["Ditto+MR"])
    curves = {"ditto": [0.30, 0.40, 0.50], "ditto+mr": [0.31, 0.42, 0.53]}
    plans = by_hand(study, lambda cell: document(cell.method, [curves[cell.method][cell.seed]]))
    cell = reproduce.compare_with_paper(study, plans).find_cell("Ditto+MR", "improvement")
    assert cell
    assert cell.ours
    assert cell.ours.mean == pytest.approx(2.0)
    assert cell.theirs == 10.67


def test_marks_of_fewer_trials_divergence_and_other_data() -> None:
    study = load_study("ablation", data="fmnist").select(["FedAvg/CNN"])

    def curve(spec: RunSpec) -> RunDocument | None:
        return document(spec.method, [0.1, 0.5]) if spec.seed < 2 else None

    plans = by_hand(study, curve)
    first = next(iter(plans.values())).document
    assert first
    first["diverged"] = {"round": 2, "client": 0, "what": "loss", "value": "nan"}
    cell = reproduce.compare_with_paper(study, plans).find_cell("FedAvg", "CNN")
    assert cell
    assert cell.marks == (
        "fmnist instead of tiny_imagenet",
        "1 round of up to 2000",
        "a trial diverged after round 1, and is not counted",
        "1 of 3 trials",
    )
    assert cell.ours
    assert cell.ours.n == 1
    assert cell.theirs == 19.46
    assert cell.difference is None  # of other data


def test_run_that_stopped_by_the_published_rule_has_no_mark() -> None:
    study = load_study("practical", trials=1).select(["fedavg/fmnist"])
    cell = reproduce.compare_with_paper(
        study, by_hand(study, lambda cell: document(cell.method, [0.1, 0.5] + [0.4] * 101))
    ).find_cell("FedAvg", "FMNIST")
    assert cell
    assert cell.marks == ()


def test_fedbabu_value_is_after_fine_tuning() -> None:
    study = load_study("practical", trials=1).select(["fedbabu/fmnist"])

    def curve(spec: RunSpec) -> RunDocument:
        run = document(spec.method, [0.1, 0.5])
        assert run["last"]
        run["last"]["adapted"] = {"weighted": 0.9, "mean": 0.9, "worst_tenth": 0.9, "std": 0.0}
        return run

    cell = reproduce.compare_with_paper(study, by_hand(study, curve)).find_cell("FedBABU", "FMNIST")
    assert cell
    assert cell.ours
    assert cell.ours.mean == pytest.approx(90)


def test_a_table_fits_in_a_narrow_terminal() -> None:
    study = load_study("practical")
    table = reproduce.compare_with_paper(
        study, by_hand(study, lambda cell: document(cell.method, [0.1, 0.5]))
    )
    lines = text_of(table, 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert sum("FedAvg+DBE" in line for line in lines) >= 2  # in blocks


def test_all_formats_have_the_same_numbers() -> None:
    study = load_study("practical", trials=1).select(["fedavg/fmnist", "apple/cifar100"])
    table = reproduce.compare_with_paper(
        study, by_hand(study, lambda c: document(c.method, [0.1, 0.85]) if c.method == "fedavg" else None)
    )
    markdown = render_paper_table(table, "markdown")
    assert "| FedAvg | before 85.00 a; paper 85.85, -0.85 |  |" in markdown
    assert "| APPLE |  | not run (53.22) |" in markdown
    records = json.loads(render_paper_table(table, "json"))
    assert records[1] | {"difference": 0} == {
        "table": "practical", "row": "FedAvg", "column": "FMNIST", "ours": 85.0, "half_width": None,
        "moment": "before", "gain": None, "after": None, "gain_after": None,
        "trials": 1, "paper": 85.85, "difference": 0, "marks": "1 round of up to 2000",
    }  # fmt: skip
    assert render_paper_table(table, "csv").splitlines()[0].startswith("table,row,column,ours")


def test_runs_of_feddbe_run_are_recognized(shell: Shell) -> None:
    """As they would be begun by hand, with other words for the same configuration, and fewer rounds."""
    options = "--data digits --model cnn_small --clients 10 --variant official --metrics accuracy"
    assert shell(f"run fedavg+dbe {options} --rounds 2 --patience 100 --out mine/any-name")[0] == 0
    code, out, err = shell("reproduce ablation --scale small --only +DBE/CNN --out mine --dry-run")
    assert code == 0
    assert "would run: mine/any-name" in err
    assert "2 rounds of up to 20" in out
    code, out, err = shell("reproduce ablation --scale small --only +DBE/CNN --out mine --rounds 2 --dry-run")
    assert "nothing is missing" in err


def test_reproduce_a_part_of_a_table(shell: Shell) -> None:
    """Another table that needs the same runs runs nothing, and shows the same numbers."""
    words = "reproduce {} --scale small --rounds 2 --out here"
    code, out, err = shell(words.format("convergence"))
    assert code == 0
    assert "2 of 2: digits-" in err
    assert "here/convergence-1/convergence-fmnist.png" in out
    runs = sorted(path.name for path in Path("here").glob("digits-*"))
    assert len(runs) == 2
    code, out, err = shell("reproduce practical --scale small --rounds 2 --out here --only FedAvg*/FMNIST")
    assert (code, err) == (0, "")
    assert sorted(path.name for path in Path("here").glob("digits-*")) == runs
    assert "digits instead of fmnist, cnn_small instead of cnn" in " ".join(out.split())
    best = [feddbe.load_run(Path("here") / name)["best"] for name in runs]
    for entry in best:
        assert entry
        assert entry["accuracy"]
        assert re.search(rf"before {100 * entry['accuracy']['weighted']:.2f}( \(.*\))? a,b", out)


def test_mdl_is_from_the_best_round_before_local_training() -> None:
    run = document("fedavg", [0.1, 0.9, 0.5])

    def measured(round: int, value: float, **more: Any) -> Any:
        about = {"round": round, "analysis": "mdl", "layer": "z_g", "moment": "before", "quick": False}
        return {**about, "on": "all", "per_client": False, "overall": {"value": value}, **more}

    run["analyses"] = [
        measured(2, 1.0), measured(1, 2.0, layer="z"), measured(1, 3.0, moment="after"),
        measured(1, 4.0, per_client=True), measured(1, 7.0, on="own"),
        measured(1, 5.0, quick=True), measured(1, 6.0),
    ]  # fmt: skip
    assert paper.read_value("mdl@z_g", run) == 6.0
    assert paper.read_value("mdl@z", run) == 2.0
    assert paper.read_value("mdl@conv1", run) is None
    study = load_study("ablation", trials=1).select(["FedAvg/MDL CNN"])
    run["analyses"] = run["analyses"][:-1]
    cell = reproduce.compare_with_paper(study, by_hand(study, lambda cell: run)).find_cell(
        "FedAvg", "MDL CNN"
    )
    assert cell
    assert cell.ours
    assert (cell.ours.mean, cell.theirs) == (5.0, 3844)
    assert "quick MDL" in cell.marks
    run["analyses"] = []
    cell = reproduce.compare_with_paper(study, by_hand(study, lambda cell: run)).find_cell(
        "FedAvg", "MDL CNN"
    )
    assert cell
    assert cell.status == "not measured"


def test_all_ends_with_a_report(shell: Shell) -> None:
    code, out, _ = shell("reproduce convergence --all --scale small --rounds 1 --only 'FedAvg' --out here")
    assert code == 0
    assert out.endswith("report  here/report.html\n")
    assert "digits-fedavg-seed0" in Path("here/report.html").read_text(encoding="utf-8")
    shell("reproduce practical --all --scale small --rounds 1 --only 'FedAvg/FMNIST' --out here")
    page = Path("here/report.html").read_text(encoding="utf-8")
    assert '"heading":"practical: Personalized methods, practical setting"' in page
    assert re.search(r'"text":"before \d+\.\d\d [a-z,]+; after \d+\.\d\d; paper 85.85"', page), (
        "ours and the paper's"
    )
    line = "feddbe reproduce practical --scale=small --rounds=1 --only=FedAvg/FMNIST --out here --dry-run"
    assert line in page
    assert re.search(r"FedAvg +before \d+\.\d\d a", shell(line.removeprefix("feddbe "))[1]), (
        "it prints the table"
    )


def test_representations_are_measured_where_a_table_or_figure_needs_them(shell: Shell) -> None:
    code, out, err = shell("reproduce ablation --scale small --only 'FedAvg/MDL CNN' --rounds 1 --out here")
    words = " ".join(out.split())
    assert (code, "not measured" in err) == (0, False)
    assert re.search(r"FedAvg \d+ a,b,c 3844", words), "a number of nats, and the paper's"
    assert "b: 1 round of up to 20. c: quick MDL." in words
    code, out, _ = shell("reproduce tsne --scale small --only FedAvg --rounds 1 --out here")
    assert code == 0
    assert Path("here/tsne-1/tsne-fmnist.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("scale", "quick"), [("--data digits28.npz", False), ("--scale small", True)])
def test_only_the_small_scale_measures_the_quick_mdl(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, scale: str, quick: bool
) -> None:
    """Whatever the data is called. The full measure takes minutes, so it is only seen to be asked for."""
    images = np.zeros((1200, 1, 28, 28), np.float32)
    np.savez("digits28.npz", x=images, y=np.arange(1200) % 10)
    quick_flags: list[bool] = []
    monkeypatch.setattr(
        "feddbe.runs.analysis.run_analyses", lambda _, question, **__: quick_flags.append(question.quick)
    )
    words = f"reproduce ablation {scale} --trials 1 --only 'FedAvg/MDL CNN' --rounds 1 --out here"
    assert shell(words).code == 0
    assert quick_flags == [quick]


def test_missing_data_is_noted_and_the_table_is_complete(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDDBE_DATA", str(Path.cwd()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path.cwd()))
    code, out, err = shell("reproduce har --trials 1 --only FedAvg --out here --dry-run")
    assert (code, err) == (0, "nothing is missing\n")
    assert "no data" in out
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("error", "state"),
    [(DataMissingError("x"), "no data"), (InvalidInputError("run 'feddbe data get har'"), "refused")],
)
def test_missing_data_status_does_not_depend_on_the_message(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, error: InvalidInputError, state: str
) -> None:
    def fail(data_dir: Path | None) -> None:
        raise error

    monkeypatch.setattr("feddbe.data.builtin.har.load", fail)
    out = shell("reproduce har --trials 1 --only FedAvg --out here --dry-run").out
    assert state in out
    assert ("Refused: run 'feddbe data get har'." in out) == (state == "refused")


def test_list_has_counts_and_estimates(shell: Shell) -> None:
    code, out, _ = shell("reproduce ablation convergence --list --scale small --rounds 1 --out here")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("ablation"))
    assert re.search(r" 4 +0 +0:00:0\d", line)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("reproduce", "no experiment given"),
        ("reproduce ablatoin", "did you mean 'ablation'"),
        ("reproduce har --scale tiny", "unknown scale 'tiny'"),
        ("reproduce har --trials 0", "trials = 0; allowed: a whole number from 1 to 1000"),
        ("reproduce har --rounds 0", "rounds = 0; allowed: a whole number >= 1"),
        ("reproduce har --format word", "unknown format 'word'"),
        ("reproduce har --only fedsgd", "unknown cell of har 'fedsgd'"),
        ("reproduce har --scale small --data fmnist", "--scale small has its own data"),
    ],
)
def test_bad_input_is_one_line(shell: Shell, words: str, message: str) -> None:
    code, out, err = shell(words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_missing_figures_have_a_reason(tmp_path: Path) -> None:
    study = load_study("convergence", trials=1).select(["TINY"])
    figures = draw_study(study, by_hand(study, lambda cell: None), tmp_path)
    assert figures == {"TINY": "not run"}
