"""A sparse gradient is the dense one: every way of training fastText, and the same with dense gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.models.registry import fasttext
from feddbe.runs.experiment import Experiment, resolve
from feddbe.training.backends import gradient
from feddbe.training.plan import Samples
from feddbe.training.trainer import ClientTrainer
from tests.federation import COMBINATIONS, are_identical, run_outcome

WORDS, LENGTH = 60, 12


def texts() -> Dataset:
    """Three labels that show in the words; the last words are in no text, the first ones in most."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    x = (torch.rand(90, LENGTH, generator=generator) ** 2 * 50).int() + 1
    x[:, 0] = y + 1
    x[torch.arange(LENGTH) >= torch.randint(1, LENGTH, (90, 1), generator=generator)] = 0
    return Dataset("texts", x, y, 3, num_words=WORDS)


class DenseMean(nn.Module):
    """The plain layer of the same name and start."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_()[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, padding_idx=0).mean(1)


def dense(sparse: nn.Sequential) -> nn.Sequential:
    layers = OrderedDict(sparse.named_children())
    layers["embedding"] = DenseMean(next(sparse.parameters()))
    return nn.Sequential(layers)


def pair(method: str, **options: object) -> tuple[Experiment, Experiment]:
    """The same experiment with the sparse layer and with the dense one."""
    torch.manual_seed(0)
    model = fasttext(WORDS, 3)
    config = Config(partition="iid", clients=2, rounds=2, lr=0.05, **options)  # type: ignore[arg-type]
    first, second = (resolve(method, config, dataset=texts(), model=m) for m in (model, dense(model)))
    return first, second


@pytest.fixture
def doubles() -> Iterator[None]:
    """In float32 FedGen's Adam makes 1e-5 out of rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("method", COMBINATIONS)
def test_every_method_ends_with_the_same_numbers(tmp_path: Path, method: str) -> None:
    sparse, plain = (run_outcome(e, tmp_path / str(i)) for i, e in enumerate(pair(method)))
    assert sparse.server.keys() == plain.server.keys()
    assert sparse.clients.keys() == plain.clients.keys()
    for found, expected in [
        (sparse.server, plain.server),
        *((s, plain.clients[c]) for c, s in sparse.clients.items()),
    ]:
        for name, tensor in expected.items():
            assert not found[name].is_sparse
            torch.testing.assert_close(found[name], tensor, atol=1e-9, rtol=1e-9)
    if "embedding.weight" in sparse.server:  # local and majority have no server
        start = pair(method)[0].task.model.parameters["embedding.weight"]
        moved = (sparse.server["embedding.weight"] != start).any(1)
        assert not moved[0], "padding stays where it is"
        assert moved[1:4].all()


def test_the_gradient_for_steps_of_a_methods_own_is_dense() -> None:
    sparse, plain = pair("fedavg")
    dataset = texts()
    batch = Samples(dataset.inputs(dataset.x[:7]), dataset.y[:7])
    tasks = [e.task for e in (sparse, plain)]
    (found, value, _), (expected, same, _) = (gradient(t, t.model.parameters, {}, batch) for t in tasks)
    assert value.item() == pytest.approx(same.item())
    for name, tensor in expected.items():
        assert found[name].layout == torch.strided
        torch.testing.assert_close(found[name], tensor)


def test_frozen_vectors_stay() -> None:
    model = fasttext(WORDS, 3)
    next(model.parameters()).requires_grad_(False)
    task = resolve("fedavg", Config(partition="iid", clients=2), dataset=texts(), model=model).task
    new = ClientTrainer(task, 1, 0).fit(task.model.parameters).params
    start = task.model.parameters
    assert torch.equal(new["embedding.weight"], start["embedding.weight"])
    assert not torch.equal(new["fc.weight"], start["fc.weight"])


def test_torchs_own_sparse_layer_trains_too() -> None:
    """`nn.EmbeddingBag(sparse=True)` of a user's: its gradient has a row for each place of a word."""
    torch.manual_seed(0)
    head = nn.Linear(8, 3)
    bag = nn.EmbeddingBag(WORDS, 8, mode="sum", sparse=True, padding_idx=0)
    ours = nn.Sequential(OrderedDict(bag=bag, head=head))
    theirs = nn.Sequential(OrderedDict(bag=_Sum(bag.weight), head=head))
    config = Config(partition="iid", clients=2, lr=0.5)
    tasks = [resolve("fedavg", config, dataset=texts(), model=m).task for m in (ours, theirs)]
    found, expected = (ClientTrainer(task, 1, 0).fit(task.model.parameters).params for task in tasks)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-6, rtol=1e-5)


class _Sum(DenseMean):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.shape[1]


def test_serial_and_pool_give_the_same_bits(tmp_path: Path) -> None:
    experiment = resolve("fedavg+dbe", Config(partition="iid", clients=2, rounds=2), dataset=texts())
    serial, pool = (run_outcome(experiment, tmp_path / name, name) for name in ("serial", "pool(workers=2)"))
    assert are_identical(serial.server, pool.server)
