"""The oracles are the rulers for the rest, so they are held against closed forms and short loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from feddbe import seeds
from tests.oracles import fedavg, methods
from tests.oracles.methods import Setting, filled

SETTINGS: dict[str, Any] = {"rounds": 2, "lr": 0.1, "batch": 10, "epochs": 2, "seed": 3, "join": 1.0}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digits(count: int = 120) -> tuple[Tensor, Tensor]:
    data = load_digits()
    x = torch.tensor((data.images[:count] / 16 - 0.5) / 0.5, dtype=torch.float32)
    return x.unsqueeze(1), torch.tensor(data.target[:count])


def parts(*sizes: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def linear_net() -> fedavg.Net:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), nn.Linear(5, 10)


def cnn() -> fedavg.Net:
    torch.manual_seed(0)
    return fedavg.digits_cnn()


def weights(net: fedavg.Net) -> list[Tensor]:
    return [w for module in net for w in module.parameters()]


def accuracy(logits: Tensor, y: Tensor) -> float:
    return int((logits.argmax(1) == y).sum()) / len(y)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_one_client_is_centralised_sgd_without_the_incomplete_batch() -> None:
    x, y = digits(47)
    found = fedavg.run(cnn(), x, y, [np.arange(47)], [np.arange(47)], **SETTINGS)
    net = nn.Sequential(*cnn())
    for t in (1, 2):
        rng = seeds.make_rng(3, "batches", t, 0)
        for rows in [part for _ in range(2) for part in np.split(rng.permutation(47)[:40], 4)]:
            grads = torch.autograd.grad(cross_entropy(net(x[rows]), y[rows]), list(net.parameters()))
            for w, g in zip(net.parameters(), grads, strict=True):
                w.data -= 0.1 * g
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(found["server"], net.parameters(), strict=True)
    )
    assert found["accuracy"][-1] == accuracy(net(x), y)
    assert not same(found["server"], weights(cnn()))


@pytest.mark.parametrize("nothing", [{"kappa": 0.0, "mu": 0.5}, {"kappa": 50.0, "mu": 0.0}])
def test_mr_without_weight_or_memory_is_fedavg(nothing: dict[str, Any]) -> None:
    x, y = digits()
    plain = fedavg.run(cnn(), x, y, parts(40, 25, 55), parts(40, 25, 55), **SETTINGS)
    zero = fedavg.run(cnn(), x, y, parts(40, 25, 55), parts(40, 25, 55), **SETTINGS, **nothing)
    assert same(plain["server"], zero["server"])
    assert plain["accuracy"] == zero["accuracy"]
    some = fedavg.run(cnn(), x, y, parts(40, 25, 55), parts(40, 25, 55), **SETTINGS, kappa=50.0, mu=0.5)
    assert not same(plain["server"], some["server"])


def test_one_round_is_the_weighted_mean_of_gradient_steps_of_those_who_take_part() -> None:
    """Short batches: each of the clients makes one step with all it has, θ_i = θ - lr g_i."""
    x, y = digits()
    train, settings = parts(3, 9, 5, 7), SETTINGS | {"rounds": 1, "epochs": 1, "join": 0.5, "seed": 5}
    found = fedavg.run(cnn(), x, y, train, train, **settings, prbm=True)
    cohort = seeds.sample_cohort(5, 1, 4, 0.5)
    assert len(cohort) == 2
    assert cohort not in (
        seeds.sample_cohort(5, 0, 4, 0.5),
        seeds.sample_cohort(5, 2, 4, 0.5),
    )  # else the round would not show
    net, start = nn.Sequential(*cnn()), weights(cnn())
    expected = [w.detach().clone() for w in start]
    for i in cohort:
        grads = torch.autograd.grad(cross_entropy(net(x[train[i]]), y[train[i]]), list(net.parameters()))
        for w, g in zip(expected, grads, strict=True):
            w -= 0.1 * g * len(train[i]) / sum(len(train[j]) for j in cohort)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found["server"], expected, strict=True))
    assert {i for i, p in found["prbm"].items() if p.any()} == set(cohort)


def test_prbm_moves_by_the_mean_gradient_at_the_cut_and_is_used_in_prediction() -> None:
    """dCE/dp = mean over the batch of (softmax - onehot) W, W being the head's weight."""
    x, y = digits()
    f, h = linear_net()
    settings = SETTINGS | {"rounds": 1, "epochs": 1}
    found = fedavg.run((f, h), x, y, [np.arange(8)], [np.arange(120)], **settings, prbm=True)
    error = h(f(x[:8])).softmax(1) - nn.functional.one_hot(y[:8], 10)
    assert torch.allclose(found["prbm"][0], -0.1 * (error @ h.weight).mean(0), atol=1e-6)
    w, b, head, bias = found["server"]
    z = x.flatten(1) @ w.T + b
    assert found["accuracy"][1] == accuracy((z + found["prbm"][0]) @ head.T + bias, y)
    assert found["accuracy"][1] != accuracy(z @ head.T + bias, y)


