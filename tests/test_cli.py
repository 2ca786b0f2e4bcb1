"""The command line in this process: what it takes, what it prints, and one line for every kind of mistake."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

import feddbe
from feddbe import cli, data, models
from feddbe.callbacks.base import Callback
from feddbe.config.parameters import describe_signature
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.registry import METHODS
from feddbe.results.document import RoundResult
from feddbe.runs.store import RUN_FILE, RunStore
from tests.progress import LINE, without_progress

SMALL = "--clients 3 --partition iid --model mlp --engine serial"


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Shell:
    """Types `feddbe ...` in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: str) -> Result:
        self._capsys.readouterr()
        code = cli.main(shlex.split(line))
        out, err = self._capsys.readouterr()
        return Result(code, out, without_progress(err))

    def json(self, line: str) -> dict[str, Any]:
        code, out, err = self(f"{line} --json")
        assert (code, err) == (0, "")
        document: dict[str, Any] = json.loads(out)
        return document


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return Shell(capsys)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


# Mistakes


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Good and bad files for the table below."""
    rng = np.random.RandomState(0)
    x = rng.randint(0, 256, (60, 8, 8)).astype(np.uint8)
    y = np.arange(60) % 3
    floats = rng.standard_normal((60, 5)).astype(np.float32)

    def save(name: str, **arrays: Any) -> bytes:
        np.savez(tmp_path / name, **arrays)
        return (tmp_path / name).read_bytes()

    whole = save("good.npz", x=x, y=y)
    (tmp_path / "cut_short.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "flipped.npz").write_bytes(whole[:500] + bytes(byte ^ 255 for byte in whole[500:]))
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "nothing.npz").write_bytes(b"")
    save("without_y.npz", x=x)
    save("pickled.npz", x=np.array([{}] * 60), y=y)
    save("too_few_labels.npz", x=x, y=y[:-1])
    save("codes.npz", x=x.astype(np.int64), y=y)
    save("each.npz", x=x, y=np.arange(60) * 3)
    save("halves.npz", x=x, y=y + 0.5)
    save("nan.npz", x=np.where(floats == floats[11, 2], np.nan, floats), y=y)
    save("numbers.npz", x=np.arange(60) * np.ones((60, 1), np.int64), y=y)
    rows = np.arange(60)
    save("fits.npz", train_0=rows[:20], test_0=rows[20:30], train_1=rows[30:50], test_1=rows[50:])
    save("outside.npz", train_0=rows, test_0=np.array([4000]))
    save("twice.npz", train_0=rows[:20], test_0=rows[19:])
    save("gap.npz", train_0=rows[:20], test_0=rows[20:30], train_2=rows[30:50], test_2=rows[50:])
    (tmp_path / "unknown_key.toml").write_text('method = "fedavg"\nroundz = 3\n')
    (tmp_path / "wrong_value.toml").write_text('method = "fedavg"\nrounds = "many"\n')
    (tmp_path / "wrong_kind.toml").write_text('method = "fedavg"\nresume = 1\n')
    (tmp_path / "syntax.toml").write_text('method = "fedavg\n')
    (tmp_path / "latin.toml").write_bytes(b'method = "f\xe9davg"\n')
    (tmp_path / "no_method.toml").write_text("rounds = 3\n")
    (tmp_path / "two.toml").write_text('method = ["fedavg", "fedavg+mr"]\n')
    (tmp_path / "a_file").write_text("")
    return tmp_path


MISTAKES = {
    # methods and their options
    "run fedagv": ["unknown method 'fedagv'", "did you mean 'fedavg'?", "allowed: "],
    "run ''": ["unknown method ''", "fedavg"],
    "run fedavg+dbee": ["unknown add-on 'dbee'", "did you mean 'dbe'?", "dbe, ft, mr, prbm"],
    "run fedavg+": ["unknown add-on ''", "dbe, ft, mr, prbm"],
    "run fedavg+dbe+mr": ["'fedavg+dbe+mr' has mr twice"],
    "run fedavg+prbm+prbm": ["has prbm twice"],
    "run 'fedavg+dbe(kapa=3)'": ["'kapa'", "did you mean 'kappa'?", "mu"],
    "run 'fedavg(kappa=3)'": ["option of fedavg 'kappa'", "weights"],
    "run 'fedavg+dbe(kappa)'": ["'kappa'", "kappa=5"],
    "run 'fedavg+dbe(kappa=3'": ["cannot read method 'fedavg+dbe(kappa=3'"],
    "run 'fedavg+dbe(kappa=-1)'": ["kappa = -1", ">= 0"],
    "run 'fedavg+dbe(kappa=nan)'": ["kappa = nan", ">= 0"],
    "run 'fedavg+dbe(kappa=much)'": ["kappa = 'much'", ">= 0"],
    "run 'fedavg+dbe(mu=1.5)'": ["mu = 1.5", ">= 0 and <= 1"],
    "run 'fedavg+dbe(mu=-0.1)'": ["mu = -0.1", ">= 0 and <= 1"],
    "run 'fedavg+mr(q=2)'": ["q = 2", ">= 0 and <= 1"],
    "run 'fedavg+mr(s=-1)'": ["s = -1", ">= 0"],
    "run 'fedavg+mr(init_epochs=0)'": ["init_epochs = 0", "a whole number >= 1"],
    "run 'fedavg+mr(init_mean=exct)'": ["init_mean 'exct'", "did you mean 'exact'?", "debiased, "],
    "run 'fedavg+mr(mr_half=2)'": ["mr_half = 2", "true, false"],
    "run 'fedavg+prbm(prbm_lr=-1)'": ["prbm_lr = -1", ">= 0"],
    "compare fedavg fedavg+dbe fedavg": ["the same method twice", "fedavg+dbe"],
    "compare fedavg fedavg+dbf": ["unknown add-on 'dbf'", "dbe, ft, mr, prbm"],
    "run fedavg fedavg+mr": ["run takes one method, not 2", "compare"],
    "run two.toml": ["run takes one method, not 2", "compare"],
    "run": ["no method given", "feddbe methods"],
    "compare": ["no method given", "feddbe methods"],
    # numbers
    "run fedavg --rounds -1": ["rounds = -1", "a whole number >= 0"],
    "run fedavg --rounds 1.5": ["rounds = 1.5", "a whole number >= 0"],
    "run fedavg --rounds many": ["rounds = 'many'", "a whole number >= 0"],
    "run fedavg --patience 0": ["patience = 0", "a whole number >= 1"],
    "run fedavg --local-epochs 0": ["epochs = 0", "a whole number >= 1"],
    "run fedavg --batch-size 0": ["batch = 0", "a whole number >= 1"],
    "run fedavg --batch-size ten": ["batch = 'ten'", "a whole number >= 1"],
    "run fedavg --lr 0": ["lr = 0", "a number > 0"],
    "run fedavg --lr -0.1": ["lr = -0.1", "a number > 0"],
    "run fedavg --lr nan": ["lr = nan", "a number > 0"],
    "run fedavg --lr inf": ["lr = inf", "a number > 0"],
    "run fedavg --lr fast": ["lr = 'fast'", "a number > 0"],
    "run fedavg --participation 0": ["join = 0", "> 0 and <= 1"],
    "run fedavg --participation 1.01": ["join = 1.01", "> 0 and <= 1"],
    "run fedavg --participation half": ["join = 'half'", "> 0 and <= 1"],
    "run fedavg --seed -1": ["seed = -1", ">= 0"],
    "run fedavg --partition-seed -1": ["partition_seed = -1", ">= 0"],
    "run fedavg --partition-seed 4294967296": ["partition seed 4294967296", "0..4294967295"],
    "run fedavg --clients 0": ["clients = 0", "a whole number >= 1"],
    "run fedavg --clients few": ["clients = 'few'", "a whole number >= 1"],
    "run fedavg --clients 1798": ["clients = 1798", "1797 samples", "1..898"],
    # names
    "run fedavg --data dgits": ["unknown data set 'dgits'", "did you mean 'digits'?", "FILE.npz", "fmnist"],
    "run fedavg --model cnn_smal": ["unknown model 'cnn_smal'", "did you mean 'cnn_small'?", "mlp"],
    "run fedavg --model cnn": ["'cnn'", "16x16", "(1, 8, 8)", "cnn_small"],
    "run fedavg --cut cnv1": ["unknown cut 'cnv1'", "did you mean 'conv1'?", "fc1"],
    "run fedavg --engine pol": [
        "unknown engine 'pol'", "did you mean 'pool'?",
        "auto, pool, pool(workers=N), ray, ray(address=HOST:PORT), serial",
    ],
    "run fedavg --engine pool:2": ["unknown engine 'pool:2'", "pool(workers=N)"],
    "run fedavg --engine 'pool(workers=0)'": ["pool workers = 0", "a whole number >= 1"],
    "run fedavg --engine 'pool(wrkers=2)'": ["option of pool 'wrkers'", "did you mean 'workers'?"],
    "run fedavg --engine 'ray(cpus=0)'": ["ray cpus = 0", "a whole number >= 1"],
    "run fedavg --engine 'ray(address=h:1,cpus=2)'": ["ray cpus = 2 with an address", "the nodes"],
    "run fedavg --engine 'serial(workers=2)'": ["option of serial 'workers'", "allowed: (none)"],
    "run fedavg --data 'hra(layout=scrambled)'": ["unknown data set 'hra'", "did you mean 'har'?"],
    "run fedavg --data 'digits(layout=scrambled)'": ["option of digits 'layout'", "allowed: (none)"],
    "run fedavg --data 'har(lay=scrambled)'": ["option of har 'lay'", "did you mean 'layout'?"],
    "run fedavg --data 'har(layout=scrumbled)'": ["har layout 'scrumbled'", "channels, scrambled"],
    "run fedavg --data 'nowhere(1)'": ["unknown data set 'nowhere'"],
    "run fedavg --model 'mlp(rep=linear)'": ["option of mlp 'rep'", "allowed: (none)"],
    "run fedavg --model 'fasttext(rep=lin)'": ["fasttext rep 'lin'", "linear, logsoftmax"],
    "run fedavg --model 'fasttext(rep)'": ["cannot read option 'rep'", "kappa=5"],
    "run fedavg --eval al": ["eval = 'al'", "all, cohort, sample:M"],
    "run fedavg --eval sample:0": ["eval = 'sample:0'", "M >= 1"],
    "run fedavg --variant papr": ["'papr'", "did you mean 'paper'?", "default, official, paper"],
    "run fedavg --bn-buffers lokal": ["'lokal'", "did you mean 'local'?", "average, local"],
    "run fedavg --short-batch kep": ["'kep'", "did you mean 'keep'?", "keep, refuse"],
    "run fedavg --partition idd": ["unknown partition 'idd'", "did you mean 'iid'?", "dirichlet:BETA"],
    "run fedavg --partition iid:3": ["'iid:3'", "takes no value"],
    "run fedavg --partition dirichlet": ["'dirichlet'", "a number above 0"],
    "run fedavg --partition dirichlet:-1": ["'-1'", "a number above 0"],
    "run fedavg --partition pathological:0": ["'0'", "a whole number from 1 on"],
    "run fedavg --partition pathological:11": ["pathological:11", "1..10"],
    "run fedavg --partition natural": ["'natural'", "client column", "iid"],
    # the words of the command line
    "rum fedavg": ["unknown command 'rum'", "did you mean 'run'?", "check, compare, data, "],
    "data shwo digits": ["unknown command 'shwo'", "did you mean 'show'?", "get, list, show"],
    "run fedavg --roundz 3": ["unknown option '--roundz'", "did you mean '--rounds'?", "--partition-seed"],
    "compare fedavg --jsn": ["unknown option '--jsn'", "did you mean '--json'?"],
    "data show digits --rounds 3": ["unknown option '--rounds'", "--partition,"],
    "run fedavg --rounds": ["'--rounds'", "requires an argument"],
    "show": ["'RUN...'", "feddbe show --help"],
    "show one two": ["'one' is not the folder of a run"],
    "show nowhere --format html": ["unknown format 'html'", "csv, json, latex, markdown"],
    "show nowhere": ["'nowhere'", "runs/"],
    "show nowhere --moment later": ["unknown moment 'later'", "adapted, after, before, published"],
    "data get dgits": ["unknown data set 'dgits'", "did you mean 'digits'?", "fmnist"],
    "data show dgits": ["unknown data set 'dgits'", "did you mean 'digits'?"],
    "data show digits --plot bubbles.txt --save split.npz": ["'.txt'", ".pdf, .png, .svg"],
    "data show digits --save nowhere/split.npz": ["nowhere/split.npz", "No such file or directory"],
    # files
    "run fedavg --data missing.npz": ["missing.npz", "no file"],
    "run fedavg --data cut_short.npz": ["cut_short.npz", "numpy.savez"],
    "run fedavg --data flipped.npz": ["flipped.npz", "numpy.savez"],
    "run fedavg --data text.npz": ["text.npz", "not an .npz file"],
    "run fedavg --data nothing.npz": ["nothing.npz", "not an .npz file"],
    "run fedavg --data without_y.npz": ["without_y.npz", "no array 'y'", "it has: x"],
    "run fedavg --data pickled.npz": ["pickled.npz", "pickled", "plain arrays"],
    "run fedavg --data too_few_labels.npz": ["(59,)", "60 samples"],
    "run fedavg --data codes.npz": ["int64", "?words="],
    "run fedavg --data each.npz": ["another label in each of 60 rows"],
    "run fedavg --shift turn:3": ["unknown shift 'turn'", "rotate:S"],
    "run fedavg --data good.npz?resize=8": ["'?resize=' does not apply to 'good.npz'", "?words="],
    "run fedavg --data halves.npz": ["the label 0.5", "whole numbers"],
    "run fedavg --data nan.npz": ["nan.npz", "NaN", "row 11"],
    "run fedavg --data numbers.npz": ["numbers.npz", "int64", "uint8"],
    "run fedavg --data good.npz --clients 61 --partition iid": ["clients = 61", "60 samples", "1..30"],
    "run fedavg --data good.npz --partition dirichlet:0.01 --clients 9": ["10000 draws", "9 clients"],
    "run fedavg --data good.npz --split outside.npz": ["outside.npz", "index 4000", "0..59"],
    "run fedavg --data good.npz --split twice.npz": ["twice.npz", "index 19 twice"],
    "run fedavg --data good.npz --split gap.npz": ["gap.npz", "'train_1'", "without a gap"],
    "run fedavg --data good.npz --split good.npz": ["good.npz", "'train_0'"],
    "run fedavg --data good.npz --split cut_short.npz": ["cut_short.npz", "numpy.savez"],
    "run fedavg --data good.npz --split fits.npz --clients 3": ["clients = 3", "'fits.npz' has 2"],
    "run fedavg --data good.npz --split fits.npz --partition iid": ["--split and --partition"],
    "run missing.toml": ["missing.toml", "No such file or directory"],
    "run unknown_key.toml": ["unknown_key.toml", "'roundz'", "did you mean 'rounds'?", "partition_seed"],
    "run wrong_value.toml": ["rounds = 'many'", "a whole number >= 0"],
    "run wrong_kind.toml": ["resume = 1", "true, false"],
    "run syntax.toml": ["syntax.toml", "TOML", "line 1"],
    "run latin.toml": ["latin.toml", "TOML"],
    "run no_method.toml": ["no method given", "feddbe methods"],
    "run fedavg --out a_file": ["'a_file'", "File exists"],
    "run fedavg --out a_file/run": ["'a_file/run'", "Not a directory"],
    "run fedavg --resume": ["--resume", "'runs'", "without --resume"],
    "run fedavg --resume --out new": ["--resume", "'new'", "without --resume"],
    "compare fedavg fedavg+mr --resume": ["--resume", "'runs'", "without --resume"],
}  # fmt: skip


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(line: str, shell: Shell, files: Path) -> None:
    before = tree(files)
    code, out, err = shell(line)
    assert (code, out) == (2, "")
    assert err.startswith("feddbe: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for words in MISTAKES[line]:
        assert words in err
    assert tree(files) == before


def test_an_add_on_that_a_method_does_not_take(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    class Proud(FedAvg):
        name: ClassVar[str] = "proud"
        refuses: ClassVar[dict[str, str]] = {"mr": "it has no common representation"}

    monkeypatch.setitem(METHODS, "proud", Proud)
    code, out, err = shell("run proud+dbe")
    assert (code, out) == (2, "")
    assert err == "feddbe: proud does not support +mr: it has no common representation\n"
    assert shell.json(f"run proud+dbe --force --rounds 0 {SMALL}")["method"] == "proud+dbe"


def test_a_line_break_in_a_value_does_not_make_two_lines(shell: Shell) -> None:
    code, _, err = shell("run 'fed\navg'")
    assert code == 2
    assert err.count("\n") == 1


def test_another_configuration_in_the_folder_of_a_run(shell: Shell, tmp_path: Path) -> None:
    assert shell(f"run 'fedavg+mr(kappa=2)' --rounds 1 {SMALL} --out one")[0] == 0
    before = tree(tmp_path)
    for line, words in {
        f"run 'fedavg+mr(kappa=3)' {SMALL} --seed 5": ["mr kappa 2.0 there, 3.0 now", "seed 0 there, 5 now"],
        f"run fedavg {SMALL} --partition-seed 2 --resume": [
            "method fedavg+mr(kappa=2) there, fedavg now",
            "partition_seed 1 there, 2 now",
        ],
        f"run 'fedavg+mr(kappa=2)' {SMALL}": ["contains this run already", "--resume", "--out"],
    }.items():
        code, out, err = shell(f"{line} --out one")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "'one' holds" in err
        assert "rounds" not in err  # in which they may differ
        assert "method_options" not in err
        for word in words:
            assert word in err
    assert tree(tmp_path) == before


def test_divergence_names_client_round_and_value(shell: Shell) -> None:
    code, out, err = shell(
        "run fedavg --lr 1e6 --rounds 3 --clients 3 --partition iid --engine serial --out wild"
    )
    assert (code, err.count("\n")) == (3, 1)
    for word in ("fedavg", "client 0", "round 1", "nan", "feddbe show wild"):
        assert word in err
    assert "(diverged in round 1)" in " ".join(out.split())
    document = shell.json("show wild")
    assert [entry["round"] for entry in document["rounds"]] == [0]
    assert document["diverged"] == {"round": 1, "client": 0, "what": "loss", "value": "nan"}
    assert shell("show wild").out.endswith("fedavg: diverged in round 1\n")
    assert shell.json("runs wild")["runs"][0]["state"] == "diverged in round 1"


def test_a_run_that_diverged_diverges_again_when_it_is_resumed(shell: Shell) -> None:
    command = "--lr 1e6 --rounds 3 --clients 3 --partition iid --engine serial --out wild"
    first = shell(f"run fedavg {command}")
    again = shell("run --resume --out wild")
    assert (again.code, again.out) == (3, first.out)
    tried, error = again.err.splitlines()
    assert tried == "feddbe: fedavg diverged in round 1, which is tried once more"
    assert f"{error}\n" == first.err


def test_a_method_that_diverges_does_not_keep_the_others_from_running(shell: Shell) -> None:
    code, out, err = shell(f"compare 'fedavg+prbm(prbm_lr=1e20)' fedavg --rounds 2 {SMALL} --out both")
    assert out.count("best @2") == 1, "the other one's results"
    assert Path("both/curves.png").is_file()
    assert code == 3
    assert "fedavg+prbm(prbm_lr=1e20): training diverged" in err
    found = shell.json("show both")["runs"]
    assert [run["method"] for run in found] == ["fedavg+prbm(prbm_lr=1e20)", "fedavg"], "as it was typed"
    assert [run["diverged"] and run["diverged"]["round"] for run in found] == [1, None]
    runs = {run["method"]: run for run in found}
    assert len(runs["fedavg"]["rounds"]) == 3
    assert runs["fedavg"]["last"]["round"] == 2
    assert len(runs["fedavg+prbm(prbm_lr=1e20)"]["rounds"]) < 3


# What it prints


def test_a_line_per_round_where_there_is_no_terminal(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each round, with the accuracy of the one before; then the last one's own."""
    words = shlex.split(f"run fedavg+dbe --rounds 3 {SMALL} --json --out three")
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    said = [line.groupdict() for line in LINE.finditer(err)]
    assert without_progress(err) == ""
    assert [(line["done"], line["rounds"], line["of"]) for line in said] == [
        ("1", "3", "0"), ("2", "3", "1"), ("3", "3", "2"), ("3", "3", "3"),
    ]  # fmt: skip
    accuracies = [entry["accuracy"]["weighted"] for entry in json.loads(out)["rounds"]]
    assert [line["accuracy"] for line in said] == [f"{100 * accuracy:.2f}" for accuracy in accuracies]
    assert [line["left"] is None for line in said] == [False, False, True, True]
    assert cli.main([*words[:-1], "quiet", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_run_is_continued_by_its_folder_alone(shell: Shell) -> None:
    shell(f"run 'fedavg+dbe(kappa=3)' --rounds 1 {SMALL} --lr 0.05 --seed 2 --json --out one")
    whole = shell.json(f"run 'fedavg+dbe(kappa=3)' --rounds 2 {SMALL} --lr 0.05 --seed 2 --out two")
    code, out, err = shell("run --resume --out one --rounds 2")
    assert (code, err) == (0, "")
    assert "fedavg+dbe" in out, "a table: --json was of the first command"
    assert shell.json("show one")["server_sha256"] == whole["server_sha256"]
    code, out, err = shell("run --resume --out one --lr 0.5")
    assert (code, out) == (2, "")
    assert "'one' contains a run with another configuration (lr 0.05 in the run, 0.5 now)" in err
    assert "lr" in shell("run --resume --out one --dry-run").out


def test_results_in_every_format(shell: Shell) -> None:
    shell(f"compare fedavg+dbe fedavg --rounds 1 {SMALL} --out both")
    shell(f"run fedavg --rounds 1 {SMALL} --seed 1 --out other")
    found = list(csv.DictReader(io.StringIO(shell("show other both --format csv").out)))
    assert [row["run"] for row in found] == ["fedavg, seed 1", "fedavg+dbe", "fedavg, seed 0"], "as typed"
    documents = shell.json("show other both")["runs"]
    for row, document in zip(found, documents, strict=True):
        assert float(row["best_weighted"]) == document["best"]["accuracy"]["weighted"]
        assert row["folder"] == document["folder"]
    assert json.loads(shell("show other both --format json").out)[1]["method"] == "fedavg+dbe"
    assert "| fedavg | 2 | " in shell("show other both --format markdown").out, "two seeds"
    percent = f"{100 * documents[1]['best']['accuracy']['worst_tenth']:.2f}"
    assert f" | {percent} | " in shell("show both --format markdown").out
    assert f" & {percent} & " in shell("show both --format latex").out


def test_each_clients_accuracy(shell: Shell) -> None:
    shell(f"compare fedavg+dbe fedavg --rounds 1 {SMALL} --out both")
    rows = list(csv.DictReader(io.StringIO(shell("show both --clients --format csv").out)))
    assert [(row["method"], row["client"]) for row in rows] == [
        (method, str(client)) for method in ("fedavg+dbe", "fedavg") for client in range(3)
    ]
    assert shell.json("show both --clients")["clients"][2]["best"] == float(rows[2]["best"])
    shown = shell("show both --clients").out
    assert f"{100 * float(rows[2]['best']):.2f}" in shown
    assert shell("show both/fedavg --clients --format markdown").out.startswith(
        "| client | test samples | best @"
    )
    store = RunStore.open(Path("both/fedavg"))
    store.set_meta("client_names", ["Ulm", "Köln", "Jena"])
    store.close()
    assert [row["name"] for row in shell.json("show both/fedavg --clients")["clients"]] == [
        "Ulm", "Köln", "Jena",
    ]  # fmt: skip
    assert "Köln" in shell("show both/fedavg --clients").out


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_curves_as_a_picture(shell: Shell, suffix: str, start: bytes) -> None:
    shell(f"run fedavg --rounds 1 {SMALL} --out one")
    assert shell(f"show one --plot curves.{suffix}").out.endswith(f"curves  curves.{suffix}\n")
    assert Path(f"curves.{suffix}").read_bytes().startswith(start)


def test_the_table_the_pictures_and_the_folder(shell: Shell, tmp_path: Path) -> None:
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


def test_json_of_a_comparison_is_what_show_says_later(shell: Shell) -> None:
    document = shell.json(f"compare fedavg fedavg+dbe --rounds 1 {SMALL} --out pair")
    assert [run["method"] for run in document["runs"]] == ["fedavg", "fedavg+dbe"]
    assert document.keys() == {"runs"}
    for run in document["runs"]:
        assert run == shell.json(f"show '{run['folder']}'")
    assert document == shell.json("show pair")
    shown = shell("show pair").out
    assert shown.count("fedavg+dbe:") == 1
    assert "fedavg:" in shown


def test_json_has_its_hashes_in_lines_of_their_own(shell: Shell) -> None:
    """So that `diff <(... | grep sha256) <(... | grep sha256)` compares all of them."""
    code, out, _ = shell(f"run fedavg+dbe --rounds 1 {SMALL} --json")
    assert code == 0
    document = json.loads(out)
    found = "".join(line for line in out.splitlines() if "sha256" in line)
    assert len(document["clients_sha256"]) == 3
    for digest in (document["server_sha256"], *document["clients_sha256"].values()):
        assert digest in found


def test_options_of_a_file_then_the_command_line(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(
        'method = "fedavg+mr"\nclients = 3\npartition = "iid"\nmodel = "mlp"\nengine = "serial"\n'
        "rounds = 7\nlr = 0.2\nbatch = 9\npartition-seed = 3\n"
    )
    found = shell.json("run small.toml --lr 0.3 --eval cohort --rounds 1")
    wanted = {"lr": 0.3, "rounds": 1, "batch_size": 9, "partition_seed": 3, "eval": "cohort", "clients": 3}
    assert {key: found["config"][key] for key in wanted} == wanted
    assert found["method"] == "fedavg+mr"
    assert len(found["rounds"]) == 2
    (tmp_path / "two.toml").write_text('method = ["fedavg", "fedavg+mr"]\n')
    runs = shell.json(f"compare two.toml --rounds 0 {SMALL}")["runs"]
    assert [run["method"] for run in runs] == ["fedavg", "fedavg+mr"]


def test_a_dry_run_tells_what_would_be_run_and_writes_nothing(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text('clients = 3\npartition = "iid"\nbatch = 9\n')
    before = tree(tmp_path)
    line = "compare 'fedavg+mr(kappa=3)' local small.toml --local-epochs 2 --model mlp --dry-run"
    code, out, err = shell(line)
    assert (code, err) == (0, "")
    rows = [" ".join(row.split()) for row in out.splitlines()]
    for row in (
        "batch 9 small.toml", "epochs 2 given", "model mlp given", "rounds 40 data set digits",
        "join 1 general default", "mr kappa 3 given", "lr 0.1 model mlp", "fedavg+mr(kappa=3)", "local",
    ):  # fmt: skip
        assert rows.count(row) == 1
    for words in ("estimate: ", "trained by compiled; ", "its round in ms: training "):
        assert sum(row.startswith(words) for row in rows) == 2
    assert max(map(len, out.splitlines())) <= 110
    found = shell.json(line)["experiments"]
    assert [one["method"] for one in found] == ["fedavg+mr(kappa=3)", "local"]
    assert found[0]["settings"]["batch_size"] == {"value": 9, "from": "small.toml"}
    for one in found:
        assert one["estimate"]["seconds"] > one["estimate"]["seconds_per_round"] > 0
        assert one["estimate"]["memory_mb"] > 50
    assert tree(tmp_path) == before
    one = shell.json("run local small.toml --model mlp --local-epochs 2 --dry-run")
    assert one["config_hash"] == found[1]["config_hash"]


@pytest.mark.parametrize("command", ["", "run", "compare", "runs", "show", "methods", "data", "data show"])
@pytest.mark.parametrize("columns", [60, 80])
def test_help_fits(
    command: str, columns: int, shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = shell(f"{command} --help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: feddbe {command}".rstrip())
    assert max(map(len, out.splitlines())) <= columns
    assert "..." not in out.partition("\n")[2]  # nothing is cut
    assert tree(tmp_path) == {}


def test_help_names_defaults(shell: Shell) -> None:
    words = " ".join(shell("run --help").out.split())
    for part in (
        f"{', '.join(describe_signature(name, s.options) for name, s in data.BUILTIN_DATASETS.items())} [digits]",
        "[dirichlet:0.1, har natural, ag_news dirichlet:1]",
        "clients N [20]", "fasttext(rep=linear|logsoftmax)",
        "[100, digits 40]", "partition [0]",
        "[cnn 0.005, cnn_small 0.1, fasttext 0.5, har_cnn 0.1, mlp 0.1, resnet18 0.1",
        "default, paper, official [default]", "keep, refuse [keep]", "round [1.0]",
        "har(layout=channels|scrambled)",
        ", ".join(describe_signature(name, m.options) for name, m in models.MODELS.items()),
    ):  # fmt: skip
        assert part in words


def test_without_a_command_it_shows_help(shell: Shell) -> None:
    assert shell("") == shell("--help")
    assert shell("data") == shell("data --help")


def test_version(shell: Shell) -> None:
    code, out, _ = shell("--version")
    assert code == 0
    assert out.split()[0] == "feddbe"
    assert out.split()[1][0].isdigit()


@pytest.mark.parametrize("columns", [60, 80])
def test_methods_tells_every_parameter(columns: int, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = shell("methods")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= columns
    words = " ".join(out.split())
    described = {one["name"]: one for one in shell.json("methods")["methods"]}
    assert {"fedavg", "prbm", "mr", "dbe"} <= described.keys()
    assert "dbe" in described["fedavg"]["addons"]
    for one in described.values():
        assert one["name"] in words
        for parameter in one["parameters"]:
            assert f"{parameter['name']} {parameter['meaning']} {parameter['allowed']}; default" in words
    assert "default 50 for cnn; 1 for cnn_small, har_cnn, mlp, resnet18, own" in words
    assert [p["name"] for p in described["mr"]["parameters"]][:2] == ["kappa", "mu"]


def test_data_list_and_get(shell: Shell) -> None:
    rows = {row["name"]: row for row in shell.json("data list")["data"]}
    assert rows["digits"]["found"] == "in scikit-learn"
    assert rows.keys() >= {"digits", "fmnist"}
    out = shell("data list").out
    assert all(row["description"] in out for row in rows.values())
    assert shell("data get digits") == (0, "digits: in scikit-learn\n", "")


def test_data_show_saves_plots_and_reads_back(shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell("data show digits --clients 4 --partition iid --save mine.npz --plot mine.svg")
    assert (code, err) == (0, "")
    assert out.endswith("mine.npz\nmine.svg\n")
    assert "<svg" in (tmp_path / "mine.svg").read_text()
    made = shell.json("data show digits --clients 4 --partition iid")
    assert made.keys() == {"clients", "index_sha256"}
    assert made["index_sha256"].keys() == {"parts", "train", "test"}
    assert [client.keys() for client in made["clients"]] == [{"train", "test", "labels"}] * 4
    assert sum(client["train"] + client["test"] for client in made["clients"]) == 1797
    assert sum(sum(client["labels"]) for client in made["clients"]) == 1797
    again = shell.json("data show digits --split mine.npz")
    assert again["clients"] == made["clients"]
    assert again["index_sha256"] == {**made["index_sha256"], "parts": None}


# Runs that were cut off


class Impatient(Callback):
    """Presses Ctrl-C after some rounds of one method."""

    def __init__(self, method: str, after: int) -> None:
        self.method, self.after, self.name = method, after, ""

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.name = name

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        if self.name == self.method and done == self.after:
            raise KeyboardInterrupt


class Unwilling(Callback):
    """Presses Ctrl-C before anything is done."""

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        raise KeyboardInterrupt


OPTIONS: dict[str, Any] = {
    "clients": 3, "partition": "iid", "model": "mlp", "engine": "serial", "rounds": 3,
}  # fmt: skip


def started(methods: Sequence[str], after: int, **more: Any) -> None:
    """The comparison, stopped in its last method."""
    with pytest.raises(KeyboardInterrupt):
        feddbe.compare(methods, callback=Impatient(methods[-1], after), **OPTIONS, **more)


def same(a: list[RoundResult], b: list[RoundResult]) -> bool:
    """But for the time that they took."""
    return [{**entry, "seconds": 0} for entry in a] == [{**entry, "seconds": 0} for entry in b]


def test_a_run_whose_last_entry_was_never_evaluated(shell: Shell) -> None:
    started(["fedavg"], after=2, out="cut")
    document = shell.json("show cut")
    assert [entry["accuracy"] is None for entry in document["rounds"]] == [False, False, True]
    assert document["last"]["round"] == 1
    assert "last @1" in shell("show cut").out
    (row,) = shell.json("runs cut")["runs"]
    assert (row["name"], row["rounds"], row["state"]) == ("fedavg", 2, "3 wanted")
    assert "3 wanted" in shell("runs cut").out
    done = shell.json(f"run fedavg --rounds 3 {SMALL} --out cut/fedavg --resume")
    assert [entry["accuracy"] is None for entry in done["rounds"]] == [False] * 4
    assert shell.json("runs cut")["runs"][0]["state"] == "done"


def test_a_run_that_was_extended_and_stopped_at_once_is_not_done(shell: Shell) -> None:
    shell(f"run fedavg --rounds 1 {SMALL} --out longer")
    with pytest.raises(KeyboardInterrupt):
        feddbe.run("fedavg", **OPTIONS, out="longer", resume=True, callback=Unwilling())
    (row,) = shell.json("runs longer")["runs"]
    assert (row["rounds"], row["state"]) == (1, "3 wanted")


def test_compare_resume_goes_on_where_it_stopped(shell: Shell) -> None:
    """The finished method is not run again, the broken one goes on, the missing one starts."""
    whole = shell.json(f"compare fedavg fedavg+mr fedavg+dbe --rounds 3 {SMALL} --out whole")["runs"]
    started(["fedavg", "fedavg+mr"], after=1)
    first = feddbe.load("compare-digits-1/fedavg")
    other = feddbe.run("fedavg", **OPTIONS)  # the same configuration, but no part of the comparison
    begun_last(Path(other["folder"]))
    resumed = shell.json(f"compare fedavg fedavg+mr fedavg+dbe --rounds 3 {SMALL} --resume")["runs"]
    assert [Path(run["folder"]).parent for run in resumed] == [Path("runs/compare-digits-1")] * 3
    assert resumed[0]["rounds"] == first["rounds"]  # seconds too
    for mine, reference in zip(resumed, whole, strict=True):
        assert same(mine["rounds"], reference["rounds"])
        assert mine["server_sha256"] == reference["server_sha256"]
        assert mine["clients_sha256"] == reference["clients_sha256"]


def begun_last(folder: Path) -> None:
    """Tests are faster than the clock in a run's file."""
    store = RunStore.open(folder)
    store.set_meta("begun", "2999-01-01T00:00:00+00:00")
    store.close()


def test_resume_without_a_folder_takes_the_run_begun_last(shell: Shell) -> None:
    for _ in range(2):
        shell(f"run fedavg --rounds 1 {SMALL}")
    begun_last(Path("runs/digits-fedavg-1"))
    found = shell.json(f"run fedavg --rounds 2 {SMALL} --resume")
    assert found["folder"] == "runs/digits-fedavg-1"
    assert len(found["rounds"]) == 3
    assert found["config"]["rounds"] == 2


def test_runs_survives_folders_that_are_no_runs(shell: Shell, tmp_path: Path) -> None:
    shell(f"run fedavg --rounds 1 {SMALL} --out runs/good")
    for name, content in {"empty": b"", "garbage": b"no database" * 500, "half": None}.items():
        (tmp_path / "runs" / name).mkdir()
        if content is not None:
            (tmp_path / "runs" / name / RUN_FILE).write_bytes(content)
    rows = {row["name"]: row["state"] for row in shell.json("runs")["runs"]}
    assert rows == {"good": "done", "empty": "unreadable", "garbage": "damaged"}
    code, out, _ = shell("runs")
    assert code == 0
    assert "garbage" in out
    code, _, err = shell("show garbage")
    assert (code, err.count("\n")) == (2, 1)
    assert "garbage" in err
    code, out, err = shell(f"run fedavg --rounds 1 {SMALL} --resume --json")
    assert (code, json.loads(out)["folder"]) == (0, "runs/good")
    assert err.startswith("feddbe: skipped: 'runs/garbage/run.sqlite' is damaged (file is not a database)")
    assert err.count("\n") == 1


def test_check_says_what_is_whole(shell: Shell) -> None:
    shell(f"run fedavg --rounds 2 {SMALL} --out runs/good")
    assert shell("check good") == (0, "runs/good: whole, goes on from round 2\n", "")
    (found,) = shell.json("check good")["runs"]
    parts = dict.fromkeys(["meta", "SQLite", "rows", "states", "rounds", "model"], "intact")
    assert found == {"folder": "runs/good", "intact": True, "round": 2, "parts": parts}
    file = Path("runs/good") / RUN_FILE
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    code, out, err = shell("check good")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("feddbe: 'runs/good/run.sqlite' is damaged (")
    assert "intact" not in err
    assert shell("check good --json").code == 2


def test_check_compares_the_servers_state_with_the_model(shell: Shell) -> None:
    shell(f"run fedavg --rounds 1 {SMALL} --out one")
    store = RunStore.open(Path("one"))
    server = store.server_state()
    server.pop("fc.bias")
    store.write_server_state("last", server, 1)
    store.close()
    code, _, err = shell("check one")
    assert (code, err.count("\n")) == (2, 1)
    assert "belongs to another model: expected 'fc.bias'" in err


def test_runs_of_an_empty_place_and_of_one_run(shell: Shell) -> None:
    assert shell("runs").out == "no runs in runs/; start one with: feddbe run fedavg+dbe\n"
    shell(f"run fedavg --rounds 0 {SMALL} --out alone")
    assert shell.json("runs alone")["runs"][0]["name"] == "alone"


def test_a_run_that_lost_patience_is_done(shell: Shell) -> None:
    document = shell.json(f"run fedavg --rounds 60 --patience 1 --lr 0.0001 {SMALL} --out bored")
    assert len(document["rounds"]) < 61
    assert shell.json("runs bored")["runs"][0]["state"] == "done"


# The interface, frozen: whoever changes it sees it here


DATA = ["--data-dir", "--partition", "--partition-seed", "--clients", "--split", "--shift"]
RUN = [
    "--data", *DATA, "--model", "--cut",
    "--rounds", "--patience", "--local-epochs",
    "--batch-size", "--lr", "--lr-decay", "--optimizer", "--momentum", "--weight-decay", "--clip-norm",
    "--participation", "--seed", "--variant", "--short-batch", "--bn-buffers", "--force",
    "--metrics", "--eval", "--eval-after", "--validation",
    "--new-clients", "--adapt-epochs", "--adaptation", "--engine", "--device", "--trainer",
    "--min-replies", "--worker-timeout", "--keep-best",
    "--out", "--resume", "--json", "--quiet", "--seeds",
    "--code", "--trust", "--dry-run",
]  # fmt: skip
STORED = ["--code", "--trust", "--json"]
COMMANDS = {
    "run": RUN,
    "compare": RUN,
    "runs": ["--json"],
    "show": ["--moment", "--clients", "--format", "--plot", "--json"],
    "check": ["--json"],
    "measure": [
        "--analyses",
        "--round",
        "--moment",
        "--layers",
        "--samples",
        "--quick",
        "--per-client",
        *STORED,
    ],
    "fairness": ["--round", "-o", "--out", "--json"],
    "overhead": ["--json"],
    "report": ["-o", "--out", "--live", "--port"],
    "reproduce": [
        "--all",
        "--list",
        "--trials",
        "--only",
        "--rounds",
        "--data",
        "--scale",
        "-o",
        "--out",
        "--dry-run",
        "--format",
    ],
    "tune": [
        "--data",
        "--data-dir",
        "--partition",
        "--partition-seed",
        "--clients",
        "--shift",
        "--model",
        "--cut",
        "--rounds",
        "--patience",
        "--local-epochs",
        "--batch-size",
        "--lr",
        "--lr-decay",
        "--optimizer",
        "--momentum",
        "--weight-decay",
        "--clip-norm",
        "--participation",
        "--seed",
        "--variant",
        "--short-batch",
        "--bn-buffers",
        "--force",
        "--metrics",
        "--eval",
        "--eval-after",
        "--validation",
        "--adapt-epochs",
        "--engine",
        "--device",
        "--trainer",
        "--min-replies",
        "--worker-timeout",
        "--out",
        "--json",
        "--quiet",
        "--trials",
        "--space",
    ],
    "export": ["--client", "--round", "--out", "--onnx", *STORED],
    "predict": ["--client", "--data", "--round", *STORED],
    "methods": ["--json"],
    "data list": ["--data-dir", "--json"],
    "data get": ["--force", "--data-dir"],
    "data show": [*DATA, "--json", "--save", "--plot"],
}


def options_by_command(group: Any, prefix: str = "") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= options_by_command(command, f"{name} ")
        else:
            flags = [flag for param in command.params for flag in param.opts if flag.startswith("-")]
            found[prefix + name] = flags
    return found


def test_commands_and_options_are_these() -> None:
    assert options_by_command(cli.app) == COMMANDS
