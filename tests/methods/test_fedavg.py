"""FedAvg and its add-ons compared with an independent PyTorch loop, on digits with the published split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from feddbe import seeds
from feddbe.config.options import Config
from feddbe.methods.base import Upload
from feddbe.methods.registry import hyperparameters, parse_method
from feddbe.runs.experiment import Experiment, resolve
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.oracles import fedavg as oracle
from tests.small_runs import experiment, make_dataset, run_outcome

DIGITS: dict[str, Any] = {
    "partition": "dirichlet:0.1",
    "clients": 20,
    "model": "cnn_small",
    "rounds": 3,
    "batch_size": 10,
    "lr": 0.1,
}


def run_oracle(e: Experiment, **options: Any) -> dict[str, Any]:
    """Return the oracle's result for the same task, from weights that it draws itself."""
    dataset, split, training = e.task.dataset, e.task.split, e.task.training
    with seeds.torch_seeded(seeds.torch_seed(e.task.seed, "model")):
        net = oracle.digits_cnn()
    return oracle.run(
        net,
        (dataset.x.float() / 16 - 0.5) / 0.5,
        dataset.y,
        split.train,
        split.test,
        rounds=e.task.rounds,
        lr=training.lr,
        batch=training.batch_size,
        epochs=training.local_epochs,
        seed=e.task.seed,
        participation=e.options.participation,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "settings", "options"),
    [
        ("fedavg", {}, {}),
        ("fedavg", {"participation": 0.3, "local_epochs": 2, "seed": 4}, {}),
        ("fedavg+prbm", {}, {"prbm": True}),
        ("fedavg+mr(kappa=1)", {}, {"kappa": 1.0, "mu": 1.0}),
        ("fedavg+dbe(kappa=1)", {}, {"kappa": 1.0, "mu": 1.0, "prbm": True}),
        ("fedavg+dbe(kappa=5,mu=0.1)", {"participation": 0.3}, {"kappa": 5.0, "mu": 0.1, "prbm": True}),
        ("fedavg+dbe", {"variant": "paper"}, {"kappa": 1.0, "mu": 1.0, "prbm": True, "init_mean": "exact"}),
        (
            "fedavg+dbe(mu=0.3)",
            {"variant": "official", "local_epochs": 2},
            {"kappa": 1.0, "mu": 0.3, "prbm": True, "init_epochs": 2},
        ),
        (
            "fedavg+dbe(mu=0.3,init_mean=debiased)",
            {},
            {"kappa": 1.0, "mu": 0.3, "prbm": True, "init_mean": "debiased"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_matches_oracle(name: str, settings: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """After three rounds: parameters, PRBM vectors and global mean to 1e-5, accuracies to a few samples."""
    e = resolve(name, Config(**{**DIGITS, **settings}))
    outcome, expected = run_outcome(e, tmp_path), run_oracle(e, **options)
    for parameter, other in zip(e.task.model.parameters, expected["server"], strict=True):
        torch.testing.assert_close(outcome.server[parameter], other, rtol=0, atol=1e-5)
    participants = {
        c for t in (1, 2, 3) for c in seeds.sample_cohort(e.task.seed, t, 20, e.options.participation)
    }
    if options.get("prbm"):
        assert outcome.clients.keys() == participants
        for client, state in outcome.clients.items():
            torch.testing.assert_close(state["prbm"], expected["prbm"][client], rtol=0, atol=1e-5)
            assert state["prbm"].abs().max() > 0
    if "kappa" in options:
        torch.testing.assert_close(outcome.server["mean"], expected["z_bar"], rtol=0, atol=1e-5)
    accuracies = [entry["accuracy"]["weighted"] for entry in outcome.rounds if entry["accuracy"]]
    assert accuracies == pytest.approx(
        expected["accuracy"], abs=3 / sum(len(rows) for rows in e.task.split.test)
    )


def test_one_client_equals_centralized_sgd(tmp_path: Path) -> None:
    """The average of one model is that model: the bits of torch.optim.SGD over its data."""
    e = experiment("fedavg", make_dataset([60]), local_epochs=2, trainer="autograd")
    outcome = run_outcome(e, tmp_path)
    task, indices = e.task, e.task.split.train[0]
    with seeds.torch_seeded(seeds.torch_seed(0, "model")):
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for t in (1, 2):
        rng = seeds.make_rng(0, "batches", t, 0)
        for _ in range(2):
            order = torch.from_numpy(indices[rng.permutation(len(indices))])
            for batch in torch.split(order, 10)[: len(indices) // 10]:
                sgd.zero_grad()
                loss = nn.functional.cross_entropy(
                    net(task.dataset.x[batch] * (2 / 16) - 1), task.dataset.y[batch]
                )
                loss.backward()  # type: ignore[no-untyped-call]
                sgd.step()
    for name, parameter in zip(task.model.parameters, net.parameters(), strict=True):
        assert torch.equal(outcome.server[name], parameter.data)


def test_average_is_weighted_by_samples(tmp_path: Path) -> None:
    """One round is the average of the clients' own results, with weights 45/99, 33/99 and 21/99."""
    e = experiment("fedavg", rounds=1)
    trained = [ClientTrainer(e.task, 1, client).fit(e.task.model.parameters).params for client in range(3)]
    outcome = run_outcome(e, tmp_path)
    for name, value in outcome.server.items():
        mean = sum(w * state[name].double() for w, state in zip((45, 33, 21), trained, strict=True)) / 99
        torch.testing.assert_close(value.double(), mean, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ditto", "scaffold", "pfedme"])
def test_weights_option_selects_samples_or_uniform(name: str) -> None:
    """Models of 0 and 1 from 30 and 10 samples: 1/4 by samples, 1/2 uniformly."""
    for weights, mean in (("samples", 0.25), ("uniform", 0.5)):
        e = experiment(f"{name}(weights={weights})")
        server = e.method.server_init(Context(e.task, 1))
        uploads = [
            Upload(i, n, {name: torch.full_like(t, i) for name, t in server.items()})
            for i, n in enumerate((30, 10))
        ]
        new = e.method.aggregate(Context(e.task, 1), server, uploads)
        assert all(torch.allclose(new[n], torch.tensor(mean)) for n in e.task.model.parameters)
    default = "uniform" if name in ("scaffold", "pfedme") else "samples"
    assert hyperparameters(parse_method(name))[name]["weights"] == default
