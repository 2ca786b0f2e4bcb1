"""Training of one client, against short loops and values computed by hand."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from feddbe import seeds
from feddbe.data.builtin import digits
from feddbe.data.dataset import Dataset
from feddbe.data.split import Split
from feddbe.errors import DivergenceError
from feddbe.models.split_model import SplitModel
from feddbe.state import State, sha256
from feddbe.training.fit_plan import Batches, Samples
from feddbe.training.loss_terms import Batch, Term, TermContext
from feddbe.training.task import Task, Training
from feddbe.training.trainer import ClientTrainer, ExtraParameter

SIZES = (25, 7, 12)
TEST = 300


@pytest.fixture(autouse=True)
def deterministic_torch() -> Iterator[None]:
    """Use one thread, as in a run, and a fixed seed for initial weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with seeds.torch_seeded(0):
        yield
    torch.set_num_threads(before)


def make_plain_model() -> nn.Sequential:
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 5), act=nn.Tanh(), head=nn.Linear(5, 3)))


def make_dropout_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))


def make_batch_norm_model() -> nn.Sequential:
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 5), norm=nn.BatchNorm1d(5), head=nn.Linear(5, 3)))


def make_task(
    make_model: Callable[[], nn.Module] = make_plain_model,
    *,
    seed: int = 0,
    sizes: Sequence[int] = SIZES,
    **training: Any,
) -> Task:
    """Return a task whose client i has sizes[i] training samples and 300 test samples.

    The first input of a sample is its index, divided by the number of samples.
    """
    n = sum(sizes) + TEST * len(sizes)
    rng = np.random.RandomState(7)
    x = torch.tensor(rng.randn(n, 4), dtype=torch.float32)
    x[:, 0] = torch.arange(n) / n
    y = torch.tensor(rng.randint(0, 3, n))
    indices = np.split(rng.permutation(n), np.cumsum([*sizes, *[TEST] * len(sizes)])[:-1])
    split = Split.from_arrays(indices[: len(sizes)], indices[len(sizes) :])
    settings = Training(**{"lr": 0.1, **training})
    model = SplitModel(make_model(), x[:1], onednn=False)
    return Task(model, Dataset("toy", x, y, 3), split, settings, seed)


def sample_indices(task: Task, batch: Samples) -> list[int]:
    return (batch.x[:, 0] * len(task.dataset)).round().int().tolist()


def record_batches(
    task: Task, round_: int = 1, client: int = 0, epochs: int | None = None
) -> list[list[int]]:
    """Return the sample indices of each batch."""

    def step(carry: list[list[int]], const: None, batch: Samples, key: int) -> list[list[int]]:
        assert torch.equal(batch.y, task.dataset.y[sample_indices(task, batch)])
        return [*carry, sample_indices(task, batch)]

    return ClientTrainer(task, round_, client).run_steps(step, [], None, epochs)


def sum_term(*names: str) -> Term:
    """Return a loss with gradient 1 for all values of these parameters, and 0 for all others."""

    def apply(context: TermContext, carry: State) -> tuple[Tensor, State]:
        return torch.stack([context.params[name].sum() for name in names]).sum(), carry

    return Term(apply)


def rounded_parameters(task: Task) -> State:
    """Return parameters with few binary digits, so that sums of a few of them are exact."""
    return {name: (p * 16).round() / 16 for name, p in task.model.parameters.items()}


# --- batches


def test_epoch_is_a_permutation_without_the_incomplete_batch() -> None:
    """25 samples in batches of 10: two batches, five samples left out."""
    t = make_task()
    order = t.split.train[0][seeds.make_rng(0, "batches", 1, 0).permutation(25)].tolist()
    assert record_batches(t) == [order[:10], order[10:20]]


def test_every_epoch_is_shuffled() -> None:
    t = make_task(local_epochs=2)
    both_epochs = record_batches(t)
    rng = seeds.make_rng(0, "batches", 1, 0)
    orders = [t.split.train[0][rng.permutation(25)].tolist() for _ in range(2)]
    assert both_epochs == [order[first : first + 10] for order in orders for first in (0, 10)]
    assert both_epochs[:2] != both_epochs[2:]
    assert record_batches(t, epochs=1) == both_epochs[:2]
    assert record_batches(make_task(), epochs=2) == both_epochs


