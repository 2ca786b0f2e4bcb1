"""The functions for Python users, with users' data and models."""

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
    """Change to an empty folder and return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_dataset(classes: int = 3) -> feddbe.Dataset:
    """Return three clouds of points, divided among five clients."""
    rng = np.random.RandomState(0)
    y = np.arange(90) % classes
    x = rng.standard_normal((90, 4)).astype(np.float32) + 3 * np.eye(4, dtype=np.float32)[y]
    return feddbe.Dataset(
        "clouds", torch.from_numpy(x), torch.from_numpy(y), classes, client=np.repeat(np.arange(5), 18)
    )


def make_layers() -> list[nn.Module]:
    """Return the layers of a small network, with fixed initial parameters."""
    torch.manual_seed(3)
    return [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)]


class Residual(nn.Module):
    """A module that is not `nn.Sequential`, so that it has to be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, _, self.last = make_layers()
        self.middle = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.first(x))
        logits: Tensor = self.last(z + torch.relu(self.middle(z)))
        return logits


def test_run_is_loaded_and_drawn(folder: Path) -> None:
    document = feddbe.run("fedavg+dbe", **SMALL, model="mlp", seed=4)
    assert document["folder"] == "runs/digits-fedavg+dbe-1"
    assert document["config"]["seed"] == 4
    assert document["config"]["model"] == "mlp"
    assert [result["round"] for result in document["rounds"]] == [0, 1, 2]
    for name in (document["folder"], Path(document["folder"]), "digits-fedavg+dbe-1"):
        assert feddbe.load(name) == {**document, "folder": str(Path("runs/digits-fedavg+dbe-1"))}
    without_hashes = feddbe.load(document["folder"], hashes=False)
    assert without_hashes == {**document, "server_sha256": "", "clients_sha256": {}}
    (folder / "pictures").mkdir()
    for output_dir in ("pictures", folder / "pictures"):
        paths = feddbe.draw(output_dir, [document])
        assert [path.name for path in paths] == ["curves.png", "data.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def accuracies(run: feddbe.Run) -> list[Any]:
    """Return the accuracy of every round."""
    return [result["accuracy"] for result in run["rounds"]]


def test_compare_uses_equal_data_model_and_seed() -> None:
    first, second = feddbe.compare(["fedavg", "fedavg+mr(kappa=0)"], **SMALL, model="mlp", out="both")
    assert [Path(run["folder"]) for run in (first, second)] == [
        Path("both/fedavg"), Path("both/fedavg+mr-kappa0"),
    ]  # fmt: skip
    # with kappa = 0 it is FedAvg: equal numbers show that everything else was equal
    assert accuracies(first) == accuracies(second)
    assert first["config_hash"] != second["config_hash"]


def test_compare_over_values_reports_progress_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    """In a script without a terminal, as on the command line."""
    options: dict[str, Any] = {**SMALL, "model": "mlp", "lr": [0.1, 0.2], "name": "rates"}
    feddbe.compare(["fedavg"], **options)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "feddbe: values are chosen on held-out training data: --validation 0.2"
    assert sorted(line.split(": ")[0] for line in lines[1:]) == ["1 of 2", "2 of 2"]
    feddbe.compare(["fedavg"], **options, quiet=True)
    assert capsys.readouterr().err == ""


def test_compare_equals_separate_runs() -> None:
    """Runs of a comparison share data and model, and do not change them."""
    names = ["fedavg+dbe", "ditto", "fedavg"]
    for compared in feddbe.compare(names, **SMALL, out="all"):
        separate = feddbe.run(compared["method"], **SMALL, out=f"separate-{compared['method']}")
        for key in ("config_hash", "server_sha256", "clients_sha256"):
            assert separate[key] == compared[key]


def test_run_with_a_dataset_object() -> None:
    document = feddbe.run(
        "fedavg+dbe", data=make_dataset(), partition="natural", rounds=3, lr=0.1, engine="serial"
    )
    assert document["config"]["data"] == "clouds"
    assert document["config"]["clients"] == 5
    assert document["folder"] == "runs/clouds-fedavg+dbe-1"
    assert document["last"] is not None
    assert document["last"]["accuracy"] is not None
    assert document["last"]["accuracy"]["weighted"] > 0.8 > document["majority_accuracy"]


def test_dataset_objects_are_identified_by_content() -> None:
    options: dict[str, Any] = {**SMALL, "rounds": 0, "out": "same"}
    feddbe.run("fedavg", data=make_dataset(), **options)
    other = feddbe.Dataset("clouds", make_dataset().x + 1, make_dataset().y, 3)
    with pytest.raises(feddbe.InvalidInputError, match="another configuration"):
        feddbe.run("fedavg", data=other, **options)


def test_model_object_has_the_same_results_in_every_form() -> None:
    """A module, a pair and a function that build the same layers are the same model."""
    features, classifier = nn.Sequential(*make_layers()[:2]), make_layers()[2]

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        assert (shape, classes) == ((4,), 3)
        return nn.Sequential(*make_layers())

    models: dict[str, ModelSource] = {
        "module": nn.Sequential(*make_layers()), "pair": (features, classifier), "builder": build,
    }  # fmt: skip
    runs = {
        name: feddbe.run("fedavg+dbe", data=make_dataset(), model=model, **SMALL)
        for name, model in models.items()
    }
    module = runs["module"]
    assert {run["config"]["model"] for run in runs.values()} == {"own"}
    for run in runs.values():
        assert accuracies(run) == accuracies(module)
        assert run["clients_sha256"] == module["clients_sha256"]
        assert len(run["clients_sha256"]) == 3
    assert runs["builder"]["server_sha256"] == module["server_sha256"]


def test_traced_model_is_split_at_the_requested_cut() -> None:
    runs = [
        feddbe.run("fedavg+dbe", data=make_dataset(), model=Residual(), cut=cut, **SMALL)
        for cut in (None, "first")
    ]
    assert runs[1]["config"]["cut"] == "first"
    assert runs[0]["config"]["cut"] != "first"
    assert runs[0]["server_sha256"] != runs[1]["server_sha256"]
    with pytest.raises(feddbe.InvalidInputError, match="unknown cut 'frist'; did you mean 'first'"):
        feddbe.run("fedavg", data=make_dataset(), model=Residual(), cut="frist", **SMALL)


def test_run_does_not_change_the_module_of_the_user() -> None:
    model = nn.Sequential(*make_layers())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    feddbe.run("fedavg", data=make_dataset(), model=model, **SMALL)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


class StopAfterRound(Callback):
    """Records its events and raises KeyboardInterrupt after a round."""

    def __init__(self, last_round: int) -> None:
        self.last_round = last_round
        self.starts: list[tuple[str, Path, int, int]] = []
        self.rounds: list[int] = []

    def on_run_begin(self, name: str, folder: Path, done: int, rounds: int) -> None:
        self.starts.append((name, folder, done, rounds))

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        self.rounds.append(done)
        if done == self.last_round:
            raise KeyboardInterrupt


@pytest.mark.parametrize("engine", ["serial", "pool(workers=2)"])
def test_resume_after_interrupt_is_bit_exact(engine: str) -> None:
    options: dict[str, Any] = {**SMALL, "data": make_dataset(), "rounds": 4, "engine": engine}
    uninterrupted = feddbe.run("fedavg+dbe", **options, out="complete")
    callback = StopAfterRound(2)
    with pytest.raises(KeyboardInterrupt):
        feddbe.run("fedavg+dbe", **options, out="cut", callback=callback)
    assert callback.starts == [("fedavg+dbe", Path("cut"), 0, 4)]
    assert callback.rounds == [0, 1, 2]
    assert [result["round"] for result in feddbe.load_run("cut")["rounds"]] == [0, 1, 2]
    with pytest.raises(feddbe.InvalidInputError, match="contains this run already"):
        feddbe.run("fedavg+dbe", **options, out="cut")
    callback = StopAfterRound(-1)
    resumed = feddbe.run("fedavg+dbe", **options, out="cut", resume=True, callback=callback)
    assert callback.starts == [("fedavg+dbe", Path("cut"), 2, 4)]
    assert resumed["server_sha256"] == uninterrupted["server_sha256"]
    assert resumed["clients_sha256"] == uninterrupted["clients_sha256"]
    assert accuracies(resumed) == accuracies(uninterrupted)


def test_resume_with_more_rounds_extends_a_run() -> None:
    options: dict[str, Any] = {**SMALL, "data": make_dataset(), "out": "longer"}
    feddbe.run("fedavg", **{**options, "rounds": 1})
    extended = feddbe.run("fedavg", **{**options, "rounds": 3, "resume": True})
    uninterrupted = feddbe.run("fedavg", **{**options, "rounds": 3, "out": "uninterrupted"})
    assert extended["config"]["rounds"] == feddbe.load_run("longer")["config"]["rounds"] == 3
    assert extended["server_sha256"] == uninterrupted["server_sha256"]
    assert len(extended["rounds"]) == 4


def linear_chain(*sizes: int) -> nn.Module:
    """Return linear layers with these numbers of features."""
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def test_run_resumes_from_its_folder_without_other_options() -> None:
    """Method and options are those of the run, also if the method has its own default."""
    options: dict[str, Any] = {**SMALL, "rounds": 1, "lr": None, "model": "cnn_small", "seed": 3}
    feddbe.compare(["scaffold", "fedavg"], **options, out="short")
    uninterrupted = feddbe.compare(["scaffold", "fedavg"], **{**options, "rounds": 3}, out="complete")
    longer = feddbe.compare(resume=True, out="short", rounds=3)
    assert [run["config"]["lr"] for run in longer] == [0.05, 0.1]
    for run, expected in zip(longer, uninterrupted, strict=True):
        assert run["server_sha256"] == expected["server_sha256"]
    single = feddbe.run(resume=True, out="short/fedavg", rounds=4)
    assert (single["method"], single["last"]["round"], single["config"]["seed"]) == ("fedavg", 4, 3)
    with pytest.raises(feddbe.InvalidInputError, match=r"lr 0\.1 in the run, 0\.2 now"):
        feddbe.run(resume=True, out="short/fedavg", lr=0.2)
    with pytest.raises(
        feddbe.InvalidInputError, match="'short' contains 2 runs; compare --resume --out short resumes"
    ):
        feddbe.run(resume=True, out="short")
    with pytest.raises(feddbe.InvalidInputError, match="no method given"):
        feddbe.run(out="short")


def test_resume_requires_python_objects_again() -> None:
    objects: dict[str, Any] = {"data": make_dataset(), "model": nn.Sequential(*make_layers())}
    feddbe.run("fedavg", **objects, **SMALL, out="own")
    with pytest.raises(
        feddbe.InvalidInputError, match="the model of 'own' was a Python object; pass it again as model="
    ):
        feddbe.run(data=objects["data"], out="own", resume=True)
    assert feddbe.run(**objects, out="own", resume=True, rounds=3)["last"]["round"] == 3


def test_compare_returns_diverged_runs_and_run_raises() -> None:
    diverging = "fedavg+prbm(prbm_lr=1e20)"
    first, second = feddbe.compare([diverging, "fedavg"], **SMALL, model="mlp")
    assert first["diverged"]["round"] == 1
    assert (second["diverged"], second["last"]["round"]) == (None, 2)
    with pytest.raises(feddbe.DivergenceError, match="at client 0 in round 1") as caught:
        feddbe.run(diverging, **SMALL, model="mlp", out="single")
    assert caught.value.round == 1
    assert "diverged in round 1" in repr(feddbe.load("single"))


def test_run_has_curve_clients_and_representations() -> None:
    run = feddbe.run("fedavg+dbe", **SMALL, model="mlp", seed=4)
    expected = [(result["round"], result["accuracy"]["weighted"]) for result in run["rounds"]]
    assert run.curve() == expected
    assert run.curve("mean")[2] == (2, run["last"]["accuracy"]["mean"])
    with pytest.raises(feddbe.InvalidInputError, match="unknown statistic 'men'; did you mean 'mean'"):
        run.curve("men")
    clients = run.clients()
    assert [client["client"] for client in clients] == [0, 1, 2]
    correct = sum(client["samples"] * (client["best"] or 0) for client in clients)
    samples = sum(client["samples"] for client in clients)
    assert correct / samples == pytest.approx(run["best"]["accuracy"]["weighted"])
    assert repr(run).startswith("<Run fedavg+dbe: digits, iid, 3 clients, 2 rounds, seed 4, best ")
    assert "<td" in run._repr_html_()
    assert "fedavg+dbe" in run._repr_html_()
    both = feddbe.compare(["fedavg", "fedavg+mr"], **SMALL, model="mlp")
    assert both._repr_html_().count("<tr>") == 3


def test_run_converts_to_a_pandas_frame() -> None:
    run = feddbe.run("fedavg", **SMALL, model="mlp", validation=0.2)
    frame = run.to_pandas()
    assert frame.index.tolist() == [0, 1, 2]
    assert frame["accuracy"].tolist() == [accuracy for _, accuracy in run.curve()]
    assert frame["accuracy_worst_tenth"].tolist() == [accuracy for _, accuracy in run.curve("worst_tenth")]
    assert frame.loc[2, "validation"] == run["last"]["validation"]["weighted"]
    assert frame.loc[1, "train_loss"] == run["rounds"][1]["train_loss"]


def test_invalid_input_raises_and_writes_nothing(folder: Path) -> None:
    natural: dict[str, Any] = {"data": make_dataset(), "partition": "natural"}
    invalid_inputs: list[tuple[str, dict[str, Any], str]] = [
        ("fedagv", {}, "did you mean 'fedavg'"),
        ("fedavg", {"roundz": 3}, "unknown option 'roundz'; did you mean 'rounds'"),
        ("fedavg", {"rounds": -3}, "rounds = -3"),
        ("fedavg", {"data": make_dataset(), "partition": "iid", "clients": 80}, "too many for 90 samples"),
        (
            "fedavg",
            {"data": make_dataset(), "clients": 80},
            "clients = 80, but the data's client column has 5",
        ),
        ("fedavg", {**natural, "clients": 4}, "clients = 4, but the data's client column has 5"),
        ("fedavg", {**natural, "model": linear_chain(5, 8, 3)}, "does not take inputs of shape"),
        ("fedavg", {**natural, "model": linear_chain(4, 8, 2)}, "returns 2 logits, the data has 3 classes"),
    ]
    for method, options, message in invalid_inputs:
        with pytest.raises(feddbe.InvalidInputError, match=message):
            feddbe.run(method, **options)
    assert list(folder.iterdir()) == []


def test_failing_start_leaves_no_empty_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(feddbe.FedAvg):
        name: ClassVar[str] = "broken"

        def server_init(self, ctx: Context) -> State:
            raise RuntimeError("cannot start")

    monkeypatch.setitem(feddbe.METHODS, "broken", Broken)
    for out in (None, "a/b/c"):
        with pytest.raises(RuntimeError, match="cannot start"):
            feddbe.run("broken", data=make_dataset(), **SMALL, out=out)
        with pytest.raises(RuntimeError, match="cannot start"):
            feddbe.compare(["broken", "fedavg"], data=make_dataset(), **SMALL, out=out)
    assert list(folder.iterdir()) == []
    (folder / "before").mkdir()
    with pytest.raises(RuntimeError, match="cannot start"):
        feddbe.run("broken", data=make_dataset(), **SMALL, out="before")
    assert (folder / "before").is_dir()  # it existed before


def test_unusable_output_folder_is_a_store_error(folder: Path) -> None:
    (folder / "runs").write_text("a file, not a folder")
    with pytest.raises(feddbe.StoreError, match="runs"):
        feddbe.run("fedavg", data=make_dataset(), **SMALL)
    (folder / "blocked" / "run.sqlite").mkdir(parents=True)
    with pytest.raises(feddbe.StoreError, match="blocked"):
        feddbe.run("fedavg", data=make_dataset(), **SMALL, out="blocked")


def test_public_names_are_defined_in_feddbe() -> None:
    assert feddbe.callbacks.ProgressLines.__module__ == "feddbe.callbacks.display"
    assert set(feddbe.__all__) <= set(dir(feddbe))
    for name in set(feddbe.__all__) - {"METHODS"}:
        assert getattr(feddbe, name).__module__.startswith("feddbe.")
    assert "fedavg" in feddbe.METHODS
    with pytest.raises(AttributeError, match="no attribute 'fedavg'"):
        feddbe.fedavg  # noqa: B018


def test_resume_with_other_versions_is_noted(tmp_path: Path) -> None:
    class MessageRecorder(Callback):
        def __init__(self) -> None:
            self.messages: list[str] = []

        def on_message(self, text: str) -> None:
            self.messages.append(text)

    options: dict[str, Any] = {"clients": 3, "partition": "iid", "engine": "serial", "out": str(tmp_path)}
    feddbe.run("fedavg", rounds=1, **options)
    recorder = MessageRecorder()
    feddbe.run("fedavg", rounds=1, resume=True, callback=recorder, **options)
    assert recorder.messages == []
    store = RunStore.open(tmp_path)
    versions = store.meta("versions")
    store.set_meta("versions", {**versions, "torch": "1.0"})
    store.close()
    document = feddbe.run("fedavg", rounds=2, resume=True, callback=recorder, **options)
    (message,) = recorder.messages
    assert message == f"resumed with other versions: torch 1.0 before, {versions['torch']} now"
    assert document["remarks"] == [message]


def test_name_of_a_method_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_names: list[str] = []
    method_name = registry.MethodName

    def record_name(text: str, parts: Any) -> registry.MethodName:
        parsed_names.append(text)
        return method_name(text, parts)

    monkeypatch.setattr(registry, "MethodName", record_name)
    feddbe.compare(["fedavg", "fedprox(mu=0.1)+dbe"], **SMALL, model="mlp")
    assert parsed_names == ["fedavg", "fedprox(mu=0.1)+dbe"]
