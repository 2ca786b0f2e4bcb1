"""Tests of AG News: valid and invalid files, subsets, and the real files if available."""

from __future__ import annotations

import csv
import gzip
import hashlib
import lzma
import threading
from collections.abc import Callable, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from feddbe.cli.main import main
from feddbe.data.builtin import ag_news
from feddbe.data.files import Publisher
from feddbe.data.registry import BUILTIN_DATASETS, load_dataset
from feddbe.errors import InvalidInputError

needs_ag_news = pytest.mark.skipif(
    not ag_news.find(None), reason="AG News, or a subset of it, is not on this machine"
)
TRAIN = [("3", "Oil up", 'It said "no", (AP).'), ("1", "Oil\\down", "no news; no change")]
TEST = [("4", "A new disk", "oil")]
SUBSET = "a subset: 2 of 120,000 training rows, 1 of 7,600 test rows"


def as_csv(rows: Sequence[tuple[str, ...]]) -> bytes:
    quoted = (",".join(f'"{field.replace(chr(34), chr(34) * 2)}"' for field in row) for row in rows)
    return "".join(f"{line}\n" for line in quoted).encode()


def write_files(
    folder: Path, ending: str = "", train: bytes = as_csv(TRAIN), test: bytes = as_csv(TEST)
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    packers: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
    for name, content in (("train.csv", train), ("test.csv", test)):
        (folder / f"{name}{ending}").write_bytes(packers[ending](content))
    return folder


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine without AG News; return its home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    for name in ("FEDDBE_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_title_and_description_are_joined(tmp_path: Path, empty_home: Path, ending: str) -> None:
    data = ag_news.load(write_files(tmp_path / "data", ending))
    assert (data.name, data.classes, data.y.tolist()) == ("ag_news", 4, [2, 0, 3])
    assert (data.x.dtype, data.x.shape) == (torch.int32, (3, 200))
    # by frequency: no 3; oil 2; then one each: ( ) , . a ap change disk it new news oil\down said up
    words = [
        "<unk>",
        "no",
        "oil",
        *"(),.a",
        "ap",
        "change",
        "disk",
        "it",
        "new",
        "news",
        "oil\\down",
        "said",
        "up",
    ]
    assert data.num_words == len(words)
    texts = ["oil up it said no , ( ap ) .", "oil\\down no news no change", "a new disk oil"]
    for row, text in zip(data.x.tolist(), texts, strict=True):
        numbers = [words.index(word) for word in text.split()]
        assert row == numbers + [0] * (200 - len(numbers))
    assert data.inputs(data.x[:1]).dtype == torch.int64


def test_second_load_uses_the_cache(tmp_path: Path, empty_home: Path) -> None:
    folder = write_files(tmp_path / "data")
    first = ag_news.load(folder)
    second = ag_news.load(folder)
    assert torch.equal(first.x, second.x)
    assert (first.num_words, first.note, first.sha256()) == (
        second.num_words,
        second.note,
        second.sha256(),
    )
    assert list(folder.rglob("*.cache"))
    write_files(folder, test=as_csv([("2", "Another", "file")]))
    assert ag_news.load(folder).y.tolist() == [2, 0, 1], "another file makes another cache"


def test_subset_is_noted(tmp_path: Path, empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_files(tmp_path / "data", ".xz")
    assert ag_news.load(folder).note == SUBSET
    assert ag_news.describe_location(folder) == f"{folder} ({SUBSET})"
    assert main(["data", "list", "--data-dir", str(folder)]) == 0
    assert SUBSET in capsys.readouterr().out
    show_command = [
        "data",
        "show",
        "ag_news",
        "--data-dir",
        str(folder),
        "--partition",
        "iid",
        "--clients",
        "1",
    ]
    assert main(show_command) == 0
    assert f"ag_news: {SUBSET}" in capsys.readouterr().out


def test_complete_data_has_no_note(tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ag_news, "ROWS", (2, 1))
    folder = write_files(tmp_path / "data")
    assert ag_news.load(folder).note == ""
    assert ag_news.describe_location(folder) == str(folder)


def test_missing_data_error_names_folders_and_remedies(tmp_path: Path, empty_home: Path) -> None:
    assert BUILTIN_DATASETS["ag_news"].locate(tmp_path) is None
    write_files(tmp_path)
    (tmp_path / "test.csv").unlink()
    with pytest.raises(InvalidInputError) as caught:
        load_dataset("ag_news", tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        str(tmp_path),
        str(empty_home / ".cache" / "feddbe"),
        "feddbe data get ag_news",
        "train.csv and test.csv",
    ):
        assert part in message
    assert message.endswith(f"into {tmp_path / 'ag_news'}")


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            as_csv([("1", "a", "b"), ("5", "x", "y")]),
            r"row 2 of .*test.csv is '5,x,y'; expected a class \(1, 2",
        ),
        (b"label,title\n", "row 1 of .* is 'label,title'; expected a class"),
        (b"1\n", "row 1 of .* is '1'; expected a class"),
        (b"", "test.csv is empty"),
        (b'"1","\xff"\n', "cannot read .*test.csv: .* fetch the file again"),
    ],
)
def test_invalid_file_is_an_error(tmp_path: Path, empty_home: Path, test: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ag_news.load(write_files(tmp_path / "data", test=test))
    assert not list(tmp_path.rglob("*.cache")), "nothing half-written"


@pytest.mark.parametrize("ending", [".gz", ".xz"])
def test_error_names_damaged_archive(tmp_path: Path, empty_home: Path, ending: str) -> None:
    path = write_files(tmp_path / "data", ending) / f"train.csv{ending}"
    path.write_bytes(path.read_bytes()[:-12])
    assert ag_news.describe_location(tmp_path / "data") == f"{tmp_path / 'data'} (damaged)"
    with pytest.raises(InvalidInputError, match=f"cannot read {path}"):
        ag_news.load(tmp_path / "data")


def test_data_get_downloads_and_verifies(
    tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = write_files(tmp_path / "publisher")
    published = ag_news.publisher.checksums
    sums = {name: f"md5:{hashlib.md5((publisher / name).read_bytes()).hexdigest()}" for name in published}
    with LocalServer(publisher) as url:
        monkeypatch.setattr(ag_news, "publisher", Publisher(url, published))
        with pytest.raises(InvalidInputError, match=r"train.csv from .* has the checksum md5:"):
            BUILTIN_DATASETS["ag_news"].download(None)
        monkeypatch.setattr(ag_news, "publisher", Publisher(url, sums))
        BUILTIN_DATASETS["ag_news"].download(None)
        folder = empty_home / ".cache" / "feddbe" / "ag_news"
        assert len(ag_news.load(None)) == 3
        assert main(["data", "get", "ag_news"]) == 0
        assert capsys.readouterr().out.endswith("(verified)\n")
        content = (folder / "test.csv").read_bytes()
        (folder / "test.csv").write_bytes(content[:-2] + b"!\n")
        assert main(["data", "get", "ag_news"]) == 2
        assert "test.csv is damaged" in capsys.readouterr().err
        assert main(["data", "get", "ag_news", "--force"]) == 0
    assert (folder / "test.csv").read_bytes() == content


class LocalServer:
    """Local server instead of the publisher; as a context manager, it returns its address."""

    def __init__(self, folder: Path) -> None:
        class Quiet(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> str:
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_address[1]}/"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(scope="module")
def real_rows() -> list[list[list[str]]]:
    """Return the rows of the real files, parsed by Python's csv module."""
    parts = []
    for path in ag_news.find(None):
        with ag_news._open_file(path) as file:
            parts.append(list(csv.reader(file)))
    return parts


@needs_ag_news
def test_real_files(real_rows: list[list[list[str]]]) -> None:
    """The publisher's test file has 1,900 rows of each class; the complete data has 98,635 words."""
    data = ag_news.load(None)
    train, test = real_rows
    assert len(data) == len(train) + len(test)
    assert torch.bincount(data.y[len(train) :]).tolist() == [1900] * 4
    assert data.y.tolist() == [int(row[0]) - 1 for row in (*train, *test)]
    assert int(data.x.max()) == data.num_words - 1
    if (len(train), len(test)) == ag_news.ROWS:
        assert (data.num_words, data.note) == (98_635, "")
    else:
        assert data.note.startswith(f"a subset: {len(train):,} of 120,000")
