"""Sparse gradients of fastText's embedding: every method has the results of dense gradients."""

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
from feddbe.training.backends import compute_gradient
from feddbe.training.fit_plan import Samples
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import COMBINATIONS, are_identical, run_outcome

WORDS, LENGTH = 60, 12


def make_texts() -> Dataset:
    """Return texts with three labels; the last words are in no text, the first ones in most."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    x = (torch.rand(90, LENGTH, generator=generator) ** 2 * 50).int() + 1
    x[:, 0] = y + 1
    x[torch.arange(LENGTH) >= torch.randint(1, LENGTH, (90, 1), generator=generator)] = 0
    return Dataset("texts", x, y, 3, num_words=WORDS)


class DenseMean(nn.Module):
    """Dense layer with the name and initial weight of `MeanEmbedding`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_()[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, padding_idx=0).mean(1)


def with_dense_embedding(sparse: nn.Sequential) -> nn.Sequential:
    layers = OrderedDict(sparse.named_children())
    layers["embedding"] = DenseMean(next(sparse.parameters()))
    return nn.Sequential(layers)


def make_experiments(method: str, **options: object) -> tuple[Experiment, Experiment]:
    """Return an experiment with the sparse layer, and the same with the dense one."""
    torch.manual_seed(0)
    model = fasttext(WORDS, 3)
    config = Config(partition="iid", clients=2, rounds=2, lr=0.05, **options)  # type: ignore[arg-type]
    sparse = resolve(method, config, dataset=make_texts(), model=model)
    dense = resolve(method, config, dataset=make_texts(), model=with_dense_embedding(model))
    return sparse, dense


@pytest.fixture
def float64() -> Iterator[None]:
    """Compute in float64: in float32, FedGen's Adam turns rounding into differences of 1e-5."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("method", COMBINATIONS)
def test_every_method_equals_dense_gradients(tmp_path: Path, method: str) -> None:
    sparse_experiment, dense_experiment = make_experiments(method)
    sparse = run_outcome(sparse_experiment, tmp_path / "sparse")
    dense = run_outcome(dense_experiment, tmp_path / "dense")
    assert sparse.server.keys() == dense.server.keys()
    assert sparse.clients.keys() == dense.clients.keys()
    pairs = [(sparse.server, dense.server)]
    pairs += [(state, dense.clients[client]) for client, state in sparse.clients.items()]
    for actual, expected in pairs:
        for name, tensor in expected.items():
            assert not actual[name].is_sparse
            torch.testing.assert_close(actual[name], tensor, atol=1e-9, rtol=1e-9)
    if "embedding.weight" in sparse.server:  # local and majority have no server
        start = sparse_experiment.task.model.parameters["embedding.weight"]
        moved = (sparse.server["embedding.weight"] != start).any(1)
        assert not moved[0], "padding is not trained"
        assert moved[1:4].all()


def test_gradient_function_returns_dense_tensors() -> None:
    sparse, dense = make_experiments("fedavg")
    dataset = make_texts()
    batch = Samples(dataset.inputs(dataset.x[:7]), dataset.y[:7])
    actual, expected = (compute_gradient(e.task, e.task.model.parameters, {}, batch) for e in (sparse, dense))
    assert actual.loss.item() == pytest.approx(expected.loss.item())
    for name, tensor in expected.gradients.items():
        assert actual.gradients[name].layout == torch.strided
        torch.testing.assert_close(actual.gradients[name], tensor)


def test_frozen_embedding_is_not_trained() -> None:
    model = fasttext(WORDS, 3)
    next(model.parameters()).requires_grad_(False)
    task = resolve("fedavg", Config(partition="iid", clients=2), dataset=make_texts(), model=model).task
    new = ClientTrainer(task, 1, 0).fit(task.model.parameters).params
    start = task.model.parameters
    assert torch.equal(new["embedding.weight"], start["embedding.weight"])
    assert not torch.equal(new["fc.weight"], start["fc.weight"])


def test_sparse_embedding_bag_equals_a_dense_sum() -> None:
    """The sparse gradient of `nn.EmbeddingBag` has a row for each occurrence of a word."""
    torch.manual_seed(0)
    head = nn.Linear(8, 3)
    bag = nn.EmbeddingBag(WORDS, 8, mode="sum", sparse=True, padding_idx=0)
    sparse = nn.Sequential(OrderedDict(bag=bag, head=head))
    dense = nn.Sequential(OrderedDict(bag=_DenseSum(bag.weight), head=head))
    config = Config(partition="iid", clients=2, lr=0.5)
    tasks = [resolve("fedavg", config, dataset=make_texts(), model=m).task for m in (sparse, dense)]
    actual, expected = (ClientTrainer(task, 1, 0).fit(task.model.parameters).params for task in tasks)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=2e-6, rtol=1e-5)


class _DenseSum(DenseMean):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.shape[1]


def test_serial_and_pool_are_bit_identical(tmp_path: Path) -> None:
    experiment = resolve("fedavg+dbe", Config(partition="iid", clients=2, rounds=2), dataset=make_texts())
    serial, pool = (run_outcome(experiment, tmp_path / name, name) for name in ("serial", "pool(workers=2)"))
    assert are_identical(serial.server, pool.server)
