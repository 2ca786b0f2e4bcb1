"""FedGen, FedFomo and APPLE, which send more than a model, as plain PyTorch loops.

Only the seeds are imported from feddbe. Each function documents the order of its tensors.
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
from tests.oracles.methods import (
    ExtraLoss,
    Net,
    Result,
    Setting,
    gradient,
    mean,
    parameters_of,
    with_parameters,
)

__all__ = ["apple", "apple_client", "fedfomo", "fedgen", "fomo_weights", "init_core", "similarity"]


def generate(g: nn.Module, eps: Tensor, y: Tensor, classes: int, shape: torch.Size) -> Tensor:
    """Return features for the labels y from this noise."""
    features: Tensor = g(torch.cat([eps, one_hot(y, classes).to(eps)], 1))
    return features.reshape(len(y), *shape)


def similarity(eps: Tensor, z: Tensor) -> Tensor:
    """Return exp(-mean over all n^2 pairs of the noise's distance times the features')."""
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
    net, shape = s.net, s.zero_representation().shape
    classes = s.net[1](s.zero_representation()[None]).shape[1]
    counts = torch.stack([torch.bincount(s.y[torch.from_numpy(r)], minlength=classes) for r in s.train])
    prior = counts.sum(0) / counts.sum()
    with seeds.torch_seeded(seeds.torch_seed(s.seed, "generator")):
        # no bias: BatchNorm removes it, so Adam would follow the rounding errors of a zero gradient
        first, norm = nn.Linear(noise + classes, hidden, bias=False), nn.BatchNorm1d(hidden)
        g = nn.Sequential(first, norm, nn.ReLU(), nn.Linear(hidden, math.prod(shape)))
    adam = torch.optim.Adam(g.parameters(), lr=gen_lr)

    def term(i: int, t: int) -> ExtraLoss | None:
        if t == 1:
            return None
        batch = 0

        def from_generator(net: Net, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
            nonlocal batch
            rng = torch.Generator()
            rng.manual_seed(seeds.torch_seed(s.seed, "torch", t, i) % 2**62 + batch)
            batch += 1
            labels = torch.multinomial(prior, len(y), replacement=True, generator=rng)
            eps, eps2 = (torch.rand(len(y), noise, generator=rng) for _ in range(2))
            p = s.p[i] if s.prbm else torch.zeros(shape)
            shift = p if level == "z_g" else torch.zeros(shape)
            with torch.no_grad():
                z1, z2 = (generate(g, e, c, classes, shape) for e, c in ((eps, labels), (eps2, y)))
                teacher = net[1](z2 + shift).log_softmax(1)
            generated_loss = cross_entropy(net[1](z1 + shift), labels)
            pupil = net[1](z + p).log_softmax(1)
            distillation = (teacher.exp() * (teacher - pupil)).sum(1).mean()
            return decay ** (t - 1) * torch.add(alpha * generated_loss, beta * distillation)

        return from_generator

    def received(i: int) -> Net:
        return s.with_statistics(net, i)

    for t, cohort in s.iterate_rounds(received):
        new = []
        g.eval()
        for i in cohort:
            trained, _ = s.fit(received(i), i, t, extra=term(i, t))
            s.store_statistics(trained, i)
            s.record_predictions("after", t - 1, i, trained)
            new.append(trained)
        net = with_parameters(net, mean([parameters_of(n) for n in new], s.average_weights(cohort)))
        g.train()
        cohort_counts = counts[cohort]
        labels = cohort_counts.sum(0).nonzero().flatten()
        weight = cohort_counts / cohort_counts.sum(
            0
        )  # nan for a label that no client has, which is never drawn
        if lite:
            weight = torch.tensor(s.average_weights(cohort))[:, None].expand(-1, classes)
        rng = torch.Generator().manual_seed(seeds.torch_seed(s.seed, "generator", t))
        for _ in range(steps):
            y = labels[torch.randint(len(labels), (gen_batch,), generator=rng)]
            eps = torch.rand(gen_batch, noise, generator=rng)
            z = generate(g, eps, y, classes, shape)
            weighted_logits = [weight[k, y, None] * h(z) for k, (_, h) in enumerate(new)]
            loss = cross_entropy(torch.stack(weighted_logits).sum(0), y) + diversity * similarity(eps, z)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    generator_params, state = list(g.parameters()), adam.state
    moments = [state[w][kind] for kind in ("exp_avg", "exp_avg_sq") for w in generator_params]
    server = [
        *parameters_of(net),
        *(w.detach() for w in generator_params),
        norm.running_mean,
        norm.running_var,
    ]
    return Result([*server, *moments, state[generator_params[0]]["step"]], {i: [p] for i, p in s.p.items()})


def fomo_weights(s: Setting, indices: NDArray[np.int64], old: Net, candidates: Sequence[Net]) -> list[float]:
    """Return (L(old) - L(theta_j)) / |theta_j - old|, with L on these samples."""

    def loss(net: Net) -> float:
        f, h = (m.eval() for m in copy.deepcopy(net))
        with torch.no_grad():
            return cross_entropy(h(f(s.x[indices])), s.y[indices]).item()

    weights = []
    for net in candidates:
        pairs = zip(parameters_of(net), parameters_of(old), strict=True)
        norm = math.sqrt(sum(((a - b).double() ** 2).sum().item() for a, b in pairs))
        weights.append((loss(old) - loss(net)) / norm if norm > 0 else 0.0)
    return weights


def select_models(
    s: Setting, t: int, i: int, candidates: Sequence[int], affinity: Tensor, m: int, epsilon: float
) -> list[int]:
    """Return the clients whose models client i receives: m - 1 of the candidates.

    Each is the one with the highest affinity or, with probability epsilon, a random one.
    """
    rng = seeds.make_rng(s.seed, "explore", t, i)
    order = [int(j) for j in rng.permutation([j for j in sorted(candidates) if j != i])]
    greedy, selected = sorted(order, key=lambda j: -affinity[j].item()), []
    for _ in range(min(m - 1, len(order))):
        selected.append((order if rng.random_sample() < epsilon else greedy)[0])
        order.remove(selected[-1])
        greedy.remove(selected[-1])
    return selected


def fedfomo(
    s: Setting, m: int = 5, epsilon: float = 0.3, epsilon_decay: float = 0.05, held_out: float = 0.2
) -> Result:
    """Server: the affinity P, then each client's last upload in client order (theta^0 where there is none).

    Private: old, then current.
    """
    n = len(s.train)
    validation_sizes = [max(1, int(held_out * len(indices))) for indices in s.train]
    validation = [indices[-k:] for indices, k in zip(s.train, validation_sizes, strict=True)]
    training = [
        indices[:-k] if len(indices) > 1 else indices
        for indices, k in zip(s.train, validation_sizes, strict=True)
    ]
    affinity = torch.zeros(n, n)
    uploads: dict[int, Net] = {}
    old, current = dict.fromkeys(range(n), s.net), dict.fromkeys(range(n), s.net)
    for t, cohort in s.iterate_rounds(lambda i: s.with_statistics(current[i], i)):
        old_uploads, old_affinity, part = dict(uploads), affinity.clone(), copy.copy(s)
        part.train = training  # the mean of MR stays that of all samples
        for i in cohort:
            selected = select_models(
                s, t, i, list(old_uploads), old_affinity[i], m, epsilon - epsilon_decay * (t - 1)
            )
            nets = [s.with_statistics(net, i) for net in (*(old_uploads[j] for j in selected), current[i])]
            w = fomo_weights(s, validation[i], s.with_statistics(old[i], i), nets)
            start, positive = current[i], [max(0.0, v) for v in w]
            if sum(positive) > 0:
                start = with_parameters(
                    start, mean([parameters_of(net) for net in nets], [v / sum(positive) for v in positive])
                )
            old[i], (current[i], _) = start, part.fit(s.with_statistics(start, i), i, t)
            s.store_statistics(current[i], i)
            s.record_predictions("after", t - 1, i, current[i])
            uploads[i] = current[i]
            for j, v in zip([*selected, i], w, strict=True):
                affinity[i, j] += v
    last = [v for i in range(n) for v in parameters_of(uploads.get(i, s.net))]
    return Result(
        [affinity, *last], {i: [*parameters_of(old[i]), *parameters_of(current[i])] for i in range(n)}
    )


def init_core(s: Setting, i: int) -> list[Tensor]:
    """Return the initial core of client i."""

    def reset_parameters(module: nn.Module) -> None:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    net = copy.deepcopy(s.net)
    with seeds.torch_seeded(seeds.torch_seed(s.seed, "core", 0, i)):
        for module in net:
            module.apply(reset_parameters)
    return parameters_of(net)


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
    """Return the client's core and p after one round. `penalty` is lambda_t mu."""
    cores, net = [list(core) for core in cores], s.with_statistics(s.net, i)
    for indices in s.batches(i, t, s.epochs):
        net = with_parameters(net, mean(cores, p.tolist()))
        g = gradient(net, s.x[indices], s.y[indices])
        p_gradient = torch.stack(
            [torch.stack([(a * b).sum() for a, b in zip(g, c, strict=True)]).sum() for c in cores]
        )
        cores[i] = [c - eta1 * p[i] * d for c, d in zip(cores[i], g, strict=True)]
        p = p - eta2 * (p_gradient + penalty * (p - p0))
    s.store_statistics(net, i)
    return list(cores[i]), p


