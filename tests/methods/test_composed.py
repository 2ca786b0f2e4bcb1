"""Methods with add-ons."""

from __future__ import annotations

import torch

from feddbe.methods.addons import MR, PRBM, Composed
from feddbe.methods.apple import APPLE
from feddbe.methods.base import MODEL, Upload
from feddbe.methods.ditto import Ditto
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.fedfomo import FedFomo
from feddbe.methods.scaffold import Scaffold
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import experiment


def test_inner_method_never_sees_addon_entries() -> None:
    """Neither in the received message nor in its private state nor in the server state."""
    seen_names: list[set[str]] = []

    class RecordingScaffold(Scaffold):
        def train(self, ctx, trainer, received, private):  # type: ignore[no-untyped-def]
            seen_names.extend([set(received), set(private)])
            return super().train(ctx, trainer, received, private)

        def aggregate(self, ctx, server, uploads):  # type: ignore[no-untyped-def]
            seen_names.append(set(server))
            return super().aggregate(ctx, server, uploads)

    task = experiment("scaffold+dbe").task
    method, ctx = Composed(RecordingScaffold(), (PRBM(), MR())), Context(task, 1)
    server = method.server_init(ctx) | {"mean": torch.zeros(64)}
    upload, private = method.train(ctx, ClientTrainer(task, 1, 0), server, method.client_init(ctx))
    new = method.aggregate(ctx, server, [Upload(0, 45, upload)])
    assert len(seen_names) == 3
    assert not any({"mean", "prbm"} & names for names in seen_names)
    assert "prbm" in private
    assert "prbm" not in upload
    assert torch.equal(new["mean"], server["mean"])
    assert "mean" not in method.broadcast(ctx, server, 0)


def test_declarations_are_combined() -> None:
    dbe = Composed(FedAvg(), (PRBM(), MR()))
    assert (dbe.keeps, dbe.secret, dbe.constant) == (("prbm",), ("prbm",), ("mean",))
    assert dbe.sends == (MODEL, *MR.sends)
    assert dbe.receives == (MODEL, *MR.receives)
    assert dbe.has_setup
    prbm_only = Composed(FedAvg(), (PRBM(),))
    assert (prbm_only.keeps, prbm_only.constant, prbm_only.has_setup) == (("prbm",), (), False)


def test_setup_sends_only_parameters_that_the_method_sends() -> None:
    """MR averages models (`init_keep_model`), but FedPer's heads stay private."""
    e = experiment("fedper+mr(init_keep_model=true)")
    upload, _ = e.method.client_setup(
        Context(e.task, 0), ClientTrainer(e.task, 0, 0), e.task.model.parameters, {}
    )
    assert upload.keys() == {*e.task.model.body, "mean"}


def test_declarations_of_the_inner_method_are_kept() -> None:
    ditto = Composed(Ditto(), (MR(),))
    assert ditto.inference_track == Ditto.inference_track == "personal"
    apple = Composed(APPLE(), ())
    assert apple.needs_all_clients == APPLE.needs_all_clients != ""
    assert apple.fixed_options == APPLE.fixed_options != {}
    assert not Composed(FedFomo(), (MR(),)).has_uniform_broadcast