def test_mr_gradient_in_closed_form() -> None:
    """One batch, m = mean f(x): debiased z_bar = m, r = mu m; f's bias moves by -lr kappa mu/K (mu - 1) m."""
    x, y = digits(10)
    settings = SETTINGS | {"rounds": 1, "epochs": 1}
    f, h = linear_net()
    mr: list[dict[str, Any]] = [{}, {"kappa": 7.0, "mu": 0.3, "init_mean": "debiased"}]
    run = [fedavg.run((f, h), x, y, [np.arange(10)], [np.arange(10)], **settings, **extra) for extra in mr]
    mean = f(x).mean(0)
    assert torch.allclose(run[1]["z_bar"], mean, atol=1e-6)
    moved = run[1]["server"][1] - run[0]["server"][1]
    assert torch.allclose(moved, -0.1 * 7.0 * 0.3 / 5 * (0.3 - 1) * mean, atol=1e-6)
    assert moved.abs().max() > 1e-3


def test_initial_means_in_closed_form_at_lr_zero() -> None:
    """With lr = 0 the features stay f(x; θ^0): exact is their mean, momentum with mu = 1 the last batch's."""
    x, y = digits(60)
    f, h = linear_net()
    train, settings = parts(20, 40), SETTINGS | {"rounds": 0, "lr": 0.0, "kappa": 1.0}
    z = f(x)

    def z_bar(**extra: Any) -> Tensor:
        found = fedavg.run((f, h), x, y, train, train, **settings, **extra)["z_bar"]
        assert isinstance(found, Tensor)
        return found

    orders = [train[i][seeds.make_rng(3, "batches", 0, i).permutation(n)] for i, n in enumerate((20, 40))]
    last = sum(n / 60 * z[order[-10:]].mean(0) for n, order in zip((20, 40), orders, strict=True))
    assert torch.allclose(z_bar(mu=1.0), torch.as_tensor(last), atol=1e-6)
    assert torch.allclose(z_bar(mu=0.5, init_mean="exact"), z.mean(0), atol=1e-6)
    # mu = 0.5 over client 0's two batches weighs them 1/4 and 1/2, debiased 1/3 and 2/3.
    alone = {"momentum": (1 / 4, 1 / 2), "debiased": (1 / 3, 2 / 3)}
    first, second = z[orders[0][:10]].mean(0), z[orders[0][10:]].mean(0)
    for init_mean, (a, b) in alone.items():
        found = fedavg.run((f, h), x, y, train[:1], train[:1], **settings, mu=0.5, init_mean=init_mean)[
            "z_bar"
        ]
        assert torch.allclose(found, a * first + b * second, atol=1e-6)


def test_the_start_is_left_as_it_was_and_is_entry_zero() -> None:
    x, y = digits(50)
    net = cnn()
    found = fedavg.run(net, x, y, parts(20, 30), parts(20, 30), **SETTINGS, kappa=1.0, mu=1.0, prbm=True)
    assert same(weights(net), weights(cnn()))
    assert found["accuracy"][0] == accuracy(nn.Sequential(*net)(x), y)
    assert len(found["accuracy"]) == 3


def normed_net() -> fedavg.Net:
    torch.manual_seed(0)
    f = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
    return f, nn.Linear(8, 10)


def setting(net: fedavg.Net, *sizes: int, **options: Any) -> Setting:
    x, y = digits(sum(sizes))
    chosen = {"rounds": 2, "lr": 0.1, "join": 1.0, "seed": 3, **options}
    return Setting(net, x, y, parts(*sizes), parts(*sizes), **chosen)


def loss(net: nn.Module, s: Setting, i: int = 0) -> float:
    with torch.no_grad():
        return cross_entropy(net.eval()(s.x[s.test[i]]), s.y[s.test[i]]).item()