def apple(
    s: Setting, mu: float = 0.1, eta1: float | None = None, eta2: float = 0.001, rounds_l: int = 10
) -> Result:
    """Server: the cores in client order. Private: p_i."""
    n = len(s.train)
    assert s.cohort(1) == list(range(n)), "APPLE needs all clients"
    p0 = torch.tensor([len(rows) for rows in s.train]) / sum(len(rows) for rows in s.train)
    cores, p = [init_core(s, i) for i in range(n)], dict.fromkeys(range(n), p0)

    def mixture(i: int, own_core: Sequence[Tensor] = ()) -> Net:
        all_cores = [*cores[:i], own_core or cores[i], *cores[i + 1 :]]
        return s.with_statistics(with_parameters(s.net, mean(all_cores, p[i].tolist())), i)

    for t, cohort in s.iterate_rounds(mixture):
        lam = (math.cos(math.pi * (t - 1) / rounds_l) + 1) / 2 if t - 1 < rounds_l else 0.0
        rate = n * s.lr if eta1 is None else eta1
        new = []
        for i in cohort:
            core, p[i] = apple_client(s, i, t, cores, p[i], p0, rate, eta2, lam * mu)
            s.record_predictions("after", t - 1, i, mixture(i, core))
            new.append(core)
        cores = new
    return Result([v for core in cores for v in core], {i: [own_core] for i, own_core in p.items()})