def test_fewer_samples_than_the_batch_size_are_one_batch() -> None:
    t = make_task(local_epochs=2)
    first, second = record_batches(t, client=1)
    assert sorted(first) == sorted(second) == sorted(t.split.train[1].tolist())
    assert first != second


def test_batch_sizes_of_all_samples_and_of_one() -> None:
    assert [len(batch) for batch in record_batches(make_task(batch_size=25))] == [25]
    assert [len(batch) for batch in record_batches(make_task(batch_size=1))] == [1] * 25


def test_order_of_samples_depends_on_seed_round_and_client_only() -> None:
    t = make_task(sizes=(25, 25))
    positions = {index: i for indices in t.split.train for i, index in enumerate(indices.tolist())}
    orders = list[str]()
    for t_ in (t, make_task(sizes=(25, 25), seed=1)):
        for round_, client in [(1, 0), (2, 0), (1, 1), (0, 0)]:
            batches = record_batches(t_, round_, client)
            orders.append(str([positions[index] for batch in batches for index in batch]))
    assert len(set(orders)) == len(orders) == 8
    trainer = ClientTrainer(t, 1, 0)
    repeated: list[list[list[int]]] = []
    for _ in range(2):
        trainer.rng("batches").permutation(3)
        batches = trainer.run_steps(lambda c, _, b, key: [*c, sample_indices(t, b)], list[list[int]](), None)
        repeated.append(batches)
        trainer.fit(t.model.parameters)
    assert repeated[0] == repeated[1] == record_batches(t)


def test_run_steps_passes_carry_and_constants() -> None:
    trainer = ClientTrainer(make_task(local_epochs=2), 1, 0)
    assert (
        trainer.run_steps(lambda carry, const, batch, key: carry * const + len(batch.y), 1, 3) == 81 + 10 * 40
    )


def test_keys_of_batches_are_distinct_and_reproducible() -> None:
    """Keys seed random operations of terms; torch accepts them as seeds."""

    def record_keys(round_: int, client: int) -> list[int]:
        return ClientTrainer(make_task(local_epochs=3), round_, client).run_steps(
            lambda c, _, b, key: [*c, key], list[int](), None
        )

    keys = record_keys(1, 0)
    assert len(set(keys)) == 6
    assert all(0 <= key < 2**63 for key in keys)
    assert record_keys(1, 0) == keys
    assert not set(keys) & {*record_keys(2, 0), *record_keys(1, 2)}


def test_images_are_normalized_in_the_batch() -> None:
    t = make_task()
    images = Dataset("toy", torch.arange(len(t.dataset)).to(torch.uint8)[:, None], t.dataset.y, 3, 0.5, -1.0)
    inputs = ClientTrainer(Task(t.model, images, t.split, t.training), 1, 0).run_steps(
        lambda c, _, batch, key: [*c, batch.x], list[Tensor](), None
    )
    indices = record_batches(t)[0]
    assert inputs[0].dtype == torch.float32
    assert inputs[0][:, 0].tolist() == [index % 256 * 0.5 - 1 for index in indices]


# --- fit


@pytest.mark.parametrize("client", [0, 1, 2])
@pytest.mark.parametrize("epochs", [1, 3])
def test_fit_equals_sgd_on_the_cross_entropy(client: int, epochs: int) -> None:
    t = make_task(local_epochs=epochs)
    trainer = ClientTrainer(t, 1, client)
    fitted = trainer.fit(t.model.parameters)
    net = make_plain_model()
    net.load_state_dict(t.model.parameters)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    total, samples = 0.0, 0
    for indices in record_batches(t, client=client):
        sgd.zero_grad()
        loss = F.cross_entropy(net(t.dataset.x[indices]), t.dataset.y[indices])
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        total += loss.item() * len(indices)
        samples += len(indices)
    for name, p in net.named_parameters():
        assert torch.allclose(fitted.params[name], p, atol=1e-6)
        assert not torch.equal(fitted.params[name], t.model.parameters[name])
    assert list(trainer.losses) == ["shared"]
    assert trainer.losses["shared"] == pytest.approx((total, samples))
    assert fitted.carries == []


