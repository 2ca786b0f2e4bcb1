"""User methods: from a file, from a package, from Python, and their errors."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import feddbe
from feddbe import cli, methods
from feddbe.config.parameters import parameter
from feddbe.errors import InvalidInputError
from feddbe.methods.addons import MR, PRBM, Composed
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.fedprox import FedProx
from feddbe.methods.registry import METHODS, format_name, hyperparameters, is_in_memory, parse_method
from feddbe.state import State
from feddbe.training.loss_terms import prox
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import are_identical, experiment, make_dataset, run_outcome

FILE = """
from dataclasses import dataclass
from typing import ClassVar, Optional
from feddbe import FedAvg
from feddbe.methods import parameter
from feddbe.training.loss_terms import prox

@dataclass(frozen=True)
class MyProx(FedAvg):
    name: ClassVar[str] = "myprox"
    mu: float = parameter(0.001, "weight of the term", low=0)
    Every: Optional[int] = parameter(None, "only in every n-th round", low=1)
    on: bool = parameter(True, "whether there is one")

    def train(self, ctx, trainer, received, private):
        on = self.on and ctx.round % (self.Every or 1) == 0
        return trainer.fit(received, terms=[prox(self.mu, received)] if on else []).params, private
"""
OPTIONS: dict[str, Any] = {"partition": "natural", "model": "mlp", "lr": 0.1, "engine": "serial"}


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Remove the methods that a test registers."""
    before = set(METHODS)
    yield
    methods.installed_methods.cache_clear()
    for name in set(METHODS) - before:
        del METHODS[name]


