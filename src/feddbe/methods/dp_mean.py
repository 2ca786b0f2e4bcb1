"""A client's mean with (epsilon, delta)-differential privacy by the analytic Gaussian mechanism.

Two data sets of one client are neighbors if one of its n samples is replaced by another; n is public. Each
sample's representation is clipped to the L2 norm C, and the mean is sent with Gaussian noise:

    r = 1/n sum_j z_j min(1, C / |z_j|) + N(0, sigma^2 I)          sensitivity 2 C / n

The bound holds if z_j depends on sample j alone. It does not hold for features of a model trained on the
client's data, where every sample influences every z_j: such a mean is only known to be inside a ball of
radius C, a sensitivity of 2 C for any n. Therefore the mean is that of theta^0 (`init_mean=start`), which is
equal for all clients and independent of their data.

sigma is the smallest sufficient value (Balle and Wang, "Improving the Gaussian Mechanism for Differential
Privacy", ICML 2018, theorem 8, https://arxiv.org/abs/1805.06530): with a = sensitivity / sigma, the mechanism
is (epsilon, delta)-private exactly if

    Phi(a/2 - epsilon/a) - e^epsilon Phi(-a/2 - epsilon/a) <= delta.

The formula is implemented here because neither library with it can be installed with the other dependencies:
diffprivlib 0.6.6 cannot be imported with scikit-learn 1.9, dp-accounting 0.6.0 requires attrs < 24 and
dm-tree.

docs/privacy.md states the scope of the guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDING = 1e-6
"""Relative increase of sigma, so that the error of the root never weakens the guarantee."""


class PrivacyGuarantee(NamedTuple):
    """Privacy guarantee of the mean that a client sends."""

    epsilon: float
    delta: float
    clip: float
    """C, the largest L2 norm of a representation."""

    def clip_norms(self, z: Tensor) -> Tensor:
        """Return each sample's z in double precision, scaled to the norm C if its norm is larger."""
        flat = z.double().flatten(1)
        norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        clipped: Tensor = flat * (self.clip / norms.clamp(min=self.clip))
        return clipped.view(z.shape)

    def sigma(self, samples: int) -> float:
        """Return the noise's standard deviation on each coordinate of a mean over `samples` samples."""
        return noise_scale(self.epsilon, self.delta) * 2 * self.clip / samples

    def describe(self, sizes: Sequence[int]) -> str:
        """Return the guarantee in words, for clients with these numbers of samples."""
        smallest, largest = self.sigma(max(sizes)), self.sigma(min(sizes))
        return (
            f"the mean that a client sends before round 1 is ({self.epsilon:g}, {self.delta:g})-"
            "differentially private for the replacement of one of its n training samples, n public: norms "
            f"clipped to {self.clip:g}, noise of sigma {self.sigma(1):.4g}/n on each coordinate, "
            f"{smallest:.3g} to {largest:.3g} here; this covers that mean and no other message; the noise is "
            "derived from the run's seed, which simulates the mechanism: in production it must be each "
            "client's secret"
        )


def log_delta(epsilon: float, ratio: float) -> float:
    """Return the logarithm of the smallest delta at this epsilon, with ratio = sensitivity / sigma."""
    from scipy.special import log_ndtr

    plus = float(log_ndtr(ratio / 2 - epsilon / ratio))
    minus = epsilon + float(log_ndtr(-ratio / 2 - epsilon / ratio))
    return plus + math.log(-math.expm1(minus - plus)) if minus < plus else -math.inf


def noise_scale(epsilon: float, delta: float) -> float:
    """Return sigma for a sensitivity of 1; sigma is proportional to the sensitivity."""
    from scipy.optimize import brentq

    def log_delta_excess(log_ratio: float) -> float:
        return max(log_delta(epsilon, math.exp(log_ratio)), -1e300) - math.log(delta)

    low = high = math.log(math.sqrt(2 * epsilon) if epsilon > 1 else 1.0)
    while log_delta_excess(low) > 0:
        low -= 1
    while log_delta_excess(high) < 0:
        high += 1
    root = low if low == high else brentq(log_delta_excess, low, high, xtol=1e-13, rtol=1e-14)
    return math.exp(-root) * (1 + _ROUNDING)
