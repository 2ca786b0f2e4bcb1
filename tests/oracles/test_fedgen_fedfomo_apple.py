"""Oracles of FedGen, FedFomo and APPLE, compared with closed forms and with each other."""

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
from tests.oracles import fedgen_fedfomo_apple as oracle
from tests.oracles import methods
from tests.oracles.methods import Net, Setting, parameters_of, with_parameters
from tests.oracles.test_fedavg import are_equal, build_linear_net, load_images, split_indices

MODEL = 4
"""Number of tensors of `build_linear_net`."""


def build_setting(sizes: Sequence[int] = (40, 25, 55), **options: Any) -> Setting:
    x, y = load_images(sum(sizes))
    settings = {"rounds": 3, "lr": 0.1, "participation": 0.67, "seed": 1, **options}
    return Setting(build_linear_net(), x, y, split_indices(*sizes), split_indices(*sizes), **settings)


def load_generator(server: Sequence[Tensor]) -> nn.Module:
    """Return G in evaluation mode from the oracle's server tensors."""
    g = nn.Sequential(
        nn.Linear(42, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 5)
    ).eval()
    norm = g[1]
    assert isinstance(norm, nn.BatchNorm1d)
    rest = [norm.running_mean, norm.running_var]
    for tensor, value in zip([*g.parameters(), *rest], server[MODEL : MODEL + 7], strict=True):
        assert tensor is not None
        tensor.data.copy_(value)
    return g


@pytest.mark.parametrize("addons", [{}, {"kappa": 5.0}, {"kappa": 5.0, "prbm": True, "mu": 0.5}])
def test_fedgen_with_zero_weights_equals_fedavg(addons: dict[str, Any]) -> None:
    plain = methods.fedavg(build_setting(**addons))
    zero = oracle.fedgen(build_setting(**addons), alpha=0.0, beta=0.0)
    assert are_equal(plain.server, zero.server[:MODEL])
    assert all(are_equal(p, zero.private[i]) for i, p in plain.private.items())


def test_fedgen_terms_start_in_round_2() -> None:
    runs = [[f(build_setting(rounds=t)).server for f in (methods.fedavg, oracle.fedgen)] for t in (1, 2)]
    (plain1, after_1), (plain2, after_2) = runs
    assert are_equal(plain1, after_1[:MODEL])
    assert not any(torch.equal(a, b) for a, b in zip(plain2, after_2[:MODEL], strict=True))
    for run, steps in ((after_1, 50), (after_2, 100)):
        assert run[-1].item() == steps
        assert len(run) == MODEL + 5 + 2 + 5 + 5 + 1


def test_fedgen_second_round_matches_closed_form() -> None:
    """One batch of one client with PRBM: steps of h's bias and p from softmax minus target of each term."""
    s = build_setting([10], rounds=1, prbm=True)
    first = oracle.fedgen(s)
    second = oracle.fedgen(build_setting([10], rounds=2, prbm=True), alpha=3.0, beta=4.0, decay=0.9)
    (f, h), g, p = (
        with_parameters(s.net, first.server[:MODEL]),
        load_generator(first.server),
        first.private[0][0],
    )
    rng = torch.Generator().manual_seed(seeds.torch_seed(1, "torch", 2, 0) % 2**62)
    labels = torch.multinomial(torch.bincount(s.y, minlength=10) / 10, 10, replacement=True, generator=rng)
    order = torch.from_numpy(seeds.make_rng(1, "batches", 2, 0).permutation(10))
    x, y = s.x[order], s.y[order]
    eps, eps2 = torch.rand(10, 32, generator=rng), torch.rand(10, 32, generator=rng)
    z1 = g(torch.cat([eps, one_hot(labels, 10).float()], 1))
    z2 = g(torch.cat([eps2, one_hot(y, 10).float()], 1))
    pupil = h(f(x) + p).softmax(1)
    real = pupil - one_hot(y, 10) + 4 * 0.9 * (pupil - h(z2).softmax(1))
    false = 3 * 0.9 * (h(z1).softmax(1) - one_hot(labels, 10))
    difference = second.server[MODEL - 1] - first.server[MODEL - 1]
    torch.testing.assert_close(difference, -0.1 * (real + false).mean(0), rtol=0, atol=1e-6)
    head = first.server[MODEL - 2]
    torch.testing.assert_close(second.private[0][0] - p, -0.1 * (real @ head).mean(0), rtol=0, atol=1e-6)


