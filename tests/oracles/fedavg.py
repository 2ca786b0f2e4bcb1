"""FedAvg, +PRBM, +MR and +DBE as one plain PyTorch loop.

The loop is deliberately naive: it copies modules for every client and uses autograd and torch's SGD. Only the
names of the random streams are shared with feddbe. Models must not have buffers (no BatchNorm).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from feddbe import seeds

__all__ = ["digits_cnn", "local_dbe", "run"]

Net = tuple[nn.Module, nn.Module]
Indices = Sequence[NDArray[np.int64]]


def digits_cnn() -> Net:
    """Return body f and head h for 8x8 images, with torch's default initialization (the caller seeds)."""
    conv1, conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    body = nn.Sequential(conv1, nn.ReLU(), nn.MaxPool2d(2), conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return body.extend([nn.Linear(128, 64), nn.ReLU()]), nn.Linear(64, 10)


def run(
    net: Net,
    x: Tensor,
    y: Tensor,
    train: Indices,
    test: Indices,
    *,
    rounds: int,
    lr: float,
    batch: int,
    epochs: int,
    seed: int,
    participation: float,
    kappa: float | None = None,
    mu: float | None = None,
    prbm: bool = False,
    init_mean: str = "momentum",
    init_epochs: int = 1,
) -> dict[str, Any]:
    """Train a copy of `net` = (f, h) at θ^0 with clients `train[i]`, and test on `test[i]`.

    `kappa=None` means no MR and no setup. Returns `server` (parameters of f, then of h), `prbm` (client ->
    p_i, empty without PRBM), `z_bar` (or None) and `accuracy` (of rounds 0 to `rounds`).
    """
    net, sizes, all_clients = deepcopy(net), [len(indices) for indices in train], range(len(train))
    zero = torch.zeros_like(net[0](x[:1])[0])
    p_by_client = dict.fromkeys(all_clients, zero)
    z_bar: Tensor | None = None

    def local(i: int, t: int, epochs: int, p: Tensor | None) -> tuple[Net, Tensor, int]:
        """Train one client in round t, p in place; return the model, r and the number of steps."""
        f, h = (module.train() for module in deepcopy(net))
        sgd = torch.optim.SGD([*f.parameters(), *h.parameters(), *([] if p is None else [p])], lr=lr)
        rng, r, steps = seeds.make_rng(seed, "batches", t, i), zero, 0
        for _ in range(epochs):
            order = train[i][rng.permutation(sizes[i])]
            for k in range(max(1, sizes[i] // batch)):
                rows = order[k * batch : (k + 1) * batch]
                z = f(x[rows])
                loss = cross_entropy(h(z if p is None else z + p), y[rows])
                if mu is not None:
                    r = (1 - mu) * r.detach() + mu * z.mean(0)
                if kappa is not None and z_bar is not None:
                    loss = loss + kappa * (0.5 * (r - z_bar) ** 2).mean()
                sgd.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                sgd.step()
                steps += 1
        return (f, h), r.detach(), steps

    @torch.no_grad()
    def accuracy() -> float:
        f, h = (module.eval() for module in net)
        hits = sum(
            int((h(f(x[indices]) + p_by_client[i]).argmax(1) == y[indices]).sum())
            for i, indices in enumerate(test)
        )
        return hits / sum(len(indices) for indices in test)

    if kappa is not None:
        assert mu is not None, "MR needs mu"
        assert init_mean in ("momentum", "exact", "debiased"), init_mean
        means = []
        for i in all_clients:  # z_bar is still None, so this is plain CE; the models are discarded
            (f, _), mean, steps = local(i, 0, init_epochs, None)
            if init_mean == "exact":
                mean = f.eval()(x[train[i]]).mean(0).detach()
            elif init_mean == "debiased":
                mean = mean / (1 - (1 - mu) ** steps)
            means.append(sizes[i] / sum(sizes) * mean)
        z_bar = torch.stack(means).sum(0)

    curve = [accuracy()]
    for t in range(1, rounds + 1):
        cohort = seeds.sample_cohort(seed, t, len(train), participation)
        total: list[Tensor] | None = None
        for i in cohort:
            p = p_by_client[i].clone().requires_grad_() if prbm else None
            trained, _, _ = local(i, t, epochs, p)
            p_by_client[i] = zero if p is None else p.detach()
            share = sizes[i] / sum(sizes[j] for j in cohort)
            weighted = [share * w.detach() for m in trained for w in m.parameters()]
            total = weighted if total is None else [a + b for a, b in zip(total, weighted, strict=True)]
        for w, new in zip((w for m in net for w in m.parameters()), total or [], strict=True):
            w.data = new
        curve.append(accuracy())
    server = [w.detach() for m in net for w in m.parameters()]
    return {"server": server, "prbm": p_by_client if prbm else {}, "z_bar": z_bar, "accuracy": curve}


def local_dbe(
    module: nn.Module,
    start: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    indices: NDArray[np.int64],
    p: Tensor,
    z_bar: Tensor,
    *,
    kappa: float,
    mu: float,
    lr: float,
    round: int,
    client: int,
    batch: int = 10,
    seed: int = 0,
) -> nn.Module:
    """Train `module`, whose last layer is h, from `start` for one epoch of FedAvg+DBE, and p in place."""
    module.load_state_dict(start)
    layers = [layer for layer in module.modules() if not isinstance(layer, nn.Sequential)]
    f, h = nn.Sequential(*layers[:-1]).train(), layers[-1]
    p.requires_grad_()
    sgd = torch.optim.SGD([*f.parameters(), *h.parameters(), p], lr=lr)
    order, r = (
        indices[seeds.make_rng(seed, "batches", round, client).permutation(len(indices))],
        torch.zeros_like(p),
    )
    for k in range(len(indices) // batch):
        batch_indices = order[k * batch : (k + 1) * batch]
        z = f(x[batch_indices])
        r = (1 - mu) * r.detach() + mu * z.mean(0)
        loss = cross_entropy(h(z + p), y[batch_indices]) + kappa * (0.5 * (r - z_bar) ** 2).mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    p.requires_grad_(False)
    return module.eval()
