"""The batched program against each probe on its own in plain PyTorch; bits do not depend on threads."""

from __future__ import annotations

import math
from threading import Event

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from feddbe.metrics.representations import mdl
from feddbe.metrics.representations.mdl import (
    Probes,
    initial_probe,
    map_parallel,
    report_progress_to,
    single_threaded,
    train_probes,
)
from feddbe.seeds import make_rng

WIDTHS = (7, 16, 16, 3)
SEEDS = 3


def start(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return initial_probe(WIDTHS, [make_rng(5, "test", client=s) for s in range(SEEDS)], dtype)


def samples(n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """x, y, and an order of all for each seed."""
    rng = np.random.RandomState(3)
    x = torch.from_numpy(rng.randn(n, WIDTHS[0]))
    y = torch.from_numpy(rng.randint(0, WIDTHS[-1], n))
    return x, y, torch.from_numpy(np.stack([rng.permutation(n) for _ in range(SEEDS)]))


def plain(parameters: list[Tensor], s: int) -> nn.Sequential:
    """Probe s as a module, with copies of its weights."""
    layers: list[nn.Module] = []
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[2], dtype=weight.dtype)
        linear.weight.data = weight[s].T.clone()
        linear.bias.data = bias[s, 0].clone()
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize(("size", "batch"), [(40, 12), (25, 24), (9, 12), (12, 12)])
def test_every_probe_is_what_plain_pytorch_makes_of_it(size: int, batch: int) -> None:
    """Autograd, torch.optim.Adam, one probe at a time, the same first weights and batches: in double
    precision the weights after 30 steps agree to 1e-9, and so do the validation losses. Sizes above, at and
    below a batch."""
    x, y, orders = samples()
    known, steps, lr = orders[:, :size], 30, 0.01
    parameters = start()
    nets = [plain(parameters, s) for s in range(SEEDS)]
    hot = torch.eye(WIDTHS[-1], dtype=x.dtype)[y]
    probes = train_probes(parameters, x, hot, known, steps=steps, batch=batch, lr=lr)
    for s, net in enumerate(nets):
        adam = torch.optim.Adam(net.parameters(), lr=lr)
        taken = min(batch, size)
        for t in range(steps):
            rows = [int(known[s, (t * taken + j) % size]) for j in range(taken)]
            adam.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            adam.step()
        linears = [layer for layer in net if isinstance(layer, nn.Linear)]
        for (weight, bias), linear in zip(probes.layers, linears, strict=True):
            torch.testing.assert_close(weight[s], linear.weight.data.T, rtol=0, atol=1e-9)
            torch.testing.assert_close(bias[s, 0], linear.bias.data, rtol=0, atol=1e-9)
        with torch.no_grad():
            assert probes.nll(x, y)[s] == pytest.approx(
                nn.functional.cross_entropy(net(x), y).item(), rel=1e-9
            )


def test_first_weights_are_as_those_of_a_linear_layer() -> None:
    """torch.nn.Linear: weights and biases uniform within 1/sqrt(inputs), so of variance 1/(3 inputs)."""
    found = initial_probe((400, 300, 2), [make_rng(0, "test", client=s) for s in range(2)])
    assert [tuple(p.shape) for p in found] == [(2, 400, 300), (2, 1, 300), (2, 300, 2), (2, 1, 2)]
    linear = nn.Linear(400, 300)
    for mine, theirs in ((found[0], linear.weight), (found[1], linear.bias)):
        assert mine.dtype == torch.float32
        assert mine.abs().max() <= 1 / 20
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.1)
        assert mine.std().item() == pytest.approx(1 / math.sqrt(3 * 400), rel=0.1)


def test_a_probe_begins_the_same_whoever_is_beside_it() -> None:
    alone = initial_probe(WIDTHS, [make_rng(5, "test", client=2)], torch.float64)
    assert all(torch.equal(one[0], three[2]) for one, three in zip(alone, start(), strict=True))


def test_likelihood_of_a_probe_that_knows_nothing() -> None:
    """All weights 0: each of three labels costs ln 3."""
    probes = Probes([torch.zeros_like(p) for p in start()], 1, 0.1)
    assert probes.nll(*samples()[:2]) == pytest.approx([math.log(3)] * SEEDS)


def test_a_stop_ends_training_at_the_next_step() -> None:
    x, y, orders = samples()
    stop = Event()
    stop.set()
    parameters = start()
    train_probes(
        parameters, x, nn.functional.one_hot(y, 3).double(), orders, steps=10**9, batch=8, lr=1.0, stop=stop
    )
    assert all(torch.equal(now, then) for now, then in zip(parameters, start(), strict=True))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_programs_have_one_thread_each_and_leave_the_number_as_it_was(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = map_parallel(lambda item, _: (item, torch.get_num_threads()), [3, 1, 2])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found == [(3, 1), (1, 1), (2, 1)]


def test_the_share_is_reported_while_programs_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdl, "TICK", 0.001)
    heard: list[float] = []
    enough = Event()

    def listen(share: float) -> None:
        heard.append(share)
        if len(heard) == 3:
            enough.set()

    with report_progress_to(listen):
        assert map_parallel(lambda item, _: enough.wait(60), [1, 2], lambda: 0.5) == [True, True]
    assert heard[:3] == [0.5] * 3


def test_an_error_in_one_stops_the_others() -> None:
    stopped = []

    def work(item: str, stop: Event) -> None:
        if item == "wrong":
            raise ValueError(item)
        stopped.append(stop.wait(60))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="wrong"):
            map_parallel(work, ["waits", "wrong", "never begins", "nor this"])
    finally:
        torch.set_num_threads(before)
    # a thread that is free before the error is noticed may take one more, which is stopped at once
    assert stopped
    assert all(stopped)


def test_one_thread_for_a_while() -> None:
    before = torch.get_num_threads()
    with single_threaded() as was:
        assert (was, torch.get_num_threads()) == (before, 1)
    assert torch.get_num_threads() == before
