"""Tests of .npz files: accepted arrays, their encoding, and errors."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feddbe.config.options import Config
from feddbe.data.federated import load_federated_data
from feddbe.data.registry import load_dataset
from feddbe.data.user.arrays import load_npz, read_npz
from feddbe.errors import InvalidInputError
from feddbe.federation.data_spec import DataSpec

IMAGES = np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def write_npz(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "mine.npz", **arrays)
    return folder / "mine.npz"


def test_load_gray_images(tmp_path: Path) -> None:
    data = load_npz(write_npz(tmp_path, x=IMAGES, y=LABELS))
    assert (data.name, data.classes, len(data), data.client) == ("mine.npz", 3, 6, None)
    assert (data.x.shape, data.x.dtype) == ((6, 1, 4, 5), torch.uint8)
    assert np.array_equal(data.x[:, 0].numpy(), IMAGES)
    assert (data.y.tolist(), data.y.dtype) == (LABELS.tolist(), torch.int64)
    assert data.inputs(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == pytest.approx([-1, 1])


@pytest.mark.parametrize("shape", [(6, 7), (6, 3, 4, 5), (6, 9, 1, 4, 2)])
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", ">f4", "f8"])
def test_other_shapes_are_kept(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    data = load_npz(write_npz(tmp_path, x=np.asfortranarray(x), y=LABELS))
    assert data.x.shape == shape
    assert data.x.is_contiguous()
    assert data.x.dtype == (torch.uint8 if dtype == "u1" else torch.float32)
    assert np.array_equal(data.x.numpy(), x)


def test_float_sequences_are_unchanged(tmp_path: Path) -> None:
    x = np.linspace(-3, 3, 120).reshape(6, 4, 5)
    data = load_npz(write_npz(tmp_path, x=x, y=LABELS))
    assert (data.scale, data.shift) == (1, 0)
    assert torch.equal(data.inputs(data.x), torch.from_numpy(x.astype(np.float32)))
    assert "sequences of 4 steps" in data.note


@pytest.mark.parametrize("where", ["file", "query"])
def test_load_word_numbers_with_vocabulary_size(tmp_path: Path, where: str) -> None:
    x = np.arange(12).reshape(6, 2)
    if where == "file":
        data = load_npz(write_npz(tmp_path, x=x, y=LABELS, words=50))
    else:
        data = load_dataset(f"{write_npz(tmp_path, x=x, y=LABELS)}?words=50")
    assert (data.num_words, data.x.dtype, data.x.tolist()) == (50, torch.int32, x.tolist())
    assert data.inputs(data.x).dtype == torch.int64


def test_integers_need_a_vocabulary_size(tmp_path: Path) -> None:
    """Codes and counts look the same, so integers are not guessed to be words."""
    path = write_npz(tmp_path, x=np.arange(12).reshape(6, 2), y=LABELS)
    with pytest.raises(
        InvalidInputError, match=r"x in .* is int64; accepted are .* word numbers with \?words="
    ):
        load_dataset(path)
    with pytest.raises(InvalidInputError, match=r"has the word number 10, with words = 10; allowed: 0..9"):
        load_dataset(f"{path}?words=10")
    with pytest.raises(InvalidInputError, match=r"words=ten: it must be the size of the vocabulary"):
        load_dataset(f"{path}?words=ten")
    path = write_npz(tmp_path, x=IMAGES, y=LABELS)
    with pytest.raises(InvalidInputError, match=r"words=10: x in .* is uint8; word numbers are"):
        load_dataset(f"{path}?words=10")
    path = write_npz(tmp_path, x=np.zeros((6, 2, 2), int), y=LABELS)
    with pytest.raises(InvalidInputError, match=r"word numbers must be \(n, length\)"):
        load_dataset(f"{path}?words=10")


@pytest.mark.parametrize("dtype", ["u1", "i2", ">i4", "u8", "f4", "f8"])
def test_load_labels_of_any_number_type(tmp_path: Path, dtype: str) -> None:
    data = load_npz(write_npz(tmp_path, x=IMAGES, y=LABELS.astype(dtype)))
    assert (data.y.tolist(), data.y.dtype) == (LABELS.tolist(), torch.int64)


@pytest.mark.parametrize("kind", [str, "S"])
def test_text_labels_are_numbered_in_sorted_order(tmp_path: Path, kind: Any) -> None:
    data = load_npz(
        write_npz(tmp_path, x=IMAGES, y=np.array(["dog", "cat", "ant", "dog", "ant", "cat"]).astype(kind))
    )
    assert (data.y.tolist(), data.classes) == ([2, 1, 0, 2, 0, 1], 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_images_are_transposed(tmp_path: Path, channels: int) -> None:
    x = np.arange(6 * 4 * 5 * channels, dtype=np.uint16).reshape(6, 4, 5, channels).astype(np.uint8)
    data = load_npz(write_npz(tmp_path, x=x, y=LABELS))
    assert data.x.shape == (6, channels, 4, 5)
    assert data.x.is_contiguous()
    assert np.array_equal(data.x.numpy(), np.moveaxis(x, 3, 1))
    assert "channels last" in data.note


@pytest.mark.parametrize("shape", [(6, 3, 5, 3), (6, 1, 5, 3), (6, 4, 5, 2)])
def test_other_images_are_not_transposed(tmp_path: Path, shape: tuple[int, ...]) -> None:
    data = load_npz(write_npz(tmp_path, x=np.zeros(shape, np.uint8), y=LABELS))
    assert (data.x.shape, data.note) == (shape, "")


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([1, 2, 3, 1, 2, 3], ("1", "2", "3")),
        ([1, 1, 1, 5, 5, 1], ("1", "5")),
        ([-1, 1, 1, -1, 1, 1], ("-1", "1")),
        ([2.0, 10.0, 2.0, 2.0, 10.0, 2.0], ("2", "10")),
        ([True, False, True, False, True, True], ("False", "True")),
        ([1001, 1002, 1003, 1001, 1001, 1001], ("1001", "1002", "1003")),
    ],
)
def test_classes_are_the_labels_that_occur(tmp_path: Path, labels: list[Any], names: tuple[str, ...]) -> None:
    data = load_npz(write_npz(tmp_path, x=IMAGES, y=np.array(labels)))
    assert (data.classes, data.label_names) == (len(names), names)
    assert [
        float(data.label_names[k]) if isinstance(labels[0], float) else data.label_names[k] for k in data.y
    ] == (labels if isinstance(labels[0], float) else [str(label) for label in labels])


def test_label_minus_one_is_noted_as_a_class(tmp_path: Path) -> None:
    assert "-1 is a class" in load_npz(write_npz(tmp_path, x=IMAGES, y=LABELS - 1)).note


@pytest.mark.parametrize(
    "client",
    [
        np.array([30, -1, 30, 7, 7, -1]),
        np.array(["c", "a", "c", "bb", "bb", "a"]),
        np.array([b"c", b"a", b"c", b"bb", b"bb", b"a"]),
    ],
)
def test_clients_are_numbered_in_the_order_of_their_ids(tmp_path: Path, client: Any) -> None:
    data = load_npz(write_npz(tmp_path, x=IMAGES, y=LABELS, client=client))
    assert data.client is not None
    assert data.client.tolist() == [2, 0, 2, 1, 1, 0]
    assert data.client.dtype == np.int64


def test_other_arrays_are_not_read(tmp_path: Path) -> None:
    assert len(load_npz(write_npz(tmp_path, x=IMAGES, y=LABELS, notes=np.array([{}])))) == 6


NAN_IN_ROW_4 = np.where(np.arange(6) == 4, np.nan, 1.0)[:, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "has no array 'x'; it has: y; needed are x and y"),
        ({"y": None, "labels": LABELS}, "has no array 'y'; it has: x, labels; needed"),
        ({"x": None, "y": None}, "has no array 'x'; it has: nothing"),
        ({"x": IMAGES.astype(np.int64)}, "x in .* is int64; accepted are uint8 .* and float32"),
        ({"x": IMAGES > 3}, "x in .* is bool; accepted"),
        ({"x": np.array(list("abcdef"))}, "x in .* is <U1; accepted"),
        ({"x": IMAGES * 1j}, "x in .* is complex128; accepted"),
        ({"x": IMAGES[:, 0, 0]}, r"x in .* has shape \(6,\); it needs"),
        ({"x": np.uint8(3)}, r"x in .* has shape \(\); it needs"),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, r"x in .* has shape \(0, 4, 5\); it needs"),
        ({"x": IMAGES[:, :0]}, r"x in .* has shape \(6, 0, 5\)"),
        ({"x": NAN_IN_ROW_4}, "x in .* has NaN or infinite values .* first in row 4, in 1 rows"),
        ({"x": NAN_IN_ROW_4 * np.inf}, "first in row 0, in 6 rows"),
        ({"x": np.full((6, 2), 1e300)}, "NaN or infinite values .as float32., first in row 0"),
        ({"y": LABELS[:5]}, r"y in .* has shape \(5,\), but x has 6 samples; it must be \(6,\)"),
        ({"y": LABELS[:, None]}, r"y in .* has shape \(6, 1\)"),
        ({"y": LABELS + 0.5}, "y in .* has the label 0.5; labels must be whole numbers"),
        ({"y": np.array([0, 1, np.nan, 0, 0, 0])}, "y in .* has the label nan; labels must be whole"),
        ({"y": np.array([0, 1, np.inf, 0, 0, 0])}, "y in .* has the label inf; labels must be whole"),
        ({"y": np.arange(6) * 100}, "y in .* has another label in each of 6 rows; it must name"),
        ({"y": LABELS * 1j}, "y in .* is complex128; it must hold whole numbers or text"),
        ({"client": LABELS[:4]}, r"client in .* has shape \(4,\), but x has 6 samples"),
        ({"client": LABELS / 2}, "client in .* is float64; it must hold integers or strings"),
        ({"x": np.array([{}] * 6)}, "pickled Python objects, which are never read"),
    ],
)
def test_invalid_arrays_are_an_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays = {name: a for name, a in ({"x": IMAGES, "y": LABELS} | change).items() if a is not None}
    path = write_npz(tmp_path, **arrays)
    with pytest.raises(InvalidInputError, match=message) as caught:
        load_npz(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("labels", "name"), [(np.array(["a"] * 6), "a"), (LABELS * 0 + 1, "1")])
def test_run_on_a_single_label_is_an_error(tmp_path: Path, labels: Any, name: str) -> None:
    """A node of a federation may have one label only, so that the file itself is valid."""
    path = write_npz(tmp_path, x=IMAGES, y=labels)
    assert load_npz(path).labels == (name,)
    with pytest.raises(InvalidInputError, match=f"has only the label '{name}'; at least 2 classes"):
        load_federated_data(Config(data=str(path)))
    with pytest.raises(InvalidInputError, match="at least 2 classes are needed"):
        DataSpec.from_example(str(path))


@pytest.mark.parametrize("text", ["", "Object arrays cannot be loaded when allow_pickle=False"])
def test_pickled_arrays_are_not_recognized_by_numpy_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError(text)

    monkeypatch.setattr(np.lib.format, "read_array", fail)
    monkeypatch.setattr("numpy.lib._format_impl.read_array", fail, raising=False)
    with pytest.raises(InvalidInputError, match="pickled Python objects, which are never read"):
        load_npz(write_npz(tmp_path, x=np.array([{}] * 6), y=LABELS))
    with pytest.raises(InvalidInputError, match=r"write it again with numpy\.savez"):
        load_npz(write_npz(tmp_path, x=IMAGES, y=LABELS))


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"mine.npz does not exist"):
        load_npz(tmp_path / "mine.npz")


def test_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot read .*Is a directory"):
        load_npz(tmp_path)


class Trap:
    """Creates a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    trap = Trap(tmp_path / "sprung")
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(trap))
    with pytest.raises(InvalidInputError, match=r"is not an .npz file"):
        load_npz(tmp_path / "pickle.npz")
    with pytest.raises(InvalidInputError, match="pickled"):
        load_npz(write_npz(tmp_path, x=np.array([trap], object), y=LABELS))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"\x93NUMPY\x01\0"])
def test_other_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mine.npz").write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"mine.npz is not an .npz file; write one with numpy.savez"):
        load_npz(tmp_path / "mine.npz")


@pytest.mark.parametrize("keep", [2, 30, 200, -1])
def test_truncated_file_is_an_error(tmp_path: Path, keep: int) -> None:
    path = write_npz(tmp_path, x=IMAGES, y=LABELS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        InvalidInputError, match=r"cannot read .*mine.npz: .*; write it again with numpy.savez"
    ):
        load_npz(path)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.booleans())
def test_damage_is_detected_or_harmless(tmp_path: Path, data: st.DataObject, compressed: bool) -> None:
    """With any wrong byte, the arrays are right or there is an error of one line."""
    path = tmp_path / "damaged.npz"
    (np.savez_compressed if compressed else np.savez)(path, x=IMAGES, y=LABELS)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(2, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    message = ""
    arrays: dict[str, Any] = {}
    try:
        arrays, _ = read_npz(path)
    except InvalidInputError as error:
        message = str(error)
    assert "\n" not in message
    for name, right in (("x", IMAGES), ("y", LABELS)):
        assert name not in arrays or np.array_equal(arrays[name], right)
