"""Tables of numbers or text: which columns are what, and what becomes of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from feddbe.data import load
from feddbe.errors import BadInput
from feddbe.options.config import Config
from feddbe.runs.experiment import load_data

PEOPLE = "age,income,label,client\n30,1e4,yes,b\n40,2e4,no,a\n50,3e4,no,b\n40,2e4,yes,a\n"
REVIEWS = "title,text,y\nGood,a good film!,1\nBad,a bad film,3\nGood,,1\n"


def csv(folder: Path, text: str = PEOPLE, name: str = "mine.csv") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def parquet(folder: Path, **columns: Any) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), folder / "mine.parquet")
    return folder / "mine.parquet"


def test_numbers_are_standardised(tmp_path: Path) -> None:
    data = load(csv(tmp_path))
    assert (data.name, data.classes, data.tokens) == ("mine.csv", 2, 0)
    assert (data.x.dtype, data.x.shape) == (torch.float32, (4, 2))
    root = float(np.sqrt(2))
    assert data.x.tolist() == [[pytest.approx(v)] * 2 for v in (-root, 0, root, 0)]
    assert data.y.tolist() == [1, 0, 0, 1]
    assert data.client is not None
    assert data.client.tolist() == [1, 0, 1, 0]


def test_a_client_column_is_the_partition_unless_another_is_asked_for(tmp_path: Path) -> None:
    data = str(csv(tmp_path))
    assert load_data(Config(data=data))[2].partition == "natural"
    assert load_data(Config(data=data, partition="iid", clients=1))[2].partition == "iid"


def test_columns_by_name(tmp_path: Path) -> None:
    path = csv(
        tmp_path, PEOPLE.replace("label,client", "a&b,who").replace("age", "a,ge").replace("a,ge", '"a,ge"')
    )
    data = load(f"{path}?label=a%26b&client=who&x=a%2Cge")
    assert (data.x.shape, data.classes, data.client is None) == ((4, 1), 2, False)
    assert load(f"{path}?label=a%26b&x=income").client is None


def test_constant_column_and_byte_order_mark(tmp_path: Path) -> None:
    data = load(csv(tmp_path, "﻿y\tx\n0\t5\n1\t5\n1\t5\n", "mine.tsv"))
    assert (data.x.tolist(), data.y.tolist()) == ([[0], [0], [0]], [0, 1, 1])


def test_text_columns_are_joined_and_their_words_numbered(tmp_path: Path) -> None:
    data = load(csv(tmp_path, REVIEWS))
    assert (data.tokens, data.x.dtype) == (6, torch.int32)  # <unk> good a bad film !
    assert data.x.tolist() == [[1, 2, 1, 4, 5], [3, 2, 3, 4, 0], [1, 0, 0, 0, 0]]
    assert (data.y.tolist(), data.classes) == ([0, 1, 0], 2)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [("10 9 10", [1, 0, 1]), ("-1 1 1", [0, 1, 1]), ("b a a", [1, 0, 0]), ("2.0 1 1", [1, 0, 0])],
)
def test_labels_in_sorted_order(tmp_path: Path, labels: str, expected: list[int]) -> None:
    rows = "".join(f"{row},{label}\n" for row, label in enumerate(labels.split()))
    assert load(csv(tmp_path, "x,y\n" + rows)).y.tolist() == expected


@pytest.mark.parametrize(
    ("clients", "expected"), [("10 9 10", [1, 0, 1]), ("7 007 7", [1, 0, 1]), ("b a b", [1, 0, 1])]
)
def test_clients_in_the_order_of_their_ids(tmp_path: Path, clients: str, expected: list[int]) -> None:
    rows = "".join(f"{row},{row % 2},{client}\n" for row, client in enumerate(clients.split()))
    found = load(csv(tmp_path, "x,y,client\n" + rows)).client
    assert found is not None
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("text", "query", "message"),
    [
        (
            PEOPLE,
            "?label=target",
            r"has no column 'target'; it has: age, income, label, client; name yours as in",
        ),
        (PEOPLE.replace("label", "target"), "", "has no column 'label'; it has: age, income, target, client"),
        (PEOPLE, "?client=user", "has no column 'user'; it has: age"),
        (PEOPLE, "?x=age,size", "has no column 'size'; it has: age"),
        (PEOPLE, "?lable=age", "unknown word after '\\?' 'lable'; did you mean 'label'\\?"),
        (PEOPLE, "?x=age,client", "numbers in 'age' but text in client .row 0 of 'client': 'b'."),
        (PEOPLE.replace("40,2", ",2", 1), "", "numbers in 'income' but text in age .row 1 of 'age': ''."),
        (PEOPLE.replace("40,2", "nan,2", 1), "", "column 'age' of .* is nan in row 1"),
        (PEOPLE.replace("40,2", "1e300,2", 1), "", "column 'age' of .* has values too large"),
        (PEOPLE.replace("40,2e4,no", "40,no", 1), "", "line 3 of .* has 3 values, its first 4"),
        (PEOPLE.replace("income", "age"), "", "two columns of one name; it has: age, age"),
        (PEOPLE.replace("no", "yes"), "", "column 'label' of .* has only the label 'yes'"),
        (PEOPLE, "?label=age", "numbers in 'income' but text in label .row 0 of 'label': 'yes'."),
        (
            "x,y\n1,0.5\n2,1\n3,1\n",
            "",
            "column 'y' of .* has the label 0.5; labels must be whole numbers or text",
        ),
        ("x,y\n1,a\n2,b\n3,c\n", "", "column 'y' of .* has another label in each of 3 rows"),
        ("y,client\n1,a\n2,b\n1,b\n", "", "has no column beside 'y' and 'client'"),
        ("y,text\n1,\n2,;\n1,\n", "", "the text in text of .* has no words"),
        ("x,y\n", "", "has no rows"),
        ("", "", "has no rows"),
        ('x,y\n"1' + "1" * 200_000, "", "as CSV in UTF-8: field larger"),
    ],
)
def test_refuses(tmp_path: Path, text: str, query: str, message: str) -> None:
    path = csv(tmp_path, text)
    with pytest.raises(BadInput, match=message) as caught:
        load(f"{path}{query}")
    assert "\n" not in str(caught.value)
    assert query or str(path) in str(caught.value)


def test_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_bytes(b"x,y\n\xff,1\n")
    with pytest.raises(BadInput, match="as CSV in UTF-8"):
        load(tmp_path / "mine.csv")


def test_columns_of_what_has_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"'\?label=a' chooses columns, but 'mine.npz' has none"):
        load("mine.npz?label=a")


# --- Parquet


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = parquet(
        tmp_path,
        a=[1, 2, 3],
        b=pyarrow.array([True, False, True]),
        label=pyarrow.array(["x", "y", "x"]).dictionary_encode(),
        client=[5, 3, 5],
        when=pyarrow.array([1, 2, None], pyarrow.date32()),
    )
    data = load(f"{path}?x=a,b")
    assert (data.x.shape, data.y.tolist(), data.classes) == ((3, 2), [0, 1, 0], 2)
    assert data.client is not None
    assert data.client.tolist() == [1, 0, 1]
    with pytest.raises(BadInput, match=r"column 'when' of .* has no value in row 2"):
        load(path)
    with pytest.raises(BadInput, match=r"has no column 'c'; it has: a, b, label, client, when"):
        load(f"{path}?x=c")


def test_parquet_with_text(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    data = load(parquet(tmp_path, text=["a b", "b", "b c"], label=[0, 1, 1]))
    assert (data.tokens, data.x.tolist()) == (4, [[2, 1], [1, 0], [1, 3]])


def test_parquet_refuses(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = parquet(tmp_path, a=pyarrow.array([1, 2, 3], pyarrow.date32()), label=[0, 1, 1])
    with pytest.raises(
        BadInput, match=r"column 'a' of .* holds date32.*; accepted are numbers, text and images"
    ):
        load(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(BadInput, match=r"cannot read .*mine.parquet: "):
        load(path)
    path.unlink()
    with pytest.raises(BadInput, match=r"cannot read .*mine.parquet: "):
        load(path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        BadInput, match=r"mine.parquet needs pyarrow; install it with: pip install 'feddbe\[table\]'"
    ):
        load(tmp_path / "mine.parquet")


def test_ids_of_any_length_are_in_order_of_their_value(tmp_path: Path) -> None:
    ids = ["9", "12345678901234567890", "10", "12345678901234567891", "9"]
    (tmp_path / "a.csv").write_text(
        "x,label,client\n" + "".join(f"{k},{k % 2},{i}\n" for k, i in enumerate(ids))
    )
    client = load(tmp_path / "a.csv").client
    assert client is not None
    assert client.tolist() == [0, 2, 1, 3, 0]


@pytest.mark.parametrize("name", ["bad\udcff.csv", "bad\0.csv", "~nosuch/x.csv"])
def test_paths_that_cannot_be_used(name: str, tmp_path: Path) -> None:
    for what, place in ((name, None), ("har", Path(name))):
        with pytest.raises(BadInput, match="cannot use the path '") as caught:
            load(what, place)
        assert str(caught.value).isprintable()


def test_many_columns_are_looked_up_and_quoted_in_short(tmp_path: Path) -> None:
    """50,000 took 49 s, and an error of 8.9 MB."""
    names = [f"a_name_that_is_long_{k}" for k in range(20_000)]
    rows = "".join(",".join([str(k % 2), *["1"] * len(names)]) + "\n" for k in range(3))
    path = tmp_path / "wide.csv"
    path.write_text(",".join(["label", *names]) + "\n" + rows)
    assert load(path).x.shape == (3, 20_000)
    with pytest.raises(BadInput, match=r"has no column 'none'; it has: label, .* \.\.\. ") as caught:
        load(f"{path}?label=none")
    assert len(str(caught.value)) < 600
    path.write_text(",".join(["label", *names]) + "\n" + rows.replace("1\n", "word\n"))
    with pytest.raises(BadInput, match=r"has numbers in .* but text in a_name_that_is_long_19999") as caught:
        load(path)
    assert len(str(caught.value)) < 800
    path.write_text(",".join(["label", *names, names[0]]) + "\n")
    with pytest.raises(BadInput, match="two columns of one name") as caught:
        load(path)
    assert len(str(caught.value)) < 600
