"""Means with a privacy guarantee: sigma, clipping, sensitivity, notes and errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp

from feddbe.errors import InvalidInputError
from feddbe.methods.dp_mean import PrivacyGuarantee, log_delta, noise_scale
from feddbe.methods.registry import parse_method
from feddbe.training.task import Context
from feddbe.training.trainer import ClientTrainer
from tests.small_runs import experiment, make_dataset, run_outcome

GUARANTEE = "init_mean=start,epsilon=1,delta=1e-5,clip=2"


def exact_delta(epsilon: float, sigma: float) -> Any:
    """Balle and Wang's formula at a sensitivity of 1, with 60 digits."""
    with mp.workdps(60):
        a, e = 1 / mp.mpf(sigma), mp.mpf(epsilon)
        return mp.ncdf(a / 2 - e / a) - mp.exp(e) * mp.ncdf(-a / 2 - e / a)


@pytest.mark.parametrize(
    ("epsilon", "delta", "sigma"),
    [
        (0.1, 1e-5, 30.74956613),
        (1.0, 1e-5, 3.730631635),
        (1.0, 1e-3, 2.574657019),
        (2.0, 1e-12, 3.362672510),
        (10.0, 1e-5, 0.4998886197),
        (100.0, 0.1, 0.07700940212),
    ],
)
def test_sigma_equals_dp_accounting(epsilon: float, delta: float, sigma: float) -> None:
    """Values of `dp_accounting.get_sigma_gaussian`, version 0.6.0."""
    assert noise_scale(epsilon, delta) == pytest.approx(sigma, rel=2e-6)


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-3, 1e4), st.floats(1e-30, 0.5))
def test_sigma_is_sufficient_and_minimal(epsilon: float, delta: float) -> None:
    sigma = noise_scale(epsilon, delta)
    assert exact_delta(epsilon, sigma) <= delta
    assert exact_delta(epsilon, sigma * (1 - 3e-6)) > delta


def test_delta_at_epsilon_zero_is_total_variation() -> None:
    """2 Phi(a/2) - 1 in the limit epsilon -> 0."""
    assert math.exp(log_delta(1e-15, 0.7)) == pytest.approx(math.erf(0.35 / math.sqrt(2)), rel=1e-9)


def test_classical_sigma_is_larger() -> None:
    """sqrt(2 log(1.25 / delta)) / epsilon, for epsilon < 1."""
    for epsilon in (0.1, 0.5, 0.99):
        assert noise_scale(epsilon, 1e-5) < math.sqrt(2 * math.log(1.25e5)) / epsilon


def test_clip_norms_scales_only_longer_vectors() -> None:
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [0.0, -2.0]])
    expected = torch.tensor([[1.2, 1.6], [0.3, 0.4], [0.0, 0.0], [0.0, -2.0]])
    clipped = PrivacyGuarantee(1.0, 1e-5, 2.0).clip_norms(z)
    torch.testing.assert_close(clipped, expected.double(), rtol=1e-7, atol=1e-8)
    deep = PrivacyGuarantee(1.0, 1e-5, 2.0).clip_norms(torch.full((3, 2, 5, 5), 7.0))
    torch.testing.assert_close(deep.flatten(1).norm(dim=1), torch.full((3,), 2.0, dtype=torch.float64))


def upload_mean(name: str, indices: list[int] | None = None) -> torch.Tensor:
    """Return the mean that client 2 uploads, optionally with other training samples."""
    e = experiment(name)
    trainer = ClientTrainer(e.task, 0, 2)
    if indices is not None:
        trainer.rows["train"] = np.array(indices)
    up, _ = e.method.client_setup(Context(e.task, 0), trainer, dict(e.task.model.parameters), {})
    return up["mean"]


def test_replacing_a_sample_changes_the_mean_by_at_most_the_sensitivity() -> None:
    """All replacements of one of three samples by one of 40 others, at an epsilon without visible noise.
    All samples are clipped, and some replacement reaches a third of the bound."""
    name, indices = "fedavg+mr(init_mean=start,epsilon=1e6,delta=0.5,clip=0.5)", [100, 101, 102]
    mean = upload_mean(name, indices)
    distances = []
    for position in range(3):
        for other in range(40):
            replaced = list(indices)
            replaced[position] = other
            distances.append(float((upload_mean(name, replaced) - mean).norm()))
    bound = 2 * 0.5 / 3
    assert max(distances) <= bound + 20 * PrivacyGuarantee(1e6, 0.5, 0.5).sigma(3)
    assert max(distances) > bound / 3


