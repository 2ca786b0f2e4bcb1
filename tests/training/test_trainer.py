"""What one client does with its data, against short loops and numbers found by hand."""

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
from feddbe.data.dataset import Dataset
from feddbe.data.split import Split
from feddbe.errors import DivergenceError
from feddbe.models.split_model import SplitModel
from feddbe.state import State, sha256
from feddbe.training.plan import Samples
from feddbe.training.task import Task, Training
from feddbe.training.terms import Batch, Term, TermContext
from feddbe.training.trainer import ClientTrainer, ExtraParameter

SIZES = (25, 7, 12)
TEST = 300


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a run; and the weights of these tests are the same each time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with seeds.torch_seeded(0):
        yield
    torch.set_num_threads(before)


def plain() -> nn.Sequential:
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 5), act=nn.Tanh(), head=nn.Linear(5, 3)))


def dropping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))


def normed() -> nn.Sequential:
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 5), norm=nn.BatchNorm1d(5), head=nn.Linear(5, 3)))


def task(
    make: Callable[[], nn.Module] = plain, *, seed: int = 0, sizes: Sequence[int] = SIZES, **training: Any
) -> Task:
    """Client i trains on sizes[i] rows and tests on 300; the first number of a sample is its row."""
    n = sum(sizes) + TEST * len(sizes)
    rng = np.random.RandomState(7)
    x = torch.tensor(rng.randn(n, 4), dtype=torch.float32)
    x[:, 0] = torch.arange(n) / n
    y = torch.tensor(rng.randint(0, 3, n))
    rows = np.split(rng.permutation(n), np.cumsum([*sizes, *[TEST] * len(sizes)])[:-1])
    split = Split.from_arrays(rows[: len(sizes)], rows[len(sizes) :])
    settings = Training(**{"lr": 0.1, **training})
    return Task(SplitModel(make(), x[:1], onednn=False), Dataset("toy", x, y, 3), split, settings, seed)


def rows_of(task: Task, batch: Samples) -> list[int]:
    return (batch.x[:, 0] * len(task.dataset)).round().int().tolist()


def batches(task: Task, round: int = 1, client: int = 0, epochs: int | None = None) -> list[list[int]]:
    """The rows of each batch that a scan sees."""

    def step(carry: list[list[int]], const: None, batch: Samples, key: int) -> list[list[int]]:
        assert torch.equal(batch.y, task.dataset.y[rows_of(task, batch)])
        return [*carry, rows_of(task, batch)]

    return ClientTrainer(task, round, client).run_steps(step, [], None, epochs)


def sum_of(*names: str) -> Term:
    """A loss whose gradient is 1 for every entry of these parameters, and 0 for all others."""

    def apply(context: TermContext, carry: State) -> tuple[Tensor, State]:
        return torch.stack([context.params[name].sum() for name in names]).sum(), carry

    return Term(apply)


def dyadic(task: Task) -> State:
    """Parameters with few binary digits, so that sums of a few of them are exact."""
    return {name: (p * 16).round() / 16 for name, p in task.model.parameters.items()}


# --- batches


def test_an_epoch_is_a_permutation_without_the_incomplete_batch() -> None:
    """25 samples in batches of 10: two batches, five samples left out."""
    t = task()
    order = t.split.train[0][seeds.make_rng(0, "batches", 1, 0).permutation(25)].tolist()
    assert batches(t) == [order[:10], order[10:20]]


def test_every_epoch_is_shuffled_anew() -> None:
    t = task(local_epochs=2)
    found = batches(t)
    rng = seeds.make_rng(0, "batches", 1, 0)
    orders = [t.split.train[0][rng.permutation(25)].tolist() for _ in range(2)]
    assert found == [order[at : at + 10] for order in orders for at in (0, 10)]
    assert found[:2] != found[2:]
    assert batches(t, epochs=1) == found[:2]
    assert batches(task(), epochs=2) == found


def test_fewer_samples_than_a_batch_are_one_short_batch() -> None:
    t = task(local_epochs=2)
    first, second = batches(t, client=1)
    assert sorted(first) == sorted(second) == sorted(t.split.train[1].tolist())
    assert first != second


def test_a_batch_of_exactly_all_samples() -> None:
    assert [len(batch) for batch in batches(task(batch_size=25))] == [25]
    assert [len(batch) for batch in batches(task(batch_size=1))] == [1] * 25


