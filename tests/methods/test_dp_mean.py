"""The mean that is sent with a guarantee: sigma, clipping, sensitivity, what is stated and refused."""

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
from tests.federation import experiment, make_dataset, run_outcome

ASKED = "init_mean=start,epsilon=1,delta=1e-5,clip=2"


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
def test_sigma_is_that_of_google_s_library(epsilon: float, delta: float, sigma: float) -> None:
    """What `dp_accounting.get_sigma_gaussian` of version 0.6.0 returns."""
    assert noise_scale(epsilon, delta) == pytest.approx(sigma, rel=2e-6)


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-3, 1e4), st.floats(1e-30, 0.5))
def test_sigma_keeps_the_promise_and_is_hardly_larger_than_it_must_be(epsilon: float, delta: float) -> None:
    sigma = noise_scale(epsilon, delta)
    assert exact_delta(epsilon, sigma) <= delta
    assert exact_delta(epsilon, sigma * (1 - 3e-6)) > delta


def test_delta_at_no_epsilon_is_the_total_variation_of_two_gaussians() -> None:
    """2 Phi(a/2) - 1 in the limit epsilon -> 0."""
    assert math.exp(log_delta(1e-15, 0.7)) == pytest.approx(math.erf(0.35 / math.sqrt(2)), rel=1e-9)


def test_the_classical_sigma_is_larger_where_it_holds() -> None:
    """sqrt(2 log(1.25 / delta)) / epsilon, for epsilon < 1."""
    for epsilon in (0.1, 0.5, 0.99):
        assert noise_scale(epsilon, 1e-5) < math.sqrt(2 * math.log(1.25e5)) / epsilon


def test_clipping_shortens_what_is_longer_and_leaves_the_rest() -> None:
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [0.0, -2.0]])
    expected = torch.tensor([[1.2, 1.6], [0.3, 0.4], [0.0, 0.0], [0.0, -2.0]])
    found = PrivacyGuarantee(1.0, 1e-5, 2.0).clip_norms(z)
    torch.testing.assert_close(found, expected.double(), rtol=1e-7, atol=1e-8)
    deep = PrivacyGuarantee(1.0, 1e-5, 2.0).clip_norms(torch.full((3, 2, 5, 5), 7.0))
    torch.testing.assert_close(deep.flatten(1).norm(dim=1), torch.full((3,), 2.0, dtype=torch.float64))


def sent(name: str, rows: list[int] | None = None) -> torch.Tensor:
    """The mean that client 2 sends, holding these rows of the data."""
    e = experiment(name)
    local = ClientTrainer(e.task, 0, 2)
    if rows is not None:
        local.rows["train"] = np.array(rows)
    up, _ = e.method.client_setup(Context(e.task, 0), local, dict(e.task.model.parameters), {})
    return up["mean"]


def test_no_replacement_of_a_sample_moves_the_mean_further_than_the_sensitivity() -> None:
    """All replacements of one of three samples by one of 40 others, at an epsilon that leaves no noise. The
    clip bites for all, and the bound is not idle: some replacement comes to a third of it."""
    name, rows = "fedavg+mr(init_mean=start,epsilon=1e6,delta=0.5,clip=0.5)", [100, 101, 102]
    still = sent(name, rows)
    moved = []
    for place in range(3):
        for other in range(40):
            now = list(rows)
            now[place] = other
            moved.append(float((sent(name, now) - still).norm()))
    bound = 2 * 0.5 / 3
    assert max(moved) <= bound + 20 * PrivacyGuarantee(1e6, 0.5, 0.5).sigma(3)
    assert max(moved) > bound / 3