def test_fit_does_not_change_its_arguments() -> None:
    t = make_task()
    trainer = ClientTrainer(t, 1, 0)
    params, vector = {name: p.clone() for name, p in t.model.parameters.items()}, torch.zeros(5)
    trainer.extras["prbm"] = ExtraParameter(vector)
    before = sha256(params)
    module_parameters = {name: p.clone() for name, p in t.model.module.named_parameters()}
    fitted = trainer.fit(params)
    assert sha256(params) == before
    assert not any(p.requires_grad for p in params.values())
    assert not vector.any()
    assert trainer.extras["prbm"].value.any()
    assert all(torch.equal(p, module_parameters[name]) for name, p in t.model.module.named_parameters())
    assert fitted.params.keys() == params.keys()
    assert not any(p.requires_grad for p in fitted.params.values())
    for p in fitted.params.values():
        p.zero_()
    assert sha256(params) == before
    assert sha256(trainer.fit(params).params) != before


def test_only_trainable_parameters_change() -> None:
    t = make_task(local_epochs=2)
    for names in (t.model.head, t.model.body, ("body.bias",)):
        fitted = ClientTrainer(t, 1, 0).fit(t.model.parameters, trainable=names).params
        moved = {n for n, p in fitted.items() if sha256({n: p}) != sha256({n: t.model.parameters[n]})}
        assert moved == set(names)
    assert list(fitted) == list(t.model.parameters)


def test_step_of_a_single_trainable_parameter() -> None:
    """One batch: p <- p - lr grad, with the gradient of the whole model at the start."""
    t = make_task()
    fitted = ClientTrainer(t, 1, 1).fit(t.model.parameters, trainable=["head.bias"]).params
    indices = record_batches(t, client=1)[0]
    error = t.model.module(t.dataset.x[indices]).softmax(1) - F.one_hot(t.dataset.y[indices], 3)
    assert torch.allclose(
        fitted["head.bias"], t.model.parameters["head.bias"] - 0.1 * error.mean(0), atol=1e-7
    )


def test_fit_overrides_learning_rate_and_epochs() -> None:
    """Gradient 1, two steps of 1/4 per epoch: minus 1/2 for one, minus 3/2 for three; lr 1/8 halves it."""
    t = make_task(lr=0.25)
    start = rounded_parameters(t)
    for lr, epochs, moved in ((None, None, 0.5), (0.125, None, 0.25), (None, 3, 1.5), (0.0, None, 0.0)):
        fitted = ClientTrainer(t, 1, 0).fit(start, loss=sum_term("head.bias"), lr=lr, epochs=epochs).params
        assert torch.equal(fitted["head.bias"], start["head.bias"] - moved)
        assert torch.equal(fitted["body.bias"], start["body.bias"])


def test_correction_is_added_to_the_gradient_in_every_step() -> None:
    """lr 1/4, gradient 1, correction 1/2, two steps: 2 (1 + 1/2) / 4 = 3/4; without a gradient 1/4."""
    t = make_task(lr=0.25)
    start = rounded_parameters(t)
    half = {name: torch.full_like(p, 0.5) for name, p in start.items() if name != "body.weight"}
    fitted = ClientTrainer(t, 1, 0).fit(start, loss=sum_term("head.bias"), correction=half).params
    moved = {"head.bias": 0.75, "head.weight": 0.25, "body.bias": 0.25, "body.weight": 0.0}
    for name, distance in moved.items():
        assert torch.equal(fitted[name], start[name] - distance), name
    part = (
        ClientTrainer(t, 1, 0)
        .fit(start, loss=sum_term(*start), correction=half, trainable=["body.bias"])
        .params
    )
    assert {n for n, p in part.items() if not torch.equal(p, start[n])} == {"body.bias"}
    assert torch.equal(half["head.bias"], torch.full((3,), 0.5))


def test_correction_changes_a_step_by_the_learning_rate_times_it() -> None:
    t = make_task()
    correction = {name: torch.randn_like(p) for name, p in t.model.parameters.items()}
    plain = ClientTrainer(t, 1, 1).fit(t.model.parameters).params
    corrected = ClientTrainer(t, 1, 1).fit(t.model.parameters, correction=correction).params
    for name in correction:
        assert torch.allclose(plain[name] - corrected[name], 0.1 * correction[name], atol=1e-6)


