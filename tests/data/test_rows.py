"""Tests that new rows are encoded like training rows."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feddbe.config.options import Config
from feddbe.data import rows
from feddbe.data.federated import load_federated_data
from feddbe.data.registry import load_dataset

PEOPLE = "age;job;y;client\n" + "".join(
    f"{k % 9},5;{'abc'[k % 3]};{'no' if k % 2 else 'yes'};{k % 2}\n" for k in range(24)
)


def test_table_rows_are_encoded_like_training_rows(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text(PEOPLE)
    data = load_federated_data(Config(data=str(path)))[0]
    inputs = rows.read_rows(data.preprocessing_spec.to_json(), path)
    assert np.array_equal(inputs, data.x.numpy())
    (tmp_path / "new.csv").write_text("job,extra,age\nb,1,2.5\n")
    new_inputs = rows.read_rows(data.preprocessing_spec.to_json(), tmp_path / "new.csv")
    same = np.flatnonzero((np.arange(24) % 9 == 2) & (np.arange(24) % 3 == 2))  # 2,5 and c, but for the job
    assert new_inputs[0, 0] == data.x[same[0], 0]
    assert new_inputs[0, 1:].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age\n1\n", "column 'job' is missing; the model takes age, job"),
        ("age,job\n1,d\n", "'job' is 'd' in line 2, which no training row had; known: a, b, c"),
        ("age,job\n1,a\nx,b\n", "'age' is 'x' in line 3; it must be a number"),
        ("age,job\n,a\n", "'age' has no value in line 2; fill it in"),
        ("age,job\n1,a,2\n", "line 2 of .* has 3 values, its first 2"),
        ("age,job\n", "has no rows"),
    ],
)
def test_unsuitable_rows_are_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "people.csv").write_text(PEOPLE)
    preprocessing = load_federated_data(Config(data=str(tmp_path / "people.csv")))[
        0
    ].preprocessing_spec.to_json()
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        rows.read_rows(preprocessing, tmp_path / "new.csv")
    assert "\n" not in str(caught.value)


def test_other_file_types_are_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text(PEOPLE)
    preprocessing = load_federated_data(Config(data=str(tmp_path / "people.csv")))[
        0
    ].preprocessing_spec.to_json()
    with pytest.raises(
        ValueError, match=r"new.parquet is not a .csv or .tsv file; write the new rows as one"
    ):
        rows.read_rows(preprocessing, tmp_path / "new.parquet")


def test_texts_are_encoded_like_training_texts(tmp_path: Path) -> None:
    path = tmp_path / "news.csv"
    path.write_text('title,text,y\nGood,"a good, long film!",1\nBad,a bad film,3\nGood,,1\n')
    data = load_dataset(path)
    assert np.array_equal(rows.read_rows(data.preprocessing_spec.to_json(), path), data.x.numpy())
    path.write_text("text,title\nnever good,a\n")
    known = {word: k for k, word in enumerate(data.preprocessing_spec.vocabulary)}
    assert rows.read_rows(data.preprocessing_spec.to_json(), path)[0, :3].tolist() == [
        known["a"],
        0,
        known["good"],
    ]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_images_are_encoded_like_training_images(tmp_path: Path, mode: str) -> None:
    for k in range(4):
        folder = tmp_path / "pets" / ("cat", "dog")[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        value = np.random.RandomState(k).randint(0, 256, (9 + k, 8, 3)).astype(np.uint8)
        Image.fromarray(value if mode == "RGB" else value[:, :, 0]).save(folder / f"{k}.png")
    data = load_dataset(f"{tmp_path / 'pets'}?resize=6")
    inputs = rows.read_rows(data.preprocessing_spec.to_json(), tmp_path / "pets")
    assert np.array_equal(inputs, data.inputs(data.x).numpy())
    assert (
        rows.read_rows(data.preprocessing_spec.to_json(), tmp_path / "pets" / "cat" / "0.png").shape[0] == 1
    )
    fixed = data.preprocessing_spec.to_json() | {"resized": False}
    with pytest.raises(ValueError, match=r"is 8x9; the model takes 6x6 pixels"):
        rows.read_rows(fixed, tmp_path / "pets" / "cat" / "0.png")


def test_arrays_are_encoded_like_training_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.random.RandomState(0).randint(0, 256, (6, 5, 4)).astype(np.uint8), y=[0, 1] * 3)
    data = load_dataset(path)
    assert np.array_equal(
        rows.read_rows(data.preprocessing_spec.to_json(), path), data.inputs(data.x).numpy()
    )
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"cannot read .*a.npz"):
        rows.read_rows(data.preprocessing_spec.to_json(), path)
    np.savez(path, x=np.zeros((2, 3, 4), np.uint8))
    with pytest.raises(
        ValueError, match=r"has shape \(2, 3, 4\); the model takes samples of shape \(1, 5, 4\)"
    ):
        rows.read_rows(data.preprocessing_spec.to_json(), path)


def test_module_imports_nothing_of_feddbe() -> None:
    """The file is copied next to an exported model."""
    code = (
        f"import sys; sys.path[:0] = [{str(Path(rows.__file__).parent)!r}]; import rows; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert not {"feddbe", "torch", "PIL"} & {name.partition(".")[0] for name in done.stdout.split()}


# --- new rows pass the checks of training rows


def write_people(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "people.csv").write_text(PEOPLE)
    return load_federated_data(Config(data=str(tmp_path / "people.csv")))[0].preprocessing_spec.to_json()


def check_error(preprocessing: dict[str, Any], path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        rows.read_rows(preprocessing, path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,job,age\n1,a,2\n", "two columns of one name, 'age'; name each column once"),
        ("age,job\n1e300,a\n", "line 2 has a number that is too large to compute with"),
        ("age,job\n1,a\n1e999,a\n", "'age' is '1e999' in line 3; it must be a number"),
        ("age,job\nnan,a\n", "'age' has no value in line 2"),
    ],
)
def test_new_rows_of_a_table_are_checked(tmp_path: Path, text: str, message: str) -> None:
    preprocessing = write_people(tmp_path)
    (tmp_path / "new.csv").write_text(text)
    check_error(preprocessing, tmp_path / "new.csv", message)


def test_table_model_rejects_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 4), np.float32))
    check_error(write_people(tmp_path), tmp_path / "new.npz", r"new.npz is not a .csv or .tsv file")


@pytest.mark.parametrize("kind", ["table", "texts", "images", "arrays"])
@pytest.mark.parametrize("suffix", [".csv", ".npz", ".png"])
def test_pipe_is_rejected(tmp_path: Path, kind: str, suffix: str) -> None:
    os.mkfifo(tmp_path / f"pipe{suffix}")
    preprocessing = write_people(tmp_path) | {"kind": kind, "shape": [1, 4, 4]}
    check_error(preprocessing, tmp_path / f"pipe{suffix}", "is neither a file nor a folder")


GRAY: dict[str, Any] = {"kind": "images", "shape": [1, 6, 5], "scale": 2 / 255, "shift": -1.0, "words": 0}


def test_images_with_more_than_8_bits_per_channel_are_rejected(tmp_path: Path) -> None:
    """A value of 285 would become 255."""
    Image.fromarray(np.full((6, 5), 285, np.uint16)).save(tmp_path / "deep.png")
    check_error(
        GRAY | {"resized": False}, tmp_path / "deep.png", "of mode 'I;16', at most .* of 8 bits a channel"
    )


def test_format_that_starts_a_program_is_rejected(tmp_path: Path) -> None:
    """Pillow passes EPS to Ghostscript, even with another suffix."""
    Image.new("L", (5, 6)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    check_error(GRAY | {"resized": False}, tmp_path / "a.png", "cannot read the image .*a.png")


def test_large_image_is_not_decoded(tmp_path: Path) -> None:
    Image.new("1", (5000, 5000)).save(tmp_path / "large.png")
    check_error(
        GRAY | {"resized": True}, tmp_path / "large.png", "5000x5000 pixels of mode '1', at most 16777216"
    )


def test_pipe_in_image_folder_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    check_error(GRAY | {"resized": True}, tmp_path, "it is not a plain file")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 6, 5), np.float32), "is float32; the model takes uint8"),
        (np.zeros((2, 6, 5), np.int64), "is int64; the model takes uint8"),
        (np.zeros((0, 6, 5), np.uint8), r"has shape \(0, 1, 6, 5\); the model takes"),
        (np.array(3, np.uint8), r"has shape \(\); the model takes"),
        (np.array([{}]), "cannot read .*: Object arrays cannot be loaded"),
    ],
)
def test_new_arrays_are_checked(tmp_path: Path, x: Any, message: str) -> None:
    np.savez(tmp_path / "new.npz", x=x)
    check_error(GRAY, tmp_path / "new.npz", message)


def test_compressed_archive_over_size_limit_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_UNPACKED_BYTES", 1000)  # 256 MB take long to write
    np.savez_compressed(tmp_path / "new.npz", x=np.zeros((1, 1 << 20), np.uint8))
    check_error(GRAY, tmp_path / "new.npz", r"would unpack to \d+; write it without compression")


def test_an_array_of_int_is_not_taken_for_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 4), np.int64))
    preprocessing = {"kind": "arrays", "shape": [4], "scale": 1.0, "shift": 0.0, "words": 0}
    check_error(preprocessing, tmp_path / "new.npz", "is int64; the model takes float32")


def write_array_header(path: Path, shape: tuple[int, ...], dtype: str = "|u1") -> None:
    """Write an .npz file whose array has a shape that its bytes do not have."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(30)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", content)


