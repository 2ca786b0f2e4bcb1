"""MDL: the arithmetic of a curve by hand, what is kept and whitened, and that it measures what it should."""

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


def clusters(n: int = 200, apart: float = 1.0, seed: int = 0) -> Points:
    """Four labels, a cluster each in eight dimensions; apart = 0 is noise."""
    rng = np.random.RandomState(seed)
    y = rng.randint(0, 4, n)
    return make_points(3 + apart * rng.randn(4, 8)[y] + 0.5 * rng.randn(n, 8), y)


def test_a_curve_by_hand() -> None:
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


def test_a_curve_that_rises_again() -> None:
    """Sample complexity is the first size that is good enough; what is below eps does not pay for what is
    above: 10 x 0 + 10 x 1 + 10 x 2 = 30."""
    found = MDL((10, 20, 30), ((1.0, 1.0), (2.0, 2.0), (3.0, 3.0)), 4, 3, TINY)
    assert (found.esc(1), found.sdl(1)) == (10, 30)
    assert description_length([10, 20, 30], np.array([0.5, 2.0, 1.0]), 1.0) == 10


def test_the_sizes_of_a_thousand_samples() -> None:
    """10 x 90^(k/9), rounded up, by a calculator: 90^(1/9) = 1.64867."""
    assert training_sizes(900, 10) == [10, 17, 28, 45, 74, 122, 201, 332, 546, 900]
    assert training_sizes(10**6, 2) == [10, 10**6]
    assert training_sizes(900, 3) == [10, 95, 900]  # 10 sqrt(90) = 94.87


def test_the_last_size_is_all_of_them() -> None:
    """10**log10(n) may be a little more than n."""
    every = range(30, 3000)
    assert any(math.ceil(10 ** math.log10(n)) > n for n in every)
    assert all(training_sizes(n, 10)[-1] == n for n in every)


