"""fastText with the compiled backend: fits equal those of autograd."""

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
from feddbe.training.loss_terms import MeanRegularizer, Term
from feddbe.training.trainer import ClientTrainer, ExtraParameter, TrainedModel

WORDS, LENGTH, CLASSES = 70, 15, 3
Prepare = Callable[[ClientTrainer], None]


def make_texts(samples: int = 84) -> Dataset:
    """Return texts with repeated and unknown words; one text has no known word."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.rand(samples, LENGTH, generator=generator) ** 3 * (WORDS - 5)).int()
    x[5] = 0
    return Dataset("texts", x, torch.arange(samples) % CLASSES, CLASSES, num_words=WORDS)


def make_trainer(model: nn.Module | None = None, cut: str | None = None, **options: object) -> ClientTrainer:
    torch.manual_seed(0)
    module = fasttext(WORDS, CLASSES) if model is None else model
    config = Config(partition="iid", clients=2, lr=0.7, local_epochs=2, cut=cut, **options)  # type: ignore[arg-type]
    return ClientTrainer(resolve("fedavg", config, dataset=make_texts(), model=module).task, 1, 0)


def initial_parameters(trainer: ClientTrainer) -> dict[str, Tensor]:
    return trainer.task.model.parameters


def with_prbm(lr: float | None = None) -> Prepare:
    def prepare(trainer: ClientTrainer) -> None:
        value = torch.linspace(-1, 1, trainer.task.model.feature_shape[0])
        trainer.extras["prbm"] = ExtraParameter(value.to(initial_parameters(trainer)["fc.weight"].dtype), lr)

    return prepare


def with_mr(method: MR) -> Prepare:
    def prepare(trainer: ClientTrainer) -> None:
        mean = torch.linspace(1, -1, trainer.task.model.feature_shape[0])
        method.attach(trainer, ["shared"], {"mean": mean}, {})

    return prepare


def fit_all_parameters(trainer: ClientTrainer) -> TrainedModel:
    return trainer.fit(initial_parameters(trainer))


def fit_with_both_backends(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], ClientTrainer],
    fit: Callable[[ClientTrainer], TrainedModel],
) -> list[tuple[TrainedModel, ClientTrainer]]:
    """Return the results and trainers of the compiled backend and of autograd."""
    compiled_trainer = make()
    compiled = fit(compiled_trainer)
    monkeypatch.setattr(backend, "unsupported_reason", lambda plan: "not supported")
    autograd_trainer = make()
    expected = fit(autograd_trainer)
    assert (set(compiled_trainer.trainers), set(autograd_trainer.trainers)) == ({"compiled"}, {"autograd"})
    return [(compiled, compiled_trainer), (expected, autograd_trainer)]


def assert_equal(pair: list[tuple[TrainedModel, ClientTrainer]], tolerance: float = 2e-6) -> None:
    def assert_close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)

    (compiled, compiled_trainer), (expected, autograd_trainer) = pair
    for name, tensor in expected.params.items():
        assert_close(compiled.params[name], tensor)
    for name, extra in autograd_trainer.extras.items():
        assert_close(compiled_trainer.extras[name].value, extra.value)
    for compiled_carry, expected_carry in zip(compiled.carries, expected.carries, strict=True):
        for name, tensor in expected_carry.items():
            assert_close(compiled_carry[name], tensor)
    compiled_loss, expected_loss = compiled_trainer.losses["shared"], autograd_trainer.losses["shared"]
    assert compiled_loss[0] == pytest.approx(expected_loss[0], rel=1e-5)
    assert compiled_loss[1] == expected_loss[1]


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
def test_fit_equals_autograd(monkeypatch: pytest.MonkeyPatch, cut: str, prepare: list[Prepare]) -> None:
    def make() -> ClientTrainer:
        trainer = make_trainer(cut=cut)
        for prepare_part in prepare:
            prepare_part(trainer)
        return trainer

    pair = fit_with_both_backends(monkeypatch, make, fit_all_parameters)
    assert_equal(pair)
    fitted, trainer = pair[0]
    start = initial_parameters(trainer)
    assert not any(torch.equal(tensor, start[name]) for name, tensor in fitted.params.items())


def test_running_mean_without_target_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setup has no global mean yet."""
    regularizer = MeanRegularizer(0.3)
    carry = regularizer.init_carry((32,))
    term = Term(regularizer, {}, carry)
    pair = fit_with_both_backends(
        monkeypatch, make_trainer, lambda trainer: trainer.fit(initial_parameters(trainer), terms=[term])
    )
    assert_equal(pair)
    assert pair[0][0].carries[0]["r"].any()
    assert not carry["r"].any(), "the term's initial carry is not changed"


@pytest.mark.parametrize("names", [["fc.weight", "fc.bias"], ["fc1.bias"], ["embedding.weight"]])
def test_only_trainable_parameters_change(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    pair = fit_with_both_backends(
        monkeypatch,
        make_trainer,
        lambda trainer: trainer.fit(initial_parameters(trainer), trainable=names, lr=0.3),
    )
    assert_equal(pair)
    for name, tensor in pair[0][0].params.items():
        assert torch.equal(tensor, initial_parameters(pair[0][1])[name]) == (name not in names)


@pytest.mark.parametrize(
    ("layers", "batch_size"),
    [
        ([nn.Linear(8, 3, bias=False)], 4),
        ([nn.Linear(8, 40), nn.Linear(40, 5, bias=False), nn.Linear(5, 3)], 100),
    ],
    ids=["one layer, no bias", "three layers, all data in a batch"],
)
def test_other_depths_and_batch_sizes(
    monkeypatch: pytest.MonkeyPatch, layers: list[nn.Module], batch_size: int
) -> None:
    parts = {"words": MeanEmbedding(WORDS, 8)} | {f"fc{i}": layer for i, layer in enumerate(layers)}
    model = nn.Sequential(OrderedDict(parts))

    def make() -> ClientTrainer:
        return make_trainer(model, batch_size=batch_size)

    assert_equal(fit_with_both_backends(monkeypatch, make, fit_all_parameters))


def test_float64_fit_is_exact_to_the_last_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fasttext(WORDS, CLASSES).double()

    def make() -> ClientTrainer:
        trainer = make_trainer(model)
        with_prbm()(trainer)
        return trainer

    assert_equal(fit_with_both_backends(monkeypatch, make, fit_all_parameters), tolerance=1e-12)


def test_nan_loss_is_an_error() -> None:
    trainer = make_trainer()
    params = {name: torch.full_like(p, torch.nan) for name, p in initial_parameters(trainer).items()}
    with pytest.raises(DivergenceError, match="loss"):
        trainer.fit(params)


def test_word_outside_of_the_vocabulary_is_an_error() -> None:
    task = make_trainer().task
    model = SplitModel(fasttext(WORDS - 20, CLASSES), torch.zeros_like(task.dataset.x[:1]).long())
    trainer = ClientTrainer(replace(task, model=model), 1, 0)
    with pytest.raises(InvalidInputError, match=r"a text has word 6\d, the model has 50 words"):
        trainer.fit(initial_parameters(trainer))
