"""Probes: small networks of one shape, trained side by side as one batched program.

Probe s of S is x -> relu(x W1 + b1) -> relu(. W2 + b2) -> softmax(. W3 + b3), on its own samples in its own
order. Their weights are stacked, (S, in, out), so that a layer of all probes is one batched product. Forward
and backward are written out, into buffers that are made once; Adam is torch's own in its fused form: with
small batches the traffic of weights and moments is most of the work, and this is one pass over them instead
of a dozen.

A program stays on one torch thread, and programs run next to each other (`side_by_side`). A probe's sums are
so the same bits however many threads there are; and nobody waits at the end of each of the twenty small
operations of a step, which on a busy machine costs more than the operations (benchmarks/mdl.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from threading import Event
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from feddbe.representations.progress import report

__all__ = ["Probes", "initial", "one_thread", "side_by_side", "train"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")
TICK = 0.5
"""Seconds between two reports."""


def initial(
    widths: Sequence[int], streams: Sequence[np.random.RandomState], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """W1, b1, W2, b2, ... of one probe per stream, as torch.nn.Linear begins: uniform in +-1/sqrt(inputs).

    Weights are (S, in, out), biases (S, 1, out).
    """
    found = []
    for inputs, outputs in pairwise(widths):
        most = 1 / math.sqrt(inputs)
        for rows in (inputs, 1):
            drawn = np.stack([stream.uniform(-most, most, (rows, outputs)) for stream in streams])
            found.append(torch.from_numpy(drawn).to(dtype))
    return found


class Probes:
    """S networks and what a step on batches of one size needs; `parameters` (see `initial`) change in
    place."""

    def __init__(self, parameters: Sequence[Tensor], batch: int, lr: float) -> None:
        self.layers = list(zip(parameters[::2], parameters[1::2], strict=True))
        self._outputs = [bias.new_empty(len(bias), batch, bias.shape[2]) for _, bias in self.layers]
        self._slopes = [torch.empty_like(output) for output in self._outputs[:-1]]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        self._adam = torch.optim.Adam(parameters, lr=lr, fused=True)

    def step(self, x: Tensor, hot: Tensor) -> None:
        """One step of Adam on the mean negative log-likelihood of x (S, batch, K) and labels (S, batch, C),
        which are rows of the unit matrix."""
        outputs = self._forward(x, self._outputs)
        # d/dlogits of the mean over the batch of -log softmax(logits)[y] is (softmax(logits) - hot) / batch
        slope = torch.softmax(outputs[-1], -1, out=outputs[-1]).sub_(hot).div_(x.shape[1])
        for i, (weight, bias) in reversed(list(enumerate(self.layers))):
            below = outputs[i - 1] if i else x
            torch.bmm(below.mT, slope, out=weight.grad)
            torch.sum(slope, 1, keepdim=True, out=bias.grad)
            if i:
                slope = torch.bmm(slope, weight.mT, out=self._slopes[i - 1])
                # zero where the unit is off, as autograd has it for relu
                torch.ops.aten.threshold_backward.grad_input(slope, below, 0.0, grad_input=slope)
        self._adam.step()

    def nll(self, x: Tensor, y: Tensor) -> list[float]:
        """Each probe's mean negative log-likelihood, in nats, of the same samples x (n, K) with labels y
        (n)."""
        each = x.expand(len(self.layers[0][0]), *x.shape)
        outputs = [bias.new_empty(len(bias), len(x), bias.shape[2]) for _, bias in self.layers]
        logs = torch.log_softmax(self._forward(each, outputs)[-1].double(), -1)
        found: list[float] = (-logs[:, torch.arange(len(y)), y].mean(1)).tolist()
        return found

    def _forward(self, x: Tensor, outputs: list[Tensor]) -> list[Tensor]:
        for (weight, bias), output in zip(self.layers, outputs, strict=True):
            x = torch.baddbmm(bias, x, weight, out=output)
            if output is not outputs[-1]:
                output.relu_()
        return outputs


def train(
    parameters: Sequence[Tensor],
    x: Tensor,
    hot: Tensor,
    orders: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float,
    stop: Event | None = None,
    on_step: Callable[[int], None] = lambda done: None,
) -> Probes:
    """Probe s learns the samples orders[s] of x (n, K) and hot (n, C), which it goes round in that order.

    A batch goes on where the last one ended and begins again at the end of the order, so that each has
    exactly `batch` samples and all samples come equally often. No more samples than a batch: all of them at
    each step. (`stop`: training ends early, because nobody wants the result any more; `on_step` gets
    the number of steps done.)
    """
    size = orders.shape[1]
    batch = min(batch, size)
    probes = Probes(parameters, batch, lr)
    ring = torch.cat([orders, orders[:, : batch - 1]], 1)
    xs, hots = (each.new_empty(len(orders), batch, each.shape[1]) for each in (x, hot))
    for t in range(steps):
        if stop is not None and stop.is_set():
            break
        if t == 0 or batch < size:
            start = t * batch % size
            rows = ring[:, start : start + batch].reshape(-1)
            torch.index_select(x, 0, rows, out=xs.view(-1, x.shape[1]))
            torch.index_select(hot, 0, rows, out=hots.view(-1, hot.shape[1]))
        probes.step(xs, hots)
        on_step(t + 1)
    return probes


@contextmanager
def one_thread() -> Iterator[int]:
    """One torch thread in the block; gives the number that there was before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def side_by_side(
    work: Callable[[Item, Event], Answer], items: Sequence[Item], share: Callable[[], float] | None = None
) -> list[Answer]:
    """work(item, stop) of each item, on one torch thread each, as many at a time as torch has threads here.

    Work begins in the order of the items, so the longest should come first. `stop` is set when the answers
    are no longer wanted: after Ctrl-C, or an error in one of them. `share` returns how much of all is done,
    which is reported from this thread while others work.
    """
    stop = Event()
    with one_thread() as threads, ThreadPoolExecutor(threads, "probes", torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(work, item, stop) for item in items]
        try:
            while wait(futures, TICK, FIRST_EXCEPTION).not_done and not any(map(_has_failed, futures)):
                if share is not None:
                    report(share())
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in futures]  # in order: an error is before what it cancelled


def _has_failed(future: Future[Answer]) -> bool:
    return future.done() and future.exception() is not None
