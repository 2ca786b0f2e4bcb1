"""FedGen, FedFomo and APPLE, which send more than a model, as plain PyTorch loops.

Nothing of feddbe but its seeds, like the other oracles; each function says in which order its tensors are.
A model's tensors are f's parameters, then h's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from feddbe import seeds
from tests.oracles.methods import Extra, Net, Result, Setting, filled, gradient, mean, values

__all__ = ["alike", "apple", "apple_client", "fedfomo", "fedgen", "fomo_weights", "fresh"]


def generated(g: nn.Module, eps: Tensor, y: Tensor, classes: int, shape: torch.Size) -> Tensor:
    """Features of the labels y from this noise."""
    made: Tensor = g(torch.cat([eps, one_hot(y, classes).to(eps)], 1))
    return made.reshape(len(y), *shape)


def alike(eps: Tensor, z: Tensor) -> Tensor:
    """exp(-mean over all n^2 pairs of the noise's distance times the features'): small where G spreads."""
    z = z.flatten(1)
    half = (torch.pdist(eps) ** 2 / eps.shape[1] * torch.pdist(z, 1) / z.shape[1]).sum()  # j < k
    return (-2 * half / len(z) ** 2).exp()


def fedgen(
    s: Setting,
    alpha: float = 1.0,
    beta: float = 1.0,
    decay: float = 0.98,
    diversity: float = 1.0,
    noise: int = 32,
    hidden: int = 256,
    steps: int = 50,
    gen_batch: int = 128,
    gen_lr: float = 3e-4,
    lite: bool = False,
    level: str = "z",
) -> Result:
    """Server: the model; G's parameters in G's order; its BatchNorm's running mean and variance; Adam's first
    moments in G's order, its second moments, and the number of its steps. Private: PRBM's vector, if any.
    """
    if lite:
        beta, decay, diversity = 0.0, 1.0, 0.0
    net, shape = s.net, s.zero().shape
    classes = s.net[1](s.zero()[None]).shape[1]
    counts = torch.stack([torch.bincount(s.y[torch.from_numpy(r)], minlength=classes) for r in s.train])
    prior = counts.sum(0) / counts.sum()
    with seeds.torch_seeded(seeds.torch_seed(s.seed, "generator")):
        # no bias: the normalisation takes it out again, so Adam would follow the rounding of a zero gradient
        first, norm = nn.Linear(noise + classes, hidden, bias=False), nn.BatchNorm1d(hidden)
        g = nn.Sequential(first, norm, nn.ReLU(), nn.Linear(hidden, math.prod(shape)))
    adam = torch.optim.Adam(g.parameters(), lr=gen_lr)

    def term(i: int, t: int) -> Extra | None:
        if t == 1:
            return None
        batch = 0

        def from_generator(net: Net, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
            nonlocal batch
            rng = torch.Generator()
            rng.manual_seed(seeds.torch_seed(s.seed, "torch", t, i) % 2**62 + batch)
            batch += 1
            drawn = torch.multinomial(prior, len(y), replacement=True, generator=rng)
            eps, eps2 = (torch.rand(len(y), noise, generator=rng) for _ in range(2))
            p = s.p[i] if s.prbm else torch.zeros(shape)
            there = p if level == "z_g" else torch.zeros(shape)
            with torch.no_grad():
                z1, z2 = (generated(g, e, c, classes, shape) for e, c in ((eps, drawn), (eps2, y)))
                teacher = net[1](z2 + there).log_softmax(1)
            known = cross_entropy(net[1](z1 + there), drawn)
            pupil = net[1](z + p).log_softmax(1)
            close = (teacher.exp() * (teacher - pupil)).sum(1).mean()
            return decay ** (t - 1) * torch.add(alpha * known, beta * close)

        return from_generator

    def received(i: int) -> Net:
        return s.at(net, i)

    for t, cohort in s.calls(received):
        new = []
        g.eval()
        for i in cohort:
            own, _ = s.fit(received(i), i, t, extra=term(i, t))
            s.left(own, i)
            s.judge("after", t - 1, i, own)
            new.append(own)
        net = filled(net, mean([values(n) for n in new], s.shares(cohort)))
        g.train()
        there = counts[cohort]
        labels = there.sum(0).nonzero().flatten()
        weight = there / there.sum(0)  # nan for a label that nobody has, which is never drawn
        if lite:
            weight = torch.tensor(s.shares(cohort))[:, None].expand(-1, classes)
        rng = torch.Generator().manual_seed(seeds.torch_seed(s.seed, "generator", t))
        for _ in range(steps):
            y = labels[torch.randint(len(labels), (gen_batch,), generator=rng)]
            eps = torch.rand(gen_batch, noise, generator=rng)
            z = generated(g, eps, y, classes, shape)
            votes = [weight[k, y, None] * h(z) for k, (_, h) in enumerate(new)]
            loss = cross_entropy(torch.stack(votes).sum(0), y) + diversity * alike(eps, z)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    made, state = list(g.parameters()), adam.state
    moments = [state[w][kind] for kind in ("exp_avg", "exp_avg_sq") for w in made]
    server = [*values(net), *(w.detach() for w in made), norm.running_mean, norm.running_var]
    return Result([*server, *moments, state[made[0]]["step"]], {i: [p] for i, p in s.p.items()})


def fomo_weights(s: Setting, rows: NDArray[np.int64], old: Net, candidates: Sequence[Net]) -> list[float]:
    """(L(old) - L(theta_j)) / |theta_j - old|, L on these rows."""

    def loss(net: Net) -> float:
        f, h = (m.eval() for m in copy.deepcopy(net))
        with torch.no_grad():
            return cross_entropy(h(f(s.x[rows])), s.y[rows]).item()

    weights = []
    for net in candidates:
        pairs = zip(values(net), values(old), strict=True)
        far = math.sqrt(sum(((a - b).double() ** 2).sum().item() for a, b in pairs))
        weights.append((loss(old) - loss(net)) / far if far > 0 else 0.0)
    return weights


def fomo_sent(
    s: Setting, t: int, i: int, there: Sequence[int], liked: Tensor, m: int, epsilon: float
) -> list[int]:
    """Whose models client i is sent: m - 1 of those `there`, the most liked or, with epsilon, any."""
    rng = seeds.make_rng(s.seed, "explore", t, i)
    order = [int(j) for j in rng.permutation([j for j in sorted(there) if j != i])]
    greedy, sent = sorted(order, key=lambda j: -liked[j].item()), []
    for _ in range(min(m - 1, len(order))):
        sent.append((order if rng.random_sample() < epsilon else greedy)[0])
        order.remove(sent[-1])
        greedy.remove(sent[-1])
    return sent


def fedfomo(
    s: Setting, m: int = 5, epsilon: float = 0.3, epsilon_decay: float = 0.05, held_out: float = 0.2
) -> Result:
    """Server: the affinity P, then each client's last upload in client order (theta^0 where there is none).

    Private: old, then current.
    """
    n = len(s.train)
    held = [max(1, int(held_out * len(rows))) for rows in s.train]
    check = [rows[-k:] for rows, k in zip(s.train, held, strict=True)]
    rest = [rows[:-k] if len(rows) > 1 else rows for rows, k in zip(s.train, held, strict=True)]
    affinity = torch.zeros(n, n)
    uploads: dict[int, Net] = {}
    old, current = dict.fromkeys(range(n), s.net), dict.fromkeys(range(n), s.net)
    for t, cohort in s.calls(lambda i: s.at(current[i], i)):
        before, liked, part = dict(uploads), affinity.clone(), copy.copy(s)
        part.train = rest  # the mean of MR stays that of all rows
        for i in cohort:
            sent = fomo_sent(s, t, i, list(before), liked[i], m, epsilon - epsilon_decay * (t - 1))
            nets = [s.at(net, i) for net in (*(before[j] for j in sent), current[i])]
            w = fomo_weights(s, check[i], s.at(old[i], i), nets)
            start, good = current[i], [max(0.0, v) for v in w]
            if sum(good) > 0:
                start = filled(start, mean([values(net) for net in nets], [v / sum(good) for v in good]))
            old[i], (current[i], _) = start, part.fit(s.at(start, i), i, t)
            s.left(current[i], i)
            s.judge("after", t - 1, i, current[i])
            uploads[i] = current[i]
            for j, v in zip([*sent, i], w, strict=True):
                affinity[i, j] += v
    last = [v for i in range(n) for v in values(uploads.get(i, s.net))]
    return Result([affinity, *last], {i: [*values(old[i]), *values(current[i])] for i in range(n)})


def fresh(s: Setting, i: int) -> list[Tensor]:
    """The core that client i starts with."""

    def anew(module: nn.Module) -> None:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    net = copy.deepcopy(s.net)
    with seeds.torch_seeded(seeds.torch_seed(s.seed, "core", 0, i)):
        for module in net:
            module.apply(anew)
    return values(net)


def apple_client(
    s: Setting,
    i: int,
    t: int,
    cores: Sequence[Sequence[Tensor]],
    p: Tensor,
    p0: Tensor,
    eta1: float,
    eta2: float,
    penalty: float,
) -> tuple[list[Tensor], Tensor]:
    """One client's round: its core and its p after it. `penalty` is lambda_t mu."""
    cores, net = [list(core) for core in cores], s.at(s.net, i)
    for rows in s.batches(i, t, s.epochs):
        net = filled(net, mean(cores, p.tolist()))
        g = gradient(net, s.x[rows], s.y[rows])
        slope = torch.stack(
            [torch.stack([(a * b).sum() for a, b in zip(g, c, strict=True)]).sum() for c in cores]
        )
        cores[i] = [c - eta1 * p[i] * d for c, d in zip(cores[i], g, strict=True)]
        p = p - eta2 * (slope + penalty * (p - p0))
    s.left(net, i)
    return list(cores[i]), p


