"""The other methods as plain PyTorch loops: whole modules, autograd, torch's own SGD.

Nothing of feddbe but its seeds. Each function follows the formulas of the method's paper and returns the
final server parameters (f's, then h's, as far as the server has them) and each client's private tensors.
What clients predict, and the BatchNorm statistics, it leaves in the setting.
"""

from __future__ import annotations

import copy
from collections import defaultdict
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
    "Seen",
    "Setting",
    "apfl",
    "ditto",
    "fedavg",
    "fedbabu",
    "fedper",
    "fedprox",
    "fedrep",
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
Rows = Sequence[NDArray[np.int64]]


class Result(NamedTuple):
    server: list[Tensor]
    private: dict[int, list[Tensor]]


class Seen(NamedTuple):
    """A client's predictions on its test rows."""

    samples: int
    correct: int
    loss: float


@dataclass
class Setting:
    """The task, and which add-ons go on the method."""

    net: Net
    x: Tensor
    y: Tensor
    train: Rows
    test: Rows
    rounds: int
    lr: float
    join: float
    seed: int = 0
    batch: int = 10
    epochs: int = 1
    bn: str = "local"
    weights: str | None = None
    """Of the average: samples or uniform; None is the method's own."""
    kappa: float | None = None
    mu: float = 1.0
    prbm: bool = False
    prbm_lr: float | None = None
    ft: int = 0
    """Epochs of fine-tuning at the end; 0: none."""
    z_bar: Tensor | None = None
    p: dict[int, Tensor] = field(default_factory=dict)
    tracks: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)
    """Each client's BatchNorm statistics, per track; with `average`, `shared` is the same for all between
    rounds."""
    seen: dict[tuple[str, int, int], Seen] = field(default_factory=dict)
    """(moment, entry, client) -> what it predicted."""

    def __post_init__(self) -> None:
        everyone = range(len(self.train))
        self.tracks = defaultdict(lambda: dict.fromkeys(everyone, statistics(self.net)))
        if self.prbm:
            self.p = {i: self.zero() for i in everyone}
        if self.kappa is not None:
            means, n = [], sum(len(rows) for rows in self.train)
            for i in everyone:
                net, r = self.fit(self.at(self.net, i), i, 0, epochs=1, prbm=False)
                self.left(net, i)
                means.append(r)
            self.z_bar = torch.stack([len(self.train[i]) / n * r for i, r in enumerate(means)]).sum(0)
            self.average(everyone)

    def apart(self, r: Tensor) -> Tensor:
        """MR's loss without kappa."""
        return torch.zeros(()) if self.z_bar is None else (0.5 * (r - self.z_bar) ** 2).mean()

    def zero(self) -> Tensor:
        """0 in the shape of a representation."""
        with torch.no_grad():
            return torch.zeros_like(copy.deepcopy(self.net[0]).eval()(self.x[:1])[0])

    def cohort(self, t: int) -> list[int]:
        return seeds.sample_cohort(self.seed, t, len(self.train), self.join)

    def shares(self, cohort: Sequence[int], default: str = "samples") -> list[float]:
        """The weights of the average."""
        if (self.weights or default) == "uniform":
            return [1 / len(cohort)] * len(cohort)
        return [len(self.train[i]) / sum(len(self.train[j]) for j in cohort) for i in cohort]

    def batches(self, i: int, t: int, epochs: int) -> Iterator[Tensor]:
        rng, rows = seeds.make_rng(self.seed, "batches", t, i), self.train[i]
        for _ in range(epochs):
            order = rows[rng.permutation(len(rows))]
            for at in range(max(1, len(rows) // self.batch)):
                yield torch.from_numpy(order[at * self.batch : (at + 1) * self.batch])

    def at(self, net: Net, i: int, track: str = "shared") -> Net:
        """A copy of the net with this client's statistics."""
        net = copy.deepcopy(net)
        for b, value in zip((b for m in net for b in m.buffers()), self.tracks[track][i], strict=True):
            b.copy_(value)
        return net

    def left(self, net: Net, i: int, track: str = "shared") -> None:
        """The client keeps the net's statistics."""
        self.tracks[track][i] = statistics(net)

    def average(self, cohort: Sequence[int]) -> None:
        """What the server does with the shared statistics: by samples, whatever the method's weights."""
        if self.bn == "average":
            n = sum(len(self.train[i]) for i in cohort)
            new = []
            for several in zip(*(self.tracks["shared"][i] for i in cohort), strict=True):
                rows = zip(cohort, several, strict=True)
                b = torch.stack([len(self.train[i]) / n * b.double() for i, b in rows]).sum(0)
                new.append((b if several[0].is_floating_point() else b.round()).to(several[0].dtype))
            self.tracks["shared"] = dict.fromkeys(range(len(self.train)), new)

    @torch.no_grad()
    def judge(self, moment: str, entry: int, i: int, net: Net) -> None:
        """What the client predicts with this net and its statistics, and its p_i."""
        (f, h), rows = (m.eval() for m in copy.deepcopy(net)), torch.from_numpy(self.test[i])
        logits, y = h(f(self.x[rows]) + self.p.get(i, 0)), self.y[rows]
        correct = int((logits.argmax(1) == y).sum())
        self.seen[moment, entry, i] = Seen(len(y), correct, cross_entropy(logits, y).item())

    def calls(
        self, deployed: Callable[[int], Net], adapted: Callable[[int, int], Net] | None = None
    ) -> Iterator[tuple[int, list[int]]]:
        """Each round t with its cohort. Before each and after the last, everyone predicts with what it
        deploys, entry t - 1; and, at each or at the last, with what it makes of that on its own."""
        for t in range(1, self.rounds + 2):
            for i in range(len(self.train)):
                self.judge("before", t - 1, i, deployed(i))
                if adapted:
                    self.judge("adapted", t - 1, i, adapted(i, t))
                elif self.ft and t > self.rounds:
                    p = self.p.copy()
                    tuned, _ = self.fit(deployed(i), i, t, epochs=self.ft, mr=False)
                    self.judge("adapted", t - 1, i, tuned)
                    self.p = p
            if t <= self.rounds:
                cohort = self.cohort(t)
                yield t, cohort
                self.average(cohort)

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
        f, h = (m.train() for m in copy.deepcopy(net))
        p = self.p[i].clone().requires_grad_() if (self.prbm if prbm is None else prbm) else None
        weights = [w for k, m in enumerate((f, h)) if only in (None, k) for w in m.parameters()]
        sgd = torch.optim.SGD(weights, lr=self.lr)
        if p is not None:
            self.p[i] = p  # so that an extra term sees it as it is now
            rate = self.lr if self.prbm_lr is None else self.prbm_lr
            sgd.add_param_group({"params": [p], "lr": rate})
        r = self.zero()
        for rows in self.batches(i, t, epochs or self.epochs):
            x, y = self.x[rows], self.y[rows]
            z = f(x)
            loss = cross_entropy(h(z if p is None else z + p), y)
            r = (1 - self.mu) * r.detach() + self.mu * z.mean(0)
            loss = self.regularized(loss, r) if mr else loss
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

    def regularized(self, loss: Tensor, r: Tensor) -> Tensor:
        """The task loss and, after the preparation, MR's."""
        return loss if self.kappa is None else loss + self.kappa * self.apart(r)


def statistics(net: Net) -> list[Tensor]:
    return [b.clone() for m in net for b in m.buffers()]


def values(net: Net, only: int | None = None) -> list[Tensor]:
    return [w.detach() for k, m in enumerate(net) if only in (None, k) for w in m.parameters()]


def filled(net: Net, new: Sequence[Tensor], only: int | None = None) -> Net:
    """A copy of the net, its statistics included, with these parameters."""
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

    def received(i: int) -> Net:
        return s.at(net, i)

    for t, cohort in s.calls(received):
        new = []
        for i in cohort:
            own, _ = s.fit(received(i), i, t, only=only, extra=extra(net, i))
            s.left(own, i)
            s.judge("after", t - 1, i, own)
            new.append(values(own))
        net = filled(net, mean(new, s.shares(cohort)))
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

    def received(i: int) -> Net:
        return s.at(x, i)

    for t, cohort in s.calls(received):
        ys, deltas = [], []
        for i in cohort:
            y, _ = s.fit(received(i), i, t, shift=[a - b for a, b in zip(c, own[i], strict=True)])
            s.left(y, i)
            s.judge("after", t - 1, i, y)
            steps = sum(1 for _ in s.batches(i, t, s.epochs))
            rows = zip(own[i], c, values(x), values(y), strict=True)
            new = [ci - ck + (a - b) / (steps * s.lr) for ci, ck, a, b in rows]
            deltas.append([a - b for a, b in zip(new, own[i], strict=True)])
            own[i] = new
            ys.append(values(y))
        moved = mean(ys, s.shares(cohort, "uniform"))
        x = filled(x, [a + eta_g * (b - a) for a, b in zip(values(x), moved, strict=True)])
        c = [a + b for a, b in zip(c, mean(deltas, [1 / n] * len(cohort)), strict=True)]
    return Result([*values(x), *c], {i: [*own[i], *([s.p[i]] if s.prbm else [])] for i in own})


def moon(s: Setting, mu: float = 1.0, tau: float = 0.5, contrast: str = "z_g") -> Result:
    """The global and the previous model only look on: in evaluation mode, as they were when it began."""
    net, everyone = s.net, range(len(s.train))
    own = {i: values(s.net) for i in everyone}

    def received(i: int) -> Net:
        return s.at(net, i)

    for t, cohort in s.calls(received):
        new = []
        for i in cohort:
            looking = received(i)[0].eval(), s.at(filled(net, own[i]), i, "previous")[0].eval()

            def term(_: Net, z: Tensor, x: Tensor, y: Tensor, i: int = i, looking: Net = looking) -> Tensor:
                with torch.no_grad():
                    z_glob, z_prev = (f(x) for f in looking)
                z = z + s.p[i] if contrast == "z" else z
                near = (cosine_similarity(z, z_glob) / tau).exp()
                far = (cosine_similarity(z, z_prev) / tau).exp()
                return mu * -(near / (near + far)).log().mean()

            trained, _ = s.fit(received(i), i, t, extra=term)
            s.left(trained, i)
            s.left(trained, i, "previous")
            s.judge("after", t - 1, i, trained)
            own[i] = values(trained)
            new.append(own[i])
        net = filled(net, mean(new, s.shares(cohort)))
    return Result(values(net), {i: [*own[i], *([s.p[i]] if s.prbm else [])] for i in everyone})


def ditto(
    s: Setting, lam: float = 1.0, personal_epochs: int | None = None, mr_target: str = "global"
) -> Result:
    net, everyone = s.net, range(len(s.train))
    own = {i: values(s.net) for i in everyone}

    def personal(i: int) -> Net:
        return s.at(filled(s.net, own[i]), i, "personal")

    for t, cohort in s.calls(personal):
        new, anchor = [], values(net)

        def near(n: Net, z: Tensor, x: Tensor, y: Tensor, anchor: list[Tensor] = anchor) -> Tensor:
            return lam / 2 * distance(n, anchor)

        for i in cohort:
            v, _ = s.fit(personal(i), i, t, epochs=personal_epochs, mr=mr_target == "both", extra=near)
            s.left(v, i, "personal")
            s.judge("after", t - 1, i, v)
            own[i] = values(v)
            w, _ = s.fit(s.at(net, i), i, t)
            s.left(w, i)
            new.append(values(w))
        net = filled(net, mean(new, s.shares(cohort)))
    return Result(values(net), own)


def fedper(s: Setting, head_epochs: int = 0) -> Result:
    """With head epochs it is FedRep: first h alone, which leaves no statistics, then f alone."""
    body, heads = values(s.net, 0), {i: values(s.net, 1) for i in range(len(s.train))}

    def whole(i: int) -> Net:
        return s.at(filled(filled(s.net, body, 0), heads[i], 1), i)

    for t, cohort in s.calls(whole):
        new = []
        for i in cohort:
            if head_epochs:
                net, _ = s.fit(whole(i), i, t, epochs=head_epochs, only=1, mr=False)
                heads[i] = values(net, 1)
                net, _ = s.fit(whole(i), i, t, only=0)
            else:
                net, _ = s.fit(whole(i), i, t)
                heads[i] = values(net, 1)
            s.left(net, i)
            s.judge("after", t - 1, i, net)
            new.append(values(net, 0))
        body = mean(new, s.shares(cohort))
    return Result(body, heads)


def fedrep(s: Setting, head_epochs: int = 10) -> Result:
    return fedper(s, head_epochs)


class Both(nn.Module):
    """Two heads on the same z, added."""

    def __init__(self, h: nn.Module, h_p: nn.Module) -> None:
        super().__init__()
        self.h, self.h_p = h, h_p

    def forward(self, z: Tensor) -> Tensor:
        logits: Tensor = self.h(z) + self.h_p(z)
        return logits


def fedrod(s: Setting) -> Result:
    """The two steps of a batch one after the other, the second from the first's forward pass."""
    net, heads = s.net, {i: copy.deepcopy(s.net[1]) for i in range(len(s.train))}

    def deployed(i: int) -> Net:
        f, h = s.at(net, i)
        return f, Both(h, heads[i])

    for t, cohort in s.calls(deployed):
        new = []
        for i in cohort:
            f, h = (m.train() for m in s.at(net, i))
            shared = torch.optim.SGD([*f.parameters(), *h.parameters()], lr=s.lr)
            personal = torch.optim.SGD(heads[i].parameters(), lr=s.lr)
            counts = torch.bincount(s.y[torch.from_numpy(s.train[i])], minlength=10).double()
            prior = counts.clamp(min=1e-8).log().to(s.x)
            r = s.zero()
            for rows in s.batches(i, t, s.epochs):
                x, y = s.x[rows], s.y[rows]
                z = f(x)
                logits = h(z)
                loss = cross_entropy(logits + prior, y)
                r = (1 - s.mu) * r.detach() + s.mu * z.mean(0)
                loss = s.regularized(loss, r)
                shared.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                shared.step()
                personal.zero_grad()
                cross_entropy(logits.detach() + heads[i](z.detach()), y).backward()  # type: ignore[no-untyped-call]
                personal.step()
            s.left((f, h), i)
            s.judge("after", t - 1, i, (f, Both(h, heads[i])))
            new.append(values((f, h)))
        net = filled(net, mean(new, s.shares(cohort)))
    return Result(values(net), {i: [w.detach() for w in head.parameters()] for i, head in heads.items()})


def local(s: Setting) -> Result:
    own = {i: values(s.net) for i in range(len(s.train))}

    def deployed(i: int) -> Net:
        return s.at(filled(s.net, own[i]), i, "personal")

    for t, cohort in s.calls(deployed):
        for i in cohort:
            net, _ = s.fit(deployed(i), i, t)
            s.left(net, i, "personal")
            s.judge("after", t - 1, i, net)
            own[i] = values(net)
    return Result([], own)


def gradient(net: Net, x: Tensor, y: Tensor) -> list[Tensor]:
    """In training mode: the net's statistics move."""
    f, h = (m.train() for m in net)
    weights = [w for m in net for w in m.parameters()]
    return list(torch.autograd.grad(cross_entropy(h(f(x)), y), weights))


def perfedavg(
    s: Setting,
    alpha: float = 0.01,
    beta: float | None = None,
    hessian: str = "first-order",
    delta: float = 0.001,
) -> Result:
    """Two batches per step, or three. Each net starts with the statistics that the last gradient left."""
    net, rate, parts = s.net, s.lr if beta is None else beta, 3 if hessian == "free" else 2

    def moved(net: Net, start: Sequence[Tensor], step: float, g: Sequence[Tensor]) -> Net:
        return filled(net, [a + step * b for a, b in zip(start, g, strict=True)])

    def received(i: int) -> Net:
        return s.at(net, i)

    def adapted(i: int, t: int) -> Net:
        w, rows = received(i), next(s.batches(i, t, 1))
        return moved(w, values(w), -alpha, gradient(w, s.x[rows], s.y[rows]))

    for t, cohort in s.calls(received, adapted):
        new = []
        for i in cohort:
            rng, rows, w = seeds.make_rng(s.seed, "batches", t, i), s.train[i], received(i)
            for _ in range(s.epochs):
                order = torch.from_numpy(rows[rng.permutation(len(rows))])
                size = min(parts * s.batch, len(rows))
                for at in range(0, len(rows) // size * size, size):
                    each = torch.split(order[at : at + size], size // parts)
                    (x1, y1), (x2, y2), *third = [(s.x[d], s.y[d]) for d in each[:parts]]
                    start = values(w)
                    w = moved(w, start, -alpha, gradient(w, x1, y1))
                    u = gradient(w, x2, y2)
                    for x3, y3 in third:
                        w = moved(w, start, delta, u)
                        up = gradient(w, x3, y3)
                        w = moved(w, start, -delta, u)
                        down = gradient(w, x3, y3)
                        d = [(a - b) / (2 * delta) for a, b in zip(up, down, strict=True)]
                        u = [a - alpha * b for a, b in zip(u, d, strict=True)]
                    w = moved(w, start, -rate, u)
            s.left(w, i)
            s.judge("after", t - 1, i, w)
            new.append(values(w))
        net = filled(net, mean(new, s.shares(cohort)))
    return Result(values(net), {})


def pfedme(
    s: Setting,
    lam: float = 15.0,
    k: int = 5,
    lr_p: float = 0.01,
    eta: float = 0.005,
    beta: float = 1.0,
    evaluate: str = "theta",
) -> Result:
    """`evaluate` is what a client keeps of its last round, and deploys: theta, or its own w."""
    net, own = s.net, {i: values(s.net) for i in range(len(s.train))}

    def deployed(i: int) -> Net:
        return s.at(filled(s.net, own[i]), i)

    for t, cohort in s.calls(deployed):
        new = []
        for i in cohort:
            theta, w = s.at(net, i), values(net)
            for rows in s.batches(i, t, s.epochs):
                for _ in range(k):
                    g = gradient(theta, s.x[rows], s.y[rows])
                    steps = zip(values(theta), g, w, strict=True)
                    theta = filled(theta, [a - lr_p * (b + lam * (a - c)) for a, b, c in steps])
                w = [a - eta * lam * (a - b) for a, b in zip(w, values(theta), strict=True)]
            s.left(theta, i)
            own[i] = values(theta) if evaluate == "theta" else w
            s.judge("after", t - 1, i, deployed(i))
            new.append(w)
        pairs = zip(values(net), mean(new, s.shares(cohort, "uniform")), strict=True)
        net = filled(net, [(1 - beta) * a + beta * b for a, b in pairs])
    return Result(values(net), own)


def apfl(s: Setting, alpha: float = 0.5, adaptive: bool = True) -> Result:
    """The personal step is taken first, with w as it was before the batch; then w's own."""
    net, alphas = s.net, dict.fromkeys(range(len(s.train)), alpha)
    own = {i: values(s.net) for i in range(len(s.train))}

    def mixture(i: int, w: Net | None = None) -> Net:
        a, pairs = alphas[i], zip(own[i], values(w or net), strict=True)
        return s.at(filled(net, [a * v + (1 - a) * u for v, u in pairs]), i, "personal")

    for t, cohort in s.calls(mixture):
        new = []
        for i in cohort:

            def personal(w: Net, z: Tensor, x: Tensor, y: Tensor, i: int = i) -> Tensor:
                m, a = mixture(i, w), alphas[i]
                g = gradient(m, x, y)
                s.left(m, i, "personal")
                rows = list(zip(own[i], values(w), g, strict=True))
                own[i] = [v - s.lr * a * d for v, _, d in rows]
                if adaptive:
                    slope = sum(float(((v - u) * d).sum()) for v, u, d in rows)
                    alphas[i] = min(1.0, max(0.0, a - s.lr * slope))
                return torch.zeros(())

            w, _ = s.fit(s.at(net, i), i, t, extra=personal)
            s.left(w, i)
            s.judge("after", t - 1, i, mixture(i, w))
            new.append(values(w))
        net = filled(net, mean(new, s.shares(cohort)))
    return Result(values(net), {i: [torch.tensor(alphas[i]), *own[i]] for i in own})
