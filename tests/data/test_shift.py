"""Feature shift: closed forms of each kind, and who gets what."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.data.federated import load_federated_data
from feddbe.data.shift import apply_shift, draw_client_shifts, parse_shift, shift_images
from feddbe.data.split import Split
from feddbe.errors import InvalidInputError
from feddbe.runs.experiment import resolve

BYTES = (0.0, 255.0)
RNG = np.random.RandomState(0)
IMAGES = torch.from_numpy(RNG.randint(0, 256, (5, 3, 8, 8)).astype(np.uint8))


def shift_with_fixed_seed(
    x: Tensor, name: str, strength: float, bounds: tuple[float, float] = BYTES
) -> Tensor:
    return apply_shift(x, name, strength, bounds, np.random.RandomState(1))


@pytest.mark.parametrize("name", ["rotate", "blur", "noise", "contrast", "invert"])
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_strength_zero_changes_nothing(name: str, kind: torch.dtype) -> None:
    x = IMAGES.to(kind)
    shifted = shift_with_fixed_seed(x, name, 0.0)
    assert shifted.dtype == kind
    assert torch.allclose(shifted.double(), x.double(), atol=1e-3)
    assert kind != torch.uint8 or torch.equal(shifted, x)


def test_invert_is_the_complement_and_its_own_inverse() -> None:
    once = shift_with_fixed_seed(IMAGES, "invert", 1.0)
    assert torch.equal(once, 255 - IMAGES)
    assert torch.equal(shift_with_fixed_seed(once, "invert", 1.0), IMAGES)


@pytest.mark.parametrize(("angle", "turns"), [(90.0, 1), (180.0, 2), (-90.0, -1)])
def test_rotation_is_counterclockwise(angle: float, turns: int) -> None:
    assert torch.equal(shift_with_fixed_seed(IMAGES, "rotate", angle), torch.rot90(IMAGES, turns, (2, 3)))


def test_non_square_images_rotate_by_the_same_angle() -> None:
    """A ring stays a ring, which it would not if an axis were stretched."""
    rows, columns = torch.meshgrid(torch.arange(33) - 16, torch.arange(49) - 24, indexing="ij")
    ring = (10 * torch.exp(-((rows**2 + columns**2).sqrt() - 8).square() / 8))[None, None].float()
    assert torch.allclose(shift_with_fixed_seed(ring, "rotate", 37.0, (0.0, 10.0)), ring, atol=0.3)


def test_blur_keeps_the_sum_and_spreads_as_a_gaussian() -> None:
    point = torch.zeros(1, 1, 21, 21)
    point[0, 0, 10, 10] = 1
    blurred = shift_with_fixed_seed(point, "blur", 2.0)[0, 0]
    assert float(blurred.sum()) == pytest.approx(1, abs=1e-5)
    offsets = torch.arange(21) - 10
    variance = float((blurred.sum(1) * offsets**2).sum())
    assert variance == pytest.approx(4, rel=0.05)  # cut off at three deviations
    assert torch.allclose(blurred, blurred.T)


@pytest.mark.parametrize(("shape", "sigma"), [((21, 21), 2.0), ((8, 8), 5.0), ((6, 9), 40.0)])
def test_blur_wider_than_the_image_is_not_cut_at_its_size(shape: tuple[int, int], sigma: float) -> None:
    """Equal to scipy's filter with weights cut off at three deviations and repeated edges."""
    x = torch.from_numpy(np.random.RandomState(2).random_sample((2, 3, *shape)).astype(np.float32))
    expected = gaussian_filter(x.double().numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=3.0)
    assert shift_with_fixed_seed(x, "blur", sigma, (0.0, 1.0)).numpy() == pytest.approx(expected, abs=1e-5)


def test_noise_has_the_given_deviation_and_stays_in_range() -> None:
    gray = torch.full((4, 1, 64, 64), 100, dtype=torch.uint8)
    noisy = shift_with_fixed_seed(gray, "noise", 0.1, (0.0, 200.0)).double()
    assert float(noisy.std()) == pytest.approx(20, rel=0.05)
    strong = shift_with_fixed_seed(gray, "noise", 1.0, (0.0, 200.0))
    assert (int(strong.min()), int(strong.max())) == (0, 200)