def apple(
    s: Setting, mu: float = 0.1, eta1: float | None = None, eta2: float = 0.001, rounds_l: int = 10
) -> Result:
    """Server: the cores in client order. Private: p_i."""
    n = len(s.train)
    assert s.cohort(1) == list(range(n)), "APPLE needs everyone"
    p0 = torch.tensor([len(rows) for rows in s.train]) / sum(len(rows) for rows in s.train)
    cores, p = [fresh(s, i) for i in range(n)], dict.fromkeys(range(n), p0)

    def mixture(i: int, own: Sequence[Tensor] = ()) -> Net:
        there = [*cores[:i], own or cores[i], *cores[i + 1 :]]
        return s.at(filled(s.net, mean(there, p[i].tolist())), i)

    for t, cohort in s.calls(mixture):
        lam = (math.cos(math.pi * (t - 1) / rounds_l) + 1) / 2 if t - 1 < rounds_l else 0.0
        rate = n * s.lr if eta1 is None else eta1
        new = []
        for i in cohort:
            core, p[i] = apple_client(s, i, t, cores, p[i], p0, rate, eta2, lam * mu)
            s.judge("after", t - 1, i, mixture(i, core))
            new.append(core)
        cores = new
    return Result([v for core in cores for v in core], {i: [own] for i, own in p.items()})
