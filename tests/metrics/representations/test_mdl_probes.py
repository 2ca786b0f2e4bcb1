"""Batched probes compared with single probes in plain PyTorch; bits do not depend on threads."""

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
    init_probes,
    map_parallel,
    report_progress_to,
    single_threaded,
    train_probes,
)
from feddbe.seeds import make_rng

WIDTHS = (7, 16, 16, 3)
SEEDS = 3


def initial_parameters(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return init_probes(WIDTHS, [make_rng(5, "test", client=s) for s in range(SEEDS)], dtype)


def samples(n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, y, and a permutation for each seed."""
    rng = np.random.RandomState(3)
    x = torch.from_numpy(rng.randn(n, WIDTHS[0]))
    y = torch.from_numpy(rng.randint(0, WIDTHS[-1], n))
    return x, y, torch.from_numpy(np.stack([rng.permutation(n) for _ in range(SEEDS)]))


def as_module(parameters: list[Tensor], s: int) -> nn.Sequential:
    """Return probe s as a module, with copies of its weights."""
    layers: list[nn.Module] = []
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[2], dtype=weight.dtype)
        linear.weight.data = weight[s].T.clone()
        linear.bias.data = bias[s, 0].clone()
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize(("size", "batch"), [(40, 12), (25, 24), (9, 12), (12, 12)])
def test_probes_equal_those_of_plain_pytorch(size: int, batch: int) -> None:
    """Autograd, torch.optim.Adam, one probe at a time, the same first weights and batches: in double
    precision the weights after 30 steps agree to 1e-9, and so do the validation losses. Sizes above, at and
    below a batch."""
    x, y, orders = samples()
    known, steps, lr = orders[:, :size], 30, 0.01
    parameters = initial_parameters()
    nets = [as_module(parameters, s) for s in range(SEEDS)]
    hot = torch.eye(WIDTHS[-1], dtype=x.dtype)[y]
    probes = train_probes(parameters, x, hot, known, steps=steps, batch=batch, lr=lr)
    for s, net in enumerate(nets):
        adam = torch.optim.Adam(net.parameters(), lr=lr)
        batch_size = min(batch, size)
        for t in range(steps):
            rows = [int(known[s, (t * batch_size + j) % size]) for j in range(batch_size)]
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


def test_initial_weights_are_those_of_a_linear_layer() -> None:
    """torch.nn.Linear: weights and biases uniform within 1/sqrt(inputs), so of variance 1/(3 inputs)."""
    parameters = init_probes((400, 300, 2), [make_rng(0, "test", client=s) for s in range(2)])
    assert [tuple(p.shape) for p in parameters] == [(2, 400, 300), (2, 1, 300), (2, 300, 2), (2, 1, 2)]
    linear = nn.Linear(400, 300)
    for ours, theirs in ((parameters[0], linear.weight), (parameters[1], linear.bias)):
        assert ours.dtype == torch.float32
        assert ours.abs().max() <= 1 / 20
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.1)
        assert ours.std().item() == pytest.approx(1 / math.sqrt(3 * 400), rel=0.1)


def test_initial_weights_do_not_depend_on_other_probes() -> None:
    single = init_probes(WIDTHS, [make_rng(5, "test", client=2)], torch.float64)
    assert all(
        torch.equal(weights[0], stacked[2])
        for weights, stacked in zip(single, initial_parameters(), strict=True)
    )


def test_loss_of_a_constant_probe() -> None:
    """All weights 0: each of three labels costs ln 3."""
    probes = Probes([torch.zeros_like(p) for p in initial_parameters()], 1, 0.1)
    assert probes.nll(*samples()[:2]) == pytest.approx([math.log(3)] * SEEDS)


def test_stop_event_ends_training_at_the_next_step() -> None:
    x, y, orders = samples()
    stop = Event()
    stop.set()
    parameters = initial_parameters()
    train_probes(
        parameters, x, nn.functional.one_hot(y, 3).double(), orders, steps=10**9, batch=8, lr=1.0, stop=stop
    )
    assert all(
        torch.equal(current, initial)
        for current, initial in zip(parameters, initial_parameters(), strict=True)
    )


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_workers_have_one_thread_and_restore_the_number(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = map_parallel(lambda item, _: (item, torch.get_num_threads()), [3, 1, 2])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert results == [(3, 1), (1, 1), (2, 1)]


def test_progress_is_reported_during_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdl, "REPORT_SECONDS", 0.001)
    reported: list[float] = []
    enough = Event()

    def listen(share: float) -> None:
        reported.append(share)
        if len(reported) == 3:
            enough.set()

    with report_progress_to(listen):
        assert map_parallel(lambda item, _: enough.wait(60), [1, 2], lambda: 0.5) == [True, True]
    assert reported[:3] == [0.5] * 3


def test_error_in_one_item_stops_the_others() -> None:
    stopped = []

    def work(item: str, stop: Event) -> None:
        if item == "wrong":
            raise ValueError(item)
        stopped.append(stop.wait(60))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="wrong"):
            map_parallel(work, ["waits", "wrong", "never starts", "nor this"])
    finally:
        torch.set_num_threads(before)
    # a thread that is free before the error is noticed may take one more, which is stopped at once
    assert stopped
    assert all(stopped)


def test_single_threaded_restores_the_number() -> None:
    before = torch.get_num_threads()
    with single_threaded() as previous:
        assert (previous, torch.get_num_threads()) == (before, 1)
    assert torch.get_num_threads() == before
