"""Commands, options and exit codes; every invalid input is answered with one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from feddbe import cli
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.registry import METHODS
from tests.cli.shell import SMALL, Shell, list_tree


@pytest.fixture
def input_files(tmp_path: Path) -> Path:
    """Return a folder with valid and invalid files for `INVALID_INPUTS`."""
    rng = np.random.RandomState(0)
    x = rng.randint(0, 256, (60, 8, 8)).astype(np.uint8)
    y = np.arange(60) % 3
    floats = rng.standard_normal((60, 5)).astype(np.float32)

    def save(name: str, **arrays: Any) -> bytes:
        np.savez(tmp_path / name, **arrays)
        return (tmp_path / name).read_bytes()

    content = save("good.npz", x=x, y=y)
    (tmp_path / "truncated.npz").write_bytes(content[: len(content) // 2])
    (tmp_path / "flipped.npz").write_bytes(content[:500] + bytes(byte ^ 255 for byte in content[500:]))
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    save("without_y.npz", x=x)
    save("pickled.npz", x=np.array([{}] * 60), y=y)
    save("too_few_labels.npz", x=x, y=y[:-1])
    save("codes.npz", x=x.astype(np.int64), y=y)
    save("unique_labels.npz", x=x, y=np.arange(60) * 3)
    save("fractions.npz", x=x, y=y + 0.5)
    save("nan.npz", x=np.where(floats == floats[11, 2], np.nan, floats), y=y)
    save("numbers.npz", x=np.arange(60) * np.ones((60, 1), np.int64), y=y)
    indices = np.arange(60)
    save("fits.npz", train_0=indices[:20], test_0=indices[20:30], train_1=indices[30:50], test_1=indices[50:])
    save("outside.npz", train_0=indices, test_0=np.array([4000]))
    save("twice.npz", train_0=indices[:20], test_0=indices[19:])
    save("gap.npz", train_0=indices[:20], test_0=indices[20:30], train_2=indices[30:50], test_2=indices[50:])
    (tmp_path / "unknown_key.toml").write_text('method = "fedavg"\nroundz = 3\n')
    (tmp_path / "wrong_value.toml").write_text('method = "fedavg"\nrounds = "many"\n')
    (tmp_path / "wrong_type.toml").write_text('method = "fedavg"\nresume = 1\n')
    (tmp_path / "syntax.toml").write_text('method = "fedavg\n')
    (tmp_path / "latin.toml").write_bytes(b'method = "f\xe9davg"\n')
    (tmp_path / "no_method.toml").write_text("rounds = 3\n")
    (tmp_path / "two.toml").write_text('method = ["fedavg", "fedavg+mr"]\n')
    (tmp_path / "a_file").write_text("")
    return tmp_path


INVALID_INPUTS = {
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
    "run fedavg --local-epochs 0": ["local_epochs = 0", "a whole number >= 1"],
    "run fedavg --batch-size 0": ["batch_size = 0", "a whole number >= 1"],
    "run fedavg --batch-size ten": ["batch_size = 'ten'", "a whole number >= 1"],
    "run fedavg --lr 0": ["lr = 0", "a number > 0"],
    "run fedavg --lr -0.1": ["lr = -0.1", "a number > 0"],
    "run fedavg --lr nan": ["lr = nan", "a number > 0"],
    "run fedavg --lr inf": ["lr = inf", "a number > 0"],
    "run fedavg --lr fast": ["lr = 'fast'", "a number > 0"],
    "run fedavg --participation 0": ["participation = 0", "> 0 and <= 1"],
    "run fedavg --participation 1.01": ["participation = 1.01", "> 0 and <= 1"],
    "run fedavg --participation half": ["participation = 'half'", "> 0 and <= 1"],
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
    "run fedavg --variant papr": ["'papr'", "did you mean 'paper'?", "default, early-2023, official, paper"],
    "run fedavg --bn-buffers lokal": ["'lokal'", "did you mean 'local'?", "average, local"],
    "run fedavg --short-batch kep": ["'kep'", "did you mean 'keep'?", "keep, refuse"],
    "run fedavg --partition idd": ["unknown partition 'idd'", "did you mean 'iid'?", "dirichlet:BETA"],
    "run fedavg --partition iid:3": ["'iid:3'", "takes no value"],
    "run fedavg --partition dirichlet": ["'dirichlet'", "a number above 0"],
    "run fedavg --partition dirichlet:-1": ["'-1'", "a number above 0"],
    "run fedavg --partition pathological:0": ["'0'", "a whole number from 1 on"],
    "run fedavg --partition pathological:11": ["pathological:11", "1..10"],
    "run fedavg --partition natural": ["'natural'", "client column", "iid"],
    # commands and options
    "rum fedavg": ["unknown command 'rum'", "did you mean 'run'?", "analyze, compare, data, "],
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
    "run fedavg --data missing.npz": ["missing.npz", "does not exist"],
    "run fedavg --data truncated.npz": ["truncated.npz", "numpy.savez"],
    "run fedavg --data flipped.npz": ["flipped.npz", "numpy.savez"],
    "run fedavg --data text.npz": ["text.npz", "not an .npz file"],
    "run fedavg --data empty.npz": ["empty.npz", "not an .npz file"],
    "run fedavg --data without_y.npz": ["without_y.npz", "no array 'y'", "it has: x"],
    "run fedavg --data pickled.npz": ["pickled.npz", "pickled", "plain arrays"],
    "run fedavg --data too_few_labels.npz": ["(59,)", "60 samples"],
    "run fedavg --data codes.npz": ["int64", "?words="],
    "run fedavg --data unique_labels.npz": ["another label in each of 60 rows"],
    "run fedavg --shift turn:3": ["unknown shift 'turn'", "rotate:S"],
    "run fedavg --data good.npz?resize=8": ["'?resize=' does not apply to 'good.npz'", "?words="],
    "run fedavg --data fractions.npz": ["the label 0.5", "whole numbers"],
    "run fedavg --data nan.npz": ["nan.npz", "NaN", "row 11"],
    "run fedavg --data numbers.npz": ["numbers.npz", "int64", "uint8"],
    "run fedavg --data good.npz --clients 61 --partition iid": ["clients = 61", "60 samples", "1..30"],
    "run fedavg --data good.npz --partition dirichlet:0.01 --clients 9": ["10000 draws", "9 clients"],
    "run fedavg --data good.npz --split outside.npz": ["outside.npz", "index 4000", "0..59"],
    "run fedavg --data good.npz --split twice.npz": ["twice.npz", "index 19 twice"],
    "run fedavg --data good.npz --split gap.npz": ["gap.npz", "'train_1'", "without a gap"],
    "run fedavg --data good.npz --split good.npz": ["good.npz", "'train_0'"],
    "run fedavg --data good.npz --split truncated.npz": ["truncated.npz", "numpy.savez"],
    "run fedavg --data good.npz --split fits.npz --clients 3": ["clients = 3", "'fits.npz' has 2"],
    "run fedavg --data good.npz --split fits.npz --partition iid": ["--split and --partition"],
    "run missing.toml": ["missing.toml", "No such file or directory"],
    "run unknown_key.toml": ["unknown_key.toml", "'roundz'", "did you mean 'rounds'?", "partition_seed"],
    "run wrong_value.toml": ["rounds = 'many'", "a whole number >= 0"],
    "run wrong_type.toml": ["resume = 1", "true, false"],
    "run syntax.toml": ["syntax.toml", "TOML", "line 1"],
    "run latin.toml": ["latin.toml", "TOML"],
    "run no_method.toml": ["no method given", "feddbe methods"],
    "run fedavg --out a_file": ["'a_file'", "File exists"],
    "run fedavg --out a_file/run": ["'a_file/run'", "Not a directory"],
    "run fedavg --resume": ["--resume", "'runs'", "without --resume"],
    "run fedavg --resume --out new": ["--resume", "'new'", "without --resume"],
    "compare fedavg fedavg+mr --resume": ["--resume", "'runs'", "without --resume"],
}  # fmt: skip


@pytest.mark.parametrize("line", INVALID_INPUTS)
def test_invalid_input_prints_one_line_and_writes_nothing(line: str, shell: Shell, input_files: Path) -> None:
    before = list_tree(input_files)
    code, out, err = shell(line)
    assert (code, out) == (2, "")
    assert err.startswith("feddbe: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for part in INVALID_INPUTS[line]:
        assert part in err
    assert list_tree(input_files) == before


def test_discouraged_addon_requires_force(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict(FedAvg):
        name: ClassVar[str] = "strict"
        discouraged_addons: ClassVar[dict[str, str]] = {"mr": "it has no common representation"}

    monkeypatch.setitem(METHODS, "strict", Strict)
    code, out, err = shell("run strict+dbe")
    assert (code, out) == (2, "")
    assert err == "feddbe: strict does not support +mr: it has no common representation\n"
    assert shell.json(f"run strict+dbe --force --rounds 0 {SMALL}")["method"] == "strict+dbe"


def test_line_break_in_value_is_printed_in_one_line(shell: Shell) -> None:
    code, _, err = shell("run 'fed\navg'")
    assert code == 2
    assert err.count("\n") == 1


def test_version_option_prints_name_and_version(shell: Shell) -> None:
    code, out, _ = shell("--version")
    assert code == 0
    assert out.split()[0] == "feddbe"
    assert out.split()[1][0].isdigit()


DATA_OPTIONS = [
    "--data-dir", "--partition", "--partition-seed", "--clients", "--min-samples", "--split", "--shift",
]  # fmt: skip
TRAINING_OPTIONS = [
    "--rounds", "--patience", "--local-epochs", "--batch-size", "--lr", "--lr-decay", "--optimizer",
    "--momentum", "--weight-decay", "--clip-norm", "--participation", "--seed", "--variant", "--batch-order",
    "--short-batch",
    "--bn-buffers", "--force", "--metrics", "--eval", "--last-test-batch", "--eval-after", "--validation",
]  # fmt: skip
ENGINE_OPTIONS = ["--engine", "--device", "--trainer", "--min-replies", "--worker-timeout"]
RUN_OPTIONS = [
    "--data", *DATA_OPTIONS, "--model", "--cut", *TRAINING_OPTIONS,
    "--new-clients", "--adapt-epochs", "--adaptation", *ENGINE_OPTIONS, "--keep-best", "-o", "--out",
    "--resume",
    "--json", "--quiet", "--seeds", "--partition-seeds", "--name", "--code", "--trust",
    "--callback", "--dry-run",
]  # fmt: skip
TUNE_OPTIONS = [
    "--data", *DATA_OPTIONS[:5], "--shift", "--model", "--cut",
    *TRAINING_OPTIONS, "--adapt-epochs", *ENGINE_OPTIONS, "-o", "--out", "--json", "--quiet",
    "--trials", "--space",
]  # fmt: skip
STORED_RUN_OPTIONS = ["--code", "--trust", "--json"]
COMMANDS = {
    "run": RUN_OPTIONS,
    "compare": RUN_OPTIONS,
    "runs": ["--json"],
    "show": ["--moment", "--clients", "--format", "--plot", "--callback", "--json"],
    "verify": ["--json"],
    "analyze": [
        "--analyses", "--round", "--moment", "--layers", "--samples", "--on", "--quick", "--per-client",
        *STORED_RUN_OPTIONS,
    ],
    "fairness": ["--round", "-o", "--out", "--json"],
    "overhead": ["--json"],
    "report": ["-o", "--out", "--live", "--port"],
    "reproduce": [
        "--all", "--list", "--trials", "--only", "--rounds", "--data", "--scale", "-o", "--out", "--dry-run",
        "--format",
    ],
    "tune": TUNE_OPTIONS,
    "export": ["--client", "--round", "-o", "--out", "--onnx", *STORED_RUN_OPTIONS],
    "predict": ["--client", "--data", "--round", *STORED_RUN_OPTIONS],
    "methods": ["--json"],
    "data list": ["--data-dir", "--json"],
    "data get": ["--force", "--data-dir"],
    "data show": [*DATA_OPTIONS, "--json", "--save", "--plot"],
    "federation init": ["--host", "--like", "--port", "--listen"],
    "federation invite": [],
    "federation remove": [],
    "federation join": ["--data", "--state", "--methods", "--allow-file"],
    "federation flower": [],
    "federation status": ["--json"],
    "federation export": ["--state", "-o", "--out", "--onnx"],
}  # fmt: skip
"""The interface; a change of it must be made here too."""


def options_by_command(group: Any, prefix: str = "") -> dict[str, list[str]]:
    """Return the options of every command, with subcommands by their full names."""
    options: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            options |= options_by_command(command, f"{name} ")
        else:
            flags = [flag for param in command.params for flag in param.opts if flag.startswith("-")]
            options[prefix + name] = flags
    return options


def test_commands_and_options_are_unchanged() -> None:
    assert options_by_command(cli.app) == COMMANDS