# --- extras


def sum_of_z(context: TermContext, carry: State) -> tuple[Tensor, State]:
    """Return a loss with gradient 1 for all values of prbm."""
    return context.batch.z[0].sum(), carry


@pytest.mark.parametrize(("extra_lr", "moved"), [(None, 0.5), (0.125, 0.25), (0.0, 0.0), (2.0, 4.0)])
def test_extras_are_trained_with_their_own_learning_rate(extra_lr: float | None, moved: float) -> None:
    """Gradient 1, two steps: 2 / 4 at the fit's rate 1/4, else twice their own."""
    trainer = ClientTrainer(make_task(lr=0.25), 1, 0)
    trainer.extras = {"prbm": ExtraParameter(torch.ones(5), extra_lr), "other": ExtraParameter(torch.ones(2))}
    trainer.fit(rounded_parameters(trainer.task), loss=Term(sum_of_z))
    assert torch.equal(trainer.extras["prbm"].value, torch.full((5,), 1 - moved))
    assert trainer.extras["prbm"].lr == extra_lr
    assert torch.equal(trainer.extras["other"].value, torch.ones(2)), "no gradient, no step"
    assert not trainer.extras["prbm"].value.requires_grad


def test_next_fit_continues_with_the_trained_extras() -> None:
    trainer = ClientTrainer(make_task(lr=0.25), 1, 0)
    trainer.extras["prbm"] = ExtraParameter(torch.zeros(5), 0.5)
    for fits in (1, 2, 3):
        trainer.fit(rounded_parameters(trainer.task), loss=Term(sum_of_z))
        assert torch.equal(trainer.extras["prbm"].value, torch.full((5,), -1.0 * fits))


def test_prbm_vector_is_added_to_the_representation_in_fit_and_forward() -> None:
    """With learning rate 0, the loss is that of h(f(x) + p)."""
    t = make_task()
    trainer, vector = ClientTrainer(t, 1, 1), torch.linspace(-1, 1, 5)
    trainer.extras["prbm"] = ExtraParameter(vector, 0.0)
    trainer.fit(t.model.parameters, lr=0.0)
    indices = record_batches(t, client=1)[0]
    x, y = t.dataset.x[indices], t.dataset.y[indices]
    net = t.model.module
    assert isinstance(net, nn.Sequential)
    logits = net[2](net[:2](x) + vector)
    assert trainer.losses["shared"][0] == pytest.approx(7 * F.cross_entropy(logits, y).item())
    assert torch.equal(trainer.forward(t.model.parameters, x).logits, logits)


# --- terms


def count_batches(context: TermContext, carry: State) -> tuple[None, State]:
    """Add the constant `step` in each batch, without a loss."""
    return None, {"n": carry["n"] + context.const["step"]}


def test_carry_is_passed_to_the_next_batch_and_returned() -> None:
    """Four batches, counted in steps of 1 from 0 and in steps of 10 from 5."""
    start = torch.tensor(5.0)
    ones = Term(count_batches, {"step": torch.tensor(1.0)}, {"n": torch.tensor(0.0)})
    tens = Term(count_batches, {"step": torch.tensor(10.0)}, {"n": start})
    t = make_task(local_epochs=2)
    trainer = ClientTrainer(t, 1, 0)
    trainer.attach("shared", Term(count_batches, {"step": torch.tensor(100.0)}, {"n": torch.tensor(0.0)}))
    for _ in range(2):  # the second fit starts from the same carry
        fitted = trainer.fit(t.model.parameters, terms=[ones, tens])
        assert [carry["n"].item() for carry in fitted.carries] == [4, 45]
    assert start.item() == 5
    assert sha256(fitted.params) == sha256(ClientTrainer(t, 1, 0).fit(t.model.parameters).params)