def test_fedgen_teacher_weights_sum_to_one_for_each_label() -> None:
    """At lr = 0 all heads are equal, so the weights do not matter, and G minimizes this head's loss."""
    lite = oracle.fedgen(build_setting(lr=0.0), lite=True).server
    full = oracle.fedgen(build_setting(lr=0.0), diversity=0.0).server
    for a, b in zip(lite[MODEL : MODEL + 7], full[MODEL : MODEL + 7], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    y, h = torch.arange(10).repeat(20), build_linear_net()[1]
    eps = torch.rand(200, 32, generator=torch.Generator().manual_seed(0))
    losses = [
        cross_entropy(h(load_generator(server)(torch.cat([eps, one_hot(y, 10).float()], 1))), y).item()
        for server in (oracle.fedgen(build_setting(lr=0.0, rounds=1), steps=1).server, full)
    ]
    assert losses[1] < 0.5 * losses[0]


def test_fedgen_similarity_of_two_points() -> None:
    """Noise 0 and 1, features (0, 0) and (2, 4): two of the four pairs count 1 * 3."""
    similarity = oracle.similarity(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    assert similarity.item() == pytest.approx(math.exp(-1.5))


def scalar_net(a: float) -> Net:
    """Logits (a x, -a x)."""
    h = nn.Linear(1, 2, bias=False)
    h.weight.data = torch.tensor([[a], [-a]]).float()
    return nn.Flatten(), h


def test_fedfomo_weights_match_closed_form() -> None:
    """On x = 1, y = 0 the loss is log(1 + e^(-2a)), and the distance to a = 0 is |a| sqrt(2)."""
    indices = np.arange(1)
    s = Setting(
        scalar_net(0), torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), [indices], [indices], 1, 0.1, 1.0
    )
    weights = oracle.fomo_weights(s, indices, scalar_net(0), [scalar_net(a) for a in (0.5, -0.5, 0.0, 1.0)])
    gain = [(math.log(2) - math.log1p(math.exp(-2 * a))) / (abs(a) * math.sqrt(2)) for a in (0.5, -0.5, 1.0)]
    assert gain[1] < 0
    assert weights == pytest.approx([gain[0], gain[1], 0, gain[2]], abs=1e-6)


def test_fedfomo_with_one_model_is_local_training_on_four_fifths_of_the_data() -> None:
    s = build_setting()
    s.train = [indices[: math.ceil(0.8 * len(indices))] for indices in s.train]
    assert [len(indices) for indices in s.train] == [32, 20, 44]
    local = methods.local(s)
    for i, private in oracle.fedfomo(build_setting(), m=1).private.items():
        assert are_equal(local.private[i], private[MODEL:])


def test_fedfomo_second_round_uses_uploads_of_the_first() -> None:
    first, second = (oracle.fedfomo(build_setting(rounds=t, participation=1.0)) for t in (1, 2))
    s = build_setting()
    nets = [with_parameters(s.net, first.private[i][MODEL:]) for i in range(3)]
    assert not first.server[0].any()
    assert are_equal(first.server[1:], [w for net in nets for w in parameters_of(net)])
    expected = [oracle.fomo_weights(s, s.train[i][-k:], s.net, nets) for i, k in enumerate((8, 5, 11))]
    torch.testing.assert_close(second.server[0], torch.tensor(expected))
    assert (second.server[0] > 0).sum() > 3
    for i, w in enumerate(torch.tensor(expected).clamp(min=0)):
        for k, old in enumerate(second.private[i][:MODEL]):
            mixed = sum(w[j] / w.sum() * parameters_of(nets[j])[k] for j in range(3))
            torch.testing.assert_close(old, torch.as_tensor(mixed))


def test_fedfomo_selects_by_affinity_or_at_random() -> None:
    """Each position is selected independently: at epsilon 0 by affinity, at 1 at random."""
    s, candidates, affinity = build_setting(), [0, 1, 2, 4, 5], torch.tensor([0.1, -0.2, 9.0, 7.0, 0.3, 0.2])

    def select(epsilon: float, m: int = 9) -> list[tuple[int, ...]]:
        return [tuple(oracle.select_models(s, t, 2, candidates, affinity, m, epsilon)) for t in range(200)]

    assert set(select(0.0)) == {(4, 5, 0, 1)}
    assert set(select(0.0, m=3)) == {(4, 5)}
    assert set(select(0.5, m=1)) == {()}
    at_random = select(1.0)
    assert len(set(at_random)) == 24
    assert all(sorted(models) == [0, 1, 4, 5] for models in at_random)
    firsts = [models[0] for models in select(0.4, m=3)]
    assert firsts.count(4) / 200 == pytest.approx(0.6 + 0.4 / 4, abs=0.1)
    second = [models[1] for models in select(0.4, m=3) if models[0] == 4]
    assert second.count(5) / len(second) == pytest.approx(0.6 + 0.4 / 3, abs=0.1)
    affinity[:] = 0
    assert len(set(select(0.0))) == 24


def to_float64(s: Setting) -> Setting:
    s = copy.copy(s)
    f, h = copy.deepcopy(s.net)
    s.net, s.x = (f.double(), h.double()), s.x.double()
    return s


def test_apple_with_own_core_only_equals_local_training() -> None:
    s = build_setting(participation=1.0)
    cores = [oracle.init_core(s, i) for i in range(3)]
    assert not torch.equal(cores[0][0], cores[1][0])
    for i in range(3):
        relations = torch.eye(3)[i]
        core, p = oracle.apple_client(s, i, 2, cores, relations, relations, 0.1, 0.0, 1.0)
        expected, _ = s.fit(with_parameters(s.net, cores[i]), i, 2)
        for a, b in zip(core, parameters_of(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert torch.equal(p, relations)


def test_apple_gradients_match_the_loss_of_the_mixture() -> None:
    """Numerically in p, plus the penalty; by autograd in the core, with the net written out."""
    s = to_float64(build_setting([10, 10, 10], participation=1.0))
    cores = [oracle.init_core(s, i) for i in range(3)]
    p, p0 = torch.tensor([0.2, 0.5, 0.4]).double(), torch.full((3,), 1 / 3).double()
    x, y = s.x[s.train[1]].flatten(1), s.y[s.train[1]]

    def loss(p: Tensor, core_params: Sequence[Tensor]) -> Tensor:
        w, b, head, bias = (
            p[0] * c[0] + p[1] * o + p[2] * c[2]
            for o, c in zip(core_params, zip(*cores, strict=True), strict=True)
        )
        return cross_entropy((x @ w.T + b) @ head.T + bias, y)

    core, new_p = oracle.apple_client(s, 1, 1, cores, p, p0, 0.1, 1.0, 0.7)
    differences = [loss(p + d, cores[1]) - loss(p - d, cores[1]) for d in 1e-6 * torch.eye(3).double()]
    torch.testing.assert_close(p - new_p, torch.stack(differences) / 2e-6 + 0.7 * (p - p0), rtol=0, atol=1e-6)
    leaves = [c.clone().requires_grad_() for c in cores[1]]
    for old, new, g in zip(cores[1], core, torch.autograd.grad(loss(p, leaves), leaves), strict=True):
        torch.testing.assert_close(old - new, 0.1 * g)


def test_apple_uses_cores_of_the_previous_round() -> None:
    """From the state after one round, each client alone gives what the second round gave it."""
    first, second = (
        oracle.apple(build_setting(rounds=t, participation=1.0), eta1=0.1, rounds_l=2) for t in (1, 2)
    )
    s = build_setting(participation=1.0)
    cores = [first.server[MODEL * i : MODEL * (i + 1)] for i in range(3)]
    p0 = torch.tensor([40, 25, 55]) / 120
    for i in (2, 0, 1):
        core, p = oracle.apple_client(s, i, 2, cores, first.private[i][0], p0, 0.1, 0.001, 0.05)
        assert are_equal(core, second.server[MODEL * i : MODEL * (i + 1)])
        torch.testing.assert_close(p, second.private[i][0])
