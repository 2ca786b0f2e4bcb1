"""Random damage and random words: what cannot be used is one line, and nothing else happens."""

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
from tests.data.builtin.test_images_idx import encode_idx as as_idx
from tests.data.user import test_arrays_pfllib, test_tables

CASES = int(os.environ.get("FEDDBE_CASES", "12"))
PIXELS = np.arange(6 * 8 * 8, dtype=np.uint8).reshape(6, 8, 8)


def npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", x=PIXELS, y=np.arange(6) % 3, client=np.arange(6) % 2)
    return folder / "a.npz"


def images(folder: Path) -> Path:
    for k in range(6):
        place = folder / "pictures" / f"class{k % 2}" / f"{k}.{('png', 'bmp', 'gif')[k % 3]}"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS[k]).save(place)
    return folder / "pictures"


def table(folder: Path) -> Path:
    return test_tables.write_csv(folder)


def parquet(folder: Path) -> Path:
    return test_tables.write_parquet(folder, age=[1.0, 2.0, 3.0, 4.0], label=["a", "b", "a", "b"])


def pfllib(folder: Path) -> Path:
    return test_arrays_pfllib.write_folder(folder / "pfllib")


@pytest.mark.parametrize("make", [npz, images, table, parquet, pfllib])
@pytest.mark.parametrize("seed", range(CASES))
def test_damaged_files_of_ones_own(make: Callable[[Path], Path], seed: int, tmp_path: Path) -> None:
    place = make(tmp_path)
    load_dataset(str(place))  # before the damage
    dice = random.Random(f"{make.__name__} {seed}")
    files = sorted(path for path in (place.rglob("*") if place.is_dir() else [place]) if path.is_file())
    file = dice.choice(files)
    file.write_bytes(damaged(file.read_bytes(), dice))
    one_line_or_nothing(lambda: load_dataset(str(place)))


@pytest.mark.parametrize("seed", range(CASES))
def test_damaged_pickles_and_idx_files(seed: int, tmp_path: Path) -> None:
    dice, file = random.Random(f"formats {seed}"), tmp_path / "a.gz"
    good = pickle.dumps({b"data": PIXELS, b"labels": [1, 2], "name": ("a", None, 1.5)})
    one_line_or_nothing(lambda: safe_pickle.load(io.BytesIO(damaged(good, dice))))
    content = as_idx(PIXELS)
    packed = gzip.compress(damaged(content, dice)) if seed % 2 else damaged(gzip.compress(content), dice)
    file.write_bytes(packed)
    one_line_or_nothing(lambda: read_idx(file, limit=10_000))


def damaged(content: bytes, dice: random.Random) -> bytes:
    """Bits flipped, a piece cut out, doubled or replaced."""
    bad = bytearray(content)
    for _ in range(dice.choice([1, 1, 4])):
        at, size = dice.randrange(len(bad)), dice.choice([1, 4, 30])
        kind = dice.choice(["flip", "flip", "cut", "double", "noise", "end"])
        if kind == "flip":
            bad[at] ^= 1 << dice.randrange(8)
        elif kind == "end":
            del bad[max(1, at) :]
        else:
            piece = {"cut": b"", "double": bad[at : at + size] * 2, "noise": dice.randbytes(size)}[kind]
            bad[at : at + size] = piece
        bad = bad or bytearray(b"x")
    return bytes(bad)


def one_line_or_nothing(act: Callable[[], object]) -> None:
    try:
        act()
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
def test_random_words(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No exception leaves `main`; what it complains about is one line that a terminal can show."""
    monkeypatch.chdir(tmp_path)
    dice = random.Random(f"words {seed}")

    def word() -> str:
        return "".join(dice.choice(PIECES) for _ in range(dice.choice([1, 1, 2, 4])))

    words = [
        "run",
        dice.choice(["fedavg", "fedavg+dbe", word(), f"fedavg({word()})", f"fedprox(mu={word()})"]),
    ]
    for option in dice.sample(OPTIONS, dice.choice([0, 1, 3])):
        words += [option, word()]
    code = main([*words, "--dry-run"])
    found = capsys.readouterr()
    assert code in (0, 2), words
    if code:
        assert found.err.startswith("feddbe: ")
        assert len(found.err.splitlines()) == 1, words
        assert found.err.rstrip("\n").isprintable(), words
        assert len(found.err) < 3000, words


@pytest.mark.parametrize("seed", range(CASES))
def test_random_toml(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dice = random.Random(f"toml {seed}")
    good = b'method = "fedavg+dbe(kappa=1)"\ndata = "digits"\nrounds = 3\nlr = 0.1\nclients = 4\n'
    Path("a.toml").write_bytes(
        damaged(good, dice) + json.dumps(dice.choice(PIECES)).encode() * dice.randrange(2)
    )
    assert main(["run", "a.toml", "--dry-run"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
