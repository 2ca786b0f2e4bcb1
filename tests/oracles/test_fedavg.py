"""Oracles of FedAvg and further methods, compared with closed forms and short loops."""

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
from tests.oracles.methods import Setting, with_parameters

SETTINGS: dict[str, Any] = {"rounds": 2, "lr": 0.1, "batch": 10, "epochs": 2, "seed": 3, "participation": 1.0}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, which is faster for models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load_images(count: int = 120) -> tuple[Tensor, Tensor]:
    data = load_digits()
    x = torch.tensor((data.images[:count] / 16 - 0.5) / 0.5, dtype=torch.float32)
    return x.unsqueeze(1), torch.tensor(data.target[:count])


def split_indices(*sizes: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def build_linear_net() -> fedavg.Net:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), nn.Linear(5, 10)


def build_cnn() -> fedavg.Net:
    torch.manual_seed(0)
    return fedavg.digits_cnn()


def parameters_of(net: fedavg.Net) -> list[Tensor]:
    return [w for module in net for w in module.parameters()]


def accuracy(logits: Tensor, y: Tensor) -> float:
    return int((logits.argmax(1) == y).sum()) / len(y)


def are_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_one_client_equals_centralized_sgd_without_incomplete_batch() -> None:
    x, y = load_images(47)
    result = fedavg.run(build_cnn(), x, y, [np.arange(47)], [np.arange(47)], **SETTINGS)
    net = nn.Sequential(*build_cnn())
    for t in (1, 2):
        rng = seeds.make_rng(3, "batches", t, 0)
        for indices in [part for _ in range(2) for part in np.split(rng.permutation(47)[:40], 4)]:
            grads = torch.autograd.grad(cross_entropy(net(x[indices]), y[indices]), list(net.parameters()))
            for w, g in zip(net.parameters(), grads, strict=True):
                w.data -= 0.1 * g
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(result["server"], net.parameters(), strict=True)
    )
    assert result["accuracy"][-1] == accuracy(net(x), y)
    assert not are_equal(result["server"], parameters_of(build_cnn()))


@pytest.mark.parametrize("options", [{"kappa": 0.0, "mu": 0.5}, {"kappa": 50.0, "mu": 0.0}])
def test_mr_with_zero_kappa_or_mu_equals_fedavg(options: dict[str, Any]) -> None:
    x, y = load_images()
    plain = fedavg.run(build_cnn(), x, y, split_indices(40, 25, 55), split_indices(40, 25, 55), **SETTINGS)
    zero = fedavg.run(
        build_cnn(), x, y, split_indices(40, 25, 55), split_indices(40, 25, 55), **SETTINGS, **options
    )
    assert are_equal(plain["server"], zero["server"])
    assert plain["accuracy"] == zero["accuracy"]
    nonzero = fedavg.run(
        build_cnn(),
        x,
        y,
        split_indices(40, 25, 55),
        split_indices(40, 25, 55),
        **SETTINGS,
        kappa=50.0,
        mu=0.5,
    )
    assert not are_equal(plain["server"], nonzero["server"])


def test_one_round_is_the_weighted_mean_of_the_cohorts_gradient_steps() -> None:
    """Each client takes one step on all of its few samples, θ_i = θ - lr g_i."""
    x, y = load_images()
    train, settings = (
        split_indices(3, 9, 5, 7),
        SETTINGS | {"rounds": 1, "epochs": 1, "participation": 0.5, "seed": 5},
    )
    result = fedavg.run(build_cnn(), x, y, train, train, **settings, prbm=True)
    cohort = seeds.sample_cohort(5, 1, 4, 0.5)
    assert len(cohort) == 2
    assert cohort not in (
        seeds.sample_cohort(5, 0, 4, 0.5),
        seeds.sample_cohort(5, 2, 4, 0.5),
    )  # otherwise the round would have no effect
    net, start = nn.Sequential(*build_cnn()), parameters_of(build_cnn())
    expected = [w.detach().clone() for w in start]
    for i in cohort:
        grads = torch.autograd.grad(cross_entropy(net(x[train[i]]), y[train[i]]), list(net.parameters()))
        for w, g in zip(expected, grads, strict=True):
            w -= 0.1 * g * len(train[i]) / sum(len(train[j]) for j in cohort)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(result["server"], expected, strict=True))
    assert {i for i, p in result["prbm"].items() if p.any()} == set(cohort)


def test_prbm_step_is_the_mean_gradient_at_the_cut_and_prbm_is_used_in_predictions() -> None:
    """dCE/dp = mean over the batch of (softmax - onehot) W, W being the head's weight."""
    x, y = load_images()
    f, h = build_linear_net()
    settings = SETTINGS | {"rounds": 1, "epochs": 1}
    result = fedavg.run((f, h), x, y, [np.arange(8)], [np.arange(120)], **settings, prbm=True)
    error = h(f(x[:8])).softmax(1) - nn.functional.one_hot(y[:8], 10)
    assert torch.allclose(result["prbm"][0], -0.1 * (error @ h.weight).mean(0), atol=1e-6)
    w, b, head, bias = result["server"]
    z = x.flatten(1) @ w.T + b
    assert result["accuracy"][1] == accuracy((z + result["prbm"][0]) @ head.T + bias, y)
    assert result["accuracy"][1] != accuracy(z @ head.T + bias, y)