def test_each_scan_sees_the_same_and_each_round_client_and_seed_another_order() -> None:
    t = task(sizes=(25, 25))
    place = {row: i for rows in t.split.train for i, row in enumerate(rows.tolist())}
    orders = {
        key: str([place[row] for batch in batches(t_, *key[1:]) for row in batch])
        for t_ in (t, task(sizes=(25, 25), seed=1))
        for key in [(t_.seed, 1, 0), (t_.seed, 2, 0), (t_.seed, 1, 1), (t_.seed, 0, 0)]
    }
    assert len(set(orders.values())) == len(orders) == 8
    local = ClientTrainer(t, 1, 0)
    seen: list[list[list[int]]] = []
    for _ in range(2):
        local.rng("batches").permutation(3)
        seen.append(local.run_steps(lambda c, _, b, key: [*c, rows_of(t, b)], list[list[int]](), None))
        local.fit(t.model.parameters)
    assert seen[0] == seen[1] == batches(t)


def test_scan_folds_and_hands_the_constants_on() -> None:
    local = ClientTrainer(task(local_epochs=2), 1, 0)
    assert (
        local.run_steps(lambda carry, const, batch, key: carry * const + len(batch.y), 1, 3) == 81 + 10 * 40
    )


def test_keys_differ_from_batch_to_batch_and_are_the_same_again() -> None:
    """They seed what is random in a term: numbers that torch takes."""

    def keys(round: int, client: int) -> list[int]:
        return ClientTrainer(task(local_epochs=3), round, client).run_steps(
            lambda c, _, b, key: [*c, key], list[int](), None
        )

    found = keys(1, 0)
    assert len(set(found)) == 6
    assert all(0 <= key < 2**63 for key in found)
    assert keys(1, 0) == found
    assert not set(found) & {*keys(2, 0), *keys(1, 2)}


def test_images_are_normalised_in_the_batch() -> None:
    t = task()
    images = Dataset("toy", torch.arange(len(t.dataset)).to(torch.uint8)[:, None], t.dataset.y, 3, 0.5, -1.0)
    found = ClientTrainer(Task(t.model, images, t.split, t.training), 1, 0).run_steps(
        lambda c, _, batch, key: [*c, batch.x], list[Tensor](), None
    )
    rows = batches(t)[0]
    assert found[0].dtype == torch.float32
    assert found[0][:, 0].tolist() == [row % 256 * 0.5 - 1 for row in rows]


# --- fit