def test_mean_without_noise_is_the_clipped_mean_at_theta_zero() -> None:
    e = experiment("fedavg+mr")
    x = e.task.dataset.inputs(e.task.dataset.x[torch.from_numpy(e.task.split.train[2])])
    with torch.no_grad():
        z = e.task.model.forward(e.task.model.parameters, x).z_g
    assert float(z.norm(dim=1).min()) > 0.5
    clipped = 0.5 * torch.nn.functional.normalize(z, dim=1)
    torch.testing.assert_close(
        upload_mean("fedavg+mr(init_mean=start,epsilon=1e6,delta=0.5,clip=0.5)"),
        clipped.mean(0),
        rtol=0,
        atol=1e-3,
    )
    torch.testing.assert_close(upload_mean("fedavg+mr(init_mean=start)"), z.mean(0))
    large_clip = "fedavg+mr(init_mean=start,epsilon=1e6,delta=0.5,clip=100)"
    torch.testing.assert_close(upload_mean(large_clip), z.mean(0), rtol=0, atol=0.05)


def test_noise_has_the_stated_sigma() -> None:
    """A client of 21 samples, C = 2: over many coordinates the noise has the standard deviation of 2 C / n
    times sigma(1, 1e-5) = 3.7306."""
    e = experiment(f"fedavg+mr({GUARANTEE})")
    clean = upload_mean("fedavg+mr(init_mean=start,epsilon=1e6,delta=0.5,clip=2)")
    noise = (upload_mean(f"fedavg+mr({GUARANTEE})") - clean).double()
    sigma = 3.7306 * 4 / e.task.samples[2]
    assert float(noise.square().mean().sqrt()) == pytest.approx(sigma, rel=3 / math.sqrt(2 * noise.numel()))
    assert f"sigma {3.7306 * 4:.4g}/n" in e.notes[0]
    assert f"{3.7306 * 4 / max(e.task.samples):.3g} to {sigma:.3g} here" in e.notes[0]


def test_mean_is_independent_of_training(tmp_path: Path) -> None:
    """The server's mean is equal at every learning rate: no sample influences it through the model."""
    name = f"fedavg+mr({GUARANTEE})"
    means = [run_outcome(experiment(name, lr=lr), tmp_path / str(lr)).server["mean"] for lr in (0.01, 0.3)]
    assert torch.equal(*means)


def test_guarantee_is_in_the_notes_of_the_run() -> None:
    notes = experiment(f"fedavg+dbe({GUARANTEE})", make_dataset([40, 44, 28, 36]), new_clients=1).notes
    assert len(notes) == 1
    for text in ("(1, 1e-05)-differentially private", "clipped to 2", "no other message", "simulates"):
        assert text in notes[0]
    assert experiment("fedavg+dbe").notes == []


INVALID_OPTIONS = {
    "epsilon=1": "a guarantee needs epsilon, delta and clip; delta is missing",
    "clip=1,init_mean=start": "a guarantee needs epsilon, delta and clip; epsilon is missing",
    "epsilon=1,delta=1e-5,clip=1": "init_mean = momentum; a guarantee needs init_mean=start",
    "epsilon=1,delta=1e-5,clip=1,init_mean=exact": "init_mean = exact; a guarantee needs init_mean=start",
    f"{GUARANTEE},s=0.1": "a guarantee has its own noise; omit s and q",
    f"{GUARANTEE},q=0.1": "a guarantee has its own noise; omit s and q",
    "init_mean=start,init_keep_model=true": "init_keep_model=true needs the training epoch that start omits",
    "epsilon=0,delta=1e-5,clip=1": "mr epsilon = 0; allowed: a number > 0",
    "epsilon=1,delta=1,clip=1": "mr delta = 1; allowed: a number > 0 and <= 0.5",
    "epsilon=1,delta=1e-5,clip=-1": "mr clip = -1; allowed: a number > 0",
}


@pytest.mark.parametrize("options", INVALID_OPTIONS)
def test_invalid_guarantee_raises_one_line_error(options: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        parse_method(f"fedavg+mr({options})")
    assert INVALID_OPTIONS[options] in str(error.value)
    assert "\n" not in str(error.value)


def test_guarantee_identifies_a_run() -> None:
    e = experiment("fedavg+mr")
    assert e.config["method_options"]["mr"]["epsilon"] is None
    assert experiment("fedavg+mr(epsilon=none)").config_hash == e.config_hash
    hashes = {
        experiment(f"fedavg+mr({o})").config_hash for o in ("init_mean=start", GUARANTEE, f"{GUARANTEE}0")
    }
    assert len(hashes | {e.config_hash}) == 4
