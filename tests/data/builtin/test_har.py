"""Tests of UCI HAR: folder and archives, order of rows and signals, errors, and the real data."""

from __future__ import annotations

import io
import os
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from feddbe.config.options import Config
from feddbe.data.builtin import har
from feddbe.data.dataset import Dataset
from feddbe.data.federated import load_federated_data
from feddbe.data.files import Publisher
from feddbe.data.registry import BUILTIN_DATASETS
from feddbe.errors import InvalidInputError
from feddbe.runs.experiment import resolve

needs_har = pytest.mark.skipif(
    har.find(None) is None, reason="UCI HAR is not on this machine (FEDDBE_DATA says where to look)"
)
TRAIN, TEST = 5, 3


def value(row: int, signal: int, step: int) -> float:
    """Return a value of the artificial window `row`; all are different."""
    return row + signal / 100 + step / 100_000


def build_files() -> dict[str, str]:
    """Return the publisher's files with eight windows of persons 2, 7 and 30, with labels 1..6."""
    labels, persons = [1, 2, 3, 4, 5, 6, 6, 1], [7, 7, 30, 2, 2, 7, 30, 2]
    texts = {"README.txt": "not read", "features.txt": "1 tBodyAcc-mean()-X"}
    for part, rows in (("train", range(TRAIN)), ("test", range(TRAIN, TRAIN + TEST))):
        texts[f"{part}/y_{part}.txt"] = "".join(f"{labels[row]}\n" for row in rows)
        texts[f"{part}/subject_{part}.txt"] = "".join(f"{persons[row]}\n" for row in rows)
        for signal, name in enumerate(har.SIGNALS):
            lines = [" ".join(f" {value(row, signal, step):.7e}" for step in range(128)) for row in rows]
            texts[f"{part}/Inertial Signals/{name}_{part}.txt"] = "\n".join(lines) + "\n"
    return texts


