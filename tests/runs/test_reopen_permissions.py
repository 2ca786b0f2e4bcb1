"""Code named by a stored run is executed only if the user allows it and its content is unchanged."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import feddbe
from feddbe import cli
from feddbe.config.user_code import make_permission
from feddbe.errors import FeddbeError, InvalidInputError, StoreError
from feddbe.export import load_client_model
from feddbe.runs.store import RUN_FILE, RunStore, checksum
from tests.crafted import RunFile

SMALL: dict[str, Any] = {"clients": 3, "partition": "iid", "model": "mlp", "engine": "serial", "lr": 0.1}
LINE = "--clients 3 --partition iid --engine serial --lr 0.1 --rounds 1 --quiet"
EVIL = "from pathlib import Path\nPath('executed').touch()\nraise SystemExit\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of feddbe's own method and model, with a stranger's file next to it."""
    monkeypatch.chdir(tmp_path)
    feddbe.run("fedavg", out="run", rounds=1, quiet=True, **SMALL)
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "evil.py").write_text(EVIL)
    Path("new.npz").write_bytes(b"")
    return tmp_path / "run"


def change(run: Path, **values: Any) -> None:
    """Put these values into what the run says of itself, as a stranger can, checksums and all."""
    file = RunFile(run)
    for key, value in values.items():
        file.set_meta(key, json.dumps(value))
    file.db.close()


def configure(run: Path, **values: Any) -> None:
    store = RunStore.open(run)
    settings = store.meta("config")
    store.close()
    change(run, config=settings | values)


def evil_paths(folder: Path) -> list[str]:
    return ["stranger/evil.py", str(folder / "stranger" / "evil.py"), "run/../stranger/evil.py"]


FORMS: list[Callable[[str], dict[str, str]]] = [
    lambda file: {"method": f"{file}:M"},
    lambda file: {"method": file},
    lambda file: {"method": f"  {file}:M(mu=1)+dbe"},
    lambda file: {"method": f"{file}+dbe"},
    lambda file: {"method": f"{file}(mu=1)"},
    lambda file: {"model": f"{file}:M"},
    lambda file: {"model": file},
    lambda file: {"model": f"{file}:M", "method": f"{file}:M"},
]
COMMANDS = [
    "check run", "check run --json", "analyze run --analyses discrepancy", "export run --client 0 --out home",
    "predict run --client 0 --data new.npz", "run --resume --out run", "run --resume --out run --dry-run",
    "run --resume --out run --rounds 3", "compare --resume --out .", "show run", "runs .", "report run",
]  # fmt: skip


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_no_command_executes_a_file_that_a_run_names(
    form: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in evil_paths(tmp_path):
        configure(run, **FORMS[form](file))
        for command in COMMANDS:
            cli.main(command.split())
            assert not Path("executed").exists(), command
            assert capsys.readouterr().err.count("\n") <= 1


@pytest.mark.parametrize(
    "use",
    [
        lambda: feddbe.analyze("run", analyses="discrepancy", quiet=True),
        lambda: feddbe.export_model("run", 0, out="home"),
        lambda: feddbe.predict("run", 0, "new.npz"),
        lambda: feddbe.run(out="run", resume=True, rounds=2, quiet=True),
        lambda: feddbe.compare(out="run", resume=True, rounds=2, quiet=True),
    ],
)
def test_no_function_executes_a_file_that_a_run_names(use: Callable[[], object], run: Path) -> None:
    configure(run, method="stranger/evil.py:M")
    with pytest.raises(
        InvalidInputError, match=r"is code in a file, 'stranger/evil.py:M', which is not executed"
    ):
        use()
    feddbe.load_run("run").clients()
    assert not Path("executed").exists()


def test_trusted_run_does_not_execute_changed_content(run: Path) -> None:
    """Neither one without a hash nor with another one."""
    configure(run, method="stranger/evil.py:M")
    with pytest.raises(InvalidInputError, match="does not store the content of its method's file"):
        feddbe.run(out="run", resume=True, trust=True, quiet=True)
    wrong: list[Any] = [{"sha256": "0" * 64, "modules": {}}, {"sha256": 3}, [], {"sha256": "", "modules": 1}]
    for stored in wrong:
        change(run, sources={"method": stored})
        with pytest.raises(FeddbeError, match=r"is not the one that the run began|its metadata: sources"):
            feddbe.run(out="run", resume=True, trust=True, quiet=True)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "settings", [None, [], {}, {"method": 3}, {"method": "fedavg", "method_options": {}}, "fedavg"]
)
def test_invalid_configuration_is_a_one_line_error(settings: Any, run: Path) -> None:
    change(run, config=settings)
    for use in (
        lambda: feddbe.analyze("run", analyses="discrepancy", quiet=True),
        lambda: feddbe.run(out="run", resume=True, quiet=True),
    ):
        with pytest.raises(StoreError, match=r"is damaged \(its metadata: config: "):
            use()


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "", "nope"])
def test_metadata_that_is_not_json_is_corrupt(text: str, run: Path) -> None:
    with sqlite3.connect(run / RUN_FILE) as database:
        change = "UPDATE meta SET value = ?, crc = ? WHERE key = 'config'"
        database.execute(change, (text, checksum(("config", text))))
    database.close()
    for command in COMMANDS:
        assert cli.main(command.split()) == (0 if command == "runs ." else 2)
    with pytest.raises(StoreError, match="is damaged"):
        feddbe.load(run)


