"""The oracles of FedGen, FedFomo and APPLE are rulers too: held against closed forms and each other."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from feddbe import seeds
from tests.oracles import fedgen_fedfomo_apple as exchanging
from tests.oracles import methods
from tests.oracles.methods import Net, Setting, filled, values
from tests.oracles.test_fedavg import digits, linear_net, parts, same

MODEL = 4
"""Tensors of `linear_net`."""


def setting(sizes: Sequence[int] = (40, 25, 55), **options: Any) -> Setting:
    x, y = digits(sum(sizes))
    chosen = {"rounds": 3, "lr": 0.1, "join": 0.67, "seed": 1, **options}
    return Setting(linear_net(), x, y, parts(*sizes), parts(*sizes), **chosen)


def generator(server: Sequence[Tensor]) -> nn.Module:
    """G in evaluation mode, from what the oracle says of the server."""
    g = nn.Sequential(
        nn.Linear(42, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 5)
    ).eval()
    norm = g[1]
    assert isinstance(norm, nn.BatchNorm1d)
    rest = [norm.running_mean, norm.running_var]
    for mine, theirs in zip([*g.parameters(), *rest], server[MODEL : MODEL + 7], strict=True):
        assert mine is not None
        mine.data.copy_(theirs)
    return g


@pytest.mark.parametrize("addons", [{}, {"kappa": 5.0}, {"kappa": 5.0, "prbm": True, "mu": 0.5}])
def test_fedgen_without_weights_is_fedavg(addons: dict[str, Any]) -> None:
    plain = methods.fedavg(setting(**addons))
    zero = exchanging.fedgen(setting(**addons), alpha=0.0, beta=0.0)
    assert same(plain.server, zero.server[:MODEL])
    assert all(same(p, zero.private[i]) for i, p in plain.private.items())


def test_fedgen_begins_after_the_first_round() -> None:
    runs = [[f(setting(rounds=t)).server for f in (methods.fedavg, exchanging.fedgen)] for t in (1, 2)]
    (plain1, one), (plain2, two) = runs
    assert same(plain1, one[:MODEL])
    assert not any(torch.equal(a, b) for a, b in zip(plain2, two[:MODEL], strict=True))
    for run, steps in ((one, 50), (two, 100)):
        assert run[-1].item() == steps
        assert len(run) == MODEL + 5 + 2 + 5 + 5 + 1


def test_fedgen_second_round_in_closed_form() -> None:
    """One batch of one client with PRBM: how h's bias and p move, from softmax minus target of each term."""
    s = setting([10], rounds=1, prbm=True)
    first = exchanging.fedgen(s)
    second = exchanging.fedgen(setting([10], rounds=2, prbm=True), alpha=3.0, beta=4.0, decay=0.9)
    (f, h), g, p = filled(s.net, first.server[:MODEL]), generator(first.server), first.private[0][0]
    rng = torch.Generator().manual_seed(seeds.torch_seed(1, "torch", 2, 0) % 2**62)
    drawn = torch.multinomial(torch.bincount(s.y, minlength=10) / 10, 10, replacement=True, generator=rng)
    order = torch.from_numpy(seeds.make_rng(1, "batches", 2, 0).permutation(10))
    x, y = s.x[order], s.y[order]
    eps, eps2 = torch.rand(10, 32, generator=rng), torch.rand(10, 32, generator=rng)
    z1 = g(torch.cat([eps, one_hot(drawn, 10).float()], 1))
    z2 = g(torch.cat([eps2, one_hot(y, 10).float()], 1))
    pupil = h(f(x) + p).softmax(1)
    real = pupil - one_hot(y, 10) + 4 * 0.9 * (pupil - h(z2).softmax(1))
    false = 3 * 0.9 * (h(z1).softmax(1) - one_hot(drawn, 10))
    moved = second.server[MODEL - 1] - first.server[MODEL - 1]
    torch.testing.assert_close(moved, -0.1 * (real + false).mean(0), rtol=0, atol=1e-6)
    head = first.server[MODEL - 2]
    torch.testing.assert_close(second.private[0][0] - p, -0.1 * (real @ head).mean(0), rtol=0, atol=1e-6)


