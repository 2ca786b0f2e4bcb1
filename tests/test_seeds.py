"""Random streams: named by four values, independent of each other, and never changing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddbe import seeds

NAMES = [
    (seed, purpose, round, client)
    for seed, purpose, round, client in itertools.product(
        (0, 1), ("batches", "noise"), (0, 1, 11), (0, 1, 11)
    )
]


def test_every_part_of_the_name_selects_another_stream() -> None:
    """Also (1, 11) and (11, 1): the parts of a name do not run together."""
    drawn = {tuple(seeds.make_rng(*name).randint(0, 2**31, 4).tolist()) for name in NAMES}
    assert len(drawn) == len(NAMES)
    assert len({seeds.torch_seed(*name) for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES[::7])
def test_make_rng_returns_a_stream_at_its_start(name: tuple[int, str, int, int]) -> None:
    first = seeds.make_rng(*name)
    expected = first.random_sample(5)
    first.random_sample(100)
    np.random.RandomState(1).shuffle(np.arange(9))
    assert np.array_equal(seeds.make_rng(*name).random_sample(5), expected)
    assert seeds.torch_seed(*name) == seeds.torch_seed(*name)


def test_round_and_client_default_to_zero() -> None:
    assert seeds.torch_seed(4, "model") == seeds.torch_seed(4, "model", 0, 0)
    assert seeds.make_rng(4, "model").randint(2**31) == seeds.make_rng(4, "model", 0, 0).randint(2**31)


@pytest.mark.parametrize("name", NAMES[::7])
def test_sample_permutations_are_the_first_of_the_stream(name: tuple[int, str, int, int]) -> None:
    rng = seeds.make_rng(*name)
    expected = [rng.permutation(9).tolist() for _ in range(3)]
    assert [permutation.tolist() for permutation in seeds.sample_permutations(3, 9, *name)] == expected


def test_streams_have_not_changed() -> None:
    """RandomState seeded with the eight little-endian words of SHA-256 of '0/batches/3/7'."""
    rng = seeds.make_rng(0, "batches", 3, 7)
    assert rng.permutation(10).tolist() == [4, 7, 5, 2, 6, 9, 3, 8, 0, 1]
    assert rng.randint(0, 1000, 3).tolist() == [9, 378, 961]
    assert seeds.torch_seed(0, "batches", 3, 7) == 7805848622593693483


@given(st.integers(0, 2**40), st.text(max_size=5), st.integers(0, 10**6), st.integers(0, 10**6))
def test_torch_seed_is_valid_for_torch(seed: int, purpose: str, round_: int, client: int) -> None:
    torch_seed = seeds.torch_seed(seed, purpose, round_, client)
    assert 0 <= torch_seed < 2**63
    assert torch.Generator().manual_seed(torch_seed).initial_seed() == torch_seed


# --- torch's own generator


def test_torch_seeded_restores_the_generator() -> None:
    generator = torch.Generator().manual_seed(5)
    expected = torch.rand(4, generator=generator)
    before = torch.get_rng_state()
    with seeds.torch_seeded(5):
        assert torch.equal(torch.rand(4), expected)
    assert torch.equal(torch.get_rng_state(), before)
    with seeds.torch_seeded(6):
        assert not torch.equal(torch.rand(4), expected)


def test_torch_seeded_restores_the_generator_after_an_error() -> None:
    before = torch.get_rng_state()

    def raise_inside() -> None:
        with seeds.torch_seeded(5):
            torch.rand(4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raise_inside()
    assert torch.equal(torch.get_rng_state(), before)


def test_nested_torch_seeded() -> None:
    with seeds.torch_seeded(5):
        plain = torch.rand(2).tolist() + torch.rand(2).tolist()
    with seeds.torch_seeded(5):
        first = torch.rand(2).tolist()
        with seeds.torch_seeded(6):
            torch.rand(7)
        assert first + torch.rand(2).tolist() == plain


# --- cohorts


@pytest.mark.parametrize(
    ("clients", "participation", "size"),
    [
        (20, 1.0, 20), (20, 0.5, 10), (100, 0.5, 50), (20, 0.1, 2), (3, 0.01, 1), (1, 0.5, 1),
        (5, 0.5, 3), (25, 0.1, 3), (20, 0.97, 19), (20, 0.98, 20), (10, 0.14, 1),
    ],
)  # fmt: skip
def test_cohort_size_is_rounded_and_at_least_one(clients: int, participation: float, size: int) -> None:
    """The nearest whole number to participation * clients, half is up, at least 1: 2.5 -> 3, 0.03 -> 1."""
    cohort = seeds.sample_cohort(0, 1, clients, participation)
    assert len(cohort) == size
    assert cohort == sorted(set(cohort))
    assert all(type(client) is int and 0 <= client < clients for client in cohort)


def test_cohorts_depend_on_seed_and_round_only() -> None:
    expected = seeds.sample_cohort(3, 5, 40, 0.25)
    seeds.make_rng(3, "cohort", 5).permutation(40)
    assert seeds.sample_cohort(3, 5, 40, 0.25) == expected
    assert seeds.sample_cohort(3, 6, 40, 0.25) != expected
    assert seeds.sample_cohort(4, 5, 40, 0.25) != expected


def test_clients_are_sampled_equally_often() -> None:
    """400 rounds of 5 out of 20: mean 100, deviation sqrt(400 1/4 3/4) = 8.7; five of these are 43."""
    times = np.bincount([c for t in range(400) for c in seeds.sample_cohort(0, t, 20, 0.25)], minlength=20)
    assert times.sum() == 2000
    assert np.abs(times - 100).max() < 43
    assert len(set(times.tolist())) > 3, "the counts of a rotation would be equal"


def test_cohorts_have_not_changed() -> None:
    """The first ten of a permutation of 20 from the stream (0, cohort, 1, 0), in id order."""
    assert seeds.sample_cohort(0, 1, 20, 0.5) == [0, 4, 5, 6, 7, 8, 10, 11, 16, 18]


# --- samples of clients


def test_sample_of_few_clients_is_the_head_of_a_permutation() -> None:
    """Published runs have these cohorts."""
    for clients in (7, seeds.MAX_PERMUTED_CLIENTS):
        expected = sorted(seeds.make_rng(0, "cohort", 3).permutation(clients)[:5].tolist())
        assert seeds.sample_clients(seeds.make_rng(0, "cohort", 3), clients, 5) == expected


def test_sample_of_many_clients_has_no_duplicates() -> None:
    rng, clients = seeds.make_rng(0, "x"), seeds.MAX_PERMUTED_CLIENTS + 1
    few, many = seeds.sample_clients(rng, clients, 1000), seeds.sample_clients(rng, clients, clients // 2)
    for sample in (few, many):
        assert sample == sorted({*sample})
        assert 0 <= sample[0] < sample[-1] < clients
        assert abs(np.mean(sample) / clients - 0.5) < 4 * 0.29 / len(sample) ** 0.5
    assert (len(few), len(many)) == (1000, clients // 2)
    assert len(seeds.sample_clients(rng, clients, clients + 1)) == clients