@pytest.mark.parametrize("bn", ["local", "average"])
def test_one_client_with_batch_norm_is_centralised_sgd(bn: str) -> None:
    """One module, its statistics included; it predicts in evaluation mode, at last after another epoch."""
    s = setting(normed_net(), 47, bn=bn, epochs=2, ft=1)
    found = methods.fedavg(s).server
    net, losses = nn.Sequential(*normed_net()), []
    for t, epochs in ((1, 2), (2, 2), (3, 1)):
        losses.append(loss(net, s))
        if t == 3:
            for a, b in zip(found, net.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
            torch.testing.assert_close(s.tracks["shared"][0], list(net.buffers()))
        rng, sgd = seeds.make_rng(3, "batches", t, 0), torch.optim.SGD(net.parameters(), lr=0.1)
        for rows in [part for _ in range(epochs) for part in np.split(rng.permutation(47)[:40], 4)]:
            sgd.zero_grad()
            cross_entropy(net.train()(s.x[rows]), s.y[rows]).backward()  # type: ignore[no-untyped-call]
            sgd.step()
    losses.append(loss(net, s))
    assert list(s.seen) == [
        *(("before", 0, 0), ("after", 0, 0), ("before", 1, 0), ("after", 1, 0)),
        *(("before", 2, 0), ("adapted", 2, 0)),
    ]
    wanted = [losses[0], losses[1], losses[1], losses[2], losses[2], losses[3]]
    assert [seen.loss for seen in s.seen.values()] == pytest.approx(wanted, rel=1e-5)


def test_statistics_are_averaged_by_samples_and_counters_rounded() -> None:
    """A first batch leaves a tenth of its mean; 1, 1 and 3 batches are 2 on average."""
    s = setting(normed_net(), 8, 12, 36, bn="average", weights="uniform", rounds=1, lr=0.0)
    methods.fedavg(s)
    z = normed_net()[0][:2](s.x)  # type: ignore[index]
    total = torch.zeros(8)
    for i, steps in enumerate((1, 1, 3)):
        order, mean = (
            s.train[i][seeds.make_rng(3, "batches", 1, i).permutation(len(s.train[i]))],
            torch.zeros(8),
        )
        for k in range(steps):
            mean = 0.9 * mean + 0.1 * z[order[10 * k : 10 * k + 10]].mean(0)
        total = total + len(order) / 56 * mean
    for i in range(3):
        torch.testing.assert_close(s.tracks["shared"][i][0], total)
        assert s.tracks["shared"][i][2].item() == 2


def test_perfedavg_adapts_by_one_step_on_the_first_batch() -> None:
    s = setting(linear_net(), 25, rounds=0)
    methods.perfedavg(s, alpha=0.3)
    net, rows = nn.Sequential(*linear_net()), seeds.make_rng(3, "batches", 1, 0).permutation(25)[:10]
    assert s.seen["before", 0, 0].loss == pytest.approx(loss(net, s))
    grads = torch.autograd.grad(cross_entropy(net(s.x[rows]), s.y[rows]), list(net.parameters()))
    for w, g in zip(net.parameters(), grads, strict=True):
        w.data -= 0.3 * g
    assert s.seen["adapted", 0, 0].loss == pytest.approx(loss(net, s))


def test_what_is_deployed_at_the_end_is_what_is_left() -> None:
    """Of methods whose clients deploy more, or less, than the server has."""
    f, h = linear_net()
    wholes: dict[str, Callable[[list[Tensor], list[Tensor]], list[Tensor]]] = {
        "fedper": lambda server, own: [*server, *own],
        "ditto": lambda server, own: own,
        "pfedme": lambda server, own: own,
        "fedavg": lambda server, own: server,
        "apfl": lambda server, own: [
            own[0] * v + (1 - own[0]) * w for v, w in zip(own[1:], server, strict=True)
        ],
    }

    def left(method: str, **options: Any) -> tuple[Setting, methods.Result]:
        s = setting((f, h), 40, 25, **options)
        return s, getattr(methods, method)(s)

    for method, whole in wholes.items():
        s, found = left(method)
        for i in range(2):
            net = nn.Sequential(*filled((f, h), whole(found.server, found.private.get(i, []))))
            assert s.seen["before", 2, i].loss == pytest.approx(loss(net, s, i), rel=1e-5)
    s, found = left("fedrod")
    w, b, *heads = found.server
    p = found.private[1]
    logits = (s.x[s.test[1]].flatten(1) @ w.T + b) @ (heads[0] + p[0]).T + heads[1] + p[1]
    assert s.seen["before", 2, 1].loss == pytest.approx(
        cross_entropy(logits, s.y[s.test[1]]).item(), rel=1e-5
    )
    s, found = left("fedavg", prbm=True)
    w, b, *heads = found.server
    logits = (s.x[s.test[1]].flatten(1) @ w.T + b + found.private[1][0]) @ heads[0].T + heads[1]
    assert s.seen["before", 2, 1].loss == pytest.approx(
        cross_entropy(logits, s.y[s.test[1]]).item(), rel=1e-5
    )


def test_fine_tuning_is_plain_and_leaves_nothing() -> None:
    """From the same model it is the same for all methods, and not with MR; p_i is trained, but not kept."""
    runs = {}
    for method in ("fedavg", "scaffold", "moon", "fedprox"):
        s = setting(normed_net(), 40, 25, rounds=0, ft=2, prbm=True, kappa=5.0)
        getattr(methods, method)(s)
        runs[method] = s
        assert not any(p.any() for p in s.p.values())
        statistics = s.tracks["shared"][0]
        assert statistics[2].item() == 4, "of the preparation"
    assert all(s.seen == runs["fedavg"].seen for s in runs.values())
    plain = setting(normed_net(), 40, 25, rounds=0, ft=2, kappa=5.0)
    methods.fedavg(plain)
    assert plain.seen["before", 0, 0] == runs["fedavg"].seen["before", 0, 0]
    assert plain.seen["adapted", 0, 0] != runs["fedavg"].seen["adapted", 0, 0]
