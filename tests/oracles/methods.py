"""The other methods as plain PyTorch loops: whole modules, autograd, torch's own SGD.

Nothing of feddbe but its seeds. Each function follows the formulas of the method's paper and returns the
final server parameters (f's, then h's, as far as the server has them) and each client's private tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from feddbe import seeds

__all__ = [
    "Result",
    "Setting",
    "apfl",
    "ditto",
    "fedavg",
    "fedbabu",
    "fedper",
    "fedprox",
    "fedrod",
    "local",
    "moon",
    "perfedavg",
    "pfedme",
    "scaffold",
]

Net = tuple[nn.Module, nn.Module]
Extra = Callable[[Net, Tensor, Tensor, Tensor], Tensor]
"""(net, z, x, y) -> what is added to the loss."""


class Result(NamedTuple):
    server: list[Tensor]
    private: dict[int, list[Tensor]]


@dataclass
class Setting:
    """The task, and which add-ons go on the method."""

    net: Net
    x: Tensor
    y: Tensor
    train: Sequence[NDArray[np.int64]]
    rounds: int
    lr: float
    join: float
    seed: int = 0
    batch: int = 10
    epochs: int = 1
    kappa: float | None = None
    mu: float = 1.0
    prbm: bool = False
    z_bar: Tensor | None = None
    p: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        zero = torch.zeros_like(self.net[0](self.x[:1])[0].detach())
        if self.prbm:
            self.p = {i: zero.clone() for i in range(len(self.train))}
        if self.kappa is not None:
            kappa, self.kappa = self.kappa, None  # plain while the means are collected
            means = [self.fit(self.net, i, 0, prbm=False)[1] for i in range(len(self.train))]
            self.kappa = kappa
            sizes = [len(rows) for rows in self.train]
            self.z_bar = sum((n / sum(sizes) * m for n, m in zip(sizes, means, strict=True)), zero)

    def cohort(self, t: int) -> list[int]:
        return seeds.cohort(self.seed, t, len(self.train), self.join)

    def shares(self, cohort: Sequence[int]) -> list[float]:
        return [len(self.train[i]) / sum(len(self.train[j]) for j in cohort) for i in cohort]

    def batches(self, i: int, t: int, epochs: int) -> Iterator[Tensor]:
        rng, rows = seeds.stream(self.seed, "batches", t, i), self.train[i]
        for _ in range(epochs):
            order = rows[rng.permutation(len(rows))]
            for at in range(max(1, len(rows) // self.batch)):
                yield torch.from_numpy(order[at * self.batch : (at + 1) * self.batch])

    def fit(
        self,
        net: Net,
        i: int,
        t: int,
        *,
        epochs: int | None = None,
        only: int | None = None,
        extra: Extra | None = None,
        shift: list[Tensor] | None = None,
        mr: bool = True,
        prbm: bool | None = None,
    ) -> tuple[Net, Tensor]:
        """Train a copy of the net (`only` its f = 0 or h = 1); the net and the running mean of f(x)."""
        f, h = copy.deepcopy(net)
        p = self.p[i].clone().requires_grad_() if (self.prbm if prbm is None else prbm) else None
        if p is not None:
            self.p[i] = p  # so that an extra term sees it as it is now
        weights = [w for k, m in enumerate((f, h)) if only in (None, k) for w in m.parameters()]
        sgd = torch.optim.SGD([*weights, *([p] if p is not None else [])], lr=self.lr)
        r = torch.zeros_like(f(self.x[:1])[0].detach())
        for rows in self.batches(i, t, epochs or self.epochs):
            x, y = self.x[rows], self.y[rows]
            z = f(x)
            loss = cross_entropy(h(z if p is None else z + p), y)
            r = (1 - self.mu) * r.detach() + self.mu * z.mean(0)
            if mr and self.kappa is not None and self.z_bar is not None:
                loss = loss + self.kappa * (0.5 * (r - self.z_bar) ** 2).mean()
            if extra is not None:
                loss = loss + extra((f, h), z, x, y)
            sgd.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for w, c in zip(weights, shift or [], strict=False):
                w.grad = w.grad + c if w.grad is not None else c
            sgd.step()
        if p is not None:
            self.p[i] = p.detach()
        return (f, h), r.detach()


def values(net: Net, only: int | None = None) -> list[Tensor]:
    return [w.detach() for k, m in enumerate(net) if only in (None, k) for w in m.parameters()]


def filled(net: Net, new: Sequence[Tensor], only: int | None = None) -> Net:
    """A copy of the net with these parameters."""
    net = copy.deepcopy(net)
    for w, value in zip(
        (w for k, m in enumerate(net) if only in (None, k) for w in m.parameters()), new, strict=True
    ):
        w.data = value.clone()
    return net


def mean(several: Sequence[Sequence[Tensor]], shares: Sequence[float]) -> list[Tensor]:
    return [
        torch.stack([s * w for s, w in zip(shares, ws, strict=True)]).sum(0)
        for ws in zip(*several, strict=True)
    ]


def distance(net: Net, anchor: Sequence[Tensor]) -> Tensor:
    """|w - anchor|^2."""
    pairs = zip((w for m in net for w in m.parameters()), anchor, strict=True)
    return torch.stack([((w - a) ** 2).sum() for w, a in pairs]).sum()


def _averaging(s: Setting, extra: Callable[[Net, int], Extra | None], only: int | None = None) -> Result:
    """FedAvg of f and h, or of f only, with a term that may depend on the received net and the client."""
    net = s.net
    for t in range(1, s.rounds + 1):
        cohort = s.cohort(t)
        new = [s.fit(net, i, t, only=only, extra=extra(net, i))[0] for i in cohort]
        net = filled(net, mean([values(n) for n in new], s.shares(cohort)))
    return Result(values(net, only), {i: [p] for i, p in s.p.items()})


def fedavg(s: Setting) -> Result:
    return _averaging(s, lambda net, i: None)


def fedprox(s: Setting, mu: float = 0.001) -> Result:
    return _averaging(s, lambda net, i: lambda new, z, x, y: mu / 2 * distance(new, values(net)))


def fedbabu(s: Setting) -> Result:
    return _averaging(s, lambda net, i: None, only=0)


def scaffold(s: Setting, eta_g: float = 1.0) -> Result:
    x, n = s.net, len(s.train)
    c = [torch.zeros_like(w) for w in values(x)]
    own = {i: [torch.zeros_like(w) for w in c] for i in range(n)}
    for t in range(1, s.rounds + 1):
        cohort, ys, deltas = s.cohort(t), [], []
        for i in cohort:
            y, _ = s.fit(x, i, t, shift=[a - b for a, b in zip(c, own[i], strict=True)])
            steps = sum(1 for _ in s.batches(i, t, s.epochs))
            rows = zip(own[i], c, values(x), values(y), strict=True)
            new = [ci - ck + (a - b) / (steps * s.lr) for ci, ck, a, b in rows]
            deltas.append([a - b for a, b in zip(new, own[i], strict=True)])
            own[i] = new
            ys.append(values(y))
        moved = mean(ys, [1 / len(cohort)] * len(cohort))
        x = filled(x, [a + eta_g * (b - a) for a, b in zip(values(x), moved, strict=True)])
        c = [a + b for a, b in zip(c, mean(deltas, [1 / n] * len(cohort)), strict=True)]
    return Result([*values(x), *c], {i: [*own[i], *([s.p[i]] if s.prbm else [])] for i in own})


def moon(s: Setting, mu: float = 1.0, tau: float = 0.5) -> Result:
    net = s.net
    previous = dict.fromkeys(range(len(s.train)), s.net)
    for t in range(1, s.rounds + 1):
        cohort, new = s.cohort(t), []
        for i in cohort:

            def contrast(_: Net, z: Tensor, x: Tensor, y: Tensor, i: int = i, net: Net = net) -> Tensor:
                with torch.no_grad():
                    z_glob, z_prev = net[0](x), previous[i][0](x)
                near = (cosine_similarity(z, z_glob) / tau).exp()
                far = (cosine_similarity(z, z_prev) / tau).exp()
                return mu * -(near / (near + far)).log().mean()

            new.append(s.fit(net, i, t, extra=contrast)[0])
        for i, own in zip(cohort, new, strict=True):
            previous[i] = own
        net = filled(net, mean([values(n) for n in new], s.shares(cohort)))
    return Result(values(net), {i: [*values(previous[i]), *([s.p[i]] if s.prbm else [])] for i in previous})


def ditto(s: Setting, lam: float = 1.0) -> Result:
    net, own = s.net, dict.fromkeys(range(len(s.train)), s.net)
    for t in range(1, s.rounds + 1):
        cohort, new, anchor = s.cohort(t), [], values(net)

        def near(n: Net, z: Tensor, x: Tensor, y: Tensor, anchor: list[Tensor] = anchor) -> Tensor:
            return lam / 2 * distance(n, anchor)

        for i in cohort:
            own[i], _ = s.fit(own[i], i, t, mr=False, extra=near)
            new.append(values(s.fit(net, i, t)[0]))
        net = filled(net, mean(new, s.shares(cohort)))
    return Result(values(net), {i: values(v) for i, v in own.items()})


def fedper(s: Setting, head_epochs: int = 0) -> Result:
    """With head epochs it is FedRep: first h alone, then f alone."""
    body, heads = values(s.net, 0), {i: values(s.net, 1) for i in range(len(s.train))}
    for t in range(1, s.rounds + 1):
        cohort, new = s.cohort(t), []
        for i in cohort:
            net = filled(filled(s.net, body, 0), heads[i], 1)
            if head_epochs:
                net, _ = s.fit(net, i, t, epochs=head_epochs, only=1, mr=False)
                net, _ = s.fit(net, i, t, only=0)
            else:
                net, _ = s.fit(net, i, t)
            heads[i] = values(net, 1)
            new.append(values(net, 0))
        body = mean(new, s.shares(cohort))
    return Result(body, heads)


def fedrod(s: Setting) -> Result:
    """The two steps of a batch one after the other, the second from the first's forward pass."""
    net, heads = s.net, {i: copy.deepcopy(s.net[1]) for i in range(len(s.train))}
    for t in range(1, s.rounds + 1):
        cohort, new = s.cohort(t), []
        for i in cohort:
            f, h = copy.deepcopy(net)
            shared = torch.optim.SGD([*f.parameters(), *h.parameters()], lr=s.lr)
            personal = torch.optim.SGD(heads[i].parameters(), lr=s.lr)
            counts = torch.bincount(s.y[torch.from_numpy(s.train[i])], minlength=10).double()
            prior = counts.clamp(min=1e-8).log().float()
            r = torch.zeros_like(f(s.x[:1])[0].detach())
            for rows in s.batches(i, t, s.epochs):
                x, y = s.x[rows], s.y[rows]
                z = f(x)
                logits = h(z)
                loss = cross_entropy(logits + prior, y)
                r = (1 - s.mu) * r.detach() + s.mu * z.mean(0)
                if s.kappa is not None and s.z_bar is not None:
                    loss = loss + s.kappa * (0.5 * (r - s.z_bar) ** 2).mean()
                shared.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                shared.step()
                personal.zero_grad()
                cross_entropy(logits.detach() + heads[i](z.detach()), y).backward()  # type: ignore[no-untyped-call]
                personal.step()
            new.append(values((f, h)))
        net = filled(net, mean(new, s.shares(cohort)))
    return Result(values(net), {i: [w.detach() for w in head.parameters()] for i, head in heads.items()})


