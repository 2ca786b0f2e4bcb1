"""UCI HAR: folder and archives alike, the order of rows and signals, what is refused, and the real data."""

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
    """What the made-up window `row` has there: all different."""
    return row + signal / 100 + step / 100_000


def files() -> dict[str, str]:
    """The publisher's files with eight windows, of persons 2, 7 and 30; labels 1..6."""
    labels, persons = [1, 2, 3, 4, 5, 6, 6, 1], [7, 7, 30, 2, 2, 7, 30, 2]
    found = {"README.txt": "not read", "features.txt": "1 tBodyAcc-mean()-X"}
    for part, rows in (("train", range(TRAIN)), ("test", range(TRAIN, TRAIN + TEST))):
        found[f"{part}/y_{part}.txt"] = "".join(f"{labels[row]}\n" for row in rows)
        found[f"{part}/subject_{part}.txt"] = "".join(f"{persons[row]}\n" for row in rows)
        for signal, name in enumerate(har.SIGNALS):
            lines = [" ".join(f" {value(row, signal, step):.7e}" for step in range(128)) for row in rows]
            found[f"{part}/Inertial Signals/{name}_{part}.txt"] = "\n".join(lines) + "\n"
    return found


def folder(place: Path, found: dict[str, str]) -> Path:
    for name, text in found.items():
        path = place / har.FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return place


def zipped(place: Path, found: dict[str, str]) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place / "UCI HAR Dataset.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in reversed(found.items()):  # the order in an archive is anyone's
            file.writestr(f"{har.FOLDER}/{name}", text)
            file.writestr(f"__MACOSX/{har.FOLDER}/{Path(name).parent}/._{Path(name).name}", b"\0\5\x16\7")
    return place


def tarred(place: Path, found: dict[str, str]) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    with tarfile.open(place / "UCI HAR Dataset.tar.xz", "w:xz") as file:
        for name, text in found.items():
            member = tarfile.TarInfo(f"./{har.FOLDER}/{name}")
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
    return place


@pytest.fixture(autouse=True)
def nowhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path | None:
    """A machine without HAR, except for the test of the real data; returns its home."""
    if "real" in request.node.name:
        return None
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    for name in ("FEDDBE_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@needs_har
def test_the_real_data() -> None:
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


@pytest.mark.parametrize("write", [folder, zipped, tarred])
def test_train_then_test_with_the_signals_in_order(
    tmp_path: Path, write: Callable[[Path, dict[str, str]], Path]
) -> None:
    data = har.load(write(tmp_path / "data", files()))
    expected = [[[value(r, c, t) for t in range(128)] for c in range(9)] for r in range(TRAIN + TEST)]
    assert data.x.shape == (8, 9, 1, 128)
    torch.testing.assert_close(data.x[:, :, 0], torch.tensor(expected))
    assert data.y.tolist() == [0, 1, 2, 3, 4, 5, 5, 0]
    assert data.client is not None
    assert data.client.tolist() == [1, 1, 2, 0, 0, 1, 2, 0]
    assert (data.x.dtype, data.y.dtype) == (torch.float32, torch.int64)


def test_it_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = zipped(tmp_path / "data", files())
    first = har.load(place)
    assert (place / "har" / "inertial.cache" / "x.npy").is_file()
    with monkeypatch.context() as patched:
        patched.setattr(har, "_decode", None)
        again = har.load(place)
    assert torch.equal(again.x, first.x)
    assert again.sha256() == first.sha256()
    archive = place / "UCI HAR Dataset.zip"
    size, time = archive.stat().st_size, archive.stat().st_mtime_ns
    archive.write_bytes(b"x" * size)
    os.utime(archive, ns=(time, time))
    with pytest.raises(InvalidInputError, match=r"^cannot read .*UCI HAR Dataset\.zip: .*; fetch it again$"):
        har.load(place)


def test_the_folder_itself_will_do(tmp_path: Path) -> None:
    inner = folder(tmp_path, files()) / har.FOLDER
    assert har.find(inner) == har.find(tmp_path) == inner
    assert len(har.load(inner)) == 8


def test_not_found_says_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        har.load(tmp_path / "data")
    said = str(caught.value)
    assert "\n" not in said
    assert str(tmp_path / "home") in said
    assert "feddbe data get har" in said
    assert said.endswith(f"put UCI HAR Dataset.zip (or the folder in it) into {tmp_path / 'data' / 'har'}")


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
def test_refuses(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    found = files()
    if text is None:
        del found[name]
    else:
        found[name] = text
    with pytest.raises(InvalidInputError, match=message) as caught:
        har.load(folder(tmp_path, found))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "har" / "inertial.cache").exists()


def test_a_file_that_is_far_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(har, "_MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(InvalidInputError, match=r"unpacks to more than the 1000 bytes that were expected"):
        har.load(zipped(tmp_path, files()))


# --- the published layout


def windows(n: int = 60) -> Dataset:
    x = torch.from_numpy(np.random.RandomState(0).randn(n, 9, 1, 128).astype(np.float32))
    return Dataset("har", x, torch.arange(n) % 6, 6, client=np.arange(n) // 20)


def test_scrambled_is_the_published_formula() -> None:
    data = windows(4)
    found = har.scramble(data)
    for c in range(9):
        for t in range(128):
            at = 128 * c + t
            assert torch.equal(found.x[:, c, 0, t], data.x[:, at % 9, 0, at // 9])
    assert found.sha256() != data.sha256()


def test_the_cache_does_not_vouch_for_the_scrambled_windows(tmp_path: Path) -> None:
    data = har.load(folder(tmp_path, files()))
    found = har.scramble(data)
    assert found.sha256() != data.sha256()
    plain = Dataset("har", found.x.clone(), found.y, 6, client=found.client)
    assert found.sha256() == plain.sha256()


def test_the_variant_chooses_layout_and_cut_and_what_is_given_wins() -> None:
    def chosen(data: str = "har", **options: Any) -> tuple[object, object, bool]:
        found = resolve("fedavg", Config(data=data, **options), dataset=windows())
        as_read = torch.equal(found.task.dataset.x, windows().x)
        return found.config["data"], found.config["cut"], as_read

    channels, scrambled = "har(layout=channels)", "har(layout=scrambled)"
    assert chosen() == chosen(variant="paper") == (channels, "fc2", True)
    assert chosen(variant="official") == (scrambled, "conv2", False)
    assert chosen(channels, variant="official", cut="fc1") == (channels, "fc1", True)
    assert chosen(scrambled) == (scrambled, "fc2", False)


def test_other_data_has_no_layout() -> None:
    with pytest.raises(InvalidInputError, match=r"^unknown option of digits 'layout'; allowed: \(none\)$"):
        resolve("fedavg", Config(data="digits(layout=channels)"))
    assert (
        resolve("fedavg", Config(variant="official", clients=3, partition="iid")).config["data"] == "digits"
    )


# --- download


@pytest.fixture
def publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local server in the publisher's place."""
    place = zipped(tmp_path / "publisher", files())

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(place))) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        monkeypatch.setattr(har, "publisher", Publisher(url, har.publisher.checksums))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("publisher")
def test_get_says_that_it_is_not_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    BUILTIN_DATASETS["har"].download(tmp_path / "data")
    place = har.find(tmp_path / "data")
    assert place == tmp_path / "data" / "har" / "UCI HAR Dataset.zip"
    assert "is not verified" in caplog.text
    assert place.with_name(place.name + ".sha256").is_file()
    assert len(har.load(tmp_path / "data")) == 8