def test_terms_are_added_and_not_part_of_the_reported_loss() -> None:
    """Gradients 1 and 1 for head.bias, lr 1/4, two steps: minus 1. The loss is that of the first term."""
    t = make_task(lr=0.25)
    start, trainer = rounded_parameters(t), ClientTrainer(t, 1, 0)
    fitted = trainer.fit(start, loss=sum_term("head.bias"), terms=[sum_term("head.bias", "body.bias")]).params
    assert torch.equal(fitted["head.bias"], start["head.bias"] - 1)
    assert torch.equal(fitted["body.bias"], start["body.bias"] - 0.5)
    # sums of three values, before the first step and after it (lower by 3 times 2/4), ten samples each
    first = start["head.bias"].sum().item()
    assert trainer.losses["shared"] == (10 * first + 10 * (first - 1.5), 20)


def test_attached_terms_apply_to_their_track_only() -> None:
    t = make_task(lr=0.25)
    start = rounded_parameters(t)
    trainer = ClientTrainer(t, 1, 0)
    trainer.attach("personal", sum_term("body.bias"))
    trainer.attach("personal", sum_term("body.bias"))
    moved = {
        track: start["body.bias"]
        - trainer.fit(start, track=track, loss=sum_term("head.bias")).params["body.bias"]
        for track in ("shared", "personal", "third")
    }
    assert {track: distance.tolist() for track, distance in moved.items()} == {
        "shared": [0] * 5, "personal": [1] * 5, "third": [0] * 5
    }  # fmt: skip
    assert set(trainer.losses) == {"shared", "personal", "third"}


def test_term_receives_the_batch_after_the_forward_pass() -> None:
    t = make_task()
    recorded: list[Batch] = []
    vector = torch.linspace(0, 1, 5)

    def record_batch(context: TermContext, carry: State) -> tuple[None, State]:
        recorded.append(context.batch)
        assert context.model is t.model
        assert context.params.keys() == t.model.parameters.keys()
        return None, carry

    trainer = ClientTrainer(t, 1, 1)
    trainer.extras["prbm"] = ExtraParameter(vector)
    trainer.fit(t.model.parameters, terms=[Term(record_batch)])
    (batch,) = recorded
    assert sample_indices(t, Samples(batch.x, batch.y)) == record_batches(t, client=1)[0]
    assert torch.equal(batch.z, batch.z_g + vector)
    assert torch.equal(batch.logits, t.model.classify(t.model.parameters, batch.z))


# --- divergence


def nan_loss(context: TermContext, carry: State) -> tuple[Tensor, State]:
    return context.params["head.bias"].sum() * math.nan, carry