def test_one_probe_of_the_curve_again_in_plain_pytorch() -> None:
    """All of it for one seed and size: RandomState(0)'s order, its last tenth (rounded up) validates, one
    mean and one deviation over all training entries, the first samples of the seed's order, its weights,
    Adam."""
    given = clusters(205)
    found = mdl(given, settings=TINY)
    assert (found.sizes, found.validation, found.classes) == ((10, 43, 184), 21, 4)
    order = np.random.RandomState(0).permutation(205)
    x, y = given.x[order].astype(np.float64), torch.from_numpy(given.y[order])
    white = torch.from_numpy((x - x[:184].mean()) / x[:184].std()).float()
    for k, size in enumerate(found.sizes):
        for s in range(2):
            weights = make_rng(0, "mdl weights", client=s)
            layers: list[nn.Module] = []
            for inputs, outputs in ((8, 16), (16, 16), (16, 4)):
                linear = nn.Linear(inputs, outputs)
                most = inputs**-0.5
                drawn = weights.uniform(-most, most, (inputs, outputs))
                linear.weight.data = torch.from_numpy(drawn.T.copy()).float()
                linear.bias.data = torch.from_numpy(weights.uniform(-most, most, outputs)).float()
                layers += [linear, nn.ReLU()]
            net = nn.Sequential(*layers[:-1])
            adam = torch.optim.Adam(net.parameters(), lr=0.01)
            mine = make_rng(0, "mdl order", client=s).permutation(184)[:size]
            batch = min(32, size)
            for t in range(60):
                rows = [int(mine[(t * batch + j) % size]) for j in range(batch)]
                adam.zero_grad()
                nn.functional.cross_entropy(net(white[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
                adam.step()
            with torch.no_grad():
                loss = nn.functional.cross_entropy(net(white[184:]), y[184:]).item()
            assert found.losses[k][s] == pytest.approx(loss, rel=1e-3)


def test_the_first_n_are_kept() -> None:
    given = clusters(300)
    first = np.random.RandomState(0).permutation(300)[:100]
    again = np.argsort(np.random.RandomState(0).permutation(100))  # undone by the shuffle of the hundred
    settings = Settings(n=100, sizes=2, seeds=2, steps=5, hidden=8)
    found = mdl(given, settings=settings)
    assert found.sizes == (10, 90)
    assert found.losses == mdl(given.select(first[again]), settings=settings).losses


def test_one_scale_and_shift_of_all_features_changes_nothing() -> None:
    given = clusters()
    moved = make_points(given.x * 8 + 64, given.y)
    assert mdl(moved, settings=TINY).nats == pytest.approx(mdl(given, settings=TINY).nats, rel=1e-2)


def test_validation_samples_do_not_whiten() -> None:
    """A validation sample far away, of whatever size, leaves the loss of the others alone: only its own
    changes."""
    given = clusters()
    last = np.random.RandomState(0).permutation(200)[-1]
    losses = []
    for far in (1e3, 1e6):
        x = given.x.copy()
        x[last] = far
        losses.append(mdl(make_points(x, given.y), settings=TINY).losses)
    # the network is linear far out: its loss there grows as the distance if the label is missed, else it is 0
    shares = np.array(losses[1]) / np.array(losses[0])
    assert ((shares > 900) | (np.abs(shares - 1) < 1e-3)).all()


def test_the_better_representation_is_the_shorter_message() -> None:
    clear, blurred, noise = (mdl(clusters(apart=a), settings=TINY) for a in (2.0, 0.5, 0.0))
    assert clear.nats < blurred.nats < noise.nats
    assert clear.nats < 0.3 * 180 * math.log(4)  # guessing costs ln 4 each
    assert noise.nats > 180 * math.log(4)  # overfitted: worse than guessing


def test_same_bits_on_any_number_of_threads_and_again() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            found.append(mdl(clusters(), settings=TINY))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2] == found[3]
    assert mdl(clusters(), settings=Settings(**(TINY.__dict__ | {"seed": 1}))).losses != found[0].losses


def test_less_than_the_default_is_marked_quick() -> None:
    assert (FULL.sizes, FULL.seeds, FULL.steps, FULL.batch, FULL.lr, FULL.hidden) == (
        10,
        5,
        4000,
        256,
        1e-4,
        512,
    )
    assert not FULL.quick
    assert QUICK.quick
    assert all(Settings(**less).quick for less in ({"sizes": 9}, {"seeds": 4}, {"steps": 3999}))
    assert not Settings(n=None, seed=3, seeds=9).quick
    assert BY_HAND.quick is True


def test_classes_are_the_labels_there_are_unless_given() -> None:
    given = clusters()
    renamed = make_points(given.x, given.y * 1000 - 7)
    assert mdl(renamed, settings=TINY).losses == mdl(given, classes=4, settings=TINY).losses
    assert mdl(given, classes=10, settings=TINY).classes == 10


@pytest.mark.parametrize(
    ("n", "sizes", "says"),
    [
        (
            11,
            2,
            r"^9 training samples .* too few for 2 different sizes from 10 on; give more samples or fewer",
        ),
        (12, 2, "10 training samples"),
        (20, 10, "18 training samples .* 10 different sizes"),
    ],
)
def test_too_few_samples_are_one_line(n: int, sizes: int, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        mdl(clusters(n), settings=Settings(sizes=sizes, seeds=2, steps=1))


def test_wrong_labels_are_one_line() -> None:
    given = clusters()
    with pytest.raises(InvalidInputError, match=r"^all 200 samples have label 3, .* more labels"):
        mdl(make_points(given.x, np.full(200, 3)), settings=TINY)
    with pytest.raises(InvalidInputError, match=r"^label 3 with classes = 3; allowed: 0 to 2$"):
        mdl(given, classes=3, settings=TINY)
    with pytest.raises(InvalidInputError, match=r"^label -1 with classes = 4; allowed: 0 to 3$"):
        mdl(make_points(given.x, given.y - 1), classes=4, settings=TINY)


def test_representations_that_are_all_the_same_are_one_line() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^every value of the representations is 0\.5, .* another place or round$"
    ):
        mdl(make_points(np.full((200, 3), 0.5), clusters().y), settings=TINY)


def test_a_step_size_that_diverges_is_one_line() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^mdl lr = 1e\+38: a probe's loss is not finite; try a smaller one$"
    ):
        mdl(clusters(), settings=Settings(sizes=2, seeds=2, steps=5, hidden=8, lr=1e38))


@pytest.mark.parametrize(
    "wrong", [{"n": 5}, {"sizes": 1}, {"seeds": 1}, {"steps": 0}, {"lr": 0.0}, {"hidden": 0}]
)
def test_wrong_settings_are_one_line(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match=f"^mdl {next(iter(wrong))} = .*; allowed: "):
        Settings(**wrong)  # type: ignore[arg-type]
