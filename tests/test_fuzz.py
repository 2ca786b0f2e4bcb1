"""Random damage of files and random arguments: every error is one line."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddbe.cli.main import main
from feddbe.data import safe_pickle
from feddbe.data.builtin.images import read_idx
from feddbe.data.registry import load_dataset
from feddbe.errors import FeddbeError
from tests.data.builtin.test_images_idx import encode_idx
from tests.data.user import test_arrays_pfllib, test_tables

CASES = int(os.environ.get("FEDDBE_CASES", "12"))
PIXELS = np.arange(6 * 8 * 8, dtype=np.uint8).reshape(6, 8, 8)


def write_npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", x=PIXELS, y=np.arange(6) % 3, client=np.arange(6) % 2)
    return folder / "a.npz"


def write_images(folder: Path) -> Path:
    for k in range(6):
        path = folder / "pictures" / f"class{k % 2}" / f"{k}.{('png', 'bmp', 'gif')[k % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS[k]).save(path)
    return folder / "pictures"


def write_csv(folder: Path) -> Path:
    return test_tables.write_csv(folder)


def write_parquet(folder: Path) -> Path:
    return test_tables.write_parquet(folder, age=[1.0, 2.0, 3.0, 4.0], label=["a", "b", "a", "b"])


def write_pfllib(folder: Path) -> Path:
    return test_arrays_pfllib.write_folder(folder / "pfllib")


@pytest.mark.parametrize("write_data", [write_npz, write_images, write_csv, write_parquet, write_pfllib])
@pytest.mark.parametrize("seed", range(CASES))
def test_damaged_user_data(write_data: Callable[[Path], Path], seed: int, tmp_path: Path) -> None:
    data = write_data(tmp_path)
    load_dataset(str(data))  # valid before the damage
    rng = random.Random(f"{write_data.__name__} {seed}")
    paths = data.rglob("*") if data.is_dir() else [data]
    file = rng.choice(sorted(path for path in paths if path.is_file()))
    file.write_bytes(damage(file.read_bytes(), rng))
    assert_succeeds_or_raises_one_line(lambda: load_dataset(str(data)))


@pytest.mark.parametrize("seed", range(CASES))
def test_damaged_pickles_and_idx_files(seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"formats {seed}")
    file = tmp_path / "a.gz"
    good = pickle.dumps({b"data": PIXELS, b"labels": [1, 2], "name": ("a", None, 1.5)})
    assert_succeeds_or_raises_one_line(lambda: safe_pickle.load(io.BytesIO(damage(good, rng))))
    content = encode_idx(PIXELS)
    packed = gzip.compress(damage(content, rng)) if seed % 2 else damage(gzip.compress(content), rng)
    file.write_bytes(packed)
    assert_succeeds_or_raises_one_line(lambda: read_idx(file, limit=10_000))


def damage(content: bytes, rng: random.Random) -> bytes:
    """Return the content with flipped bits, or pieces that are removed, doubled or replaced."""
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 4])):
        start, size = rng.randrange(len(damaged)), rng.choice([1, 4, 30])
        kind = rng.choice(["flip", "flip", "cut", "double", "noise", "end"])
        if kind == "flip":
            damaged[start] ^= 1 << rng.randrange(8)
        elif kind == "end":
            del damaged[max(1, start) :]
        else:
            piece = damaged[start : start + size]
            replacement = {"cut": b"", "double": piece * 2, "noise": rng.randbytes(size)}[kind]
            damaged[start : start + size] = replacement
        damaged = damaged or bytearray(b"x")
    return bytes(damaged)


def assert_succeeds_or_raises_one_line(function: Callable[[], object]) -> None:
    """Call a function; an error must be a `FeddbeError` with one line."""
    try:
        function()
    except FeddbeError as error:
        text = str(error)
        assert 0 < len(text) < 2000
        assert len(text.splitlines()) == 1


PIECES = [
    "fedavg", "fedprox", "dbe", "mr", "+", "(", ")", "=", ",", "kappa", "mu", "1e999", "-1", "nan", "0",
    "1e-9", " ", "\n", "'", '"', "\\", "/", "..", "~x", "{", "}", "[", "]", "%", ":", "pool", "iid",
    "dirichlet", "null", "true", "é", "\u202e", "99999999999999999999", "digits", "mlp", "cut", "é" * 50,
    "x" * 300, "#", "?", "&", "\t", "\x1b[31m",
]  # fmt: skip
OPTIONS = [
    "--lr", "--data", "--model", "--partition", "--engine", "--metrics", "--eval", "--cut", "--clients",
    "--participation", "--rounds", "--seed", "--split", "--variant", "--validation", "--out", "--patience",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(CASES))
def test_random_arguments_result_in_at_most_one_line(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`main` raises no exception; an error is one printable line."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(f"words {seed}")

    def random_word() -> str:
        return "".join(rng.choice(PIECES) for _ in range(rng.choice([1, 1, 2, 4])))

    words = [
        "run",
        rng.choice(
            [
                "fedavg",
                "fedavg+dbe",
                random_word(),
                f"fedavg({random_word()})",
                f"fedprox(mu={random_word()})",
            ]
        ),
    ]
    for option in rng.sample(OPTIONS, rng.choice([0, 1, 3])):
        words += [option, random_word()]
    code = main([*words, "--dry-run"])
    err = capsys.readouterr().err
    assert code in (0, 2), words
    if code:
        assert err.startswith("feddbe: ")
        assert len(err.splitlines()) == 1, words
        assert err.rstrip("\n").isprintable(), words
        assert len(err) < 3000, words


@pytest.mark.parametrize("seed", range(CASES))
def test_random_toml_results_in_at_most_one_line(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(f"toml {seed}")
    good = b'method = "fedavg+dbe(kappa=1)"\ndata = "digits"\nrounds = 3\nlr = 0.1\nclients = 4\n'
    Path("a.toml").write_bytes(damage(good, rng) + json.dumps(rng.choice(PIECES)).encode() * rng.randrange(2))
    assert main(["run", "a.toml", "--dry-run"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
