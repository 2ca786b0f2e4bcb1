"""Terms of the local loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from feddbe.training.loss_terms import CROSS_ENTROPY, Batch, TermContext, prox
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import experiment


def test_cross_entropy_of_the_logits() -> None:
    logits, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    batch = Batch(logits, y, logits, logits, logits)
    context = TermContext(experiment("fedavg").task.model, {}, {}, batch, 0)
    loss, carry = CROSS_ENTROPY.apply(context, {})
    assert loss is not None
    assert loss.item() == pytest.approx(F.cross_entropy(logits, y).item())
    assert carry == {}


def test_prox_gradient_is_weight_times_distance() -> None:
    """weight/2 |p - a|^2 at p = (3, 5), a = (1, 1), weight 0.5: value 5, gradient (1, 2)."""
    p = {"w": torch.tensor([3.0, 5.0], requires_grad=True)}
    term = prox(0.5, {"w": torch.ones(2)})
    unused = torch.zeros(1)
    loss, _ = term.apply(TermContext(None, p, term.const, Batch(*[unused] * 5), 0), {})  # type: ignore[arg-type]
    assert loss is not None
    assert loss.item() == 5.0
    assert torch.autograd.grad(loss, p["w"])[0].tolist() == [1.0, 2.0]


def test_prox_changes_a_step_by_its_gradient() -> None:
    """One full batch from p: p - lr g - lr weight (p - a)."""
    task = experiment("fedavg", batch_size=45).task
    p = task.model.parameters
    anchor = {name: torch.zeros_like(t) for name, t in p.items()}
    plain = ClientTrainer(task, 1, 0).fit(p).params
    proximal = ClientTrainer(task, 1, 0).fit(p, terms=[prox(2.0, anchor)]).params
    for name in p:
        torch.testing.assert_close(proximal[name], plain[name] - 0.1 * 2.0 * p[name], rtol=0, atol=1e-6)