def write_folder(data_dir: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = data_dir / har.FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return data_dir


def write_zip(data_dir: Path, texts: dict[str, str]) -> Path:
    data_dir.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(data_dir / "UCI HAR Dataset.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in reversed(texts.items()):  # archives may have any order
            file.writestr(f"{har.FOLDER}/{name}", text)
            file.writestr(f"__MACOSX/{har.FOLDER}/{Path(name).parent}/._{Path(name).name}", b"\0\5\x16\7")
    return data_dir


def write_tar(data_dir: Path, texts: dict[str, str]) -> Path:
    data_dir.mkdir(parents=True, exist_ok=True)
    with tarfile.open(data_dir / "UCI HAR Dataset.tar.xz", "w:xz") as file:
        for name, text in texts.items():
            member = tarfile.TarInfo(f"./{har.FOLDER}/{name}")
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
    return data_dir


@pytest.fixture(autouse=True)
def empty_home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path | None:
    """Simulate a machine without HAR, except for the test of the real data; return its home folder."""
    if "real" in request.node.name:
        return None
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    for name in ("FEDDBE_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@needs_har
def test_real_data() -> None:
    """Published: 10,299 windows, 30 persons, 6 activities; 7,352 windows are the training set's."""
    data = har.load(None)
    assert (data.name, data.classes, data.x.shape, data.x.dtype) == (
        "har",
        6,
        (10_299, 9, 1, 128),
        torch.float32,
    )
    assert data.client is not None
    assert np.bincount(data.client).min() * 0.75 >= 210
    assert len(np.unique(data.client)) == 30
    assert torch.bincount(data.y).tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    assert set(data.client[:7352]).isdisjoint(data.client[7352:]), "21 persons train, 9 others test"
    total, body = data.x[:, 6:], data.x[:, :3]
    assert 0.9 < float((total - body).square().sum(1).sqrt().mean()) < 1.1, "total less body is gravity, 1 g"
    _, split, options = load_federated_data(Config(data="har"), data)
    assert (options.partition, split.clients, options.data) == ("natural", 30, "har(layout=channels)")


@pytest.mark.parametrize("write", [write_folder, write_zip, write_tar])
def test_training_then_test_windows_with_signals_in_order(
    tmp_path: Path, write: Callable[[Path, dict[str, str]], Path]
) -> None:
    data = har.load(write(tmp_path / "data", build_files()))
    expected = [[[value(r, c, t) for t in range(128)] for c in range(9)] for r in range(TRAIN + TEST)]
    assert data.x.shape == (8, 9, 1, 128)
    torch.testing.assert_close(data.x[:, :, 0], torch.tensor(expected))
    assert data.y.tolist() == [0, 1, 2, 3, 4, 5, 5, 0]
    assert data.client is not None
    assert data.client.tolist() == [1, 1, 2, 0, 0, 1, 2, 0]
    assert (data.x.dtype, data.y.dtype) == (torch.float32, torch.int64)


def test_data_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = write_zip(tmp_path / "data", build_files())
    first = har.load(data_dir)
    assert (data_dir / "har" / "inertial.cache" / "x.npy").is_file()
    with monkeypatch.context() as patched:
        patched.setattr(har, "_decode", None)
        second = har.load(data_dir)
    assert torch.equal(second.x, first.x)
    assert second.sha256() == first.sha256()
    archive = data_dir / "UCI HAR Dataset.zip"
    size, time = archive.stat().st_size, archive.stat().st_mtime_ns
    archive.write_bytes(b"x" * size)
    os.utime(archive, ns=(time, time))
    with pytest.raises(InvalidInputError, match=r"^cannot read .*UCI HAR Dataset\.zip: .*; fetch it again$"):
        har.load(data_dir)


def test_dataset_folder_is_accepted_as_data_dir(tmp_path: Path) -> None:
    inner = write_folder(tmp_path, build_files()) / har.FOLDER
    assert har.find(inner) == har.find(tmp_path) == inner
    assert len(har.load(inner)) == 8


def test_missing_data_error_names_folders_and_remedies(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        har.load(tmp_path / "data")
    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path / "home") in message
    assert "feddbe data get har" in message
    assert message.endswith(f"put UCI HAR Dataset.zip (or the folder in it) into {tmp_path / 'data' / 'har'}")


SIGNAL = "test/Inertial Signals/body_gyro_y_test.txt"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (SIGNAL, None, f"has no '{SIGNAL}'; fetch it again"),
        (SIGNAL, "", f"'{SIGNAL}' in .* is not a table of numbers: .*no data"),
        (SIGNAL, "1 2\n3 x\n", f"'{SIGNAL}' in .* is not a table of numbers: .* 'x'"),
        (SIGNAL, "1 2\n3\n", f"'{SIGNAL}' in .* is not a table of numbers"),
        (SIGNAL, "1 2\n3 4\n5 6\n", rf"'{SIGNAL}' in .* a table of \(3, 2\), expected \(3, 128\)"),
        (SIGNAL, "1 2\n3 nan\n5 6\n", f"'{SIGNAL}' in .* values that are not finite"),
        ("test/y_test.txt", "1\n2\n7\n", r"has the label 7, expected 1\.\.6"),
        ("test/y_test.txt", "1\n2\n0\n", "'test/y_test.txt' in .* values that are not 1, 2"),
        ("test/subject_test.txt", "1\n2.5\n2\n", "'test/subject_test.txt' in .* values that are not 1, 2"),
        ("test/subject_test.txt", "1\n2\n", r"'test/subject_test.txt' in .* shape \(2, 1\)"),
    ],
)
def test_invalid_file_is_an_error(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    texts = build_files()
    if text is None:
        del texts[name]
    else:
        texts[name] = text
    with pytest.raises(InvalidInputError, match=message) as caught:
        har.load(write_folder(tmp_path, texts))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "har" / "inertial.cache").exists()


def test_archive_over_size_limit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(har, "_MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(InvalidInputError, match=r"unpacks to more than the 1000 bytes that were expected"):
        har.load(write_zip(tmp_path, build_files()))


# --- the published layout


def random_windows(n: int = 60) -> Dataset:
    x = torch.from_numpy(np.random.RandomState(0).randn(n, 9, 1, 128).astype(np.float32))
    return Dataset("har", x, torch.arange(n) % 6, 6, client=np.arange(n) // 20)


def test_scrambled_layout_follows_the_published_formula() -> None:
    data = random_windows(4)
    scrambled = har.scramble(data)
    for c in range(9):
        for t in range(128):
            position = 128 * c + t
            assert torch.equal(scrambled.x[:, c, 0, t], data.x[:, position % 9, 0, position // 9])
    assert scrambled.sha256() != data.sha256()


def test_scrambled_windows_are_hashed_again(tmp_path: Path) -> None:
    data = har.load(write_folder(tmp_path, build_files()))
    scrambled = har.scramble(data)
    assert scrambled.sha256() != data.sha256()
    plain = Dataset("har", scrambled.x.clone(), scrambled.y, 6, client=scrambled.client)
    assert scrambled.sha256() == plain.sha256()


def test_variant_selects_layout_and_cut_unless_given() -> None:
    def resolve_layout(data: str = "har", **options: Any) -> tuple[object, object, bool]:
        experiment = resolve("fedavg", Config(data=data, **options), dataset=random_windows())
        is_unchanged = torch.equal(experiment.task.dataset.x, random_windows().x)
        return experiment.config["data"], experiment.config["cut"], is_unchanged

    channels, scrambled = "har(layout=channels)", "har(layout=scrambled)"
    assert resolve_layout() == resolve_layout(variant="paper") == (channels, "fc2", True)
    assert resolve_layout(variant="official") == (scrambled, "conv2", False)
    assert resolve_layout(channels, variant="official", cut="fc1") == (channels, "fc1", True)
    assert resolve_layout(scrambled) == (scrambled, "fc2", False)


def test_layout_of_other_data_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"^unknown option of digits 'layout'; allowed: \(none\)$"):
        resolve("fedavg", Config(data="digits(layout=channels)"))
    assert (
        resolve("fedavg", Config(variant="official", clients=3, partition="iid")).config["data"] == "digits"
    )


# --- download


@pytest.fixture
def publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the publisher by a local server."""
    folder = write_zip(tmp_path / "publisher", build_files())

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        monkeypatch.setattr(har, "publisher", Publisher(url, har.publisher.checksums))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("publisher")
def test_download_logs_that_it_is_not_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    BUILTIN_DATASETS["har"].download(tmp_path / "data")
    archive = har.find(tmp_path / "data")
    assert archive == tmp_path / "data" / "har" / "UCI HAR Dataset.zip"
    assert "is not verified" in caplog.text
    assert archive.with_name(archive.name + ".sha256").is_file()
    assert len(har.load(tmp_path / "data")) == 8