def test_without_noise_it_is_the_mean_of_theta_zero_clipped() -> None:
    e = experiment("fedavg+mr")
    x = e.task.dataset.inputs(e.task.dataset.x[torch.from_numpy(e.task.split.train[2])])
    with torch.no_grad():
        z = e.task.model.forward(e.task.model.parameters, x).z_g
    assert float(z.norm(dim=1).min()) > 0.5
    short = 0.5 * torch.nn.functional.normalize(z, dim=1)
    torch.testing.assert_close(
        sent("fedavg+mr(init_mean=start,epsilon=1e6,delta=0.5,clip=0.5)"), short.mean(0), rtol=0, atol=1e-3
    )
    torch.testing.assert_close(sent("fedavg+mr(init_mean=start)"), z.mean(0))
    far = "fedavg+mr(init_mean=start,epsilon=1e6,delta=0.5,clip=100)"
    torch.testing.assert_close(sent(far), z.mean(0), rtol=0, atol=0.05)


def test_the_noise_has_the_sigma_that_is_stated() -> None:
    """A client of 21 samples, C = 2: over many coordinates the noise has the standard deviation of 2 C / n
    times sigma(1, 1e-5) = 3.7306."""
    e = experiment(f"fedavg+mr({ASKED})")
    clean = sent("fedavg+mr(init_mean=start,epsilon=1e6,delta=0.5,clip=2)")
    noise = (sent(f"fedavg+mr({ASKED})") - clean).double()
    sigma = 3.7306 * 4 / e.task.samples[2]
    assert float(noise.square().mean().sqrt()) == pytest.approx(sigma, rel=3 / math.sqrt(2 * noise.numel()))
    assert f"sigma {3.7306 * 4:.4g}/n" in e.notes[0]
    assert f"{3.7306 * 4 / max(e.task.samples):.3g} to {sigma:.3g} here" in e.notes[0]


def test_the_mean_does_not_depend_on_training(tmp_path: Path) -> None:
    """The server's mean is the same at every learning rate: no sample is in it through the model."""
    name = f"fedavg+mr({ASKED})"
    means = [run_outcome(experiment(name, lr=lr), tmp_path / str(lr)).server["mean"] for lr in (0.01, 0.3)]
    assert torch.equal(*means)


def test_what_is_stated_goes_with_the_run() -> None:
    remarks = experiment(f"fedavg+dbe({ASKED})", make_dataset([40, 44, 28, 36]), new_clients=1).notes
    assert len(remarks) == 1
    for text in ("(1, 1e-05)-differentially private", "clipped to 2", "no other message", "simulates"):
        assert text in remarks[0]
    assert experiment("fedavg+dbe").notes == []


REFUSED = {
    "epsilon=1": "a guarantee needs epsilon, delta and clip; delta is missing",
    "clip=1,init_mean=start": "a guarantee needs epsilon, delta and clip; epsilon is missing",
    "epsilon=1,delta=1e-5,clip=1": "init_mean = momentum; a guarantee needs init_mean=start",
    "epsilon=1,delta=1e-5,clip=1,init_mean=exact": "init_mean = exact; a guarantee needs init_mean=start",
    f"{ASKED},s=0.1": "a guarantee has its own noise; omit s and q",
    f"{ASKED},q=0.1": "a guarantee has its own noise; omit s and q",
    "init_mean=start,init_keep_model=true": "init_keep_model=true needs the training epoch that start omits",
    "epsilon=0,delta=1e-5,clip=1": "mr epsilon = 0; allowed: a number > 0",
    "epsilon=1,delta=1,clip=1": "mr delta = 1; allowed: a number > 0 and <= 0.5",
    "epsilon=1,delta=1e-5,clip=-1": "mr clip = -1; allowed: a number > 0",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_has_no_clean_sensitivity_is_refused_in_one_line(options: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        parse_method(f"fedavg+mr({options})")
    assert REFUSED[options] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_with_a_guarantee_is_another_one() -> None:
    e = experiment("fedavg+mr")
    assert e.config["method_options"]["mr"]["epsilon"] is None
    assert experiment("fedavg+mr(epsilon=none)").config_hash == e.config_hash
    hashes = {experiment(f"fedavg+mr({o})").config_hash for o in ("init_mean=start", ASKED, f"{ASKED}0")}
    assert len(hashes | {e.config_hash}) == 4