@pytest.mark.parametrize("shape", [(10**13, 6, 5), (2**40,), (-1, 6, 5), (3, 6, 5), (2**62, 2**62)])
def test_array_with_a_false_shape_is_one_line(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write_array_header(tmp_path / "new.npz", shape)
    check_error(GRAY, tmp_path / "new.npz", "cannot read .*new.npz: .*; write it with numpy.savez")


def test_archive_with_a_false_size_is_one_line(tmp_path: Path) -> None:
    """A member of 20 MB that is declared as one of 100 bytes."""
    with zipfile.ZipFile(tmp_path / "new.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(20 << 20))
    content = (tmp_path / "new.npz").read_bytes()
    content = content.replace((20 << 20).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    (tmp_path / "new.npz").write_bytes(content)
    check_error(GRAY, tmp_path / "new.npz", "cannot read .*new.npz: .*; write it with numpy.savez")


@pytest.mark.parametrize(("size", "reason"), [(60_000, "exceeds limit of"), (5_000, "has 5000x5000 pixels")])
def test_image_of_too_many_pixels_is_one_line(size: int, reason: str, tmp_path: Path) -> None:
    """Pillow rejects the first one, and the second one is for us to reject."""
    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    (tmp_path / "large.png").write_bytes(content)
    check_error(
        GRAY | {"resized": True}, tmp_path / "large.png", f"cannot read the image .*large.png: .*{reason}"
    )
