"""Names of methods without their options."""

from __future__ import annotations

from feddbe.results.seeds import strip_options


def test_options_of_every_part_are_stripped() -> None:
    assert strip_options("fedprox(mu=1)+dbe(kappa=5,mu=0.1)") == "fedprox+dbe"
    assert strip_options("local") == "local"
