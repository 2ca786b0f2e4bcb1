"""fastText: machine code and autograd give the same fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.errors import DivergenceError, InvalidInputError
from feddbe.methods.addons import MR
from feddbe.models.registry import MeanEmbedding, fasttext
from feddbe.models.split_model import SplitModel
from feddbe.runs.experiment import resolve
from feddbe.training.compiled import backend
from feddbe.training.terms import MeanRegularizer, Term
from feddbe.training.trainer import ClientTrainer, ExtraParameter, TrainedModel

WORDS, LENGTH, CLASSES = 70, 15, 3
Prepare = Callable[[ClientTrainer], None]


def texts(rows: int = 84) -> Dataset:
    """Texts with words that come twice, unknown words in their midst, and one of no known word at all."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.rand(rows, LENGTH, generator=generator) ** 3 * (WORDS - 5)).int()
    x[5] = 0
    return Dataset("texts", x, torch.arange(rows) % CLASSES, CLASSES, num_words=WORDS)


def local(model: nn.Module | None = None, cut: str | None = None, **options: object) -> ClientTrainer:
    torch.manual_seed(0)
    module = fasttext(WORDS, CLASSES) if model is None else model
    config = Config(partition="iid", clients=2, lr=0.7, local_epochs=2, cut=cut, **options)  # type: ignore[arg-type]
    return ClientTrainer(resolve("fedavg", config, dataset=texts(), model=module).task, 1, 0)


def start(client: ClientTrainer) -> dict[str, Tensor]:
    return client.task.model.parameters


def with_prbm(lr: float | None = None) -> Prepare:
    def prepare(client: ClientTrainer) -> None:
        value = torch.linspace(-1, 1, client.task.model.feature_shape[0])
        client.extras["prbm"] = ExtraParameter(value.to(start(client)["fc.weight"].dtype), lr)

    return prepare


def with_mr(method: MR) -> Prepare:
    def prepare(client: ClientTrainer) -> None:
        mean = torch.linspace(1, -1, client.task.model.feature_shape[0])
        method.attach(client, ["shared"], {"mean": mean}, {})

    return prepare


def both(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], ClientTrainer],
    fit: Callable[[ClientTrainer], TrainedModel],
) -> list[tuple[TrainedModel, ClientTrainer]]:
    """The fit by machine code, which is used, and by autograd."""
    first = make()
    found = fit(first)
    monkeypatch.setattr(backend, "unsupported_reason", lambda plan: "not supported")
    second = make()
    wanted = fit(second)
    assert (set(first.trainers), set(second.trainers)) == ({"compiled"}, {"autograd"})
    return [(found, first), (wanted, second)]


def check(pair: list[tuple[TrainedModel, ClientTrainer]], exact: float = 2e-6) -> None:
    (found, first), (wanted, second) = pair
    for name, tensor in wanted.params.items():
        torch.testing.assert_close(found.params[name], tensor, atol=exact, rtol=exact)
    for name, extra in second.extras.items():
        torch.testing.assert_close(first.extras[name].value, extra.value, atol=exact, rtol=exact)
    for one, other in zip(found.carries, wanted.carries, strict=True):
        for name, tensor in other.items():
            torch.testing.assert_close(one[name], tensor, atol=exact, rtol=exact)
    assert first.losses["shared"][0] == pytest.approx(second.losses["shared"][0], rel=1e-5)
    assert first.losses["shared"][1] == second.losses["shared"][1]


@pytest.mark.parametrize("cut", ["embedding", "fc1"])
@pytest.mark.parametrize(
    "prepare",
    [
        [],
        [with_prbm()],
        [with_prbm(0.05)],
        [with_mr(MR(kappa=2.0, mu=1.0))],
        [with_prbm(), with_mr(MR(kappa=5.0, mu=0.3, mr_half=False))],
        [with_mr(MR(kappa=5.0, mu=0.2, mr_bias_correct=True))],
        [with_mr(MR(kappa=5.0, mu=0.0, mr_bias_correct=True))],
    ],
    ids=["plain", "prbm", "prbm_lr", "mr", "dbe", "bias_correct", "mu0"],
)
def test_the_same_fit(monkeypatch: pytest.MonkeyPatch, cut: str, prepare: list[Prepare]) -> None:
    def make() -> ClientTrainer:
        client = local(cut=cut)
        for part in prepare:
            part(client)
        return client

    pair = both(monkeypatch, make, lambda client: client.fit(start(client)))
    check(pair)
    found, client = pair[0]
    assert not any(torch.equal(tensor, start(client)[name]) for name, tensor in found.params.items())


def test_a_watched_mean_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before round 1."""
    watch = MeanRegularizer(0.3)
    carry = watch.start((32,))
    term = Term(watch, {}, carry)
    pair = both(monkeypatch, local, lambda client: client.fit(start(client), terms=[term]))
    check(pair)
    assert pair[0][0].carries[0]["r"].any()
    assert not carry["r"].any(), "the term's own is not written to"


@pytest.mark.parametrize("names", [["fc.weight", "fc.bias"], ["fc1.bias"], ["embedding.weight"]])
def test_only_what_is_trainable_moves(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    pair = both(monkeypatch, local, lambda client: client.fit(start(client), trainable=names, lr=0.3))
    check(pair)
    for name, tensor in pair[0][0].params.items():
        assert torch.equal(tensor, start(pair[0][1])[name]) == (name not in names)


@pytest.mark.parametrize(
    ("layers", "batch"),
    [
        ([nn.Linear(8, 3, bias=False)], 4),
        ([nn.Linear(8, 40), nn.Linear(40, 5, bias=False), nn.Linear(5, 3)], 100),
    ],
    ids=["one, no bias", "three, all data in a batch"],
)
def test_other_depths_and_batches(
    monkeypatch: pytest.MonkeyPatch, layers: list[nn.Module], batch: int
) -> None:
    parts = {"words": MeanEmbedding(WORDS, 8)} | {f"fc{i}": layer for i, layer in enumerate(layers)}
    model = nn.Sequential(OrderedDict(parts))
    check(both(monkeypatch, lambda: local(model, batch=batch), lambda client: client.fit(start(client))))


def test_in_float64_to_the_last_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fasttext(WORDS, CLASSES).double()

    def make() -> ClientTrainer:
        client = local(model)
        with_prbm()(client)
        return client

    check(both(monkeypatch, make, lambda client: client.fit(start(client))), exact=1e-12)


def test_a_loss_that_is_no_number_is_told() -> None:
    client = local()
    broken = {name: torch.full_like(p, torch.nan) for name, p in start(client).items()}
    with pytest.raises(DivergenceError, match="loss"):
        client.fit(broken)


def test_words_that_the_model_does_not_have_are_told() -> None:
    task = local().task
    fewer = SplitModel(fasttext(WORDS - 20, CLASSES), torch.zeros_like(task.dataset.x[:1]).long())
    client = ClientTrainer(replace(task, model=fewer), 1, 0)
    with pytest.raises(InvalidInputError, match=r"a text has word 6\d, the model has 50 words"):
        client.fit(start(client))