def test_error_for_a_nan_loss_names_client_and_round() -> None:
    t = make_task()
    with pytest.raises(DivergenceError) as caught:
        ClientTrainer(t, 4, 2).fit(t.model.parameters, loss=Term(nan_loss))
    assert (caught.value.client, caught.value.round, caught.value.quantity) == (2, 4, "loss")
    assert str(caught.value) == (
        "training diverged: loss = nan at client 2 in round 4; the last good round is kept (try a smaller lr)"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_training_with_a_huge_learning_rate_diverges() -> None:
    t = make_task(lr=1e38, local_epochs=20)
    with pytest.raises(DivergenceError, match=r"^training diverged: .* at client 0 in round 1; "):
        ClientTrainer(t, 1, 0).fit(t.model.parameters)


def test_error_for_an_infinite_update_names_the_parameter() -> None:
    """The loss is finite, the gradient 1; two steps of 3e38 exceed the largest float32, 3.4e38."""
    t = make_task(lr=3e38)
    with pytest.raises(DivergenceError, match=r"update of head\.bias = inf at client 0 in round 3; "):
        ClientTrainer(t, 3, 0).fit(
            rounded_parameters(t),
            loss=sum_term("body.bias"),
            terms=[sum_term("head.bias")],
            trainable=["head.bias"],
        )
    trainer = ClientTrainer(make_task(), 1, 1)
    trainer.extras["prbm"] = ExtraParameter(torch.full((5,), -6e37), 3.4e38)
    with pytest.raises(DivergenceError, match="update of prbm = inf at client 1 in round 1; "):
        trainer.fit(rounded_parameters(trainer.task), loss=Term(sum_of_z), lr=0.0)


def test_nan_term_is_detected_in_the_update() -> None:
    """Client 1 has a single batch, so no later loss is NaN."""
    t = make_task()
    with pytest.raises(DivergenceError, match=r"update of head\.bias = nan at client 1 in round 1; "):
        ClientTrainer(t, 1, 1).fit(t.model.parameters, terms=[Term(nan_loss)])


# --- predict


def test_predictions_equal_a_plain_forward_pass() -> None:
    """300 test samples are more than one chunk of 128; labels have the same order."""
    t = make_task()
    params = {name: p + 0.5 for name, p in t.model.parameters.items()}
    for client in (0, 2):
        for on, indices in (("test", t.split.test[client]), ("train", t.split.train[client])):
            logits, y = ClientTrainer(t, 1, client).predict(
                params, lambda p, x: t.model.forward(p, x).logits, on=on
            )
            assert logits.shape == (len(indices), 3)
            expected = functional_call(t.model.module, params, (t.dataset.x[indices],))
            assert torch.allclose(logits, expected, atol=1e-6)
            assert torch.equal(y, t.dataset.y[indices])
            assert not logits.requires_grad


def test_predictions_use_the_prbm_vector() -> None:
    t = make_task()
    trainer = ClientTrainer(t, 1, 0)
    trainer.extras["prbm"] = ExtraParameter(torch.linspace(-1, 1, 5))
    logits, _ = trainer.predict(t.model.parameters, lambda p, x: trainer.forward(p, x).logits)
    x = t.dataset.x[t.split.test[0]]
    expected = t.model.forward(t.model.parameters, x, torch.linspace(-1, 1, 5)).logits
    assert torch.allclose(logits, expected, atol=1e-6)


def test_predict_applies_any_function_to_chunks() -> None:
    t = make_task()
    sums, _ = ClientTrainer(t, 1, 0).predict(t.model.parameters, lambda p, x: x.sum(0, keepdim=True))
    assert sums.shape == (3, 4), "chunks of 128, 128 and 44"
    assert torch.allclose(sums.sum(0), t.dataset.x[t.split.test[0]].sum(0), atol=1e-3)


# --- dropout and BatchNorm


def test_dropout_masks_are_reproducible_and_differ_by_round_client_and_seed() -> None:
    """With learning rate 0, losses differ only by the masks."""

    def train_and_read_loss(round_: int, client: int = 0, seed: int = 0) -> float:
        t = make_task(make_dropout_model, seed=seed)
        with seeds.torch_seeded(1):
            t = Task(SplitModel(make_dropout_model(), t.dataset.x[:1]), t.dataset, t.split, t.training, seed)
        trainer = ClientTrainer(t, round_, client)
        torch.rand(round_ + client)
        trainer.fit(t.model.parameters, lr=0.0)
        first = trainer.losses["shared"][0]
        torch.rand(3)
        trainer.fit(t.model.parameters, lr=0.0)
        assert trainer.losses["shared"][0] == first
        return first

    loss = train_and_read_loss(1)
    assert loss == train_and_read_loss(1)
    others = {train_and_read_loss(2), train_and_read_loss(1, 2), train_and_read_loss(1, 0, 1)}
    assert len({loss} | others) == 4


def test_predictions_have_no_dropout_and_keep_the_state_of_torchs_generator() -> None:
    t = make_task(make_dropout_model)
    trainer = ClientTrainer(t, 1, 0)
    before = torch.get_rng_state()
    trainer.fit(t.model.parameters)
    first, _ = trainer.predict(t.model.parameters, lambda p, x: trainer.forward(p, x).logits)
    second, _ = trainer.predict(t.model.parameters, lambda p, x: trainer.forward(p, x).logits)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(first, t.model.module(t.dataset.x[t.split.test[0]]), atol=1e-6)


def test_batch_norm_statistics_belong_to_a_track() -> None:
    """Two batches increase the counter by 2; the other track and the arguments do not change."""
    t = make_task(make_batch_norm_model)
    statistics = {"shared": {name: b.clone() for name, b in t.model.buffers.items()}}
    statistics["shared"]["norm.num_batches_tracked"] += 10
    trainer = ClientTrainer(t, 1, 0, statistics)
    trainer.fit(t.model.parameters)
    assert int(trainer.buffers("shared")["norm.num_batches_tracked"]) == 12
    assert int(trainer.buffers("personal")["norm.num_batches_tracked"]) == 0
    assert int(statistics["shared"]["norm.num_batches_tracked"]) == 10
    assert not statistics["shared"]["norm.running_mean"].any()
    assert not t.model.buffers["norm.running_mean"].any()
    trainer.fit(t.model.parameters, track="personal")
    assert int(trainer.buffers("personal")["norm.num_batches_tracked"]) == 2
    assert int(trainer.buffers("shared")["norm.num_batches_tracked"]) == 12
    assert trainer.trained_buffers().keys() == {"shared", "personal"}


def test_predictions_use_and_do_not_change_the_statistics_of_their_track() -> None:
    t = make_task(make_batch_norm_model)
    trainer = ClientTrainer(t, 1, 0)
    trainer.fit(t.model.parameters, track="personal")
    trained = {name: b.clone() for name, b in trainer.buffers("personal").items()}
    x = t.dataset.x[t.split.test[0]]
    for track, buffers in (("shared", t.model.buffers), ("personal", trained)):
        logits, _ = trainer.predict(
            t.model.parameters, lambda p, x: trainer.forward(p, x).logits, track=track
        )
        expected = functional_call(t.model.module.eval(), {**t.model.parameters, **buffers}, (x,))
        assert torch.allclose(logits, expected, atol=1e-6), track
    assert sha256(trainer.buffers("personal")) == sha256(trained)


def test_fit_without_keeping_statistics() -> None:
    t = make_task(make_batch_norm_model)
    trainer = ClientTrainer(t, 1, 0)
    without_statistics = trainer.fit(t.model.parameters, keep_statistics=False)
    assert sha256(trainer.buffers("shared")) == sha256(t.model.buffers)
    assert sha256(trainer.fit(t.model.parameters).params) == sha256(without_statistics.params)
    assert sha256(trainer.buffers("shared")) != sha256(t.model.buffers)


def test_fit_is_independent_of_an_earlier_prediction() -> None:
    t = make_task(make_batch_norm_model)
    trainer = ClientTrainer(t, 1, 0)
    trainer.predict(t.model.parameters, lambda p, x: trainer.forward(p, x).logits)
    assert sha256(trainer.fit(t.model.parameters).params) == sha256(
        ClientTrainer(t, 1, 0).fit(t.model.parameters).params
    )


def test_model_without_buffers_has_no_trained_buffers() -> None:
    t = make_task()
    trainer = ClientTrainer(t, 1, 0)
    trainer.fit(t.model.parameters)
    assert trainer.trained_buffers() == {}
    assert (trainer.samples, ClientTrainer(t, 1, 1).samples) == (25, 7)


def test_rng_of_a_client() -> None:
    trainer = ClientTrainer(make_task(seed=3), 5, 2)
    assert trainer.rng("noise").randint(2**31) == seeds.make_rng(3, "noise", 5, 2).randint(2**31)


@pytest.mark.parametrize("client", [0, 1, 2])
@pytest.mark.parametrize("epochs", [None, 3])
def test_steps_is_the_number_of_batches(client: int, epochs: int | None) -> None:
    t = make_task(local_epochs=2)
    assert ClientTrainer(t, 1, client).count_steps(epochs) == len(
        record_batches(t, client=client, epochs=epochs)
    )


def test_label_counts_of_the_training_data() -> None:
    t = make_task()
    counts = ClientTrainer(t, 1, 1).label_counts()
    assert counts.tolist() == [int((t.dataset.y[t.split.train[1]] == c).sum()) for c in range(3)]
    assert int(counts.sum()) == 7


def test_fixed_order_of_batches_is_the_order_of_the_partition() -> None:
    dataset = digits.load()
    indices = np.array([5, 3, 8, 1, 9, 2, 7])
    batches = Batches(dataset, indices, 3, 2, 0, 1, 0, is_shuffled=False)
    for inputs, labels, size in batches.iterate():
        assert size == 3
        assert torch.equal(inputs, dataset.x[indices[:6]])
        assert torch.equal(labels, dataset.y[indices[:6]])
    shuffled = Batches(dataset, indices, 3, 2, 0, 1, 0)
    assert any(not torch.equal(inputs, dataset.x[indices[:6]]) for inputs, _, _ in shuffled.iterate())
