"""PRBM and MR: closed forms and exact special cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddbe.methods.addons import MR, PRBM
from feddbe.methods.base import Upload
from feddbe.simulation.loop import setup_participants
from feddbe.state import State
from feddbe.training.loss_terms import Batch, MeanRegularizer, TermContext
from feddbe.training.task import Context, Task
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import are_identical, experiment, run_outcome


@pytest.mark.parametrize(
    "name",
    ["fedavg+mr(kappa=0)", "fedavg+prbm(prbm_lr=0)", "fedavg+dbe(kappa=0,prbm_lr=0)", "fedavg+mr(mu=0)"],
)
def test_disabled_addon_equals_fedavg_bit_for_bit(name: str, tmp_path: Path) -> None:
    """kappa = 0 adds a zero gradient, mu = 0 a constant loss, and PRBM frozen at 0 does not change z."""
    plain = run_outcome(experiment("fedavg", rounds=3), tmp_path / "plain")
    added = run_outcome(experiment(name, rounds=3), tmp_path / "added")
    added.server.pop("mean", None)
    assert are_identical(plain.server, added.server)
    assert all(not state["prbm"].any() for state in added.clients.values())


def test_dbe_equals_prbm_plus_mr(tmp_path: Path) -> None:
    dbe = run_outcome(experiment("fedavg+dbe(kappa=2,mu=0.5)"), tmp_path / "dbe")
    separate = run_outcome(experiment("fedavg+prbm+mr(kappa=2,mu=0.5)"), tmp_path / "separate")
    assert are_identical(dbe.server, separate.server)
    assert all(are_identical(dbe.clients[c], separate.clients[c]) for c in dbe.clients)


@given(
    kappa=st.floats(0.01, 100),
    mu=st.floats(0, 1),
    batch=st.integers(1, 12),
    size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_mr_gradient_matches_closed_form(kappa: float, mu: float, batch: int, size: int, seed: int) -> None:
    """d loss / d f(x_b) = kappa mu / (K B) (r - zbar) for every sample b, with the new running mean r."""
    rng = torch.Generator().manual_seed(seed)
    z, before, mean = (torch.randn(s, size, generator=rng).double() for s in (batch, 1, 1))
    z.requires_grad_()
    regularizer = MeanRegularizer(mu, kappa / 2)
    state = {"r": before[0], "weight": torch.tensor(0.5).double()}
    features = Batch(z, z, z, z, z)
    loss, after = regularizer(TermContext(None, {}, {"mean": mean[0]}, features, 0), state)  # type: ignore[arg-type]
    assert loss is not None
    r = (1 - mu) * before[0] + mu * z.detach().mean(0)
    torch.testing.assert_close(after["r"], r)
    torch.testing.assert_close(loss.detach(), kappa * 0.5 * ((r - mean[0]) ** 2).mean())
    (gradient,) = torch.autograd.grad(loss, z)
    torch.testing.assert_close(gradient, (kappa * mu / (size * batch) * (r - mean[0])).expand(batch, size))
    torch.testing.assert_close(
        gradient, (regularizer.gradient_factor(size, batch) * (r - mean[0])).expand(batch, size)
    )
    assert not after["r"].requires_grad


def test_bias_correction_divides_by_total_weight() -> None:
    """mu = 0.25, features always 1: r = 1 - 0.75^b after b batches, so r / (1 - 0.75^b) = 1."""
    running_mean = MeanRegularizer(0.25)
    state = running_mean.init_carry((3,))
    for b in range(1, 6):
        _, state = running_mean(TermContext(None, {}, {}, Batch(*[torch.ones(2, 3)] * 5), 0), state)  # type: ignore[arg-type]
        torch.testing.assert_close(state["r"], torch.full((3,), 1 - 0.75**b))
        torch.testing.assert_close(running_mean.mean_of(state), torch.ones(3))
        assert float(state["weight"]) == pytest.approx(running_mean.total_weights(0.0, b)[-1])


def test_setup_means_match_definition() -> None:
    """`exact` is the mean over all data after training; `momentum` at mu = 1 that of the last batch."""
    e = experiment("fedavg+mr")
    task, theta = e.task, e.task.model.parameters
    trained = ClientTrainer(task, 0, 1).fit(theta).params
    indices = torch.from_numpy(task.split.train[1])
    inputs = task.dataset.inputs(task.dataset.x[indices])
    exact = MR(init_mean="exact").client_setup(Context(task, 0), ClientTrainer(task, 0, 1), theta)["mean"]
    torch.testing.assert_close(exact, task.model.forward(trained, inputs).z_g.mean(0).detach())

    rng = ClientTrainer(task, 0, 1).rng("batches")
    order = rng.permutation(len(indices))[:30]  # 33 samples: three batches of ten
    before_last = _run_sgd(e.task, theta, indices[order[:20]])
    last = task.dataset.inputs(task.dataset.x[indices[order[20:]]])
    momentum = MR(mu=1.0).client_setup(Context(task, 0), ClientTrainer(task, 0, 1), theta)["mean"]
    torch.testing.assert_close(momentum, task.model.forward(before_last, last).z_g.mean(0).detach())


def _run_sgd(task: Task, params: State, indices: torch.Tensor) -> State:
    """Return the parameters after plain SGD on these samples in batches of ten."""
    work = {name: p.clone().requires_grad_() for name, p in params.items()}
    for batch in torch.split(indices, 10):
        out = task.model.forward(work, task.dataset.inputs(task.dataset.x[batch]))
        loss = torch.nn.functional.cross_entropy(out.logits, task.dataset.y[batch])
        grads = torch.autograd.grad(loss, list(work.values()))
        work = {
            n: (p - 0.1 * g).detach().requires_grad_() for (n, p), g in zip(work.items(), grads, strict=True)
        }
    return work


def test_noise_on_uploaded_mean() -> None:
    """(1 - q) r + e with e ~ N(0, s^2), not scaled by q: q = 1 is pure noise, s = 0 a share of r."""
    task = experiment("fedavg+mr").task
    theta, ctx = task.model.parameters, Context(task, 0)
    plain = MR().client_setup(ctx, ClientTrainer(task, 0, 0), theta)["mean"]
    share = MR(q=0.25).client_setup(ctx, ClientTrainer(task, 0, 0), theta)["mean"]
    torch.testing.assert_close(share, 0.75 * plain)
    noise = MR(q=1.0, s=2.0).client_setup(ctx, ClientTrainer(task, 0, 0), theta)["mean"]
    repeated = MR(q=1.0, s=2.0).client_setup(ctx, ClientTrainer(task, 0, 0), theta)["mean"]
    other = MR(q=1.0, s=2.0).client_setup(ctx, ClientTrainer(task, 0, 1), theta)["mean"]
    assert torch.equal(noise, repeated)
    assert not torch.equal(noise, other)
    assert 1.4 < noise.std() < 2.6  # 64 coordinates: the standard error is 0.18
    both = MR(q=0.25, s=2.0).client_setup(ctx, ClientTrainer(task, 0, 0), theta)["mean"]
    torch.testing.assert_close(both, 0.75 * plain + noise)


def test_setup_discards_models_unless_init_keep_model(tmp_path: Path) -> None:
    discarded = run_outcome(experiment("fedavg+mr", rounds=0), tmp_path / "discarded")
    kept = run_outcome(experiment("fedavg+mr(init_keep_model=true)", rounds=0), tmp_path / "kept")
    start = experiment("fedavg").task.model.parameters
    assert are_identical({n: t for n, t in discarded.server.items() if n != "mean"}, start)
    assert torch.equal(discarded.server["mean"], kept.server["mean"])
    model = experiment("fedavg+mr").task.model
    one_round = {n: t for n, t in kept.server.items() if n in model.parameters}
    assert not are_identical(one_round, start)


def test_setup_mean_of_sampled_clients(tmp_path: Path) -> None:
    """The mean is over the sampled clients; if the sample has all clients, it is the default mean."""
    default, all_clients = (
        run_outcome(experiment(f"fedavg+mr{options}", rounds=0), tmp_path / (options or "all"))
        for options in ("", "(init_clients=3)")
    )
    assert are_identical(default.server, all_clients.server)
    e = experiment("fedavg+mr(init_clients=2)", rounds=0)
    participants = setup_participants(e.method, 0, 3)
    uploads = []
    for client in participants:
        trainer = ClientTrainer(e.task, 0, client)
        upload, _ = e.method.client_setup(Context(e.task, 0), trainer, e.task.model.parameters, {})
        uploads.append(Upload(client, e.task.samples[client], upload))
    server = run_outcome(e, tmp_path / "some").server
    assert len(participants) == 2
    assert are_identical(server, e.method.server_setup(Context(e.task, 0), e.task.model.parameters, uploads))
    assert not torch.equal(server["mean"], default.server["mean"])
    assert e.config_hash != experiment("fedavg+mr", rounds=0).config_hash


def test_prbm_step_is_the_gradient_of_the_representation(tmp_path: Path) -> None:
    """One step: p = -lr sum_b dCE/dz_b (the sum, since p is added to every sample's z)."""
    task = experiment("fedavg+prbm", batch_size=45, rounds=1).task
    ran = run_outcome(experiment("fedavg+prbm", batch_size=45, rounds=1), tmp_path)
    indices = torch.from_numpy(task.split.train[0])
    inputs, y = task.dataset.inputs(task.dataset.x[indices]), task.dataset.y[indices]
    z = task.model.forward(task.model.parameters, inputs).z_g.detach().requires_grad_()
    logits = task.model.classify(task.model.parameters, z)
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), z)
    torch.testing.assert_close(ran.clients[0]["prbm"], -0.1 * gradient.sum(0), rtol=1e-4, atol=1e-6)


def test_constants_are_counted_once_in_bytes(tmp_path: Path) -> None:
    """4810 parameters, K = 64: the setup sends 4810 down, 64 up; the mean is sent in the first round only."""
    ran = run_outcome(experiment("fedavg+dbe"), tmp_path)
    model, mean = 4 * 4810, 4 * 64
    assert [(e["bytes_down"], e["bytes_up"]) for e in ran.rounds] == [
        (3 * model, 3 * mean),
        (3 * (model + mean), 3 * model),
        (3 * model, 3 * model),
    ]


def test_prbm_vector_has_the_shape_of_the_cut() -> None:
    for cut, shape in (("conv1", (16, 4, 4)), ("conv2", (32, 2, 2)), ("fc1", (64,))):
        task = experiment("fedavg", model="cnn_small", cut=cut).task
        assert PRBM().client_init(Context(task, 0))["prbm"].shape == shape