def test_contrast_moves_pixels_toward_the_image_mean() -> None:
    x = torch.tensor([[[[0.0, 4.0], [2.0, 2.0]]]])
    assert shift_with_fixed_seed(x, "contrast", 0.5).tolist() == [[[[1, 3], [2, 2]]]]


# --- shifts of clients


def test_strengths_differ_by_client_and_depend_on_the_seed_only() -> None:
    drawn = draw_client_shifts("rotate:30", 200, seed=1)
    angles = np.array([angle for _, angle in drawn])
    assert (angles.min() < -25, angles.max() > 25, abs(angles).max() <= 30) == (True, True, True)
    assert draw_client_shifts("rotate:30", 200, seed=1) == drawn
    assert draw_client_shifts("rotate:30", 200, seed=2) != drawn
    assert [angle for _, angle in draw_client_shifts("rotate:60", 200, seed=1)] == pytest.approx(2 * angles)
    assert 60 < sum(on for _, on in draw_client_shifts("invert", 200, 1)) < 140


def test_kinds_are_assigned_evenly() -> None:
    names = [name for name, _ in draw_client_shifts("rotate:30,blur:2,invert", 30, seed=1)]
    assert [names.count(name) for name in ("rotate", "blur", "invert")] == [10, 10, 10]


def dataset(n: int = 40) -> tuple[Dataset, Split]:
    x = torch.from_numpy(np.random.RandomState(0).randint(0, 17, (n, 1, 8, 8)).astype(np.uint8))
    rows = np.arange(n - 4).reshape(3, -1)
    split = Split.from_arrays([part[:8] for part in rows], [part[8:] for part in rows])
    return Dataset("mine", x, torch.arange(n) % 2, 2, scale=2 / 16, shift=-1.0), split


def test_all_samples_of_a_client_are_shifted_and_no_others() -> None:
    data, split = dataset()
    before = data.x.clone()
    shifted = shift_images(data, split, "invert", seed=3)
    assert torch.equal(data.x, before), "a copy"
    for client in range(3):
        rows = torch.from_numpy(np.concatenate([split.train[client], split.test[client]]))
        inverted = shifted.shift_labels[client] == "inverted"
        assert torch.equal(shifted.x[rows], 16 - before[rows] if inverted else before[rows])
    assert {"inverted", "as it is"} == {*shifted.shift_labels}
    assert torch.equal(shifted.x[-4:], before[-4:])


def test_noise_does_not_depend_on_the_validation_split() -> None:
    data, split = dataset()
    other = split.with_validation(0.3)
    assert torch.equal(
        shift_images(data, split, "noise:0.5", 1).x, shift_images(data, other, "noise:0.5", 1).x
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("turn:30", "unknown shift 'turn'; .*allowed: blur:S, contrast:S, invert, noise:S, rotate:S"),
        ("rotate:x", r"shift 'rotate:x': allowed: 0\.\.180 degrees"),
        ("rotate:200", r"shift 'rotate:200': allowed: 0\.\.180 degrees"),
        ("noise:-1", r"shift 'noise:-1': allowed: 0\.\.1"),
        ("invert:2", "shift 'invert:2': write 'invert'"),
        ("rotate,", "unknown shift ''"),
    ],
)
def test_invalid_shift_is_an_error(spec: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_shift(spec)


def test_shift_of_other_data_is_an_error(tmp_path: object) -> None:
    x = torch.zeros(8, 5)
    data = Dataset("mine", x, torch.arange(8) % 2, 2)
    with pytest.raises(
        InvalidInputError, match=r"shift 'blur': it is for images; 'mine' has inputs of shape \(5,\)"
    ):
        load_federated_data(Config(data="mine", shift="blur", partition="iid", clients=2), data)


def test_shift_changes_the_config_hash_but_not_the_split() -> None:
    plain, turned, more = (
        resolve("fedavg", Config(shift=shift, clients=5)) for shift in (None, "rotate:30", "rotate:40")
    )
    assert len({e.config_hash for e in (plain, turned, more)}) == 3
    assert plain.task.dataset.shift_labels == ()
    assert len(turned.task.dataset.shift_labels) == 5
    assert turned.task.split.index_sha256() == plain.task.split.index_sha256()