def test_fedgen_teacher_weights_add_up_to_one_for_each_label() -> None:
    """At lr = 0 all heads are one, so the weights do not matter, and G learns what this head wants."""
    lite = exchanging.fedgen(setting(lr=0.0), lite=True).server
    full = exchanging.fedgen(setting(lr=0.0), diversity=0.0).server
    for a, b in zip(lite[MODEL : MODEL + 7], full[MODEL : MODEL + 7], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    y, h = torch.arange(10).repeat(20), linear_net()[1]
    eps = torch.rand(200, 32, generator=torch.Generator().manual_seed(0))
    losses = [
        cross_entropy(h(generator(server)(torch.cat([eps, one_hot(y, 10).float()], 1))), y).item()
        for server in (exchanging.fedgen(setting(lr=0.0, rounds=1), steps=1).server, full)
    ]
    assert losses[1] < 0.5 * losses[0]


def test_fedgen_diversity_of_two_points() -> None:
    """Noise 0 and 1, features (0, 0) and (2, 4): two of the four pairs count 1 * 3."""
    found = exchanging.alike(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    assert found.item() == pytest.approx(math.exp(-1.5))


def scalar(a: float) -> Net:
    """Logits (a x, -a x)."""
    h = nn.Linear(1, 2, bias=False)
    h.weight.data = torch.tensor([[a], [-a]]).float()
    return nn.Flatten(), h


def test_fedfomo_weights_by_hand() -> None:
    """On x = 1, y = 0 the loss is log(1 + e^(-2a)), and the distance to a = 0 is |a| sqrt(2)."""
    one = np.arange(1)
    s = Setting(scalar(0), torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), [one], [one], 1, 0.1, 1.0)
    found = exchanging.fomo_weights(s, one, scalar(0), [scalar(a) for a in (0.5, -0.5, 0.0, 1.0)])
    gain = [(math.log(2) - math.log1p(math.exp(-2 * a))) / (abs(a) * math.sqrt(2)) for a in (0.5, -0.5, 1.0)]
    assert gain[1] < 0
    assert found == pytest.approx([gain[0], gain[1], 0, gain[2]], abs=1e-6)


def test_fedfomo_alone_is_local_training_on_the_first_four_fifths() -> None:
    s = setting()
    s.train = [rows[: math.ceil(0.8 * len(rows))] for rows in s.train]
    assert [len(rows) for rows in s.train] == [32, 20, 44]
    alone = methods.local(s)
    for i, private in exchanging.fedfomo(setting(), m=1).private.items():
        assert same(alone.private[i], private[MODEL:])


def test_fedfomo_second_round_weighs_the_uploads_of_the_first() -> None:
    first, second = (exchanging.fedfomo(setting(rounds=t, join=1.0)) for t in (1, 2))
    s = setting()
    nets = [filled(s.net, first.private[i][MODEL:]) for i in range(3)]
    assert not first.server[0].any()
    assert same(first.server[1:], [w for net in nets for w in values(net)])
    wanted = [exchanging.fomo_weights(s, s.train[i][-k:], s.net, nets) for i, k in enumerate((8, 5, 11))]
    torch.testing.assert_close(second.server[0], torch.tensor(wanted))
    assert (second.server[0] > 0).sum() > 3
    for i, w in enumerate(torch.tensor(wanted).clamp(min=0)):
        for k, old in enumerate(second.private[i][:MODEL]):
            mixed = sum(w[j] / w.sum() * values(nets[j])[k] for j in range(3))
            torch.testing.assert_close(old, torch.as_tensor(mixed))


def test_fedfomo_sends_the_most_liked_or_any() -> None:
    """Each place by itself: at epsilon 0 by liking, at 1 in a random order, between the two now and then."""
    s, there, liked = setting(), [0, 1, 2, 4, 5], torch.tensor([0.1, -0.2, 9.0, 7.0, 0.3, 0.2])

    def sent(epsilon: float, m: int = 9) -> list[tuple[int, ...]]:
        return [tuple(exchanging.fomo_sent(s, t, 2, there, liked, m, epsilon)) for t in range(200)]

    assert set(sent(0.0)) == {(4, 5, 0, 1)}
    assert set(sent(0.0, m=3)) == {(4, 5)}
    assert set(sent(0.5, m=1)) == {()}
    at_random = sent(1.0)
    assert len(set(at_random)) == 24
    assert all(sorted(each) == [0, 1, 4, 5] for each in at_random)
    firsts = [each[0] for each in sent(0.4, m=3)]
    assert firsts.count(4) / 200 == pytest.approx(0.6 + 0.4 / 4, abs=0.1)
    second = [each[1] for each in sent(0.4, m=3) if each[0] == 4]
    assert second.count(5) / len(second) == pytest.approx(0.6 + 0.4 / 3, abs=0.1)
    liked[:] = 0
    assert len(set(sent(0.0))) == 24


def doubled(s: Setting) -> Setting:
    s = copy.copy(s)
    f, h = copy.deepcopy(s.net)
    s.net, s.x = (f.double(), h.double()), s.x.double()
    return s


def test_apple_with_its_own_core_only_is_local_training() -> None:
    s = setting(join=1.0)
    cores = [exchanging.fresh(s, i) for i in range(3)]
    assert not torch.equal(cores[0][0], cores[1][0])
    for i in range(3):
        alone = torch.eye(3)[i]
        core, p = exchanging.apple_client(s, i, 2, cores, alone, alone, 0.1, 0.0, 1.0)
        wanted, _ = s.fit(filled(s.net, cores[i]), i, 2)
        for a, b in zip(core, values(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert torch.equal(p, alone)


def test_apple_goes_down_the_loss_of_the_mixture_in_its_core_and_in_p() -> None:
    """Numerically in p, plus the penalty; by autograd in the core, with the net written out."""
    s = doubled(setting([10, 10, 10], join=1.0))
    cores = [exchanging.fresh(s, i) for i in range(3)]
    p, p0 = torch.tensor([0.2, 0.5, 0.4]).double(), torch.full((3,), 1 / 3).double()
    x, y = s.x[s.train[1]].flatten(1), s.y[s.train[1]]

    def loss(p: Tensor, own: Sequence[Tensor]) -> Tensor:
        w, b, head, bias = (
            p[0] * c[0] + p[1] * o + p[2] * c[2] for o, c in zip(own, zip(*cores, strict=True), strict=True)
        )
        return cross_entropy((x @ w.T + b) @ head.T + bias, y)

    core, moved = exchanging.apple_client(s, 1, 1, cores, p, p0, 0.1, 1.0, 0.7)
    rises = [loss(p + d, cores[1]) - loss(p - d, cores[1]) for d in 1e-6 * torch.eye(3).double()]
    torch.testing.assert_close(p - moved, torch.stack(rises) / 2e-6 + 0.7 * (p - p0), rtol=0, atol=1e-6)
    leaves = [c.clone().requires_grad_() for c in cores[1]]
    for old, new, g in zip(cores[1], core, torch.autograd.grad(loss(p, leaves), leaves), strict=True):
        torch.testing.assert_close(old - new, 0.1 * g)


def test_apple_uses_the_cores_of_the_round_before() -> None:
    """From the state after one round, each client alone gives what the second round gave it."""
    first, second = (exchanging.apple(setting(rounds=t, join=1.0), eta1=0.1, rounds_l=2) for t in (1, 2))
    s = setting(join=1.0)
    cores = [first.server[MODEL * i : MODEL * (i + 1)] for i in range(3)]
    p0 = torch.tensor([40, 25, 55]) / 120
    for i in (2, 0, 1):
        core, p = exchanging.apple_client(s, i, 2, cores, first.private[i][0], p0, 0.1, 0.001, 0.05)
        assert same(core, second.server[MODEL * i : MODEL * (i + 1)])
        torch.testing.assert_close(p, second.private[i][0])