def local(s: Setting) -> Result:
    own = dict.fromkeys(range(len(s.train)), s.net)
    for t in range(1, s.rounds + 1):
        for i in s.cohort(t):
            own[i], _ = s.fit(own[i], i, t)
    return Result([], {i: values(v) for i, v in own.items()})


def _gradient(net: Net, x: Tensor, y: Tensor) -> list[Tensor]:
    weights = [w for m in net for w in m.parameters()]
    return list(torch.autograd.grad(cross_entropy(net[1](net[0](x)), y), weights))


def perfedavg(s: Setting, alpha: float = 0.01) -> Result:
    """First-order, beta = lr; a pair of batches per step."""
    net = s.net
    for t in range(1, s.rounds + 1):
        cohort, new = s.cohort(t), []
        for i in cohort:
            rng, rows, w = seeds.stream(s.seed, "batches", t, i), s.train[i], net
            for _ in range(s.epochs):
                order = torch.from_numpy(rows[rng.permutation(len(rows))])
                size = min(2 * s.batch, len(rows))
                for at in range(0, len(rows) // size * size, size):
                    one, two = order[at : at + size // 2], order[at + size // 2 : at + size // 2 * 2]
                    g = _gradient(w, s.x[one], s.y[one])
                    ahead = filled(w, [a - alpha * b for a, b in zip(values(w), g, strict=True)])
                    g = _gradient(ahead, s.x[two], s.y[two])
                    w = filled(w, [a - s.lr * b for a, b in zip(values(w), g, strict=True)])
            new.append(values(w))
        net = filled(net, mean(new, s.shares(cohort)))
    return Result(values(net), {})


def pfedme(s: Setting, lam: float = 15.0, k: int = 5, lr_p: float = 0.01, eta: float = 0.005) -> Result:
    net, own = s.net, {i: values(s.net) for i in range(len(s.train))}
    for t in range(1, s.rounds + 1):
        cohort, new = s.cohort(t), []
        for i in cohort:
            theta, w = net, values(net)
            for rows in s.batches(i, t, s.epochs):
                for _ in range(k):
                    g = _gradient(theta, s.x[rows], s.y[rows])
                    steps = zip(values(theta), g, w, strict=True)
                    theta = filled(theta, [a - lr_p * (b + lam * (a - c)) for a, b, c in steps])
                w = [a - eta * lam * (a - b) for a, b in zip(w, values(theta), strict=True)]
            own[i] = values(theta)
            new.append(w)
        net = filled(net, mean(new, [1 / len(cohort)] * len(cohort)))
    return Result(values(net), own)


def apfl(s: Setting, start: float = 0.5) -> Result:
    """The personal step is taken first, with w as it was before the batch; then w's own."""
    net, alphas = s.net, dict.fromkeys(range(len(s.train)), start)
    own = {i: values(s.net) for i in range(len(s.train))}
    for t in range(1, s.rounds + 1):
        cohort, new = s.cohort(t), []
        for i in cohort:

            def personal(w: Net, z: Tensor, x: Tensor, y: Tensor, i: int = i) -> Tensor:
                a, pairs = alphas[i], list(zip(own[i], values(w), strict=True))
                g = _gradient(filled(w, [a * v + (1 - a) * u for v, u in pairs]), x, y)
                slope = sum(float(((v - u) * d).sum()) for (v, u), d in zip(pairs, g, strict=True))
                own[i] = [v - s.lr * a * d for (v, _), d in zip(pairs, g, strict=True)]
                alphas[i] = min(1.0, max(0.0, a - s.lr * slope))
                return torch.zeros(())

            new.append(values(s.fit(net, i, t, extra=personal)[0]))
        net = filled(net, mean(new, s.shares(cohort)))
    return Result(values(net), {i: [torch.tensor(alphas[i]), *own[i]] for i in own})
