"""FedAvg, +PRBM, +MR and +DBE as one plain PyTorch loop, to compare the library with.

Deliberately naive: whole modules are copied for every client, autograd and torch's own SGD do the rest, and
only the names of the random streams are shared with feddbe. Models without buffers (no BatchNorm) only.
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
    """The extractor f and the head h for 8x8 images, with torch's default start (the caller seeds)."""
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
    join: float,
    kappa: float | None = None,
    mu: float | None = None,
    prbm: bool = False,
    init_mean: str = "momentum",
    init_epochs: int = 1,
) -> dict[str, Any]:
    """Train `net` = (f, h at θ^0, left as it is) with clients `train[i]`, and test on `test[i]`.

    `kappa=None` means no MR and no initialization period. Gives `server` (parameters of f, then of h),
    `prbm` (client -> p_i, empty without PRBM), `z_bar` (or None) and `accuracy` (entries 0..rounds).
    """
    net, sizes, everyone = deepcopy(net), [len(own) for own in train], range(len(train))
    zero = torch.zeros_like(net[0](x[:1])[0])
    own_p = dict.fromkeys(everyone, zero)
    z_bar: Tensor | None = None

    def local(i: int, t: int, epochs: int, p: Tensor | None) -> tuple[Net, Tensor, int]:
        """One client's training in round t; p is trained in place. The model, r, and the number of steps."""
        f, h = (module.train() for module in deepcopy(net))
        sgd = torch.optim.SGD([*f.parameters(), *h.parameters(), *([] if p is None else [p])], lr=lr)
        rng, r, steps = seeds.make_rng(seed, "batches", t, i), zero, 0
        for _ in range(epochs):
            order = train[i][rng.permutation(sizes[i])]
            for at in range(max(1, sizes[i] // batch)):
                rows = order[at * batch : (at + 1) * batch]
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
        hits = sum(int((h(f(x[own]) + own_p[i]).argmax(1) == y[own]).sum()) for i, own in enumerate(test))
        return hits / sum(len(own) for own in test)

    if kappa is not None:
        assert mu is not None, "MR needs mu"
        assert init_mean in ("momentum", "exact", "debiased"), init_mean
        means = []
        for i in everyone:  # z_bar is still None, so this is plain CE; the models are thrown away
            (f, _), mean, steps = local(i, 0, init_epochs, None)
            if init_mean == "exact":
                mean = f.eval()(x[train[i]]).mean(0).detach()
            elif init_mean == "debiased":
                mean = mean / (1 - (1 - mu) ** steps)
            means.append(sizes[i] / sum(sizes) * mean)
        z_bar = torch.stack(means).sum(0)

    curve = [accuracy()]
    for t in range(1, rounds + 1):
        cohort = seeds.sample_cohort(seed, t, len(train), join)
        total: list[Tensor] | None = None
        for i in cohort:
            p = own_p[i].clone().requires_grad_() if prbm else None
            trained, _, _ = local(i, t, epochs, p)
            own_p[i] = zero if p is None else p.detach()
            share = sizes[i] / sum(sizes[j] for j in cohort)
            mine = [share * w.detach() for m in trained for w in m.parameters()]
            total = mine if total is None else [a + b for a, b in zip(total, mine, strict=True)]
        for w, new in zip((w for m in net for w in m.parameters()), total or [], strict=True):
            w.data = new
        curve.append(accuracy())
    server = [w.detach() for m in net for w in m.parameters()]
    return {"server": server, "prbm": own_p if prbm else {}, "z_bar": z_bar, "accuracy": curve}


def local_dbe(
    module: nn.Module,
    start: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    own: NDArray[np.int64],
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
    """One client's epoch of FedAvg+DBE in this round: `module`, whose last layer is h, from `start`; p is
    trained in place."""
    module.load_state_dict(start)
    layers = [layer for layer in module.modules() if not isinstance(layer, nn.Sequential)]
    f, h = nn.Sequential(*layers[:-1]).train(), layers[-1]
    p.requires_grad_()
    sgd = torch.optim.SGD([*f.parameters(), *h.parameters(), p], lr=lr)
    order, r = own[seeds.make_rng(seed, "batches", round, client).permutation(len(own))], torch.zeros_like(p)
    for at in range(len(own) // batch):
        rows = order[at * batch : (at + 1) * batch]
        z = f(x[rows])
        r = (1 - mu) * r.detach() + mu * z.mean(0)
        loss = cross_entropy(h(z + p), y[rows]) + kappa * (0.5 * (r - z_bar) ** 2).mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    p.requires_grad_(False)
    return module.eval()
