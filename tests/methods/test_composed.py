"""A method with add-ons on it."""

from __future__ import annotations

import torch

from feddbe.methods.addons import MR, PRBM, Composed
from feddbe.methods.base import MODEL, Upload
from feddbe.methods.fedavg import FedAvg
from feddbe.methods.scaffold import Scaffold
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.federation import experiment


def test_the_method_never_sees_what_belongs_to_an_add_on() -> None:
    """Neither in what it receives nor in its private state nor in the server's."""
    seen: list[set[str]] = []

    class Watching(Scaffold):
        def train(self, ctx, trainer, received, private):  # type: ignore[no-untyped-def]
            seen.extend([set(received), set(private)])
            return super().train(ctx, trainer, received, private)

        def aggregate(self, ctx, server, uploads):  # type: ignore[no-untyped-def]
            seen.append(set(server))
            return super().aggregate(ctx, server, uploads)

    task = experiment("scaffold+dbe").task
    method, ctx = Composed(Watching(), (PRBM(), MR())), Context(task, 1)
    server = method.server_init(ctx) | {"mean": torch.zeros(64)}
    up, private = method.train(ctx, ClientTrainer(task, 1, 0), server, method.client_init(ctx))
    new = method.aggregate(ctx, server, [Upload(0, 45, up)])
    assert len(seen) == 3
    assert not any({"mean", "prbm"} & names for names in seen)
    assert "prbm" in private
    assert "prbm" not in up
    assert torch.equal(new["mean"], server["mean"])
    assert "mean" not in method.broadcast(ctx, server, 0)


def test_it_shows_what_its_parts_declare() -> None:
    both = Composed(FedAvg(), (PRBM(), MR()))
    assert (both.keeps, both.secret, both.constant) == (("prbm",), ("prbm",), ("mean",))
    assert both.sends == (MODEL, *MR.sends)
    assert both.receives == (MODEL, *MR.receives)
    assert both.has_setup
    one = Composed(FedAvg(), (PRBM(),))
    assert (one.keeps, one.constant, one.has_setup) == (("prbm",), (), False)


def test_the_preparation_sends_of_the_model_what_the_method_sends() -> None:
    """MR's models are averaged (`init_keep_model`); FedPer's heads are nobody's business."""
    e = experiment("fedper+mr(init_keep_model=true)")
    up, _ = e.method.client_setup(
        Context(e.task, 0), ClientTrainer(e.task, 0, 0), e.task.model.parameters, {}
    )
    assert up.keys() == {*e.task.model.body, "mean"}