def test_mr_gradient_matches_closed_form() -> None:
    """One batch, m = mean f(x): debiased z_bar = m, r = mu m; f's bias moves by -lr kappa mu/K (mu - 1) m."""
    x, y = load_images(10)
    settings = SETTINGS | {"rounds": 1, "epochs": 1}
    f, h = build_linear_net()
    mr: list[dict[str, Any]] = [{}, {"kappa": 7.0, "mu": 0.3, "init_mean": "debiased"}]
    results = [
        fedavg.run((f, h), x, y, [np.arange(10)], [np.arange(10)], **settings, **extra) for extra in mr
    ]
    mean = f(x).mean(0)
    assert torch.allclose(results[1]["z_bar"], mean, atol=1e-6)
    difference = results[1]["server"][1] - results[0]["server"][1]
    assert torch.allclose(difference, -0.1 * 7.0 * 0.3 / 5 * (0.3 - 1) * mean, atol=1e-6)
    assert difference.abs().max() > 1e-3


def test_initial_means_match_closed_form_at_lr_zero() -> None:
    """With lr = 0 the features stay f(x; θ^0): exact is their mean, momentum with mu = 1 the last batch's."""
    x, y = load_images(60)
    f, h = build_linear_net()
    train, settings = split_indices(20, 40), SETTINGS | {"rounds": 0, "lr": 0.0, "kappa": 1.0}
    z = f(x)

    def z_bar(**extra: Any) -> Tensor:
        mean = fedavg.run((f, h), x, y, train, train, **settings, **extra)["z_bar"]
        assert isinstance(mean, Tensor)
        return mean

    orders = [train[i][seeds.make_rng(3, "batches", 0, i).permutation(n)] for i, n in enumerate((20, 40))]
    last = sum(n / 60 * z[order[-10:]].mean(0) for n, order in zip((20, 40), orders, strict=True))
    assert torch.allclose(z_bar(mu=1.0), torch.as_tensor(last), atol=1e-6)
    assert torch.allclose(z_bar(mu=0.5, init_mean="exact"), z.mean(0), atol=1e-6)
    # mu = 0.5 over client 0's two batches weighs them 1/4 and 1/2, debiased 1/3 and 2/3.
    weights_by_mode = {"momentum": (1 / 4, 1 / 2), "debiased": (1 / 3, 2 / 3)}
    first, second = z[orders[0][:10]].mean(0), z[orders[0][10:]].mean(0)
    for init_mean, (a, b) in weights_by_mode.items():
        mean = fedavg.run((f, h), x, y, train[:1], train[:1], **settings, mu=0.5, init_mean=init_mean)[
            "z_bar"
        ]
        assert torch.allclose(mean, a * first + b * second, atol=1e-6)


def test_initial_net_is_unchanged_and_evaluated_first() -> None:
    x, y = load_images(50)
    net = build_cnn()
    result = fedavg.run(
        net, x, y, split_indices(20, 30), split_indices(20, 30), **SETTINGS, kappa=1.0, mu=1.0, prbm=True
    )
    assert are_equal(parameters_of(net), parameters_of(build_cnn()))
    assert result["accuracy"][0] == accuracy(nn.Sequential(*net)(x), y)
    assert len(result["accuracy"]) == 3


def build_batch_norm_net() -> fedavg.Net:
    torch.manual_seed(0)
    f = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
    return f, nn.Linear(8, 10)


def build_setting(net: fedavg.Net, *sizes: int, **options: Any) -> Setting:
    x, y = load_images(sum(sizes))
    settings = {"rounds": 2, "lr": 0.1, "participation": 1.0, "seed": 3, **options}
    return Setting(net, x, y, split_indices(*sizes), split_indices(*sizes), **settings)


def evaluate_loss(net: nn.Module, s: Setting, i: int = 0) -> float:
    with torch.no_grad():
        return cross_entropy(net.eval()(s.x[s.test[i]]), s.y[s.test[i]]).item()