@pytest.mark.parametrize("client", [0, 1, 2])
@pytest.mark.parametrize("epochs", [1, 3])
def test_fit_is_sgd_on_the_cross_entropy(client: int, epochs: int) -> None:
    t = task(local_epochs=epochs)
    local = ClientTrainer(t, 1, client)
    found = local.fit(t.model.parameters)
    net = plain()
    net.load_state_dict(t.model.parameters)
    sgd, total, seen = torch.optim.SGD(net.parameters(), lr=0.1), 0.0, 0
    for rows in batches(t, client=client):
        sgd.zero_grad()
        loss = F.cross_entropy(net(t.dataset.x[rows]), t.dataset.y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        total, seen = total + loss.item() * len(rows), seen + len(rows)
    for name, p in net.named_parameters():
        assert torch.allclose(found.params[name], p, atol=1e-6)
        assert not torch.equal(found.params[name], t.model.parameters[name])
    assert list(local.losses) == ["shared"]
    assert local.losses["shared"] == pytest.approx((total, seen))
    assert found.carries == []


def test_fit_leaves_what_it_is_given_as_it_was() -> None:
    t = task()
    local = ClientTrainer(t, 1, 0)
    params, vector = {name: p.clone() for name, p in t.model.parameters.items()}, torch.zeros(5)
    local.extras["prbm"] = ExtraParameter(vector)
    before, own = sha256(params), {name: p.clone() for name, p in t.model.module.named_parameters()}
    found = local.fit(params)
    assert sha256(params) == before
    assert not any(p.requires_grad for p in params.values())
    assert not vector.any()
    assert local.extras["prbm"].value.any()
    assert all(torch.equal(p, own[name]) for name, p in t.model.module.named_parameters())
    assert found.params.keys() == params.keys()
    assert not any(p.requires_grad for p in found.params.values())
    for p in found.params.values():
        p.zero_()
    assert sha256(params) == before
    assert sha256(local.fit(params).params) != before


def test_only_what_is_trainable_moves() -> None:
    t = task(local_epochs=2)
    for names in (t.model.head, t.model.body, ("body.bias",)):
        found = ClientTrainer(t, 1, 0).fit(t.model.parameters, trainable=names).params
        moved = {n for n, p in found.items() if sha256({n: p}) != sha256({n: t.model.parameters[n]})}
        assert moved == set(names)
    assert list(found) == list(t.model.parameters)


def test_the_head_alone_moves_by_its_own_gradient() -> None:
    """One short batch: p <- p - lr grad, with the gradient of the whole model at the start."""
    t = task()
    found = ClientTrainer(t, 1, 1).fit(t.model.parameters, trainable=["head.bias"]).params
    rows = batches(t, client=1)[0]
    error = t.model.module(t.dataset.x[rows]).softmax(1) - F.one_hot(t.dataset.y[rows], 3)
    assert torch.allclose(
        found["head.bias"], t.model.parameters["head.bias"] - 0.1 * error.mean(0), atol=1e-7
    )


def test_learning_rate_and_epochs_of_one_fit() -> None:
    """Gradient 1 in 2 steps of 1/4 each epoch: minus 1/2 for one, minus 3/2 for three; lr 1/8 halves."""
    t = task(lr=0.25)
    start = dyadic(t)
    for lr, epochs, moved in ((None, None, 0.5), (0.125, None, 0.25), (None, 3, 1.5), (0.0, None, 0.0)):
        found = ClientTrainer(t, 1, 0).fit(start, loss=sum_of("head.bias"), lr=lr, epochs=epochs).params
        assert torch.equal(found["head.bias"], start["head.bias"] - moved)
        assert torch.equal(found["body.bias"], start["body.bias"])


def test_a_correction_adds_lr_c_in_every_step() -> None:
    """lr 1/4, gradient 1, correction 1/2, two steps: 2 (1 + 1/2) / 4 = 3/4; without a gradient 1/4."""
    t = task(lr=0.25)
    start = dyadic(t)
    half = {name: torch.full_like(p, 0.5) for name, p in start.items() if name != "body.weight"}
    found = ClientTrainer(t, 1, 0).fit(start, loss=sum_of("head.bias"), correction=half).params
    moved = {"head.bias": 0.75, "head.weight": 0.25, "body.bias": 0.25, "body.weight": 0.0}
    for name, by in moved.items():
        assert torch.equal(found[name], start[name] - by), name
    part = (
        ClientTrainer(t, 1, 0)
        .fit(start, loss=sum_of(*start), correction=half, trainable=["body.bias"])
        .params
    )
    assert {n for n, p in part.items() if not torch.equal(p, start[n])} == {"body.bias"}
    assert torch.equal(half["head.bias"], torch.full((3,), 0.5))


def test_a_correction_moves_the_cross_entropys_step_by_lr_c() -> None:
    t = task()
    shift = {name: torch.randn_like(p) for name, p in t.model.parameters.items()}
    plainly = ClientTrainer(t, 1, 1).fit(t.model.parameters).params
    shifted = ClientTrainer(t, 1, 1).fit(t.model.parameters, correction=shift).params
    for name in shift:
        assert torch.allclose(plainly[name] - shifted[name], 0.1 * shift[name], atol=1e-6)


# --- extras


def of_z(context: TermContext, carry: State) -> tuple[Tensor, State]:
    """Gradient 1 for every entry of prbm."""
    return context.batch.z[0].sum(), carry


@pytest.mark.parametrize(("own", "moved"), [(None, 0.5), (0.125, 0.25), (0.0, 0.0), (2.0, 4.0)])
def test_extras_are_trained_with_their_own_learning_rate(own: float | None, moved: float) -> None:
    """Gradient 1, two steps: 2 / 4 at the fit's rate 1/4, else twice their own."""
    local = ClientTrainer(task(lr=0.25), 1, 0)
    local.extras = {"prbm": ExtraParameter(torch.ones(5), own), "other": ExtraParameter(torch.ones(2))}
    local.fit(dyadic(local.task), loss=Term(of_z))
    assert torch.equal(local.extras["prbm"].value, torch.full((5,), 1 - moved))
    assert local.extras["prbm"].lr == own
    assert torch.equal(local.extras["other"].value, torch.ones(2)), "no gradient, no step"
    assert not local.extras["prbm"].value.requires_grad


def test_extras_go_on_where_the_last_fit_left_them() -> None:
    local = ClientTrainer(task(lr=0.25), 1, 0)
    local.extras["prbm"] = ExtraParameter(torch.zeros(5), 0.5)
    for k in (1, 2, 3):
        local.fit(dyadic(local.task), loss=Term(of_z))
        assert torch.equal(local.extras["prbm"].value, torch.full((5,), -1.0 * k))


def test_the_vector_translates_the_representation_in_fit_and_forward() -> None:
    """With h alone trained, lr 0 for p: the first loss is that of h(f(x) + p)."""
    t = task()
    local, vector = ClientTrainer(t, 1, 1), torch.linspace(-1, 1, 5)
    local.extras["prbm"] = ExtraParameter(vector, 0.0)
    local.fit(t.model.parameters, lr=0.0)
    rows = batches(t, client=1)[0]
    net = t.model.module
    assert isinstance(net, nn.Sequential)
    logits = net[2](net[:2](t.dataset.x[rows]) + vector)
    assert local.losses["shared"][0] == pytest.approx(7 * F.cross_entropy(logits, t.dataset.y[rows]).item())
    assert torch.equal(local.forward(t.model.parameters, t.dataset.x[rows]).logits, logits)


# --- terms


def counting(context: TermContext, carry: State) -> tuple[None, State]:
    """Counts batches by its constant; no loss."""
    return None, {"n": carry["n"] + context.const["by"]}


def test_a_carry_is_handed_on_and_returned() -> None:
    """Four batches, counted by 1 from 0 and by 10 from 5."""
    start = torch.tensor(5.0)
    ones = Term(counting, {"by": torch.tensor(1.0)}, {"n": torch.tensor(0.0)})
    tens = Term(counting, {"by": torch.tensor(10.0)}, {"n": start})
    t = task(local_epochs=2)
    local = ClientTrainer(t, 1, 0)
    local.attach("shared", Term(counting, {"by": torch.tensor(100.0)}, {"n": torch.tensor(0.0)}))
    for _ in range(2):  # the second fit starts anew
        found = local.fit(t.model.parameters, terms=[ones, tens])
        assert [carry["n"].item() for carry in found.carries] == [4, 45]
    assert start.item() == 5
    assert sha256(found.params) == sha256(ClientTrainer(t, 1, 0).fit(t.model.parameters).params)


def test_terms_are_added_and_not_part_of_the_reported_loss() -> None:
    """Gradients 1 and 1 for head.bias, lr 1/4, two steps: minus 1. Loss: that of the first term only."""
    t = task(lr=0.25)
    start, local = dyadic(t), ClientTrainer(t, 1, 0)
    found = local.fit(start, loss=sum_of("head.bias"), terms=[sum_of("head.bias", "body.bias")]).params
    assert torch.equal(found["head.bias"], start["head.bias"] - 1)
    assert torch.equal(found["body.bias"], start["body.bias"] - 0.5)
    # sums of three entries, before the first step and after it (lower by 3 times 2/4), ten samples each
    first = start["head.bias"].sum().item()
    assert local.losses["shared"] == (10 * first + 10 * (first - 1.5), 20)


def test_attached_terms_act_on_their_track_only() -> None:
    t = task(lr=0.25)
    start = dyadic(t)
    local = ClientTrainer(t, 1, 0)
    local.attach("personal", sum_of("body.bias"))
    local.attach("personal", sum_of("body.bias"))
    moved = {
        track: start["body.bias"]
        - local.fit(start, track=track, loss=sum_of("head.bias")).params["body.bias"]
        for track in ("shared", "personal", "third")
    }
    assert {track: by.tolist() for track, by in moved.items()} == {
        "shared": [0] * 5, "personal": [1] * 5, "third": [0] * 5
    }  # fmt: skip
    assert set(local.losses) == {"shared", "personal", "third"}


def test_a_term_sees_the_batch_after_the_forward_pass() -> None:
    t = task()
    seen: list[Batch] = []
    vector = torch.linspace(0, 1, 5)

    def look(context: TermContext, carry: State) -> tuple[None, State]:
        seen.append(context.batch)
        assert context.model is t.model
        assert context.params.keys() == t.model.parameters.keys()
        return None, carry

    local = ClientTrainer(t, 1, 1)
    local.extras["prbm"] = ExtraParameter(vector)
    local.fit(t.model.parameters, terms=[Term(look)])
    (batch,) = seen
    assert rows_of(t, Samples(batch.x, batch.y)) == batches(t, client=1)[0]
    assert torch.equal(batch.z, batch.z_g + vector)
    assert torch.equal(batch.logits, t.model.classify(t.model.parameters, batch.z))


# --- divergence


def broken(context: TermContext, carry: State) -> tuple[Tensor, State]:
    return context.params["head.bias"].sum() * math.nan, carry


def test_a_loss_that_is_no_number_names_client_and_round() -> None:
    t = task()
    with pytest.raises(DivergenceError) as caught:
        ClientTrainer(t, 4, 2).fit(t.model.parameters, loss=Term(broken))
    assert (caught.value.client, caught.value.round, caught.value.quantity) == (2, 4, "loss")
    assert str(caught.value) == (
        "training diverged: loss = nan at client 2 in round 4; the last good round is kept (try a smaller lr)"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_real_training_with_a_huge_rate_diverges() -> None:
    t = task(lr=1e38, local_epochs=20)
    with pytest.raises(DivergenceError, match=r"^training diverged: .* at client 0 in round 1; "):
        ClientTrainer(t, 1, 0).fit(t.model.parameters)


def test_an_update_that_is_infinite_is_named() -> None:
    """Loss finite, gradient 1, two steps of 3e38: beyond the largest float32, 3.4e38."""
    t = task(lr=3e38)
    with pytest.raises(DivergenceError, match=r"update of head\.bias = inf at client 0 in round 3; "):
        ClientTrainer(t, 3, 0).fit(
            dyadic(t), loss=sum_of("body.bias"), terms=[sum_of("head.bias")], trainable=["head.bias"]
        )
    local = ClientTrainer(task(), 1, 1)
    local.extras["prbm"] = ExtraParameter(torch.full((5,), -6e37), 3.4e38)
    with pytest.raises(DivergenceError, match="update of prbm = inf at client 1 in round 1; "):
        local.fit(dyadic(local.task), loss=Term(of_z), lr=0.0)


def test_a_term_that_is_no_number_is_found_in_the_update() -> None:
    """Client 1 has one batch, so there is no second loss that would show it."""
    t = task()
    with pytest.raises(DivergenceError, match=r"update of head\.bias = nan at client 1 in round 1; "):
        ClientTrainer(t, 1, 1).fit(t.model.parameters, terms=[Term(broken)])


# --- predict


def test_predictions_are_those_of_a_plain_pass() -> None:
    """300 test rows do not fit one chunk of 128; labels come in the same order."""
    t = task()
    params = {name: p + 0.5 for name, p in t.model.parameters.items()}
    for client in (0, 2):
        for on, rows in (("test", t.split.test[client]), ("train", t.split.train[client])):
            logits, y = ClientTrainer(t, 1, client).predict(
                params, lambda p, x: t.model.forward(p, x).logits, on=on
            )
            assert logits.shape == (len(rows), 3)
            expected = functional_call(t.model.module, params, (t.dataset.x[rows],))
            assert torch.allclose(logits, expected, atol=1e-6)
            assert torch.equal(y, t.dataset.y[rows])
            assert not logits.requires_grad


def test_predictions_use_the_vector() -> None:
    t = task()
    local = ClientTrainer(t, 1, 0)
    local.extras["prbm"] = ExtraParameter(torch.linspace(-1, 1, 5))
    logits, _ = local.predict(t.model.parameters, lambda p, x: local.forward(p, x).logits)
    x = t.dataset.x[t.split.test[0]]
    expected = t.model.forward(t.model.parameters, x, torch.linspace(-1, 1, 5)).logits
    assert torch.allclose(logits, expected, atol=1e-6)


def test_predictions_of_any_function() -> None:
    t = task()
    sums, _ = ClientTrainer(t, 1, 0).predict(t.model.parameters, lambda p, x: x.sum(0, keepdim=True))
    assert sums.shape == (3, 4), "chunks of 128, 128 and 44"
    assert torch.allclose(sums.sum(0), t.dataset.x[t.split.test[0]].sum(0), atol=1e-3)


# --- dropout and BatchNorm


def test_dropout_is_the_same_again_and_another_in_another_round() -> None:
    """lr 0 keeps the weights, so the losses show the masks."""

    def loss(round: int, client: int = 0, seed: int = 0) -> float:
        t = task(dropping, seed=seed)
        with seeds.torch_seeded(1):
            t = Task(SplitModel(dropping(), t.dataset.x[:1]), t.dataset, t.split, t.training, seed)
        local = ClientTrainer(t, round, client)
        torch.rand(round + client)
        local.fit(t.model.parameters, lr=0.0)
        first = local.losses["shared"][0]
        torch.rand(3)
        local.fit(t.model.parameters, lr=0.0)
        assert local.losses["shared"][0] == first
        return first

    assert loss(1) == loss(1)
    assert len({loss(1), loss(2), loss(1, 2), loss(1, 0, 1)}) == 4


def test_nothing_is_dropped_in_predictions_and_torchs_generator_is_left_alone() -> None:
    t = task(dropping)
    local = ClientTrainer(t, 1, 0)
    before = torch.get_rng_state()
    local.fit(t.model.parameters)
    one, _ = local.predict(t.model.parameters, lambda p, x: local.forward(p, x).logits)
    two, _ = local.predict(t.model.parameters, lambda p, x: local.forward(p, x).logits)
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(one, t.model.module(t.dataset.x[t.split.test[0]]), atol=1e-6)


def test_batchnorm_statistics_belong_to_a_track() -> None:
    """Two batches from (0, 1): the counter is 2; the other track and those given stay as they were."""
    t = task(normed)
    given = {"shared": {name: b.clone() for name, b in t.model.buffers.items()}}
    given["shared"]["norm.num_batches_tracked"] += 10
    local = ClientTrainer(t, 1, 0, given)
    local.fit(t.model.parameters)
    assert int(local.buffers("shared")["norm.num_batches_tracked"]) == 12
    assert int(local.buffers("personal")["norm.num_batches_tracked"]) == 0
    assert int(given["shared"]["norm.num_batches_tracked"]) == 10
    assert not given["shared"]["norm.running_mean"].any()
    assert not t.model.buffers["norm.running_mean"].any()
    local.fit(t.model.parameters, track="personal")
    assert int(local.buffers("personal")["norm.num_batches_tracked"]) == 2
    assert int(local.buffers("shared")["norm.num_batches_tracked"]) == 12
    assert local.trained_buffers().keys() == {"shared", "personal"}


def test_predictions_use_the_statistics_of_their_track_and_leave_them() -> None:
    t = task(normed)
    local = ClientTrainer(t, 1, 0)
    local.fit(t.model.parameters, track="personal")
    trained = {name: b.clone() for name, b in local.buffers("personal").items()}
    x = t.dataset.x[t.split.test[0]]
    for track, buffers in (("shared", t.model.buffers), ("personal", trained)):
        logits, _ = local.predict(t.model.parameters, lambda p, x: local.forward(p, x).logits, track=track)
        expected = functional_call(t.model.module.eval(), {**t.model.parameters, **buffers}, (x,))
        assert torch.allclose(logits, expected, atol=1e-6), track
    assert sha256(local.buffers("personal")) == sha256(trained)


def test_a_fit_may_leave_the_statistics_as_they_were() -> None:
    t = task(normed)
    local = ClientTrainer(t, 1, 0)
    quiet = local.fit(t.model.parameters, keep_statistics=False)
    assert sha256(local.buffers("shared")) == sha256(t.model.buffers)
    assert sha256(local.fit(t.model.parameters).params) == sha256(quiet.params)
    assert sha256(local.buffers("shared")) != sha256(t.model.buffers)


def test_a_fit_after_a_prediction_on_the_same_track() -> None:
    t = task(normed)
    local = ClientTrainer(t, 1, 0)
    local.predict(t.model.parameters, lambda p, x: local.forward(p, x).logits)
    assert sha256(local.fit(t.model.parameters).params) == sha256(
        ClientTrainer(t, 1, 0).fit(t.model.parameters).params
    )


def test_a_model_without_buffers_has_none() -> None:
    t = task()
    local = ClientTrainer(t, 1, 0)
    local.fit(t.model.parameters)
    assert local.trained_buffers() == {}
    assert (local.samples, ClientTrainer(t, 1, 1).samples) == (25, 7)


def test_streams_of_a_client() -> None:
    local = ClientTrainer(task(seed=3), 5, 2)
    assert local.rng("noise").randint(2**31) == seeds.make_rng(3, "noise", 5, 2).randint(2**31)


@pytest.mark.parametrize("client", [0, 1, 2])
@pytest.mark.parametrize("epochs", [None, 3])
def test_steps_are_the_batches_of_a_scan(client: int, epochs: int | None) -> None:
    t = task(local_epochs=2)
    assert ClientTrainer(t, 1, client).steps(epochs) == len(batches(t, client=client, epochs=epochs))


def test_labels_that_a_client_trains_on() -> None:
    t = task()
    found = ClientTrainer(t, 1, 1).label_counts()
    assert found.tolist() == [int((t.dataset.y[t.split.train[1]] == c).sum()) for c in range(3)]
    assert int(found.sum()) == 7