def test_state_of_another_model_is_a_one_line_error(run: Path) -> None:
    store = RunStore.open(run)
    server = store.server_state("best")
    store.write_server_state(
        "best", {name: tensor for name, tensor in server.items() if name != "fc.bias"}, 1
    )
    store.close()
    with pytest.raises(StoreError, match=r"belongs to another model: expected 'fc.bias'"):
        feddbe.analyze(run, analyses="discrepancy", quiet=True)


def test_stored_remote_engine_is_not_used(run: Path) -> None:
    """Ray's wire carries pickled objects."""
    configure(run, engine="ray(address=203.0.113.7:6379)")
    with pytest.raises(
        InvalidInputError, match=r"names an engine on other machines, 'ray\(address=203.0.113.7:6379\)'"
    ):
        feddbe.run(out="run", resume=True, rounds=2, quiet=True)
    assert feddbe.run(out="run", resume=True, rounds=2, quiet=True, engine="serial")["last"]["round"] == 2


# --- the user's own code

METHOD = """
from dataclasses import dataclass
from typing import ClassVar
import helper
from feddbe import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    name: ClassVar[str] = "mine"

    def train(self, ctx, local, received, private):
        return helper.train(local, received), private
"""
HELPER = """
def train(local, received):
    return local.fit(received).params
"""
MODEL = """
from torch import nn

def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))
"""


@pytest.fixture
def user_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of the user's own method and model."""
    monkeypatch.chdir(tmp_path)
    Path("code").mkdir()
    for name, text in {"mine.py": METHOD, "helper.py": HELPER, "net.py": MODEL}.items():
        Path("code", name).write_text(text)
    line = f"run code/mine.py:Mine+dbe --model code/net.py:build {LINE} --out run"
    assert cli.main(line.split()) == 0
    return tmp_path


BOTH = "--code code/mine.py --code code/net.py:build"


@pytest.mark.parametrize(
    "command",
    [
        "analyze run --analyses discrepancy --samples 20 --trust",
        f"run --resume --out run --rounds 2 {BOTH}",
        "run --resume --out run --dry-run --trust",
    ],
)
def test_allowed_user_code_is_executed(
    command: str, user_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, _, _ = command.partition(" --trust" if "--trust" in command else " --code")
    capsys.readouterr()
    assert cli.main(words.split()) == 2
    assert "is code in a file, 'code/mine.py:Mine', which is not executed" in capsys.readouterr().err
    assert cli.main(command.split()) == 0


def test_verify_compares_the_state_of_a_user_model(
    user_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main(["verify", "run"]) == 0
    assert capsys.readouterr().out == "run: intact; resumes from round 1\n"


def test_moved_code_is_used_from_the_named_path(user_run: Path) -> None:
    Path("code").rename("elsewhere")
    with pytest.raises(InvalidInputError, match=r"cannot read the method's file 'code/mine.py'"):
        feddbe.export_model("run", 0, out="home", trust=True)
    client_model = load_client_model(
        "run", 0, allowed=make_permission(["elsewhere/mine.py", "elsewhere/net.py"])
    )
    assert client_model.description["model"] == "elsewhere/net.py:build"


@pytest.mark.parametrize("file", ["mine.py", "helper.py", "net.py"])
@pytest.mark.parametrize("allowed", ["--trust", BOTH])
def test_edited_code_is_not_executed(
    file: str, allowed: str, user_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("code", file)
    path.write_text(path.read_text() + "\nfrom pathlib import Path\nPath('executed').touch()\n")
    for command in COMMANDS[2:8]:
        capsys.readouterr()
        assert cli.main(f"{command} {allowed}".split()) == 2, command
        assert capsys.readouterr().err.count("\n") == 1
    assert not Path("executed").exists()


def test_only_the_named_object_is_allowed(user_run: Path) -> None:
    with pytest.raises(InvalidInputError, match="not the model's file with which"):
        feddbe.export_model("run", 0, out="home", code=["code/mine.py", "code/net.py:other"])


def test_module_outside_of_the_folder_is_not_read(user_run: Path) -> None:
    """A stored list of modules cannot make the gate read other files."""
    store = RunStore.open(Path("run"))
    sources = store.meta("sources")
    store.close()
    for name in ("../secret.py", str(user_run / "secret.py"), "../../etc/passwd"):
        (user_run / "secret.py").write_text("")
        sources["method"]["modules"][name] = hashlib.sha256(b"").hexdigest()
        change(Path("run"), sources=sources)
        with pytest.raises(
            InvalidInputError, match=r"which the method's file 'code/mine.py' imports, is not the one"
        ):
            feddbe.run(out="run", resume=True, trust=True, quiet=True)
        del sources["method"]["modules"][name]


def test_stored_content_of_user_code(user_run: Path) -> None:
    store = RunStore.open(Path("run"))
    sources = json.loads(json.dumps(store.meta("sources")))
    store.close()
    assert sources.keys() == {"model", "method"}
    assert sources["method"]["modules"].keys() == {"helper.py"}
    assert all(len(source["sha256"]) == 64 for source in sources.values())
