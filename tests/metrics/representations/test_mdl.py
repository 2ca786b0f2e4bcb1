"""MDL: values of a curve by hand, selection and whitening of samples, and the order of representations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from feddbe.errors import InvalidInputError
from feddbe.metrics.representations.mdl import (
    FULL,
    MDL,
    QUICK,
    Settings,
    description_length,
    mdl,
    training_sizes,
)
from feddbe.metrics.representations.points import Points, make_points
from feddbe.seeds import make_rng

TINY = Settings(n=None, sizes=3, seeds=2, steps=60, batch=32, lr=0.01, hidden=16)
BY_HAND = MDL((10, 30, 90), ((2.0, 1.0), (1.0, 0.5), (0.5, 0.25)), 10, 3, TINY)


def clusters(n: int = 200, separation: float = 1.0, seed: int = 0) -> Points:
    """Four labels, a cluster each in eight dimensions; apart = 0 is noise."""
    rng = np.random.RandomState(seed)
    y = rng.randint(0, 4, n)
    return make_points(3 + separation * rng.randn(4, 8)[y] + 0.5 * rng.randn(n, 8), y)


def test_values_of_a_curve_by_hand() -> None:
    """Seed 1: 10 x 2 + 20 x 1 + 60 x 0.5 = 70 nats. Seed 2: 10 x 1 + 20 x 0.5 + 60 x 0.25 = 35.
    Mean curve 1.5, 0.75, 0.375: 10 x 1.5 + 20 x 0.75 + 60 x 0.375 = 52.5, the mean of the two.
    Their standard deviation: sqrt(17.5^2 + 17.5^2) = 17.5 sqrt 2."""
    assert BY_HAND.curve.tolist() == [1.5, 0.75, 0.375]
    assert BY_HAND.nats == 52.5
    assert BY_HAND.bits == pytest.approx(52.5 / 0.6931471805599453)
    assert BY_HAND.spread == pytest.approx(17.5 * math.sqrt(2))
    assert BY_HAND.validation_loss == 0.375


def test_surplus_and_sample_complexity_by_hand() -> None:
    """eps = 0.5: 10 x 1 + 20 x 0.25 + 60 x 0 = 15. The loss is at most 0.75 from 30 samples on, never 0.3."""
    assert BY_HAND.sdl(0.5) == 15
    assert BY_HAND.sdl(0) == BY_HAND.nats
    assert [BY_HAND.esc(eps) for eps in (2, 0.75, 0.74, 0.375, 0.3)] == [10, 30, 90, 90, None]


def test_curve_that_rises() -> None:
    """Sample complexity is the first sufficient size; losses below eps do not offset losses above:
    10 x 0 + 10 x 1 + 10 x 2 = 30."""
    result = MDL((10, 20, 30), ((1.0, 1.0), (2.0, 2.0), (3.0, 3.0)), 4, 3, TINY)
    assert (result.esc(1), result.sdl(1)) == (10, 30)
    assert description_length([10, 20, 30], np.array([0.5, 2.0, 1.0]), 1.0) == 10


def test_training_sizes_by_hand() -> None:
    """10 x 90^(k/9), rounded up, by a calculator: 90^(1/9) = 1.64867."""
    assert training_sizes(900, 10) == [10, 17, 28, 45, 74, 122, 201, 332, 546, 900]
    assert training_sizes(10**6, 2) == [10, 10**6]
    assert training_sizes(900, 3) == [10, 95, 900]  # 10 sqrt(90) = 94.87


def test_last_size_is_all_samples() -> None:
    """10**log10(n) may be a little more than n."""
    counts = range(30, 3000)
    assert any(math.ceil(10 ** math.log10(n)) > n for n in counts)
    assert all(training_sizes(n, 10)[-1] == n for n in counts)


def test_losses_equal_those_of_plain_pytorch() -> None:
    """Repeat all steps for each seed and size: the permutation of RandomState(0), whose last tenth (rounded
    up) validates, one mean and one deviation over all training entries, the first samples of the seed's
    permutation, its weights, Adam."""
    points = clusters(205)
    result = mdl(points, settings=TINY)
    assert (result.sizes, result.validation, result.classes) == ((10, 43, 184), 21, 4)
    permutation = np.random.RandomState(0).permutation(205)
    x, y = points.x[permutation].astype(np.float64), torch.from_numpy(points.y[permutation])
    white = torch.from_numpy((x - x[:184].mean()) / x[:184].std()).float()
    for k, size in enumerate(result.sizes):
        for s in range(2):
            weights = make_rng(0, "mdl weights", client=s)
            layers: list[nn.Module] = []
            for inputs, outputs in ((8, 16), (16, 16), (16, 4)):
                linear = nn.Linear(inputs, outputs)
                bound = inputs**-0.5
                drawn = weights.uniform(-bound, bound, (inputs, outputs))
                linear.weight.data = torch.from_numpy(drawn.T.copy()).float()
                linear.bias.data = torch.from_numpy(weights.uniform(-bound, bound, outputs)).float()
                layers += [linear, nn.ReLU()]
            net = nn.Sequential(*layers[:-1])
            adam = torch.optim.Adam(net.parameters(), lr=0.01)
            order = make_rng(0, "mdl order", client=s).permutation(184)[:size]
            batch = min(32, size)
            for t in range(60):
                rows = [int(order[(t * batch + j) % size]) for j in range(batch)]
                adam.zero_grad()
                nn.functional.cross_entropy(net(white[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
                adam.step()
            with torch.no_grad():
                loss = nn.functional.cross_entropy(net(white[184:]), y[184:]).item()
            assert result.losses[k][s] == pytest.approx(loss, rel=1e-3)


def test_first_n_samples_are_used() -> None:
    points = clusters(300)
    first = np.random.RandomState(0).permutation(300)[:100]
    inverse = np.argsort(np.random.RandomState(0).permutation(100))  # undoes the shuffle of the hundred
    settings = Settings(n=100, sizes=2, seeds=2, steps=5, hidden=8)
    result = mdl(points, settings=settings)
    assert result.sizes == (10, 90)
    assert result.losses == mdl(points.select(first[inverse]), settings=settings).losses


def test_scale_and_shift_of_all_features_do_not_matter() -> None:
    points = clusters()
    moved = make_points(points.x * 8 + 64, points.y)
    assert mdl(moved, settings=TINY).nats == pytest.approx(mdl(points, settings=TINY).nats, rel=1e-2)


def test_validation_samples_are_not_used_for_whitening() -> None:
    """A distant validation sample changes its own loss only."""
    points = clusters()
    last = np.random.RandomState(0).permutation(200)[-1]
    losses = []
    for far in (1e3, 1e6):
        x = points.x.copy()
        x[last] = far
        losses.append(mdl(make_points(x, points.y), settings=TINY).losses)
    # the network is linear far out: its loss there grows as the distance if the label is missed, else it is 0
    shares = np.array(losses[1]) / np.array(losses[0])
    assert ((shares > 900) | (np.abs(shares - 1) < 1e-3)).all()


def test_better_representation_has_lower_mdl() -> None:
    clear, blurred, noise = (mdl(clusters(separation=a), settings=TINY) for a in (2.0, 0.5, 0.0))
    assert clear.nats < blurred.nats < noise.nats
    assert clear.nats < 0.3 * 180 * math.log(4)  # guessing costs ln 4 each
    assert noise.nats > 180 * math.log(4)  # overfitted: worse than guessing


def test_bits_do_not_depend_on_threads() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(mdl(clusters(), settings=TINY))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2] == results[3]
    assert mdl(clusters(), settings=Settings(**(TINY.__dict__ | {"seed": 1}))).losses != results[0].losses


def test_settings_below_default_are_quick() -> None:
    assert (FULL.sizes, FULL.seeds, FULL.steps, FULL.batch, FULL.lr, FULL.hidden) == (
        10,
        5,
        4000,
        256,
        1e-4,
        512,
    )
    assert not FULL.is_quick
    assert QUICK.is_quick
    assert all(Settings(**less).is_quick for less in ({"sizes": 9}, {"seeds": 4}, {"steps": 3999}))
    assert not Settings(n=None, seed=3, seeds=9).is_quick
    assert BY_HAND.is_quick is True


def test_default_classes_are_the_present_labels() -> None:
    points = clusters()
    renamed = make_points(points.x, points.y * 1000 - 7)
    assert mdl(renamed, settings=TINY).losses == mdl(points, classes=4, settings=TINY).losses
    assert mdl(points, classes=10, settings=TINY).classes == 10


@pytest.mark.parametrize(
    ("n", "sizes", "message"),
    [
        (
            11,
            2,
            r"^9 training samples .* too few for 2 different sizes from 10 on; use more samples or fewer",
        ),
        (12, 2, "10 training samples"),
        (20, 10, "18 training samples .* 10 different sizes"),
    ],
)
def test_too_few_samples_are_one_line(n: int, sizes: int, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        mdl(clusters(n), settings=Settings(sizes=sizes, seeds=2, steps=1))


def test_invalid_labels_are_one_line() -> None:
    points = clusters()
    with pytest.raises(InvalidInputError, match=r"^all 200 samples have label 3, .* more labels"):
        mdl(make_points(points.x, np.full(200, 3)), settings=TINY)
    with pytest.raises(InvalidInputError, match=r"^label 3 with classes = 3; allowed: 0 to 2$"):
        mdl(points, classes=3, settings=TINY)
    with pytest.raises(InvalidInputError, match=r"^label -1 with classes = 4; allowed: 0 to 3$"):
        mdl(make_points(points.x, points.y - 1), classes=4, settings=TINY)


def test_equal_representations_are_one_line() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^all values of the representations are 0\.5, .* another layer or round$"
    ):
        mdl(make_points(np.full((200, 3), 0.5), clusters().y), settings=TINY)


def test_diverging_learning_rate_is_one_line() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^mdl lr = 1e\+38: a probe's loss is not finite; use a smaller lr$"
    ):
        mdl(clusters(), settings=Settings(sizes=2, seeds=2, steps=5, hidden=8, lr=1e38))


@pytest.mark.parametrize(
    "wrong", [{"n": 5}, {"sizes": 1}, {"seeds": 1}, {"steps": 0}, {"lr": 0.0}, {"hidden": 0}]
)
def test_invalid_settings_are_one_line(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match=f"^mdl {next(iter(wrong))} = .*; allowed: "):
        Settings(**wrong)  # type: ignore[arg-type]
