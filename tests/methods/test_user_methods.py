"""Methods that are not feddbe's: from a file, from a package, from Python; and what goes wrong with them."""

from __future__ import annotations

import dataclasses
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
from feddbe.runs.experiment import Recipe
from feddbe.state import State
from feddbe.training.task import Context
from feddbe.training.terms import prox
from feddbe.training.trainer import ClientTrainer
from tests.federation import are_identical, experiment, make_dataset, run_outcome

FILE = """
from dataclasses import dataclass
from typing import ClassVar, Optional
from feddbe import FedAvg
from feddbe.methods import parameter
from feddbe.training.terms import prox

@dataclass(frozen=True)
class MyProx(FedAvg):
    name: ClassVar[str] = "myprox"
    mu: float = parameter(0.001, "weight of the term", low=0)
    Every: Optional[int] = parameter(None, "only in each so-manyth round", low=1)
    on: bool = parameter(True, "whether there is one")

    def train(self, ctx, local, received, private):
        on = self.on and ctx.round % (self.Every or 1) == 0
        return local.fit(received, terms=[prox(self.mu, received)] if on else []).params, private
"""
SMALL: dict[str, Any] = {"partition": "natural", "model": "mlp", "lr": 0.1, "engine": "serial"}


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What a test makes known is forgotten again."""
    before = set(METHODS)
    yield
    methods.installed_methods.cache_clear()
    for name in set(METHODS) - before:
        del METHODS[name]


def write(folder: Path, text: str = FILE, name: str = "mine.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


@dataclass(frozen=True)
class Nearby(FedAvg):
    """FedProx in this module."""

    name: ClassVar[str] = "nearby"
    mu: float = parameter(0.001, "weight of the term", low=0)

    def train(
        self, ctx: Context, trainer: ClientTrainer, received: State, private: State
    ) -> tuple[State, State]:
        return trainer.fit(received, terms=[prox(self.mu, received)]).params, private


@pytest.mark.parametrize("first", ["", "from __future__ import annotations"])
def test_the_grammar(first: str, tmp_path: Path) -> None:
    """Also in a folder with a plus and brackets, with options in large letters."""
    path = write(tmp_path / "a+b (c)", first + FILE)
    assert hyperparameters(parse_method(f"{path}:MyProx")) == {
        "myprox": {"weights": "samples", "mu": 0.001, "Every": None, "on": True}
    }
    both = parse_method(f"{path}:MyProx(mu=0.5, Every=2,on=false)+DBE(Kappa=5)")
    assert isinstance(both, Composed)
    assert both.inner.base_name == "myprox"
    assert hyperparameters(both)["myprox"] == {"weights": "samples", "mu": 0.5, "Every": 2, "on": False}
    assert hyperparameters(both)["mr"]["kappa"] == 5


def test_it_is_fedprox_to_the_bit(tmp_path: Path) -> None:
    """On serial, in a pool, continued, and given from Python."""
    name = f"{write(tmp_path)}:MyProx(mu=0.3)+dbe"
    wanted = run_outcome(experiment("fedprox(mu=0.3)+dbe"), tmp_path / "fedprox")
    pool = run_outcome(experiment(name), tmp_path / "pool", "pool(workers=2)")
    run_outcome(experiment(name, rounds=1), tmp_path / "parts")
    parts = run_outcome(experiment(name), tmp_path / "parts")
    text = format_name(Composed(Nearby(mu=0.3), (PRBM(), MR(kappa=1.0))))
    python = run_outcome(experiment(text), tmp_path / "python")
    for found in (pool, parts, python):
        assert are_identical(found.server, wanted.server)
        assert all(are_identical(found.clients[c], wanted.clients[c]) for c in wanted.clients)


def test_the_hash_follows_the_content_not_the_place(tmp_path: Path) -> None:
    first = experiment(f"{write(tmp_path)}:MyProx").config_hash
    assert experiment(f"{write(tmp_path / 'elsewhere', name='other.py')}:MyProx").config_hash == first
    edited = write(tmp_path, FILE.replace("ctx.round %", "(1 + ctx.round) %"))
    assert experiment(f"{edited}:MyProx").config_hash != first
    assert experiment("fedprox").config_hash != first


def test_an_edited_method_does_not_continue_a_run(tmp_path: Path) -> None:
    options = {"data": make_dataset(), "out": str(tmp_path / "run"), **SMALL}
    name = f"{write(tmp_path)}:MyProx"
    feddbe.run(name, rounds=1, **options)
    moved = f"{shutil.copy(tmp_path / 'mine.py', tmp_path / 'moved.py')}:MyProx"
    assert len(feddbe.run(moved, rounds=2, resume=True, **options)["rounds"]) == 3
    write(tmp_path, FILE.replace("mu: float = parameter(0.001", "mu: float = parameter(0.002"))
    with pytest.raises(
        InvalidInputError, match=r"another configuration \(.*myprox mu 0.001 in the run, 0.002 now"
    ):
        feddbe.run(name, rounds=3, resume=True, **options)
    write(tmp_path, FILE.replace("(self.Every or 1)", "(self.Every or 2)"))
    with pytest.raises(InvalidInputError, match="another configuration"):
        feddbe.run(name, rounds=3, resume=True, **options)


def test_another_process_finds_it_by_its_file(tmp_path: Path) -> None:
    """As a spawned worker or a node of a cluster does; not if the file has changed."""
    path = write(tmp_path)
    method = parse_method(f"{path}:MyProx(mu=0.3)+dbe")
    pickled = pickle.dumps(method)
    assert pickle.loads(pickled) == method
    code = f"import pickle; print(pickle.loads({pickled!r}))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.startswith("Composed(inner=MyProx(weights='samples', mu=0.3, Every=None, on=True)")
    write(tmp_path, FILE + "# edited")
    with pytest.raises(
        InvalidInputError, match=r"^the method's file '.*mine.py' is not the one that the run began "
    ):
        pickle.loads(pickled)


def test_a_recipe_needs_a_name_that_others_know(tmp_path: Path) -> None:
    text = f"{write(tmp_path)}:MyProx"
    made = dataclasses.replace(experiment(text), in_memory="")
    assert Recipe.from_experiment(made) is not None
    assert not is_in_memory(parse_method(text))
    assert experiment(format_name(Nearby())).in_memory == "data and method"


def test_what_one_would_type() -> None:
    """Options are left out at their defaults, where these are the same for every model and variant."""
    assert format_name(FedAvg()) == "fedavg"
    assert format_name(FedProx(mu=0.5)) == "fedprox(mu=0.5)"
    text = format_name(Composed(Nearby(mu=1e-7), (PRBM(), MR())))
    assert text == "nearby(mu=1e-07)+prbm+mr(kappa=50,mu=1,init_mean=momentum,init_epochs=1)"
    assert parse_method(text) == Composed(Nearby(mu=1e-7), (PRBM(), MR()))
    with pytest.raises(
        InvalidInputError, match=r"^'<class .*Nearby'>' is not a method; expected a name, or an instance"
    ):
        feddbe.run(Nearby)  # type: ignore[arg-type]


def test_a_run_of_an_object(tmp_path: Path) -> None:
    options = {"data": make_dataset(), "rounds": 1, **SMALL}
    one = feddbe.run(FedProx(mu=0.3), out=str(tmp_path / "one"), **options)
    two = feddbe.run(Nearby(mu=0.3), out=str(tmp_path / "two"), **options)
    assert (one["method"], two["method"]) == ("fedprox(mu=0.3)", "nearby(mu=0.3)")
    assert one["server_sha256"] == two["server_sha256"]
    del METHODS["nearby"]
    with pytest.raises(
        InvalidInputError, match=r"unknown method 'nearby'; .*; a class of yours is made known by fedd"
    ):
        feddbe.analyze(tmp_path / "two", analyses="discrepancy", data=make_dataset())
    METHODS["nearby"] = Nearby
    assert feddbe.analyze(tmp_path / "two", analyses="discrepancy", data=make_dataset())[0]["analyses"]


def test_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by its entry point; one with a name of feddbe's is refused, and does not stand in the way."""
    write(tmp_path, FILE, "package_of_mine.py")
    about = tmp_path / "package_of_mine-1.dist-info"
    write(about, "Metadata-Version: 2.1\nName: package-of-mine\nVersion: 1\n", "METADATA")
    write(about, "[feddbe.methods]\nmyprox = package_of_mine:MyProx\n", "entry_points.txt")
    monkeypatch.syspath_prepend(tmp_path)
    methods.installed_methods.cache_clear()
    assert "myprox" in set(METHODS)
    assert type(parse_method("myprox(mu=0.5)+dbe")) is Composed
    assert not is_in_memory(parse_method("myprox"))
    assert len(methods.source_sha256(METHODS["myprox"])) == 64
    options = {"data": make_dataset(), "out": str(tmp_path / "run"), **SMALL}
    feddbe.run("myprox", rounds=1, **options)
    write(about, "Metadata-Version: 2.1\nName: package-of-mine\nVersion: 2\n", "METADATA")
    methods.installed_methods.cache_clear()
    remarks = feddbe.run("myprox", rounds=2, resume=True, **options)["remarks"]
    assert "resumed with other versions: package-of-mine 1 before, 2 now" in remarks
    assert cli.main(["methods", "--json"]) == 0
    assert "myprox" in [one["name"] for one in json.loads(capsys.readouterr().out)["methods"]]
    write(
        about,
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
    write(about, "[feddbe.methods]\nfedavg = package_of_mine:MyProx\n", "entry_points.txt")
    methods.installed_methods.cache_clear()
    assert parse_method("fedavg") == FedAvg()
    with pytest.raises(
        InvalidInputError, match=r"^method 'fedavg' of the package package-of-mine .* of a built-in method"
    ):
        set(METHODS)
    methods.installed_methods.cache_clear()
    shutil.rmtree(about)


WRONG = {
    (FILE, ":Nope"): "unknown class in FILE: 'Nope'; allowed: MyProx",
    (FILE, ""): "name its class too, as in FILE.py:CLASS; it has: MyProx",
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


@pytest.mark.parametrize(("given", "message"), WRONG.items(), ids=range(len(WRONG)))
def test_what_goes_wrong_is_one_line(tmp_path: Path, given: tuple[str, str], message: str) -> None:
    path = write(tmp_path, given[0])
    with pytest.raises(InvalidInputError) as caught:
        parse_method(f"{path}{given[1]}")
    shown = str(caught.value).replace(f"'{path}'", "FILE").replace(str(path), "FILE")
    assert message in shown
    assert "\n" not in shown


def test_the_command_line_describes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert cli.main(["methods", f"{path}:MyProx", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["methods"]
    assert found["addons"] == ["prbm", "mr", "dbe", "ft"]
    assert [(one["name"], one["default"], one["allowed"]) for one in found["parameters"]] == [
        ("weights", "samples", "samples, uniform"),
        ("mu", 0.001, "a number >= 0"),
        ("Every", None, "a whole number >= 1"),
        ("on", True, "true, false"),
    ]
    assert cli.main(["methods", "fedprox", "mr"]) == 0
    shown = capsys.readouterr().out
    assert "fedprox" in shown
    assert "scaffold" not in shown
    assert cli.main(["methods", "fedproxx"]) == 2
    assert "unknown method or add-on 'fedproxx'; did you mean 'fedprox'?" in capsys.readouterr().err
