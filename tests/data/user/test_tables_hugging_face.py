"""Tests of Hugging Face data sets: folders like those of `save_to_disk`, and names."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from feddbe.data.registry import load_dataset
from feddbe.errors import InvalidInputError

pyarrow = pytest.importorskip("pyarrow")


def write_split(folder: Path, *shards: dict[str, Any]) -> None:
    """Write one split: Arrow streams, and state.json with their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{k:05}-of-{len(shards):05}.arrow" for k in range(len(shards))]
    for name, columns in zip(names, shards, strict=True):
        table = pyarrow.table(columns)
        with (
            pyarrow.OSFile(str(folder / name), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))


def write_splits(folder: Path, **splits: dict[str, Any]) -> Path:
    for name, columns in splits.items():
        write_split(folder / name, columns)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [*splits]}))
    return folder


def encode_png(value: int) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("L", (5, 4), value).save(file, "png")
    return {"bytes": file.getvalue(), "path": None}


def test_load_split_of_several_files(tmp_path: Path) -> None:
    write_split(tmp_path / "set", {"text": ["a b", "b"], "label": [0, 1]}, {"text": ["b c"], "label": [1]})
    data = load_dataset(tmp_path / "set")
    assert (data.name, data.num_words, data.classes) == ("set/", 4, 2)
    assert data.x.tolist() == [[2, 1], [1, 0], [1, 3]]


def test_labeled_splits_are_merged_training_split_first(tmp_path: Path) -> None:
    write_splits(
        tmp_path,
        unsupervised={"x": [9.0], "label": [-1]},
        test={"x": [2.0], "label": [1]},
        train={"x": [0.0, 1.0], "label": [0, 1]},
    )
    data = load_dataset(tmp_path)
    assert data.y.tolist() == [0, 1, 1]
    assert data.x[:, 0].argsort().tolist() == [0, 1, 2]


def test_load_images(tmp_path: Path) -> None:
    write_split(
        tmp_path,
        {"image": [encode_png(1), encode_png(2), encode_png(3)], "label": [0, 1, 1], "coarse": [0, 0, 0]},
    )
    data = load_dataset(f"{tmp_path}?x=image")
    assert (data.x.shape, data.x[:, 0, 0, 0].tolist()) == ((3, 1, 4, 5), [1, 2, 3])
    with pytest.raises(
        InvalidInputError, match=r"has images in 'image' next to 'coarse'; use the images only: \?image=image"
    ):
        load_dataset(tmp_path)
    write_split(
        tmp_path,
        {"image": [encode_png(1), {"bytes": b"no", "path": None}, encode_png(3)], "label": [0, 1, 1]},
    )
    with pytest.raises(InvalidInputError, match=r"cannot read the image in row 1 of .*: cannot identify"):
        load_dataset(tmp_path)


def test_invalid_folder_is_an_error(tmp_path: Path) -> None:
    write_splits(tmp_path, train={"x": [0.0, 1.0], "label": [0, 1]}, test={"z": [2.0], "label": [1]})
    with pytest.raises(InvalidInputError, match=r"the splits of .* do not have the same columns"):
        load_dataset(tmp_path)
    with pytest.raises(InvalidInputError, match=r"split train has no column 'y'; it has: x, label"):
        load_dataset(f"{tmp_path}?label=y")
    write_splits(tmp_path, train={"x": [0.0], "label": [-1]})
    with pytest.raises(InvalidInputError, match="has no rows with labels"):
        load_dataset(tmp_path)
    (tmp_path / "train" / "data-00000-of-00001.arrow").write_bytes(b"damaged")
    with pytest.raises(InvalidInputError, match="cannot read the data set in ") as caught:
        load_dataset(tmp_path)
    assert "\n" not in str(caught.value)


BIT_FLIP_PROGRAM = """
import sys
sys.path[:] = {path!r}
import random, warnings
from pathlib import Path
from feddbe.data import load_dataset
from feddbe.errors import InvalidInputError
folder = Path({folder!r})
(file,) = folder.glob("*.arrow")
original = file.read_bytes()
for seed in range(60):
    rng = random.Random(seed)
    damaged = bytearray(original)
    for _ in range(rng.choice([1, 8])):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    file.unlink()  # an earlier memory map must not change
    file.write_bytes(damaged)
    try:
        load_dataset(f"{{folder}}?x=text")
        print("read")
    except InvalidInputError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        print("refused")
"""


def test_damaged_files_never_crash_the_process(tmp_path: Path) -> None:
    words = [" ".join("abcdefgh"[: k % 8 + 1]) for k in range(200)]
    write_split(tmp_path, {"text": words, "label": [k % 3 for k in range(200)], "kind": ["x", "y"] * 100})
    code = BIT_FLIP_PROGRAM.format(path=sys.path, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-500:]}"
    outcomes = done.stdout.split()
    assert len(outcomes) == 60
    assert outcomes.count("refused") > 10


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_other_encoding_than_utf_8_is_one_line_error(tmp_path: Path, form: str) -> None:
    text = pyarrow.array([b"a", b"\xff\xfe", b"b"]).view(pyarrow.string())
    columns = {"text": text, "label": [0, 1, 1]}
    path = tmp_path
    if form == "arrow":
        write_split(tmp_path, columns)
    else:
        path = tmp_path / "bad.parquet"
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)
    with pytest.raises(InvalidInputError, match=r"cannot read .*UTF8") as caught:
        load_dataset(path)
    assert "\n" not in str(caught.value)


def test_hub_name_without_the_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InvalidInputError, match=r"hf:ag_news needs the datasets library; .*pip install 'feddbe\[hub\]'"
    ):
        load_dataset("hf:ag_news")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_load_data_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the library is installed, its folders are read, and names, here that of a folder with a CSV file."""
    datasets = pytest.importorskip("datasets", reason="the extra [hub] is not installed")
    monkeypatch.chdir(tmp_path)
    datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"
    columns = {"text": ["a b", "b", "b c"], "label": [0, 1, 1]}
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["n", "p"]))
    dataset = datasets.Dataset.from_dict(columns, features)
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "saved")
    assert load_dataset(tmp_path / "saved").y.tolist() == [0, 1, 1, 0, 1, 1]
    pictures = {"image": [Image.new("RGB", (2, 2), (1, 2, 3))] * 3, "label": [0, 1, 1]}
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    datasets.Dataset.from_dict(pictures, features).save_to_disk(tmp_path / "pictures")
    assert load_dataset(tmp_path / "pictures").x[0, :, 0, 0].tolist() == [1, 2, 3]
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "train.csv").write_text("text,label\na b,0\nb,1\nb c,1\n")
    assert load_dataset(f"hf:{tmp_path}/named").x.tolist() == [[2, 1], [1, 0], [1, 3]]
    with pytest.raises(InvalidInputError, match=r"cannot load hf:./nowhere: "):
        load_dataset("hf:./nowhere")


def test_class_names_are_read(tmp_path: Path) -> None:
    features = {"label": {"names": ["bad", "good", "unused"], "_type": "ClassLabel"}, "x": {"_type": "Value"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    folder = tmp_path / "set"
    folder.mkdir()
    table = pyarrow.table({"x": [1.0, 2.0, 3.0], "label": [1, 0, 1]}).replace_schema_metadata(metadata)
    with (
        pyarrow.OSFile(str(folder / "a.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    assert load_dataset(folder).label_names == ("bad", "good")
