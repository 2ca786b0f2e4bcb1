"""Runs from Python: the same as on the command line, with a user's own data and model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import feddbe
from feddbe.callbacks.base import Callback
from feddbe.methods import registry
from feddbe.models.registry import ModelSource
from feddbe.runs.store import RunStore
from feddbe.state import State
from feddbe.training.task import Context

SMALL: dict[str, Any] = {"clients": 3, "partition": "iid", "engine": "serial", "rounds": 2, "lr": 0.1}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mine(classes: int = 3) -> feddbe.Dataset:
    """Three clouds of points, and who holds which."""
    rng = np.random.RandomState(0)
    y = np.arange(90) % classes
    x = rng.standard_normal((90, 4)).astype(np.float32) + 3 * np.eye(4, dtype=np.float32)[y]
    return feddbe.Dataset(
        "clouds", torch.from_numpy(x), torch.from_numpy(y), classes, client=np.repeat(np.arange(5), 18)
    )


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)]


class Residual(nn.Module):
    """No Sequential, so that it has to be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, _, self.last = layers()
        self.middle = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.first(x))
        logits: Tensor = self.last(z + torch.relu(self.middle(z)))
        return logits


def test_run_load_and_draw(folder: Path) -> None:
    document = feddbe.run("fedavg+dbe", **SMALL, model="mlp", seed=4)
    assert document["folder"] == "runs/digits-fedavg+dbe-1"
    assert document["config"]["seed"] == 4
    assert document["config"]["model"] == "mlp"
    assert [entry["round"] for entry in document["rounds"]] == [0, 1, 2]
    for name in (document["folder"], Path(document["folder"]), "digits-fedavg+dbe-1"):
        assert feddbe.load(name) == {**document, "folder": str(Path("runs/digits-fedavg+dbe-1"))}
    without = feddbe.load(document["folder"], hashes=False)
    assert without == {**document, "server_sha256": "", "clients_sha256": {}}
    (folder / "pictures").mkdir()
    for place in ("pictures", folder / "pictures"):
        paths = feddbe.draw(place, [document])
        assert [path.name for path in paths] == ["curves.png", "data.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_compare_has_equal_data_model_and_seed() -> None:
    first, second = feddbe.compare(["fedavg", "fedavg+mr(kappa=0)"], **SMALL, model="mlp", out="both")
    assert [Path(run["folder"]) for run in (first, second)] == [
        Path("both/fedavg"), Path("both/fedavg+mr-kappa0"),
    ]  # fmt: skip
    # with kappa = 0 nothing is left but FedAvg: the same numbers show that all else was equal
    assert [e["accuracy"] for e in first["rounds"]] == [e["accuracy"] for e in second["rounds"]]
    assert first["config_hash"] != second["config_hash"]


def test_a_comparison_is_its_runs_one_by_one() -> None:
    """They share data and model, and leave both as they were."""
    names = ["fedavg+dbe", "ditto", "fedavg"]
    for together in feddbe.compare(names, **SMALL, out="all"):
        alone = feddbe.run(together["method"], **SMALL, out=f"alone-{together['method']}")
        for key in ("config_hash", "server_sha256", "clients_sha256"):
            assert alone[key] == together[key]


def test_own_data() -> None:
    document = feddbe.run("fedavg+dbe", data=mine(), partition="natural", rounds=3, lr=0.1, engine="serial")
    assert document["config"]["data"] == "clouds"
    assert document["config"]["clients"] == 5
    assert document["folder"] == "runs/clouds-fedavg+dbe-1"
    assert document["last"] is not None
    assert document["last"]["accuracy"] is not None
    assert document["last"]["accuracy"]["weighted"] > 0.8 > document["majority_accuracy"]


def test_own_data_is_told_apart_by_its_content() -> None:
    options: dict[str, Any] = {**SMALL, "rounds": 0, "out": "here"}
    feddbe.run("fedavg", data=mine(), **options)
    other = feddbe.Dataset("clouds", mine().x + 1, mine().y, 3)
    with pytest.raises(feddbe.InvalidInputError, match="another configuration"):
        feddbe.run("fedavg", data=other, **options)


def test_own_model_in_every_form() -> None:
    """A module, a pair and a builder of the same layers are the same model."""
    features, classifier = nn.Sequential(*layers()[:2]), layers()[2]

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        assert (shape, classes) == ((4,), 3)
        return nn.Sequential(*layers())

    models: dict[str, ModelSource] = {
        "module": nn.Sequential(*layers()), "pair": (features, classifier), "builder": build,
    }  # fmt: skip
    found = {
        name: feddbe.run("fedavg+dbe", data=mine(), model=model, **SMALL) for name, model in models.items()
    }
    module = found["module"]
    assert {document["config"]["model"] for document in found.values()} == {"own"}
    for document in found.values():
        assert [e["accuracy"] for e in document["rounds"]] == [e["accuracy"] for e in module["rounds"]]
        assert document["clients_sha256"] == module["clients_sha256"]
        assert len(document["clients_sha256"]) == 3
    assert found["builder"]["server_sha256"] == module["server_sha256"]


def test_own_model_that_is_traced_and_cut_where_told() -> None:
    runs = [
        feddbe.run("fedavg+dbe", data=mine(), model=Residual(), cut=cut, **SMALL) for cut in (None, "first")
    ]
    assert runs[1]["config"]["cut"] == "first"
    assert runs[0]["config"]["cut"] != "first"
    assert runs[0]["server_sha256"] != runs[1]["server_sha256"]
    with pytest.raises(feddbe.InvalidInputError, match="unknown cut 'frist'; did you mean 'first'"):
        feddbe.run("fedavg", data=mine(), model=Residual(), cut="frist", **SMALL)


def test_the_users_module_is_left_as_it_was() -> None:
    model = nn.Sequential(*layers())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    feddbe.run("fedavg", data=mine(), model=model, **SMALL)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


class Stop(Callback):
    """Counts what it is told, and stops after a round."""

    def __init__(self, after: int) -> None:
        self.after, self.began, self.rounds = after, list[tuple[str, Path, int, int]](), list[int]()

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.began.append((name, folder, done, rounds))

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self.rounds.append(done)
        if done == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("engine", ["serial", "pool(workers=2)"])
def test_an_interrupt_passes_through_and_the_run_can_be_resumed(engine: str) -> None:
    options: dict[str, Any] = {**SMALL, "data": mine(), "rounds": 4, "engine": engine}
    whole = feddbe.run("fedavg+dbe", **options, out="whole")
    watch = Stop(after=2)
    with pytest.raises(KeyboardInterrupt):
        feddbe.run("fedavg+dbe", **options, out="cut", callback=watch)
    assert watch.began == [("fedavg+dbe", Path("cut"), 0, 4)]
    assert watch.rounds == [0, 1, 2]
    assert [e["round"] for e in feddbe.load("cut")["rounds"]] == [0, 1, 2]
    with pytest.raises(feddbe.InvalidInputError, match="contains this run already"):
        feddbe.run("fedavg+dbe", **options, out="cut")
    watch = Stop(after=-1)
    resumed = feddbe.run("fedavg+dbe", **options, out="cut", resume=True, callback=watch)
    assert watch.began == [("fedavg+dbe", Path("cut"), 2, 4)]
    assert resumed["server_sha256"] == whole["server_sha256"]
    assert resumed["clients_sha256"] == whole["clients_sha256"]
    assert [e["accuracy"] for e in resumed["rounds"]] == [e["accuracy"] for e in whole["rounds"]]


def test_more_rounds_extend_a_run() -> None:
    options: dict[str, Any] = {**SMALL, "data": mine(), "out": "longer"}
    feddbe.run("fedavg", **{**options, "rounds": 1})
    extended = feddbe.run("fedavg", **{**options, "rounds": 3, "resume": True})
    at_once = feddbe.run("fedavg", **{**options, "rounds": 3, "out": "at_once"})
    assert extended["config"]["rounds"] == feddbe.load("longer")["config"]["rounds"] == 3
    assert extended["server_sha256"] == at_once["server_sha256"]
    assert len(extended["rounds"]) == 4


def chain(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def test_a_run_goes_on_by_its_folder_alone() -> None:
    """Method and options are those of the run, also where a method has a default of its own."""
    options: dict[str, Any] = {**SMALL, "rounds": 1, "lr": None, "model": "cnn_small", "seed": 3}
    feddbe.compare(["scaffold", "fedavg"], **options, out="short")
    whole = feddbe.compare(["scaffold", "fedavg"], **{**options, "rounds": 3}, out="whole")
    longer = feddbe.compare(resume=True, out="short", rounds=3)
    assert [run["config"]["lr"] for run in longer] == [0.05, 0.1]
    for one, other in zip(longer, whole, strict=True):
        assert one["server_sha256"] == other["server_sha256"]
    alone = feddbe.run(resume=True, out="short/fedavg", rounds=4)
    assert (alone["method"], alone["last"]["round"], alone["config"]["seed"]) == ("fedavg", 4, 3)
    with pytest.raises(feddbe.InvalidInputError, match=r"lr 0\.1 there, 0\.2 now"):
        feddbe.run(resume=True, out="short/fedavg", lr=0.2)
    with pytest.raises(
        feddbe.InvalidInputError, match="'short' contains 2 runs; compare --resume --out short resumes"
    ):
        feddbe.run(resume=True, out="short")
    with pytest.raises(feddbe.InvalidInputError, match="no method given"):
        feddbe.run(out="short")


def test_what_came_from_python_is_given_again() -> None:
    own: dict[str, Any] = {"data": mine(), "model": nn.Sequential(*layers())}
    feddbe.run("fedavg", **own, **SMALL, out="own")
    with pytest.raises(
        feddbe.InvalidInputError, match="the model of 'own' was a Python object; pass it again as model="
    ):
        feddbe.run(data=own["data"], out="own", resume=True)
    assert feddbe.run(**own, out="own", resume=True, rounds=3)["last"]["round"] == 3


def test_those_that_finish_are_returned_and_one_that_diverges_says_so() -> None:
    wild = "fedavg+prbm(prbm_lr=1e20)"
    first, second = feddbe.compare([wild, "fedavg"], **SMALL, model="mlp")
    assert first["diverged"]["round"] == 1
    assert (second["diverged"], second["last"]["round"]) == (None, 2)
    with pytest.raises(feddbe.DivergenceError, match="at client 0 in round 1") as caught:
        feddbe.run(wild, **SMALL, model="mlp", out="alone")
    assert caught.value.round == 1
    assert "diverged in round 1" in repr(feddbe.load("alone"))


def test_a_run_can_be_looked_at() -> None:
    run = feddbe.run("fedavg+dbe", **SMALL, model="mlp", seed=4)
    assert run.curve() == [(e["round"], e["accuracy"]["weighted"]) for e in run["rounds"]]
    assert run.curve("mean")[2] == (2, run["last"]["accuracy"]["mean"])
    with pytest.raises(feddbe.InvalidInputError, match="unknown statistic 'men'; did you mean 'mean'"):
        run.curve("men")
    clients = run.clients()
    assert [client["client"] for client in clients] == [0, 1, 2]
    right = sum(client["samples"] * (client["best"] or 0) for client in clients)
    samples = sum(client["samples"] for client in clients)
    assert right / samples == pytest.approx(run["best"]["accuracy"]["weighted"])
    assert repr(run).startswith("<Run fedavg+dbe: digits, iid, 3 clients, 2 rounds, seed 4, best ")
    assert "<td" in run._repr_html_()
    assert "fedavg+dbe" in run._repr_html_()
    both = feddbe.compare(["fedavg", "fedavg+mr"], **SMALL, model="mlp")
    assert both._repr_html_().count("<tr>") == 3


def test_a_run_as_a_frame() -> None:
    run = feddbe.run("fedavg", **SMALL, model="mlp", validation=0.2)
    frame = run.to_pandas()
    assert frame.index.tolist() == [0, 1, 2]
    assert frame["accuracy"].tolist() == [accuracy for _, accuracy in run.curve()]
    assert frame["accuracy_worst_tenth"].tolist() == [accuracy for _, accuracy in run.curve("worst_tenth")]
    assert frame.loc[2, "validation"] == run["last"]["validation"]["weighted"]
    assert frame.loc[1, "train_loss"] == run["rounds"][1]["train_loss"]


def test_mistakes_are_bad_input_and_leave_nothing(folder: Path) -> None:
    own: dict[str, Any] = {"data": mine(), "partition": "natural"}
    mistakes: list[tuple[str, dict[str, Any], str]] = [
        ("fedagv", {}, "did you mean 'fedavg'"),
        ("fedavg", {"roundz": 3}, "unknown option 'roundz'; did you mean 'rounds'"),
        ("fedavg", {"rounds": -3}, "rounds = -3"),
        ("fedavg", {"data": mine(), "partition": "iid", "clients": 80}, "too many for 90 samples"),
        ("fedavg", {"data": mine(), "clients": 80}, "clients = 80, but the data's client column has 5"),
        ("fedavg", {**own, "clients": 4}, "clients = 4, but the data's client column has 5"),
        ("fedavg", {**own, "model": chain(5, 8, 3)}, "does not take inputs of shape"),
        ("fedavg", {**own, "model": chain(4, 8, 2)}, "gives 2 logits, the data has 3 classes"),
    ]
    for method, options, words in mistakes:
        with pytest.raises(feddbe.InvalidInputError, match=words):
            feddbe.run(method, **options)
    assert list(folder.iterdir()) == []


def test_a_run_that_cannot_begin_leaves_no_empty_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(feddbe.FedAvg):
        name: ClassVar[str] = "broken"

        def server_init(self, ctx: Context) -> State:
            raise RuntimeError("not today")

    monkeypatch.setitem(feddbe.METHODS, "broken", Broken)
    for out in (None, "a/b/c"):
        with pytest.raises(RuntimeError, match="not today"):
            feddbe.run("broken", data=mine(), **SMALL, out=out)
        with pytest.raises(RuntimeError, match="not today"):
            feddbe.compare(["broken", "fedavg"], data=mine(), **SMALL, out=out)
    assert list(folder.iterdir()) == []
    (folder / "before").mkdir()
    with pytest.raises(RuntimeError, match="not today"):
        feddbe.run("broken", data=mine(), **SMALL, out="before")
    assert (folder / "before").is_dir()  # it was there before


def test_a_place_that_cannot_be_written(folder: Path) -> None:
    (folder / "runs").write_text("in the way")
    with pytest.raises(feddbe.StoreError, match="runs"):
        feddbe.run("fedavg", data=mine(), **SMALL)
    (folder / "taken" / "run.sqlite").mkdir(parents=True)
    with pytest.raises(feddbe.StoreError, match="taken"):
        feddbe.run("fedavg", data=mine(), **SMALL, out="taken")


def test_every_public_name_is_there() -> None:
    assert feddbe.callbacks.ProgressLines.__module__ == "feddbe.callbacks.display"
    assert set(feddbe.__all__) <= set(dir(feddbe))
    for name in set(feddbe.__all__) - {"METHODS"}:
        assert getattr(feddbe, name).__module__.startswith("feddbe.")
    assert "fedavg" in feddbe.METHODS
    with pytest.raises(AttributeError, match="no attribute 'fedavg'"):
        feddbe.fedavg  # noqa: B018


def test_other_versions_than_it_began_with_are_said(tmp_path: Path) -> None:
    class Listening(Callback):
        def __init__(self) -> None:
            self.said: list[str] = []

        def on_message(self, text: str) -> None:
            self.said.append(text)

    options: dict[str, Any] = {"clients": 3, "partition": "iid", "engine": "serial", "out": str(tmp_path)}
    feddbe.run("fedavg", rounds=1, **options)
    quiet, told = Listening(), Listening()
    feddbe.run("fedavg", rounds=1, resume=True, callback=quiet, **options)
    assert quiet.said == []
    store = RunStore.open(tmp_path)
    now = store.meta("versions")
    store.set_meta("versions", {**now, "torch": "1.0"})
    store.close()
    document = feddbe.run("fedavg", rounds=2, resume=True, callback=told, **options)
    line = f"resumed with other versions: torch 1.0 before, {now['torch']} now"
    assert told.said == [line]
    assert document["remarks"] == [line]


def test_a_method_s_name_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    original = registry.MethodName

    def count(text: str, parts: Any) -> registry.MethodName:
        parsed.append(text)
        return original(text, parts)

    monkeypatch.setattr(registry, "MethodName", count)
    feddbe.compare(["fedavg", "fedprox(mu=0.1)+dbe"], **SMALL, model="mlp")
    assert parsed == ["fedavg", "fedprox(mu=0.1)+dbe"]
