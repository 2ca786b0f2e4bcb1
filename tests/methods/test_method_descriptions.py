"""`feddbe methods` describes methods by their declarations, and declarations are what a run does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from feddbe.methods.base import BODY, HEAD, MODEL, Method, Names
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.fedper import FedPer
from feddbe.methods.registry import METHODS, describe_methods
from feddbe.simulation.engines.base import Broadcasts
from feddbe.state import State, matches_pattern
from tests.small_runs import MessageRecorder, experiment, run_recorded

OPTIONS = {"moon": "(projection=4)"}
"""Options with which a method has all of its declared names."""


@pytest.mark.parametrize("name", METHODS)
def test_every_declared_name_occurs_in_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undeclared names stop a run, so with this the two lists are equal."""
    received: list[State] = []
    message_for = Broadcasts.message_for

    def record(self: Broadcasts, client: int) -> State:
        received.append(message_for(self, client))
        return received[-1]

    monkeypatch.setattr(Broadcasts, "message_for", record)
    e = experiment(name + OPTIONS.get(name, ""))
    recorder = MessageRecorder(e)
    run_recorded(e, tmp_path, recorder)
    model = e.task.model
    groups = {MODEL: model.parameters, BODY: model.body, HEAD: model.head}
    observed = {
        "receives": {key for message in received for key in message},
        "sends": {key for message in recorder.messages for key in message},
        "keeps": {key for state in recorder.private for key in state},
    }
    for kind, keys in observed.items():
        for pattern in getattr(METHODS[name], kind):
            if pattern in groups:
                assert set(groups[pattern]) <= keys, (kind, pattern)
            else:
                assert any(matches_pattern(key, [pattern]) for key in keys), (kind, pattern)


def test_description_follows_from_declarations() -> None:
    @dataclass(frozen=True)
    class Described(FedPer):
        name: ClassVar[str] = "described"
        keeps: ClassVar[Names] = ("own/", "personal/")
        receives: ClassVar[Names] = (MODEL, "mean")
        constant: ClassVar[Names] = ("mean",)

    METHODS["described"] = Described
    try:
        (description,) = describe_methods(["described"])
    finally:
        del METHODS["described"]
    assert description["exchange"] == {
        "receives": "model, mean (once)",
        "sends": "body",
        "keeps": "own/, personal/",
        "secret": "personal/",
        "evaluated": "the new body with the client's head",
    }
    assert describe_methods(["dbe"])[0]["exchange"] == {
        "receives": "mean (once)", "sends": "mean", "keeps": "prbm", "secret": "prbm",
    }  # fmt: skip


def test_description_names_values_of_other_clients() -> None:
    received = {info["name"]: info["exchange"]["receives"] for info in describe_methods()}
    assert received["apple"] == "core/ (models of other clients), sample counts of all clients"
    assert received["fedfomo"] == "others/ (models of other clients)"
    assert [name for name, text in received.items() if "clients" in text] == ["fedfomo", "apple"]


@pytest.mark.parametrize("name", METHODS)
def test_override_of_inference_params_names_the_evaluated_model(name: str) -> None:
    evaluated = describe_methods([name])[0]["exchange"]["evaluated"]
    is_inherited = METHODS[name].inference_params is Method.inference_params
    assert evaluated.startswith("the received model") is is_inherited
    assert ("fine-tuned" in evaluated) is bool(METHODS[name].adapts)


def test_server_entries_outside_the_model_are_not_evaluated() -> None:
    """SCAFFOLD and FedGen receive more than a model, and need no hook to drop it."""
    for name in ("scaffold", "fedgen", "moon"):
        assert METHODS[name].inference_params is FedAvg.inference_params


def test_every_hyperparameter_has_search_values() -> None:
    """Choices and switches list their values already."""
    for info in describe_methods():
        for parameter in info["parameters"] if info["family"] != "add-on" else []:
            listed = "," in parameter["allowed"]
            assert parameter["search"] or parameter["search_rule"] or listed, (
                f"{info['name']} {parameter['name']}"
            )