@pytest.mark.parametrize("bn", ["local", "average"])
def test_one_client_with_batch_norm_equals_centralized_sgd(bn: str) -> None:
    """Equal are parameters, statistics, and losses in evaluation mode, also after fine-tuning."""
    s = build_setting(build_batch_norm_net(), 47, bn=bn, epochs=2, ft=1)
    server = methods.fedavg(s).server
    net, losses = nn.Sequential(*build_batch_norm_net()), []
    for t, epochs in ((1, 2), (2, 2), (3, 1)):
        losses.append(evaluate_loss(net, s))
        if t == 3:
            for a, b in zip(server, net.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
            torch.testing.assert_close(s.tracks["shared"][0], list(net.buffers()))
        rng, sgd = seeds.make_rng(3, "batches", t, 0), torch.optim.SGD(net.parameters(), lr=0.1)
        for indices in [part for _ in range(epochs) for part in np.split(rng.permutation(47)[:40], 4)]:
            sgd.zero_grad()
            cross_entropy(net.train()(s.x[indices]), s.y[indices]).backward()  # type: ignore[no-untyped-call]
            sgd.step()
    losses.append(evaluate_loss(net, s))
    assert list(s.predictions) == [
        *(("before", 0, 0), ("after", 0, 0), ("before", 1, 0), ("after", 1, 0)),
        *(("before", 2, 0), ("adapted", 2, 0)),
    ]
    expected = [losses[0], losses[1], losses[1], losses[2], losses[2], losses[3]]
    assert [predictions.loss for predictions in s.predictions.values()] == pytest.approx(expected, rel=1e-5)


def test_statistics_are_averaged_by_samples_and_counters_rounded() -> None:
    """A first batch leaves a tenth of its mean; 1, 1 and 3 batches are 2 on average."""
    s = build_setting(build_batch_norm_net(), 8, 12, 36, bn="average", weights="uniform", rounds=1, lr=0.0)
    methods.fedavg(s)
    z = build_batch_norm_net()[0][:2](s.x)  # type: ignore[index]
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
    s = build_setting(build_linear_net(), 25, rounds=0)
    methods.perfedavg(s, alpha=0.3)
    net, rows = nn.Sequential(*build_linear_net()), seeds.make_rng(3, "batches", 1, 0).permutation(25)[:10]
    assert s.predictions["before", 0, 0].loss == pytest.approx(evaluate_loss(net, s))
    grads = torch.autograd.grad(cross_entropy(net(s.x[rows]), s.y[rows]), list(net.parameters()))
    for w, g in zip(net.parameters(), grads, strict=True):
        w.data -= 0.3 * g
    assert s.predictions["adapted", 0, 0].loss == pytest.approx(evaluate_loss(net, s))


def test_final_predictions_use_the_final_states() -> None:
    """For methods whose clients predict with more, or less, than the server's model."""
    f, h = build_linear_net()
    combine_parameters: dict[str, Callable[[list[Tensor], list[Tensor]], list[Tensor]]] = {
        "fedper": lambda server, private: [*server, *private],
        "ditto": lambda server, private: private,
        "pfedme": lambda server, private: private,
        "fedavg": lambda server, private: server,
        "apfl": lambda server, private: [
            private[0] * v + (1 - private[0]) * w for v, w in zip(private[1:], server, strict=True)
        ],
    }

    def run_method(method: str, **options: Any) -> tuple[Setting, methods.Result]:
        s = build_setting((f, h), 40, 25, **options)
        return s, getattr(methods, method)(s)

    for method, combine in combine_parameters.items():
        s, result = run_method(method)
        for i in range(2):
            net = nn.Sequential(*with_parameters((f, h), combine(result.server, result.private.get(i, []))))
            assert s.predictions["before", 2, i].loss == pytest.approx(evaluate_loss(net, s, i), rel=1e-5)
    s, result = run_method("fedrod")
    w, b, *heads = result.server
    p = result.private[1]
    logits = (s.x[s.test[1]].flatten(1) @ w.T + b) @ (heads[0] + p[0]).T + heads[1] + p[1]
    assert s.predictions["before", 2, 1].loss == pytest.approx(
        cross_entropy(logits, s.y[s.test[1]]).item(), rel=1e-5
    )
    s, result = run_method("fedavg", prbm=True)
    w, b, *heads = result.server
    logits = (s.x[s.test[1]].flatten(1) @ w.T + b + result.private[1][0]) @ heads[0].T + heads[1]
    assert s.predictions["before", 2, 1].loss == pytest.approx(
        cross_entropy(logits, s.y[s.test[1]]).item(), rel=1e-5
    )


def test_finetuning_is_plain_sgd_and_is_not_stored() -> None:
    """From one model it is equal for all methods, without MR; p_i is trained, but not stored."""
    runs = {}
    for method in ("fedavg", "scaffold", "moon", "fedprox"):
        s = build_setting(build_batch_norm_net(), 40, 25, rounds=0, ft=2, prbm=True, kappa=5.0)
        getattr(methods, method)(s)
        runs[method] = s
        assert not any(p.any() for p in s.p.values())
        statistics = s.tracks["shared"][0]
        assert statistics[2].item() == 4, "batches of the setup"
    assert all(s.predictions == runs["fedavg"].predictions for s in runs.values())
    plain = build_setting(build_batch_norm_net(), 40, 25, rounds=0, ft=2, kappa=5.0)
    methods.fedavg(plain)
    assert plain.predictions["before", 0, 0] == runs["fedavg"].predictions["before", 0, 0]
    assert plain.predictions["adapted", 0, 0] != runs["fedavg"].predictions["adapted", 0, 0]
