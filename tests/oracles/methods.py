"""The methods as plain PyTorch loops: modules, autograd and torch's SGD.

Only the seeds are imported from feddbe. Each function follows the formulas of the method's paper. It returns
the final server parameters (f's, then h's, if the server has them) and each client's private tensors. The
clients' predictions and BatchNorm statistics are recorded in the setting.
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
    "Predictions",
    "Result",
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
ExtraLoss = Callable[[Net, Tensor, Tensor, Tensor], Tensor]
"""(net, z, x, y) -> loss to add."""
Indices = Sequence[NDArray[np.int64]]


class Result(NamedTuple):
    """Final tensors of an oracle."""

    server: list[Tensor]
    private: dict[int, list[Tensor]]


class Predictions(NamedTuple):
    """Summary of a client's predictions on its test samples."""

    samples: int
    correct: int
    loss: float


@dataclass
class Setting:
    """Task, add-ons, and the state of a run."""

    net: Net
    x: Tensor
    y: Tensor
    train: Indices
    test: Indices
    rounds: int
    lr: float
    participation: float
    seed: int = 0
    batch: int = 10
    epochs: int = 1
    bn: str = "local"
    weights: str | None = None
    """Weights of the average: samples or uniform; None: the method's default."""
    kappa: float | None = None
    mu: float = 1.0
    prbm: bool = False
    prbm_lr: float | None = None
    ft: int = 0
    """Epochs of fine-tuning after the last round; 0: none."""
    z_bar: Tensor | None = None
    p: dict[int, Tensor] = field(default_factory=dict)
    tracks: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)
    """Track -> client -> BatchNorm statistics; with `average`, `shared` is equal for all between rounds."""
    predictions: dict[tuple[str, int, int], Predictions] = field(default_factory=dict)
    """(moment, round, client) -> predictions."""

    def __post_init__(self) -> None:
        all_clients = range(len(self.train))
        self.tracks = defaultdict(lambda: dict.fromkeys(all_clients, statistics(self.net)))
        if self.prbm:
            self.p = {i: self.zero_representation() for i in all_clients}
        if self.kappa is not None:
            means, n = [], sum(len(indices) for indices in self.train)
            for i in all_clients:
                net, r = self.fit(self.with_statistics(self.net, i), i, 0, epochs=1, prbm=False)
                self.store_statistics(net, i)
                means.append(r)
            self.z_bar = torch.stack([len(self.train[i]) / n * r for i, r in enumerate(means)]).sum(0)
            self.average(all_clients)

    def mr_loss(self, r: Tensor) -> Tensor:
        """Return MR's loss without kappa."""
        return torch.zeros(()) if self.z_bar is None else (0.5 * (r - self.z_bar) ** 2).mean()

    def zero_representation(self) -> Tensor:
        """Return zeros in the shape of a representation."""
        with torch.no_grad():
            return torch.zeros_like(copy.deepcopy(self.net[0]).eval()(self.x[:1])[0])

    def cohort(self, t: int) -> list[int]:
        return seeds.sample_cohort(self.seed, t, len(self.train), self.participation)

    def average_weights(self, cohort: Sequence[int], default: str = "samples") -> list[float]:
        """Return the weights of the average."""
        if (self.weights or default) == "uniform":
            return [1 / len(cohort)] * len(cohort)
        return [len(self.train[i]) / sum(len(self.train[j]) for j in cohort) for i in cohort]

    def batches(self, i: int, t: int, epochs: int) -> Iterator[Tensor]:
        rng, indices = seeds.make_rng(self.seed, "batches", t, i), self.train[i]
        for _ in range(epochs):
            order = indices[rng.permutation(len(indices))]
            for k in range(max(1, len(indices) // self.batch)):
                yield torch.from_numpy(order[k * self.batch : (k + 1) * self.batch])

    def with_statistics(self, net: Net, i: int, track: str = "shared") -> Net:
        """Return a copy of the net with this client's statistics."""
        net = copy.deepcopy(net)
        for b, value in zip((b for m in net for b in m.buffers()), self.tracks[track][i], strict=True):
            b.copy_(value)
        return net

    def store_statistics(self, net: Net, i: int, track: str = "shared") -> None:
        """Store the net's statistics as the client's."""
        self.tracks[track][i] = statistics(net)

    def average(self, cohort: Sequence[int]) -> None:
        """Average the shared statistics by samples, for any weights of the method."""
        if self.bn == "average":
            n = sum(len(self.train[i]) for i in cohort)
            new = []
            for buffers in zip(*(self.tracks["shared"][i] for i in cohort), strict=True):
                pairs = zip(cohort, buffers, strict=True)
                b = torch.stack([len(self.train[i]) / n * b.double() for i, b in pairs]).sum(0)
                if not buffers[0].is_floating_point():
                    b = b.round()
                new.append(b.to(buffers[0].dtype))
            self.tracks["shared"] = dict.fromkeys(range(len(self.train)), new)

    @torch.no_grad()
    def record_predictions(self, moment: str, evaluated_round: int, i: int, net: Net) -> None:
        """Record the client's predictions with this net, its statistics and its p_i."""
        (f, h), indices = (m.eval() for m in copy.deepcopy(net)), torch.from_numpy(self.test[i])
        logits, y = h(f(self.x[indices]) + self.p.get(i, 0)), self.y[indices]
        correct = int((logits.argmax(1) == y).sum())
        self.predictions[moment, evaluated_round, i] = Predictions(
            len(y), correct, cross_entropy(logits, y).item()
        )

    def iterate_rounds(
        self, inference_net: Callable[[int], Net], adapted: Callable[[int, int], Net] | None = None
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield each round t with its cohort.

        Before each round and after the last, all clients predict (evaluated round t - 1). If they adapt or
        fine-tune, they also predict after it.
        """
        for t in range(1, self.rounds + 2):
            for i in range(len(self.train)):
                self.record_predictions("before", t - 1, i, inference_net(i))
                if adapted:
                    self.record_predictions("adapted", t - 1, i, adapted(i, t))
                elif self.ft and t > self.rounds:
                    p = self.p.copy()
                    finetuned, _ = self.fit(inference_net(i), i, t, epochs=self.ft, mr=False)
                    self.record_predictions("adapted", t - 1, i, finetuned)
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
        extra: ExtraLoss | None = None,
        shift: list[Tensor] | None = None,
        mr: bool = True,
        prbm: bool | None = None,
    ) -> tuple[Net, Tensor]:
        """Train a copy of the net (`only` f = 0 or h = 1); return it and the running mean of f(x)."""
        f, h = (m.train() for m in copy.deepcopy(net))
        p = self.p[i].clone().requires_grad_() if (self.prbm if prbm is None else prbm) else None
        weights = [w for k, m in enumerate((f, h)) if only in (None, k) for w in m.parameters()]
        sgd = torch.optim.SGD(weights, lr=self.lr)
        if p is not None:
            self.p[i] = p  # an extra term uses its current value
            rate = self.lr if self.prbm_lr is None else self.prbm_lr
            sgd.add_param_group({"params": [p], "lr": rate})
        r = self.zero_representation()
        for indices in self.batches(i, t, epochs or self.epochs):
            x, y = self.x[indices], self.y[indices]
            z = f(x)
            loss = cross_entropy(h(z if p is None else z + p), y)
            r = (1 - self.mu) * r.detach() + self.mu * z.mean(0)
            loss = self.add_mr_loss(loss, r) if mr else loss
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

    def add_mr_loss(self, loss: Tensor, r: Tensor) -> Tensor:
        """Return the task loss and, after the setup, MR's."""
        return loss if self.kappa is None else loss + self.kappa * self.mr_loss(r)


def statistics(net: Net) -> list[Tensor]:
    return [b.clone() for m in net for b in m.buffers()]


def parameters_of(net: Net, only: int | None = None) -> list[Tensor]:
    return [w.detach() for k, m in enumerate(net) if only in (None, k) for w in m.parameters()]


def with_parameters(net: Net, new: Sequence[Tensor], only: int | None = None) -> Net:
    """Return a copy of the net, including its statistics, with these parameters."""
    net = copy.deepcopy(net)
    for w, value in zip(
        (w for k, m in enumerate(net) if only in (None, k) for w in m.parameters()), new, strict=True
    ):
        w.data = value.clone()
    return net


def mean(tensors_of_clients: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    return [
        torch.stack([s * w for s, w in zip(weights, ws, strict=True)]).sum(0)
        for ws in zip(*tensors_of_clients, strict=True)
    ]


def distance(net: Net, anchor: Sequence[Tensor]) -> Tensor:
    """Return |w - anchor|^2."""
    pairs = zip((w for m in net for w in m.parameters()), anchor, strict=True)
    return torch.stack([((w - a) ** 2).sum() for w, a in pairs]).sum()


def _run_averaging(
    s: Setting, extra: Callable[[Net, int], ExtraLoss | None], only: int | None = None
) -> Result:
    """Run FedAvg of f and h, or of f only, with a term that may depend on the received net and the client."""
    net = s.net

    def received(i: int) -> Net:
        return s.with_statistics(net, i)

    for t, cohort in s.iterate_rounds(received):
        new = []
        for i in cohort:
            trained, _ = s.fit(received(i), i, t, only=only, extra=extra(net, i))
            s.store_statistics(trained, i)
            s.record_predictions("after", t - 1, i, trained)
            new.append(parameters_of(trained))
        net = with_parameters(net, mean(new, s.average_weights(cohort)))
    return Result(parameters_of(net, only), {i: [p] for i, p in s.p.items()})


def fedavg(s: Setting) -> Result:
    return _run_averaging(s, lambda net, i: None)


def fedprox(s: Setting, mu: float = 0.001) -> Result:
    return _run_averaging(s, lambda net, i: lambda new, z, x, y: mu / 2 * distance(new, parameters_of(net)))


def fedbabu(s: Setting) -> Result:
    return _run_averaging(s, lambda net, i: None, only=0)


def scaffold(s: Setting, eta_g: float = 1.0) -> Result:
    x, n = s.net, len(s.train)
    c = [torch.zeros_like(w) for w in parameters_of(x)]
    c_i = {i: [torch.zeros_like(w) for w in c] for i in range(n)}

    def received(i: int) -> Net:
        return s.with_statistics(x, i)

    for t, cohort in s.iterate_rounds(received):
        ys, deltas = [], []
        for i in cohort:
            y, _ = s.fit(received(i), i, t, shift=[a - b for a, b in zip(c, c_i[i], strict=True)])
            s.store_statistics(y, i)
            s.record_predictions("after", t - 1, i, y)
            steps = sum(1 for _ in s.batches(i, t, s.epochs))
            rows = zip(c_i[i], c, parameters_of(x), parameters_of(y), strict=True)
            new = [ci - ck + (a - b) / (steps * s.lr) for ci, ck, a, b in rows]
            deltas.append([a - b for a, b in zip(new, c_i[i], strict=True)])
            c_i[i] = new
            ys.append(parameters_of(y))
        y_mean = mean(ys, s.average_weights(cohort, "uniform"))
        x = with_parameters(x, [a + eta_g * (b - a) for a, b in zip(parameters_of(x), y_mean, strict=True)])
        c = [a + b for a, b in zip(c, mean(deltas, [1 / n] * len(cohort)), strict=True)]
    return Result([*parameters_of(x), *c], {i: [*c_i[i], *([s.p[i]] if s.prbm else [])] for i in c_i})


def moon(s: Setting, mu: float = 1.0, tau: float = 0.5, contrast: str = "z_g") -> Result:
    """The global and the previous model are fixed during a round, in evaluation mode."""
    net, all_clients = s.net, range(len(s.train))
    previous = {i: parameters_of(s.net) for i in all_clients}

    def received(i: int) -> Net:
        return s.with_statistics(net, i)

    for t, cohort in s.iterate_rounds(received):
        new = []
        for i in cohort:
            fixed = (
                received(i)[0].eval(),
                s.with_statistics(with_parameters(net, previous[i]), i, "previous")[0].eval(),
            )

            def term(_: Net, z: Tensor, x: Tensor, y: Tensor, i: int = i, fixed: Net = fixed) -> Tensor:
                with torch.no_grad():
                    z_glob, z_prev = (f(x) for f in fixed)
                z = z + s.p[i] if contrast == "z" else z
                near = (cosine_similarity(z, z_glob) / tau).exp()
                far = (cosine_similarity(z, z_prev) / tau).exp()
                return mu * -(near / (near + far)).log().mean()

            trained, _ = s.fit(received(i), i, t, extra=term)
            s.store_statistics(trained, i)
            s.store_statistics(trained, i, "previous")
            s.record_predictions("after", t - 1, i, trained)
            previous[i] = parameters_of(trained)
            new.append(previous[i])
        net = with_parameters(net, mean(new, s.average_weights(cohort)))
    return Result(parameters_of(net), {i: [*previous[i], *([s.p[i]] if s.prbm else [])] for i in all_clients})


def ditto(
    s: Setting, lam: float = 1.0, personal_epochs: int | None = None, mr_target: str = "global"
) -> Result:
    net, all_clients = s.net, range(len(s.train))
    personal_params = {i: parameters_of(s.net) for i in all_clients}

    def personal(i: int) -> Net:
        return s.with_statistics(with_parameters(s.net, personal_params[i]), i, "personal")

    for t, cohort in s.iterate_rounds(personal):
        new, anchor = [], parameters_of(net)

        def near(n: Net, z: Tensor, x: Tensor, y: Tensor, anchor: list[Tensor] = anchor) -> Tensor:
            return lam / 2 * distance(n, anchor)

        for i in cohort:
            v, _ = s.fit(personal(i), i, t, epochs=personal_epochs, mr=mr_target == "both", extra=near)
            s.store_statistics(v, i, "personal")
            s.record_predictions("after", t - 1, i, v)
            personal_params[i] = parameters_of(v)
            w, _ = s.fit(s.with_statistics(net, i), i, t)
            s.store_statistics(w, i)
            new.append(parameters_of(w))
        net = with_parameters(net, mean(new, s.average_weights(cohort)))
    return Result(parameters_of(net), personal_params)


def fedper(s: Setting, head_epochs: int = 0) -> Result:
    """With head epochs it is FedRep: first h alone, which leaves no statistics, then f alone."""
    body, heads = parameters_of(s.net, 0), {i: parameters_of(s.net, 1) for i in range(len(s.train))}

    def full_net(i: int) -> Net:
        return s.with_statistics(with_parameters(with_parameters(s.net, body, 0), heads[i], 1), i)

    for t, cohort in s.iterate_rounds(full_net):
        new = []
        for i in cohort:
            if head_epochs:
                net, _ = s.fit(full_net(i), i, t, epochs=head_epochs, only=1, mr=False)
                heads[i] = parameters_of(net, 1)
                net, _ = s.fit(full_net(i), i, t, only=0)
            else:
                net, _ = s.fit(full_net(i), i, t)
                heads[i] = parameters_of(net, 1)
            s.store_statistics(net, i)
            s.record_predictions("after", t - 1, i, net)
            new.append(parameters_of(net, 0))
        body = mean(new, s.average_weights(cohort))
    return Result(body, heads)


def fedrep(s: Setting, head_epochs: int = 10) -> Result:
    return fedper(s, head_epochs)


class SummedHeads(nn.Module):
    """Sum of two heads on the same z."""

    def __init__(self, h: nn.Module, h_p: nn.Module) -> None:
        super().__init__()
        self.h, self.h_p = h, h_p

    def forward(self, z: Tensor) -> Tensor:
        logits: Tensor = self.h(z) + self.h_p(z)
        return logits


def fedrod(s: Setting) -> Result:
    """The two steps of a batch run one after the other; the second uses the first's forward pass."""
    net, heads = s.net, {i: copy.deepcopy(s.net[1]) for i in range(len(s.train))}

    def inference_net(i: int) -> Net:
        f, h = s.with_statistics(net, i)
        return f, SummedHeads(h, heads[i])

    for t, cohort in s.iterate_rounds(inference_net):
        new = []
        for i in cohort:
            f, h = (m.train() for m in s.with_statistics(net, i))
            shared = torch.optim.SGD([*f.parameters(), *h.parameters()], lr=s.lr)
            personal = torch.optim.SGD(heads[i].parameters(), lr=s.lr)
            counts = torch.bincount(s.y[torch.from_numpy(s.train[i])], minlength=10).double()
            prior = counts.clamp(min=1e-8).log().to(s.x)
            r = s.zero_representation()
            for rows in s.batches(i, t, s.epochs):
                x, y = s.x[rows], s.y[rows]
                z = f(x)
                logits = h(z)
                loss = cross_entropy(logits + prior, y)
                r = (1 - s.mu) * r.detach() + s.mu * z.mean(0)
                loss = s.add_mr_loss(loss, r)
                shared.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                shared.step()
                personal.zero_grad()
                cross_entropy(logits.detach() + heads[i](z.detach()), y).backward()  # type: ignore[no-untyped-call]
                personal.step()
            s.store_statistics((f, h), i)
            s.record_predictions("after", t - 1, i, (f, SummedHeads(h, heads[i])))
            new.append(parameters_of((f, h)))
        net = with_parameters(net, mean(new, s.average_weights(cohort)))
    return Result(
        parameters_of(net), {i: [w.detach() for w in head.parameters()] for i, head in heads.items()}
    )


def local(s: Setting) -> Result:
    local_params = {i: parameters_of(s.net) for i in range(len(s.train))}

    def inference_net(i: int) -> Net:
        return s.with_statistics(with_parameters(s.net, local_params[i]), i, "personal")

    for t, cohort in s.iterate_rounds(inference_net):
        for i in cohort:
            net, _ = s.fit(inference_net(i), i, t)
            s.store_statistics(net, i, "personal")
            s.record_predictions("after", t - 1, i, net)
            local_params[i] = parameters_of(net)
    return Result([], local_params)


def gradient(net: Net, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the gradient in training mode, which updates the net's statistics."""
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

    def step_from(net: Net, start: Sequence[Tensor], step: float, g: Sequence[Tensor]) -> Net:
        return with_parameters(net, [a + step * b for a, b in zip(start, g, strict=True)])

    def received(i: int) -> Net:
        return s.with_statistics(net, i)

    def adapted(i: int, t: int) -> Net:
        w, rows = received(i), next(s.batches(i, t, 1))
        return step_from(w, parameters_of(w), -alpha, gradient(w, s.x[rows], s.y[rows]))

    for t, cohort in s.iterate_rounds(received, adapted):
        new = []
        for i in cohort:
            rng, rows, w = seeds.make_rng(s.seed, "batches", t, i), s.train[i], received(i)
            for _ in range(s.epochs):
                order = torch.from_numpy(rows[rng.permutation(len(rows))])
                size = min(parts * s.batch, len(rows))
                for offset in range(0, len(rows) // size * size, size):
                    batch_parts = torch.split(order[offset : offset + size], size // parts)
                    (x1, y1), (x2, y2), *third = [(s.x[d], s.y[d]) for d in batch_parts[:parts]]
                    start = parameters_of(w)
                    w = step_from(w, start, -alpha, gradient(w, x1, y1))
                    u = gradient(w, x2, y2)
                    for x3, y3 in third:
                        w = step_from(w, start, delta, u)
                        g_plus = gradient(w, x3, y3)
                        w = step_from(w, start, -delta, u)
                        g_minus = gradient(w, x3, y3)
                        d = [(a - b) / (2 * delta) for a, b in zip(g_plus, g_minus, strict=True)]
                        u = [a - alpha * b for a, b in zip(u, d, strict=True)]
                    w = step_from(w, start, -rate, u)
            s.store_statistics(w, i)
            s.record_predictions("after", t - 1, i, w)
            new.append(parameters_of(w))
        net = with_parameters(net, mean(new, s.average_weights(cohort)))
    return Result(parameters_of(net), {})


def pfedme(
    s: Setting,
    lam: float = 15.0,
    k: int = 5,
    lr_p: float = 0.01,
    eta: float = 0.005,
    beta: float = 1.0,
    evaluate: str = "theta",
) -> Result:
    """`evaluate` is what a client keeps and predicts with: theta, or its own w."""
    net, personal_params = s.net, {i: parameters_of(s.net) for i in range(len(s.train))}

    def inference_net(i: int) -> Net:
        return s.with_statistics(with_parameters(s.net, personal_params[i]), i)

    for t, cohort in s.iterate_rounds(inference_net):
        new = []
        for i in cohort:
            theta, w = s.with_statistics(net, i), parameters_of(net)
            for rows in s.batches(i, t, s.epochs):
                for _ in range(k):
                    g = gradient(theta, s.x[rows], s.y[rows])
                    steps = zip(parameters_of(theta), g, w, strict=True)
                    theta = with_parameters(theta, [a - lr_p * (b + lam * (a - c)) for a, b, c in steps])
                w = [a - eta * lam * (a - b) for a, b in zip(w, parameters_of(theta), strict=True)]
            s.store_statistics(theta, i)
            personal_params[i] = parameters_of(theta) if evaluate == "theta" else w
            s.record_predictions("after", t - 1, i, inference_net(i))
            new.append(w)
        pairs = zip(parameters_of(net), mean(new, s.average_weights(cohort, "uniform")), strict=True)
        net = with_parameters(net, [(1 - beta) * a + beta * b for a, b in pairs])
    return Result(parameters_of(net), personal_params)


def apfl(s: Setting, alpha: float = 0.5, adaptive: bool = True) -> Result:
    """The personal step is taken first, with w as it was before the batch; then w's own."""
    net, alphas = s.net, dict.fromkeys(range(len(s.train)), alpha)
    personal_params = {i: parameters_of(s.net) for i in range(len(s.train))}

    def mixture(i: int, w: Net | None = None) -> Net:
        a, pairs = alphas[i], zip(personal_params[i], parameters_of(w or net), strict=True)
        return s.with_statistics(with_parameters(net, [a * v + (1 - a) * u for v, u in pairs]), i, "personal")

    for t, cohort in s.iterate_rounds(mixture):
        new = []
        for i in cohort:

            def personal(w: Net, z: Tensor, x: Tensor, y: Tensor, i: int = i) -> Tensor:
                m, a = mixture(i, w), alphas[i]
                g = gradient(m, x, y)
                s.store_statistics(m, i, "personal")
                rows = list(zip(personal_params[i], parameters_of(w), g, strict=True))
                personal_params[i] = [v - s.lr * a * d for v, _, d in rows]
                if adaptive:
                    slope = sum(float(((v - u) * d).sum()) for v, u, d in rows)
                    alphas[i] = min(1.0, max(0.0, a - s.lr * slope))
                return torch.zeros(())

            w, _ = s.fit(s.with_statistics(net, i), i, t, extra=personal)
            s.store_statistics(w, i)
            s.record_predictions("after", t - 1, i, mixture(i, w))
            new.append(parameters_of(w))
        net = with_parameters(net, mean(new, s.average_weights(cohort)))
    return Result(
        parameters_of(net), {i: [torch.tensor(alphas[i]), *personal_params[i]] for i in personal_params}
    )
