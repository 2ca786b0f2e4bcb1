"""Tests of splits: published splits bit by bit, and properties of all splits."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddbe.data.builtin import digits
from feddbe.data.builtin.images import DATASETS
from feddbe.data.split import Split, load_split, partition
from feddbe.errors import InvalidInputError

Labels = npt.NDArray[np.int64]

needs_fmnist = pytest.mark.skipif(
    DATASETS["fmnist"].find(None) is None and not os.environ.get("CI"),
    reason="Fashion-MNIST is not on this machine (Debian: dataset-fashion-mnist)",
)


def part_sizes(split: Split) -> list[int]:
    assert split.parts is not None
    return [len(rows) for rows in split.parts]


def is_same_split(a: Split, b: Split) -> bool:
    return all(
        len(x) == len(y) and all(np.array_equal(r, s) for r, s in zip(x, y, strict=True))
        for x, y in ((a.train, b.train), (a.test, b.test))
    )


@pytest.fixture(scope="module")
def fmnist_labels() -> Labels:
    return DATASETS["fmnist"].load(None).y.numpy()


# --- check values of the published splits -------------------------------------------------------


@needs_fmnist
def test_fmnist_dirichlet_is_the_published_split(fmnist_labels: Labels) -> None:
    split = partition(fmnist_labels, "dirichlet:0.1", 20)
    # fmt: off
    assert part_sizes(split) == [
        82, 320, 875, 2603, 1455, 5473, 4385, 4461, 5560, 3556,
        6170, 6803, 8551, 626, 1328, 195, 2937, 4832, 5090, 4698,
    ]
    assert [len(rows) for rows in split.train] == [
        61, 240, 656, 1952, 1091, 4104, 3288, 3345, 4170, 2667,
        4627, 5102, 6413, 469, 996, 146, 2202, 3624, 3817, 3523,
    ]
    # fmt: on
    assert split.parts is not None
    assert split.parts[0][:5].tolist() == [23539, 43961, 17431, 49711, 42106]
    assert split.train[12][:5].tolist() == [6226, 49236, 53527, 53501, 23182]
    assert split.test[19][:5].tolist() == [50402, 11989, 51161, 54408, 65180]
    assert split.index_sha256() == {
        "parts": "ea9ffc349fd19d6f703d58156ea2d89db31ec0afa11866961d26219f19c9e54e",
        "train": "51072ff80e59caa65a6806f9f097a70d2c76ed65b96cb41655dc8008b4939a53",
        "test": "a31f18fbaa474d5769aef75843f6fe94221c7cdfc38a3b3a06624ffaea9ad898",
    }


@needs_fmnist
def test_fmnist_pathological_is_the_published_split(fmnist_labels: Labels) -> None:
    split = partition(fmnist_labels, "pathological:2", 20)
    # fmt: off
    assert part_sizes(split) == [
        2316, 1300, 2293, 8091, 2059, 1002, 1893, 9046, 2933, 1909,
        2564, 6594, 2332, 1925, 1000, 8743, 1913, 1683, 3116, 7288,
    ]
    # fmt: on
    assert split.index_sha256() == {
        "parts": "e91739db9ad9b835643508aef2ac40c680e98088f46da8018649b91dfc5313be",
        "train": "69d0247a3136522d2c58b974c3264e6721be5e6a2913fb9fd76e8f6995278ab9",
        "test": "4ce4126ae09e3bce04df3837dec88584bf5139207663dd7059014ef52bc372fb",
    }


def test_digits_dirichlet_takes_427_draws_from_one_stream() -> None:
    split = partition(digits.load().y.numpy(), "dirichlet:0.1", 20)
    # fmt: off
    assert part_sizes(split) == [
        64, 75, 115, 40, 81, 69, 153, 239, 59, 81, 54, 46, 75, 63, 76, 82, 45, 163, 150, 67,
    ]
    # fmt: on
    assert split.index_sha256() == {
        "parts": "9c3322049d9cc3b0ff7eafd851009c77eebeb267e984b5b100e05481870b9995",
        "train": "fc64f7386750e58b651482901f6371da03f86593279935278b802e1caee3cc0c",
        "test": "e576b837c3cedac44c0f6e47d7d0ed6eb236f1e42e17e433b6fdd604293df9c7",
    }


# fmt: off
SIZES = {
    "cifar100": (100, 600, "0.1", [
        3020, 3053, 2753, 3029, 2640, 2877, 3120, 3047, 2807, 3211,
        2761, 3359, 3290, 2971, 3301, 3132, 3345, 2642, 3035, 2607,
    ]),
    "tiny_imagenet": (200, 500, "0.1", [
        5092, 3261, 5001, 5006, 5162, 5323, 5067, 4823, 5144, 5210,
        5465, 4638, 5132, 5154, 5099, 5450, 4596, 5079, 5074, 5224,
    ]),
    "ag_news": (4, 31900, "1", [
        7196, 6681, 6817, 7904, 7026, 7766, 11591, 7399, 2726, 5970,
        7492, 4225, 4385, 10009, 3043, 4789, 4093, 7968, 6956, 3564,
    ]),
}
# fmt: on


@pytest.mark.parametrize("name", SIZES)
def test_dirichlet_sizes_depend_on_class_counts_only(name: str) -> None:
    classes, samples_per_class, beta, expected = SIZES[name]
    assert (
        part_sizes(partition(np.repeat(np.arange(classes), samples_per_class), f"dirichlet:{beta}", 20))
        == expected
    )


def test_cifar100_dirichlet_with_100_clients() -> None:
    client_sizes = part_sizes(partition(np.repeat(np.arange(100), 600), "dirichlet:0.1", 100))
    assert (min(client_sizes), max(client_sizes), sum(client_sizes)) == (275, 817, 60_000)


COUNTS = {"fmnist": (10, 7000), "cifar100": (100, 600), "tiny_imagenet": (200, 500), "ag_news": (4, 31900)}
"""Number of classes, and of samples of each class."""


@pytest.mark.parametrize(("name", "labels"), [("fmnist", 2), ("cifar100", 10), ("tiny_imagenet", 20)])
def test_pathological_settings_of_the_paper(name: str, labels: int) -> None:
    """Clients form blocks with the same labels; no other client has them."""
    classes, samples_per_class = COUNTS[name]
    split = partition(y := np.repeat(np.arange(classes), samples_per_class), f"pathological:{labels}", 20)
    assert split.parts is not None
    assert np.array_equal(np.sort(np.concatenate(split.parts)), np.arange(classes * samples_per_class))
    client_labels = [tuple(np.unique(y[rows]).tolist()) for rows in split.parts]
    assert {len(distinct) for distinct in client_labels} == {labels}
    assert len(set(client_labels)) == classes // labels
    assert [len(train) for train in split.train] == [3 * n // 4 for n in part_sizes(split)]


@pytest.mark.parametrize("clients", [20, 100])
@pytest.mark.parametrize("name", ["cifar100", "tiny_imagenet"])
def test_dirichlet_settings_of_the_paper(name: str, clients: int) -> None:
    """From beta 0.01 to 5, all samples are distributed, and clients become more similar."""
    classes, samples_per_class = COUNTS[name]
    y = np.repeat(np.arange(classes), samples_per_class)
    skew = []
    for beta in ("0.01", "0.1", "0.5", "1", "5"):
        split = partition(y, f"dirichlet:{beta}", clients)
        assert split.parts is not None
        assert np.array_equal(np.sort(np.concatenate(split.parts)), np.arange(len(y)))
        assert min(part_sizes(split)) >= 40
        assert [len(train) for train in split.train] == [3 * n // 4 for n in part_sizes(split)]
        counts = np.stack([np.bincount(y[rows], minlength=classes) for rows in split.parts])
        skew.append(float((counts > 0).mean()))
    assert skew == sorted(skew)
    assert skew[0] < 0.15
    assert skew[-1] > 0.95


# --- properties ------------------------------------------------------------------------------------

quick = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**32 - 1)


def check_split(split: Split, y: Labels, clients: int) -> None:
    """Check that each sample occurs once, and that each part is split 75/25, rounded down for training."""
    assert split.parts is not None
    assert split.clients == len(split.test) == len(split.parts) == clients
    assert sorted(np.concatenate(split.parts)) == list(range(len(y)))
    for part, train, test in zip(split.parts, split.train, split.test, strict=True):
        assert part.dtype == train.dtype == test.dtype == np.int64
        assert len(train) == int(0.75 * len(part)) >= 1
        assert len(test) == len(part) - len(train) >= 1
        assert sorted(np.concatenate([train, test])) == sorted(part)


def draw_labels(data: st.DataObject, classes: int, low: int, high: int) -> Labels:
    """Return labels with low..high samples of each class, in a random order."""
    counts = [data.draw(st.integers(low, high)) for _ in range(classes)]
    order = np.random.RandomState(data.draw(seeds))
    return order.permutation(np.repeat(np.arange(classes), counts))


@quick
@given(st.data(), st.integers(1, 12), seeds)
def test_iid_split_is_even_and_reproducible(data: st.DataObject, clients: int, seed: int) -> None:
    y = draw_labels(data, 3, clients, 3 * clients)
    split = partition(y, "iid", clients, seed)
    check_split(split, y, clients)
    assert max(part_sizes(split)) - min(part_sizes(split)) <= 1
    assert is_same_split(split, partition(y, "iid", clients, seed))


@quick
@given(st.data(), st.integers(1, 5), st.floats(1, 100), seeds)
def test_dirichlet_split_is_complete_and_reproducible(
    data: st.DataObject, clients: int, beta: float, seed: int
) -> None:
    y = draw_labels(data, 4, 10 * clients, 30 * clients)
    split = partition(y, f"dirichlet:{beta}", clients, seed)
    check_split(split, y, clients)
    assert min(part_sizes(split)) >= int(min(40, len(y) / clients / 2))
    assert split.parts is not None
    assert all(np.all(np.diff(y[rows]) >= 0) for rows in split.parts), "class by class, not shuffled"
    assert is_same_split(split, partition(y, f"dirichlet:{beta}", clients, seed))


def test_dirichlet_minimum_is_half_an_equal_share() -> None:
    """40 samples, 4 clients: at least min(40, 40/4/2) = 5, and that is reached."""
    y = np.arange(40) % 2
    assert min(min(part_sizes(partition(y, "dirichlet:0.5", 4, seed))) for seed in range(60)) == 5


def test_dirichlet_gives_every_client_at_least_two_samples() -> None:
    """12 samples, 4 clients: the published minimum would be 1, too little for two sets."""
    assert all(
        min(part_sizes(partition(np.arange(12) % 2, "dirichlet:1", 4, seed))) >= 2 for seed in range(60)
    )


def test_pathological_sizes_are_drawn_between_the_published_bounds() -> None:
    """2 x 50 samples, 4 clients, 1 label: share 25, least 12; clients 0 and 2 get max(2.5, 12/2)..24."""
    y = np.repeat([0, 1], 50)
    sizes_by_seed = [part_sizes(partition(y, "pathological:1", 4, seed)) for seed in range(200)]
    assert {n[j] for n in sizes_by_seed for j in (0, 2)} == set(range(6, 25))
    assert all(n[0] + n[1] == n[2] + n[3] == 50 for n in sizes_by_seed)


@quick
@given(st.data(), st.integers(1, 12), st.integers(2, 8), seeds)
def test_pathological_clients_share_labels_in_blocks(
    data: st.DataObject, clients: int, classes: int, seed: int
) -> None:
    """Blocks of m = ceil(N c / C) clients share c labels: client j holds the classes k with k//c == j//m."""
    labels = data.draw(st.integers(1, classes))
    holders = ceil(clients / classes * labels)
    y = draw_labels(data, classes, 50 * holders, 80 * holders)
    if ceil(clients / holders) * labels < classes:
        with pytest.raises(InvalidInputError, match="use more clients or more labels per client"):
            partition(y, f"pathological:{labels}", clients, seed)
        return
    split = partition(y, f"pathological:{labels}", clients, seed)
    check_split(split, y, clients)
    assert split.parts is not None
    for j, rows in enumerate(split.parts):
        expected = [k for k in range(classes) if k // labels == j // holders]
        assert np.unique(y[rows]).tolist() == expected
        for k in expected:
            assert np.all(np.diff(rows[y[rows] == k]) > 0), "handed out in order"
    assert is_same_split(split, partition(y, f"pathological:{labels}", clients, seed))


@quick
@given(st.data(), st.integers(1, 8), seeds)
def test_natural_clients_get_their_own_samples(data: st.DataObject, clients: int, seed: int) -> None:
    column = draw_labels(data, clients, 2, 9)
    ids = column * 7 - 3  # ids need be neither dense nor positive
    y = column % 2
    split = partition(y, "natural", data.draw(st.sampled_from([None, clients])), seed, ids)
    check_split(split, y, clients)
    assert split.parts is not None
    for k, rows in enumerate(split.parts):
        assert rows.tolist() == [row for row, owner in enumerate(column) if owner == k]
    assert is_same_split(split, partition(y, "natural", None, seed, ids))


@pytest.mark.parametrize("spec", ["iid", "dirichlet:1", "pathological:2", "natural"])
def test_another_seed_is_another_split(spec: str) -> None:
    y = np.arange(400) % 4
    column = np.arange(400) // 100
    assert not is_same_split(partition(y, spec, 4, 1, column), partition(y, spec, 4, 2, column))


def test_labels_need_not_be_dense() -> None:
    y = np.arange(300) % 3 * 5
    for spec in ("dirichlet:1", "pathological:2"):
        assert is_same_split(partition(y, spec, 3), partition(y // 5, spec, 3))


# --- invalid partitions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("dirichlett:0.1", 4, "unknown partition 'dirichlett'; did you mean 'dirichlet:BETA'"),
        ("", 4, "unknown partition ''; allowed: dirichlet:BETA, iid, natural, pathological:C"),
        ("iid:3", 4, "'iid' takes no value; write 'iid'"),
        ("dirichlet", 4, "beta is ''; it must be a number above 0"),
        ("dirichlet:big", 4, "beta is 'big'"),
        ("dirichlet:0", 4, "beta is '0'"),
        ("dirichlet:-1", 4, "beta is '-1'"),
        ("dirichlet:nan", 4, "beta is 'nan'"),
        ("dirichlet:inf", 4, "beta is 'inf'"),
        ("pathological", 4, "labels per client is ''; it must be a whole number from 1 on"),
        ("pathological:0", 4, "labels per client is '0'"),
        ("pathological:1.5", 4, "labels per client is '1.5'"),
        ("pathological:5", 4, "the data has 4 classes; allowed: 1..4"),
        ("pathological:1", 2, "given out after 2 of 4 classes; use more clients or more labels per client"),
        ("iid", None, "the number of clients is missing"),
        ("iid", 0, "clients = 0; allowed: 1 or more"),
        ("iid", 51, "clients = 51 is too many for 100 samples"),
        ("natural", None, "needs data with a client column"),
    ],
)
def test_invalid_partition_is_one_line_error(spec: str, clients: int | None, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        partition(np.arange(100) % 4, spec, clients)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_clients_with_two_samples() -> None:
    split = partition(np.arange(100) % 4, "iid", 50)
    assert {(len(a), len(b)) for a, b in zip(split.train, split.test, strict=True)} == {(1, 1)}


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(seed: int) -> None:
    with pytest.raises(
        InvalidInputError, match=f"partition seed {seed} is out of range; allowed: 0..4294967295"
    ):
        partition(np.arange(100) % 4, "iid", 4, seed)


def test_natural_rejects_another_number_of_clients() -> None:
    with pytest.raises(InvalidInputError, match="clients = 4, but the data's client column has 5"):
        partition(np.arange(100) % 4, "natural", 4, client=np.arange(100) % 5)


def test_natural_rejects_client_with_one_sample() -> None:
    with pytest.raises(InvalidInputError, match=r"client 2 with 1 of 5 samples; .* leave such clients out"):
        partition(np.zeros(5, np.int64), "natural", None, client=np.array([0, 0, 1, 1, 2]))


def test_pathological_rejects_class_too_small_for_its_clients() -> None:
    y = np.array([0] * 200 + [1] * 3)
    with pytest.raises(
        InvalidInputError, match="class 1 has 3 samples, too few for 4 clients; use fewer clients"
    ):
        partition(y, "pathological:2", 4)


def test_pathological_rejects_client_without_samples() -> None:
    """8 clients, 4 x 10 samples: clients 0, 2, 4, 6 get 0..4 of a class; seed 0 draws 4, 0, 3, 3."""
    assert np.random.RandomState(0).randint(0, 5, 4).tolist() == [4, 0, 3, 3]
    with pytest.raises(
        InvalidInputError, match=r"leaves client 2 with 0 of 40 samples; .* use fewer clients"
    ):
        partition(np.repeat(np.arange(4), 10), "pathological:1", 8, 0)


def test_dirichlet_gives_up_after_ten_thousand_draws() -> None:
    with pytest.raises(InvalidInputError) as caught:
        partition(np.arange(60) % 2, "dirichlet:0.01", 10)
    assert str(caught.value) == (
        "dirichlet:0.01 with 10 clients: none of 10000 draws gave every client at least 3 of the 60 samples; "
        "use fewer clients or a larger beta"
    )


def test_dirichlet_survives_draws_without_a_sum() -> None:
    """With beta = 1e-5 all gamma variates underflow now and then: p is NaN, which must not be used."""
    assert np.isnan(np.random.RandomState(1).dirichlet([1e-5] * 3, 1000)).any()
    with pytest.raises(InvalidInputError, match="none of 10000 draws"):
        partition(np.arange(12) % 2, "dirichlet:1e-5", 3)


# --- files -----------------------------------------------------------------------------------------


@quick
@given(st.integers(1, 9), seeds)
def test_save_and_load(tmp_path_factory: pytest.TempPathFactory, clients: int, seed: int) -> None:
    path = tmp_path_factory.mktemp("split") / "split.npz"
    split = partition(np.arange(50) % 2, "iid", clients, seed)
    split.save(path)
    loaded = load_split(path, 50)
    assert is_same_split(split, loaded)
    assert loaded.parts is None
    assert loaded.index_sha256() == split.index_sha256() | {"parts": None}


def test_save_keeps_the_name_and_leaves_nothing_else(tmp_path: Path) -> None:
    split = partition(np.arange(50) % 2, "iid", 3)
    (tmp_path / "mine").write_text("old")
    split.save(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert is_same_split(split, load_split(tmp_path / "mine", 50))


def test_save_to_unwritable_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"cannot write the split to .*nowhere.*No such file or directory"
    ):
        partition(np.arange(50) % 2, "iid", 3).save(tmp_path / "nowhere" / "split.npz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidInputError, match=r"cannot write the split to .*folder"):
        partition(np.arange(50) % 2, "iid", 3).save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


GOOD: dict[str, Any] = {
    "train_0": np.array([0, 1]),
    "test_0": np.array([2]),
    "train_1": np.array([3, 4], np.uint8),
    "test_1": np.array([5], np.int32),
}


def test_load_split_with_client_without_test_samples(tmp_path: Path) -> None:
    """A client without test samples is allowed if another client has some."""
    np.savez(tmp_path / "split.npz", **{**GOOD, "test_1": np.array([], np.int64)})
    assert load_split(tmp_path / "split.npz", 6).test.sizes.tolist() == [1, 0]


def test_load_split_of_part_of_the_data_with_any_integer_type(tmp_path: Path) -> None:
    np.savez(tmp_path / "split.npz", **GOOD)
    split = load_split(tmp_path / "split.npz", 100)
    assert [rows.tolist() for rows in [*split.train, *split.test]] == [[0, 1], [3, 4], [2], [5]]
    assert {rows.dtype for rows in [*split.train, *split.test]} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_1": None}, "has no array 'test_1'"),
        ({"train_1": None, "train_2": np.array([6])}, "has no array 'train_1'"),
        ({"train_0": None, "train_1": None}, "has no array 'train_0'"),
        ({"train_1": None}, "has an array 'test_1' that belongs to no client"),
        ({"trian_2": np.array([6])}, "has an array 'trian_2' that belongs to no client"),
        ({"train_1": np.array([3.0])}, "'train_1' in .* is float64 of shape .1,.; it must be a plain list"),
        ({"train_1": np.array([[3]])}, "'train_1' in .* is int64 of shape .1, 1."),
        ({"train_1": np.array([], np.int64)}, "'train_1' in .* is empty; every client needs at least one"),
        (
            dict.fromkeys(("test_0", "test_1"), np.array([], np.int64)),
            "'test_0' in .* is empty; .* some client one",
        ),
        ({"train_1": np.array([3, 6])}, "'train_1' in .* has index 6; .* has 6 samples, allowed: 0..5"),
        ({"train_1": np.array([-1])}, "'train_1' in .* has index -1"),
        ({"train_1": np.array([2**64 - 1], np.uint64)}, "has index 18446744073709551615"),
        ({"test_1": np.array([1])}, "uses index 1 twice .'train_0' and 'test_1'."),
        ({"train_1": np.array([3, 3])}, "uses index 3 twice .'train_1' and 'train_1'."),
        ({"train_1": np.array([{}])}, "pickled Python objects, which are never read"),
    ],
)
def test_load_split_rejects_invalid_arrays(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays = {name: rows for name, rows in (GOOD | change).items() if rows is not None}
    np.savez(tmp_path / "split.npz", **arrays)
    with pytest.raises(InvalidInputError, match=message) as caught:
        load_split(tmp_path / "split.npz", 6)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "split.npz") in str(caught.value)


def test_load_split_rejects_missing_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"split.npz does not exist"):
        load_split(tmp_path / "split.npz", 6)
    (tmp_path / "split.npz").write_text("train_0 = 1, 2, 3")
    with pytest.raises(InvalidInputError, match=r"is not an .npz file"):
        load_split(tmp_path / "split.npz", 6)