def write_file(folder: Path, text: str = FILE, name: str = "mine.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


@dataclass(frozen=True)
class ProgramProx(FedAvg):
    """FedProx in this module."""

    name: ClassVar[str] = "programprox"
    mu: float = parameter(0.001, "weight of the term", low=0)

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return trainer.fit(received, terms=[prox(self.mu, received)]).params, private


@pytest.mark.parametrize("first", ["", "from __future__ import annotations"])
def test_parse_method_of_a_file(first: str, tmp_path: Path) -> None:
    """Also in a folder with a plus and brackets, with options in large letters."""
    path = write_file(tmp_path / "a+b (c)", first + FILE)
    assert hyperparameters(parse_method(f"{path}:MyProx")) == {
        "myprox": {"weights": "samples", "mu": 0.001, "Every": None, "on": True}
    }
    both = parse_method(f"{path}:MyProx(mu=0.5, Every=2,on=false)+DBE(Kappa=5)")
    assert isinstance(both, Composed)
    assert both.inner.base_name == "myprox"
    assert hyperparameters(both)["myprox"] == {"weights": "samples", "mu": 0.5, "Every": 2, "on": False}
    assert hyperparameters(both)["mr"]["kappa"] == 5


def test_user_method_equals_fedprox_bit_for_bit(tmp_path: Path) -> None:
    """In one process, in a pool, resumed, and as a Python object."""
    name = f"{write_file(tmp_path)}:MyProx(mu=0.3)+dbe"
    expected = run_outcome(experiment("fedprox(mu=0.3)+dbe"), tmp_path / "fedprox")
    pool = run_outcome(experiment(name), tmp_path / "pool", "pool(workers=2)")
    run_outcome(experiment(name, rounds=1), tmp_path / "resumed")
    resumed = run_outcome(experiment(name), tmp_path / "resumed")
    text = format_name(Composed(ProgramProx(mu=0.3), (PRBM(), MR(kappa=1.0))))
    python = run_outcome(experiment(text), tmp_path / "python")
    for outcome in (pool, resumed, python):
        assert are_identical(outcome.server, expected.server)
        assert all(are_identical(outcome.clients[c], expected.clients[c]) for c in expected.clients)


def test_hash_depends_on_content_not_on_path(tmp_path: Path) -> None:
    first = experiment(f"{write_file(tmp_path)}:MyProx").config_hash
    assert experiment(f"{write_file(tmp_path / 'elsewhere', name='other.py')}:MyProx").config_hash == first
    edited = write_file(tmp_path, FILE.replace("ctx.round %", "(1 + ctx.round) %"))
    assert experiment(f"{edited}:MyProx").config_hash != first
    assert experiment("fedprox").config_hash != first


def test_edited_method_cannot_resume_a_run(tmp_path: Path) -> None:
    options = {"data": make_dataset(), "out": str(tmp_path / "run"), **OPTIONS}
    name = f"{write_file(tmp_path)}:MyProx"
    feddbe.run(name, rounds=1, **options)
    moved = f"{shutil.copy(tmp_path / 'mine.py', tmp_path / 'moved.py')}:MyProx"
    assert len(feddbe.run(moved, rounds=2, resume=True, **options)["rounds"]) == 3
    write_file(tmp_path, FILE.replace("mu: float = parameter(0.001", "mu: float = parameter(0.002"))
    with pytest.raises(
        InvalidInputError, match=r"another configuration \(.*myprox mu 0.001 in the run, 0.002 now"
    ):
        feddbe.run(name, rounds=3, resume=True, **options)
    write_file(tmp_path, FILE.replace("(self.Every or 1)", "(self.Every or 2)"))
    with pytest.raises(InvalidInputError, match="another configuration"):
        feddbe.run(name, rounds=3, resume=True, **options)


def test_unpickle_in_another_process(tmp_path: Path) -> None:
    """As in a spawned worker or on a cluster node; an error if the file has changed."""
    path = write_file(tmp_path)
    method = parse_method(f"{path}:MyProx(mu=0.3)+dbe")
    pickled = pickle.dumps(method)
    assert pickle.loads(pickled) == method
    code = f"import pickle; print(pickle.loads({pickled!r}))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.startswith("Composed(inner=MyProx(weights='samples', mu=0.3, Every=None, on=True)")
    write_file(tmp_path, FILE + "# edited")
    with pytest.raises(
        InvalidInputError, match=r"^the method's file '.*mine.py' is not the one that the run began "
    ):
        pickle.loads(pickled)


def test_method_is_in_memory_if_other_processes_cannot_load_it(tmp_path: Path) -> None:
    assert not is_in_memory(parse_method(f"{write_file(tmp_path)}:MyProx"))
    assert experiment(format_name(ProgramProx())).in_memory == {"data", "method"}


def test_name_of_an_instance_omits_defaults() -> None:
    """Options at their defaults are omitted if the defaults are equal for every model and variant."""
    assert format_name(FedAvg()) == "fedavg"
    assert format_name(FedProx(mu=0.5)) == "fedprox(mu=0.5)"
    text = format_name(Composed(ProgramProx(mu=1e-7), (PRBM(), MR())))
    assert text == "programprox(mu=1e-07)+prbm+mr(kappa=50,mu=1,init_mean=momentum,init_epochs=1)"
    assert parse_method(text) == Composed(ProgramProx(mu=1e-7), (PRBM(), MR()))
    with pytest.raises(
        InvalidInputError, match=r"^'<class .*ProgramProx'>' is not a method; expected a name, or an instance"
    ):
        feddbe.run(ProgramProx)  # type: ignore[arg-type]


def test_run_of_a_method_object(tmp_path: Path) -> None:
    options = {"data": make_dataset(), "rounds": 1, **OPTIONS}
    builtin_run = feddbe.run(FedProx(mu=0.3), out=str(tmp_path / "builtin"), **options)
    user_run = feddbe.run(ProgramProx(mu=0.3), out=str(tmp_path / "user"), **options)
    assert (builtin_run["method"], user_run["method"]) == ("fedprox(mu=0.3)", "programprox(mu=0.3)")
    assert builtin_run["server_sha256"] == user_run["server_sha256"]
    del METHODS["programprox"]
    with pytest.raises(
        InvalidInputError, match=r"unknown method 'programprox'; .*; register your class with fedd"
    ):
        feddbe.analyze(tmp_path / "user", analyses="discrepancy", data=make_dataset())
    METHODS["programprox"] = ProgramProx
    assert feddbe.analyze(tmp_path / "user", analyses="discrepancy", data=make_dataset())[0]["analyses"]


def test_method_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is loaded by its entry point; the name of a built-in method is an error only if it is listed."""
    write_file(tmp_path, FILE, "package_of_mine.py")
    dist_info = tmp_path / "package_of_mine-1.dist-info"
    write_file(dist_info, "Metadata-Version: 2.1\nName: package-of-mine\nVersion: 1\n", "METADATA")
    write_file(dist_info, "[feddbe.methods]\nmyprox = package_of_mine:MyProx\n", "entry_points.txt")
    monkeypatch.syspath_prepend(tmp_path)
    methods.installed_methods.cache_clear()
    assert "myprox" in set(METHODS)
    assert type(parse_method("myprox(mu=0.5)+dbe")) is Composed
    assert not is_in_memory(parse_method("myprox"))
    assert len(methods.source_sha256(METHODS["myprox"])) == 64
    options = {"data": make_dataset(), "out": str(tmp_path / "run"), **OPTIONS}
    feddbe.run("myprox", rounds=1, **options)
    write_file(dist_info, "Metadata-Version: 2.1\nName: package-of-mine\nVersion: 2\n", "METADATA")
    methods.installed_methods.cache_clear()
    remarks = feddbe.run("myprox", rounds=2, resume=True, **options)["remarks"]
    assert "resumed with other versions: package-of-mine 1 before, 2 now" in remarks
    assert cli.main(["methods", "--json"]) == 0
    assert "myprox" in [info["name"] for info in json.loads(capsys.readouterr().out)["methods"]]
    write_file(
        dist_info,
        "[feddbe.methods]\nother = package_of_mine:MyProx\nnone = package_of_mine:No\n",
        "entry_points.txt",
    )
    methods.installed_methods.cache_clear()
    with pytest.raises(
        InvalidInputError, match=r"^method 'other' of the package package-of-mine .* has name = 'myprox'"
    ):
        parse_method("other")
    with pytest.raises(InvalidInputError, match=r"^method 'none' of .* cannot be imported: AttributeError: "):
        parse_method("none")
    write_file(dist_info, "[feddbe.methods]\nfedavg = package_of_mine:MyProx\n", "entry_points.txt")
    methods.installed_methods.cache_clear()
    assert parse_method("fedavg") == FedAvg()
    with pytest.raises(
        InvalidInputError, match=r"^method 'fedavg' of the package package-of-mine .* of a built-in method"
    ):
        set(METHODS)
    methods.installed_methods.cache_clear()
    shutil.rmtree(dist_info)


INVALID_METHODS = {
    (FILE, ":Nope"): "unknown class in FILE: 'Nope'; allowed: MyProx",
    (FILE, ""): "name its class too, as in FILE.py:CLASS; the file has: MyProx",
    (FILE, ":prox"): "unknown class in FILE: 'prox'; did you mean 'MyProx'? allowed: MyProx",
    (
        FILE,
        ":MyProx(nu=1)",
    ): "unknown option of FILE:MyProx 'nu'; allowed: Every, mu, on, weights",
    (FILE, ":MyProx(mu=-1)"): "myprox mu = -1; allowed: a number >= 0",
    (FILE, ":MyProx(mu"): "cannot read method",
    (FILE, ":MyProx+mx"): "unknown add-on 'mx'; allowed: dbe, ft, mr, prbm",
    (
        FILE + "class Other: pass",
        ":Other",
    ): "Other in FILE is not a method: it must be a subclass of feddbe.Me",
    (
        FILE,
        ":FedAvg",
    ): "FedAvg in FILE has name = 'fedavg', which is reserved; choose another one: name: ClassVar",
    (FILE.replace('"myprox"', '"dbe"'), ":MyProx"): "MyProx in FILE has name = 'dbe', which is reserved",
    (FILE.replace('"myprox"', '"My"'), ":MyProx"): "has name = 'My'; allowed: lowercase letters, digits, _",
    (
        FILE.replace("@dataclass(frozen=True)", ""),
        ":MyProx",
    ): "is not a dataclass; write @dataclass(frozen=True)",
    (
        FILE.replace("(frozen=True)", ""),
        ":MyProx",
    ): "FILE cannot be executed in line 8: TypeError: cannot inherit",
    (
        FILE.replace('parameter(True, "whether there is one")', "True"),
        ":MyProx",
    ): "'on' is not an option; write on: ",
    (
        FILE.replace("mu: float", "mu: list[float]"),
        ":MyProx",
    ): "option 'mu' is of type list[float]; allowed: bool",
    (
        FILE.replace("FedAvg", "Method"),
        ":MyProx",
    ): "MyProx in FILE has no aggregate(...) (docs/writing_a_method.md)",
    ("raise ValueError('no')", ":MyProx"): "FILE cannot be executed in line 1: ValueError: no",
    ("import sys; sys.exit(3)", ":MyProx"): "FILE cannot be executed in line 1: SystemExit: 3",
}


@pytest.mark.parametrize(
    ("source_and_class", "message"), INVALID_METHODS.items(), ids=range(len(INVALID_METHODS))
)
def test_invalid_method_raises_one_line_error(
    tmp_path: Path, source_and_class: tuple[str, str], message: str
) -> None:
    path = write_file(tmp_path, source_and_class[0])
    with pytest.raises(InvalidInputError) as caught:
        parse_method(f"{path}{source_and_class[1]}")
    text = str(caught.value).replace(f"'{path}'", "FILE").replace(str(path), "FILE")
    assert message in text
    assert "\n" not in text


def test_command_line_describes_user_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_file(tmp_path)
    assert cli.main(["methods", f"{path}:MyProx", "--json"]) == 0
    (info,) = json.loads(capsys.readouterr().out)["methods"]
    assert info["addons"] == ["prbm", "mr", "dbe", "ft"]
    assert [(option["name"], option["default"], option["allowed"]) for option in info["parameters"]] == [
        ("weights", "samples", "samples, uniform"),
        ("mu", 0.001, "a number >= 0"),
        ("Every", None, "a whole number >= 1"),
        ("on", True, "true, false"),
    ]
    assert cli.main(["methods", "fedprox", "mr"]) == 0
    text = capsys.readouterr().out
    assert "fedprox" in text
    assert "scaffold" not in text
    assert cli.main(["methods", "fedproxx"]) == 2
    assert "unknown method or add-on 'fedproxx'; did you mean 'fedprox'?" in capsys.readouterr().err
