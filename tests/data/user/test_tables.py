"""Tests of tables: kinds of columns, their encoding, and errors."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from feddbe.config.options import Config
from feddbe.data import rows
from feddbe.data.dataset import Preprocessing
from feddbe.data.federated import load_federated_data
from feddbe.data.registry import load_dataset
from feddbe.errors import InvalidInputError

PEOPLE = "age,income,label,client\n30,1e4,yes,b\n40,2e4,no,a\n50,3e4,no,b\n40,2e4,yes,a\n"
REVIEWS = "title,text,y\nGood,a good film!,1\nBad,a bad film,3\nGood,,1\n"


def write_csv(folder: Path, text: str = PEOPLE, name: str = "mine.csv") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def write_parquet(folder: Path, **columns: Any) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), folder / "mine.parquet")
    return folder / "mine.parquet"


def test_numbers_are_standardized_by_training_rows_only(tmp_path: Path) -> None:
    data = load_dataset(write_csv(tmp_path))
    assert (data.name, data.classes, data.num_words) == ("mine.csv", 2, 0)
    assert data.x.tolist() == [[30, 1e4], [40, 2e4], [50, 3e4], [40, 2e4]], "raw until the split is known"
    fitted = data.fit_preprocessing(np.array([0, 2]))  # ages 30 and 50: mean 40, deviation 10
    assert (fitted.x.dtype, fitted.x.shape) == (torch.float32, (4, 2))
    assert fitted.x.tolist() == [[pytest.approx(v)] * 2 for v in (-1, 0, 1, 0)]
    assert data.fit_preprocessing(np.array([1, 2])).x[0].tolist() == pytest.approx([-3, -3])  # (30 - 45) / 5
    assert fitted.fit_preprocessing(np.array([1])) is fitted, "fitted once"
    assert (data.y.tolist(), data.label_names) == ([1, 0, 0, 1], ("no", "yes"))
    assert data.client is not None
    assert (data.client.tolist(), data.client_names) == ([1, 0, 1, 0], ("a", "b"))


def write_people(folder: Path, n: int = 40) -> Path:
    """Write rows of four clients; the income is the row's number, for client d a million more."""
    rows = (f"{k % 7},{k + 1e6 * (k % 4 == 3)},{k // 4 % 2},{'abcd'[k % 4]}\n" for k in range(n))
    return write_csv(folder, "age,income,label,client\n" + "".join(rows))


@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_statistics_exclude_test_and_validation_rows_and_new_clients(
    tmp_path: Path, validation: float
) -> None:
    path = write_people(tmp_path)
    raw = load_dataset(path).x.numpy()
    data, split, _ = load_federated_data(Config(data=str(path), validation=validation, new_clients=1))
    train = np.concatenate([split.train[k] for k in range(3)])
    mean, deviation = raw[train].mean(axis=0), raw[train].std(axis=0)
    assert np.allclose(data.x.numpy(), (raw - mean) / deviation, rtol=1e-6)
    assert data.preprocessing is not None
    statistics = [(column.name, *column.mean, column.deviation) for column in data.preprocessing.columns]
    assert statistics == [
        ("age", pytest.approx(mean[0]), pytest.approx(deviation[0])),
        ("income", pytest.approx(mean[1]), pytest.approx(deviation[1])),
    ]
    assert mean[1] < 1000, "without the million of client d, a new client"


def test_preprocessing_survives_json(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path, PEOPLE.replace("age", "town").replace("30", "x").replace("40", "y").replace("50", "x")
    )
    preprocessing = load_federated_data(Config(data=str(path)))[0].preprocessing_spec
    restored = Preprocessing.from_json(json.loads(json.dumps(preprocessing.to_json())))
    assert restored == preprocessing
    assert restored.columns[0].categories == ("x", "y")


def test_client_names_only_with_natural_partition(tmp_path: Path) -> None:
    path = str(write_people(tmp_path))
    assert load_federated_data(Config(data=path))[0].client_names == ("a", "b", "c", "d")
    assert load_federated_data(Config(data=path, partition="iid", clients=2))[0].client_names == ()


# --- missing values

MISSING_VALUES = "age,town,label\n30,Ulm,yes\n,Bonn,no\n50,,no\n40,Ulm,no\n"


def test_missing_value_error_names_line_and_remedies(tmp_path: Path) -> None:
    path = write_csv(tmp_path, MISSING_VALUES)
    message = (
        "column 'age' of .* has no value in line 3; fill it in, or .missing=drop .*, .missing=mean takes"
    )
    with pytest.raises(InvalidInputError, match=message):
        load_dataset(path)
    with pytest.raises(InvalidInputError, match=r"unknown value of .missing= 'zero'"):
        load_dataset(f"{path}?missing=zero")


def test_missing_drop_removes_rows(tmp_path: Path) -> None:
    data = load_dataset(f"{write_csv(tmp_path, MISSING_VALUES)}?missing=drop")
    assert (data.x.tolist(), data.y.tolist()) == ([[30, 1], [40, 1]], [1, 0])
    assert "2 of 4 rows were left out" in data.note


def test_missing_mean_is_that_of_the_training_rows(tmp_path: Path) -> None:
    data = load_dataset(f"{write_csv(tmp_path, MISSING_VALUES)}?missing=mean").fit_preprocessing(
        np.array([0, 1, 2])
    )
    # age: (30 + 50) / 2, so 0 when standardized; town: one Bonn and one Ulm among those that are known
    assert data.x[1].tolist() == [0, 1, 0]
    assert data.x[2].tolist() == [1, 0.5, 0.5]


def test_missing_label_or_client_cannot_be_filled(tmp_path: Path) -> None:
    path = write_csv(tmp_path, PEOPLE.replace("no,a", ",a", 1))
    with pytest.raises(
        InvalidInputError, match=r"'label' of .* has no value in line 3; fill it in, or .missing=drop"
    ):
        load_dataset(f"{path}?missing=mean")
    assert len(load_dataset(f"{path}?missing=drop")) == 3
    with pytest.raises(InvalidInputError, match=r"'client' of .* has no value in line 2"):
        load_dataset(write_csv(tmp_path, PEOPLE.replace("yes,b", "yes,", 1)))


@pytest.mark.parametrize("marker", ["", "NA", "nan", "n/a", "NULL", "?"])
def test_markers_of_a_missing_number(tmp_path: Path, marker: str) -> None:
    path = write_csv(tmp_path, PEOPLE.replace("40,2", f"{marker},2", 1))
    with pytest.raises(InvalidInputError, match=r"column 'age' of .* has no value in line 3"):
        load_dataset(path)


def test_single_wrong_cell_does_not_make_a_column_text(tmp_path: Path) -> None:
    """With `4O`, `?x=age` was suggested, which makes an experiment on words."""
    path = write_csv(tmp_path, PEOPLE.replace("40,2", "4O,2", 1))
    with pytest.raises(
        InvalidInputError, match=r"column 'age' of .* has numbers, but '4O' in line 3; correct it"
    ):
        load_dataset(path)
    data = load_dataset(f"{path}?categories=age")
    assert data.preprocessing is not None
    assert data.preprocessing.columns[0].categories == ("30", "40", "4O", "50")


# --- categories


def test_text_next_to_numbers_is_a_category(tmp_path: Path) -> None:
    data = load_dataset(f"{write_csv(tmp_path)}?x=age,client").fit_preprocessing(np.arange(4))
    assert data.x[:, 1:].tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert "one input for each category of client (2)" in data.note


def test_categories_option_makes_numbers_categories(tmp_path: Path) -> None:
    data = load_dataset(f"{write_csv(tmp_path)}?x=age&categories=age").fit_preprocessing(np.arange(4))
    assert data.x.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0]]


def test_free_text_next_to_numbers_is_an_error_with_both_remedies(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "age,text,y\n1,a b,0\n2,b c,1\n3,c d,0\n4,d e,1\n")
    with pytest.raises(
        InvalidInputError, match=r"but text in 'text' \(4 different in 4 rows.*\?drop=text, .* \?x=text"
    ):
        load_dataset(path)
    assert load_dataset(f"{path}?x=text").num_words == 6


# --- delimiters


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_delimiter_is_detected(tmp_path: Path, mark: str) -> None:
    data = load_dataset(write_csv(tmp_path, PEOPLE.replace(",", mark)))
    assert data.x.shape == (4, 2)
    assert data.client_names == ("a", "b")


def test_quoted_comma_is_not_a_delimiter(tmp_path: Path) -> None:
    data = load_dataset(write_csv(tmp_path, 'text;y\n"a, b, c";0\n"d, e, f";1\n"g, h, i";1\n'))
    assert data.num_words == 9 + 2  # nine letters, the comma, the unknown word


def test_decimal_comma_with_semicolon_delimiter(tmp_path: Path) -> None:
    data = load_dataset(write_csv(tmp_path, "x;y\n1,5;0\n2;1\n-3,25;1\n"))
    assert data.x.tolist() == [[1.5], [2], [-3.25]]
    assert data.preprocessing_spec.comma


def test_client_column_is_the_default_partition(tmp_path: Path) -> None:
    data = str(write_csv(tmp_path))
    assert load_federated_data(Config(data=data))[2].partition == "natural"
    assert load_federated_data(Config(data=data, partition="iid", clients=1))[2].partition == "iid"


def test_query_selects_columns_by_name(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path, PEOPLE.replace("label,client", "a&b,who").replace("age", "a,ge").replace("a,ge", '"a,ge"')
    )
    data = load_dataset(f"{path}?label=a%26b&client=who&x=a%2Cge")
    assert (data.x.shape, data.classes, data.client is None) == ((4, 1), 2, False)
    assert load_dataset(f"{path}?label=a%26b&x=income").client is None


def test_constant_column_and_byte_order_mark(tmp_path: Path) -> None:
    data = load_dataset(write_csv(tmp_path, "﻿y\tx\n0\t5\n1\t5\n1\t5\n", "mine.tsv")).fit_preprocessing(
        np.arange(3)
    )
    assert (data.x.tolist(), data.y.tolist()) == ([[0], [0], [0]], [0, 1, 1])


def test_text_columns_are_joined_and_tokenized(tmp_path: Path) -> None:
    data = load_dataset(write_csv(tmp_path, REVIEWS))
    assert (data.num_words, data.x.dtype) == (6, torch.int32)  # <unk> good a bad film !
    assert data.x.tolist() == [[1, 2, 1, 4, 5], [3, 2, 3, 4, 0], [1, 0, 0, 0, 0]]
    assert (data.y.tolist(), data.classes) == ([0, 1, 0], 2)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [("10 9 10", [1, 0, 1]), ("-1 1 1", [0, 1, 1]), ("b a a", [1, 0, 0]), ("2.0 1 1", [1, 0, 0])],
)
def test_labels_are_numbered_in_sorted_order(tmp_path: Path, labels: str, expected: list[int]) -> None:
    rows = "".join(f"{row},{label}\n" for row, label in enumerate(labels.split()))
    assert load_dataset(write_csv(tmp_path, "x,y\n" + rows)).y.tolist() == expected


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (
            "9007199254740994 9007199254740992 9007199254740995 9007199254740993 9007199254740992",
            [f"900719925474099{digit}" for digit in range(2, 6)],
        ),
        ("1 01 1.0 0 1", ["0", "01", "1", "1.0"]),
        ("-2 10 1e1 9 9", ["-2", "9", "10", "1e1"]),
        ("true 1 True 1", ["1", "True", "true"]),
    ],
)
def test_labels_that_differ_as_text_are_different_classes(
    tmp_path: Path, labels: str, names: list[str]
) -> None:
    """If all are numbers, classes are sorted by value, also beyond the digits of a float."""
    rows = "".join(f"{row},{label}\n" for row, label in enumerate(labels.split()))
    data = load_dataset(write_csv(tmp_path, "x,y\n" + rows))
    assert list(data.label_names) == names
    assert [names[number] for number in data.y] == labels.split()


def test_large_integer_labels_in_parquet_stay_exact_with_missing_values(tmp_path: Path) -> None:
    labels = [2**53 + 1, 2**53, None, 2**53 + 1, 2**53 + 2]
    data = load_dataset(f"{write_parquet(tmp_path, a=[1, 2, 3, 4, 5], label=labels)}?missing=drop")
    assert data.label_names == tuple(str(2**53 + k) for k in range(3))
    assert data.y.tolist() == [1, 0, 1, 2]


@pytest.mark.parametrize(
    ("clients", "expected"), [("10 9 10", [1, 0, 1]), ("7 007 7", [1, 0, 1]), ("b a b", [1, 0, 1])]
)
def test_clients_are_numbered_in_the_order_of_their_ids(
    tmp_path: Path, clients: str, expected: list[int]
) -> None:
    rows = "".join(f"{row},{row % 2},{client}\n" for row, client in enumerate(clients.split()))
    client = load_dataset(write_csv(tmp_path, "x,y,client\n" + rows)).client
    assert client is not None
    assert client.tolist() == expected


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
        (PEOPLE, "?lable=age", "unknown key after '\\?' 'lable'; did you mean 'label'\\?"),
        (PEOPLE.replace("40,2", "inf,2", 1), "", "column 'age' of .* is inf in line 3"),
        (PEOPLE, "?categories=size", "has no column 'size'; it has: age"),
        (PEOPLE, "?resize=32", ".resize= is for images; .* has none"),
        (PEOPLE, "?resize=wide", ".resize=wide: write a number of pixels"),
        (PEOPLE, "?words=100", "'.words=' does not apply to '.*mine.csv'; allowed there: .label="),
        ("x,y\n,0\n,1\n,1\n", "", "column 'x' of .* has no values; leave it out"),
        ("x,y\n,0\n1,\n1,\n", "?missing=drop", "has no row without a missing value"),
        (PEOPLE.replace("40,2", "1e300,2", 1), "", "column 'age' of .* has values too large"),
        (PEOPLE.replace("40,2e4,no", "40,no", 1), "", "line 3 of .* has 3 values, its first 4"),
        (PEOPLE.replace("income", "age"), "", "two columns of one name, 'age'; name each column once"),
        (
            "x,y\n1,0.5\n2,1\n3,1\n",
            "",
            "column 'y' of .* has the label 0.5; labels must be whole numbers or text",
        ),
        ("x,y\n1,a\n2,b\n3,c\n", "", "column 'y' of .* has another label in each of 3 rows"),
        ("y,client\n1,a\n2,b\n1,b\n", "", "has no column next to 'y' and 'client'"),
        ("y,text\n1,\n2,;\n1,\n", "", "the text in text of .* has no words"),
        ("x,y\n", "", "has no rows"),
        ("", "", "has no rows"),
        ('x,y\n"1' + "1" * 200_000, "", "as CSV in UTF-8: field larger"),
    ],
)
def test_invalid_table_is_an_error(tmp_path: Path, text: str, query: str, message: str) -> None:
    path = write_csv(tmp_path, text)
    with pytest.raises(InvalidInputError, match=message) as caught:
        load_dataset(f"{path}{query}")
    assert "\n" not in str(caught.value)
    assert query or str(path) in str(caught.value)


def test_other_encoding_than_utf_8_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_bytes(b"x,y\n\xff,1\n")
    with pytest.raises(InvalidInputError, match="as CSV in UTF-8"):
        load_dataset(tmp_path / "mine.csv")


CELLS = st.one_of(
    st.floats(-1e100, 1e100).map(repr),
    st.floats(-1e100, 1e100).map(lambda value: f'"{value!r}"'.replace(".", ",")),
    st.integers(-(10**25), 10**25).map(str),
    st.sampled_from(
        ["", "NA", "nan", "?", "007", "+5", " 5", "1_000", "1e-400", "True", "TRUE", "x", '"a,b"']
    ),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.lists(CELLS, min_size=3, max_size=12), delimiter=st.sampled_from(",;"))
def test_cells_are_parsed_as_in_exports(tmp_path: Path, cells: list[str], delimiter: str) -> None:
    """pandas infers types, but numbers and texts must be those of the cells."""
    lines = "".join(f"{cell}{delimiter}{k % 2}{delimiter}{k}\n" for k, cell in enumerate(cells))
    path = write_csv(tmp_path, f"a{delimiter}label{delimiter}b\n{lines}")
    texts = [cell.strip('"') for cell in cells]
    values = load_dataset(f"{path}?x=a,b&categories=a&missing=mean").preprocessing_spec.columns[0].categories
    assert values == tuple(sorted({*texts} - {""}))
    expected = [rows.parse_number(text, decimal_comma=delimiter == ";") for text in texts]
    if None in expected or all(math.isnan(value) for value in expected if value is not None):
        return
    numbers = load_dataset(f"{path}?x=a&missing=mean").x.numpy()[:, 0]
    assert np.array_equal(numbers, np.array(expected, float), equal_nan=True)


def test_booleans_are_texts(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "a,b,label\n1,True,x\n2,TRUE,y\n3,,x\n4,True,y\n")
    data = load_dataset(f"{path}?missing=drop")
    assert data.preprocessing_spec.columns[1].categories == ("TRUE", "True")
    assert len(data) == 3


def test_label_option_of_npz_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"'\?label=' does not apply to 'mine.npz'; allowed there: \?words="
    ):
        load_dataset("mine.npz?label=a")


# --- Parquet


def test_load_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = write_parquet(
        tmp_path,
        a=[1, 2, 3],
        b=pyarrow.array([True, False, True]),
        label=pyarrow.array(["x", "y", "x"]).dictionary_encode(),
        client=[5, 3, 5],
        when=pyarrow.array([1, 2, None], pyarrow.date32()),
    )
    data = load_dataset(f"{path}?x=a,b")
    assert (data.x.shape, data.y.tolist(), data.classes) == ((3, 2), [0, 1, 0], 2)
    assert data.client is not None
    assert data.client.tolist() == [1, 0, 1]
    with pytest.raises(InvalidInputError, match=r"column 'when' of .* holds date32"):
        load_dataset(path)
    with pytest.raises(InvalidInputError, match=r"has no column 'c'; it has: a, b, label, client, when"):
        load_dataset(f"{path}?x=c")


def test_load_parquet_with_text(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    data = load_dataset(write_parquet(tmp_path, text=["a b", "b", "b c"], label=[0, 1, 1]))
    assert (data.num_words, data.x.tolist()) == (4, [[2, 1], [1, 0], [1, 3]])


def test_load_parquet_with_missing_values(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = write_parquet(tmp_path, a=[1, None, 3, 4], b=["x", "y", None, "x"], label=[0, 1, 1, 1])
    with pytest.raises(InvalidInputError, match=r"column 'a' of .* has no value in row 1"):
        load_dataset(path)
    assert load_dataset(f"{path}?missing=drop").x.tolist() == [[1, 1], [4, 1]]
    path = write_parquet(tmp_path, a=[1, 2, 3], label=pyarrow.array([True, False, True]))
    assert load_dataset(path).label_names == ("False", "True")


def test_invalid_parquet_is_an_error(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = write_parquet(tmp_path, a=pyarrow.array([1, 2, 3], pyarrow.date32()), label=[0, 1, 1])
    with pytest.raises(
        InvalidInputError, match=r"column 'a' of .* holds date32.*; accepted are numbers, text and images"
    ):
        load_dataset(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(InvalidInputError, match=r"cannot read .*mine.parquet: "):
        load_dataset(path)
    path.unlink()
    with pytest.raises(InvalidInputError, match=r"cannot read .*mine.parquet: "):
        load_dataset(path)


def test_parquet_without_pyarrow_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        InvalidInputError, match=r"mine.parquet needs pyarrow; install it with: pip install 'feddbe\[table\]'"
    ):
        load_dataset(tmp_path / "mine.parquet")


def test_numeric_client_ids_of_any_length_are_sorted_by_value(tmp_path: Path) -> None:
    ids = ["9", "12345678901234567890", "10", "12345678901234567891", "9"]
    (tmp_path / "a.csv").write_text(
        "x,label,client\n" + "".join(f"{k},{k % 2},{i}\n" for k, i in enumerate(ids))
    )
    client = load_dataset(tmp_path / "a.csv").client
    assert client is not None
    assert client.tolist() == [0, 2, 1, 3, 0]


@pytest.mark.parametrize("name", ["bad\udcff.csv", "bad\0.csv", "~nosuch/x.csv"])
def test_unusable_path_is_an_error(name: str, tmp_path: Path) -> None:
    for data, data_dir in ((name, None), ("har", Path(name))):
        with pytest.raises(InvalidInputError, match="cannot use the path '") as caught:
            load_dataset(data, data_dir)
        assert str(caught.value).isprintable()


def test_errors_about_many_columns_are_short(tmp_path: Path) -> None:
    """50,000 columns once took 49 s and gave an error of 8.9 MB."""
    names = [f"a_name_that_is_long_{k}" for k in range(20_000)]
    rows = "".join(",".join([str(k % 2), *["1"] * len(names)]) + "\n" for k in range(3))
    path = tmp_path / "wide.csv"
    path.write_text(",".join(["label", *names]) + "\n" + rows)
    assert load_dataset(path).x.shape == (3, 20_000)
    with pytest.raises(InvalidInputError, match=r"has no column 'none'; it has: label, .* \.\.\. ") as caught:
        load_dataset(f"{path}?label=none")
    assert len(str(caught.value)) < 600
    words = "".join(f"{row[:-1]}{k}words\n" for k, row in enumerate(rows.splitlines()))
    path.write_text(",".join(["label", *names]) + "\n" + words)
    with pytest.raises(
        InvalidInputError, match=r"has numbers or categories in .* but text in 'a_name_that_is_long_19999'"
    ) as caught:
        load_dataset(path)
    assert len(str(caught.value)) < 800
    path.write_text(",".join(["label", *names, names[0]]) + "\n")
    with pytest.raises(InvalidInputError, match="two columns of one name") as caught:
        load_dataset(path)
    assert len(str(caught.value)) < 600


# --- images, dates, identifiers and missing texts in a CSV file


def write_image_table(folder: Path) -> Path:
    for k in range(4):
        (folder / "pictures").mkdir(exist_ok=True)
        Image.new("L", (5, 4), 10 * k).save(folder / "pictures" / f"{k}.PNG")
    rows_ = "".join(f"pictures/{k}.PNG,{k},{'ab'[k % 2]}\n" for k in range(4))
    return write_csv(folder, f"path,age,label\n{rows_}")


def test_paths_of_images_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_image_table(tmp_path)
    monkeypatch.chdir("/")  # paths are relative to the file, not to the working directory
    with pytest.raises(
        InvalidInputError, match=r"images in 'path' next to 'age'; use the images only: \?image=path"
    ):
        load_dataset(path)
    for query in ("image=path", "x=path", "drop=age"):
        data = load_dataset(f"{path}?{query}")
        assert (data.x.shape, data.x[:, 0, 0, 0].tolist()) == ((4, 1, 4, 5), [0, 10, 20, 30])
        assert data.preprocessing_spec.kind == "images"
    assert load_dataset(f"{path}?drop=path").x.shape == (4, 1)
    assert load_dataset(f"{path}?image=path&resize=2").x.shape == (4, 1, 2, 2)


def test_image_column_errors_name_the_line(tmp_path: Path) -> None:
    path = write_image_table(tmp_path)
    (tmp_path / "pictures" / "2.PNG").unlink()
    with pytest.raises(InvalidInputError, match=r"cannot read the image in line 4 of .*: .*No such file"):
        load_dataset(f"{path}?image=path")
    with pytest.raises(InvalidInputError, match=r"^\?image=age: the column .* has numbers; expected paths"):
        load_dataset(f"{path}?image=age")
    path.write_text(path.read_text().replace("pictures/2.PNG", "NA"))
    with pytest.raises(
        InvalidInputError, match=r"'path' of .* no value in line 4; .*missing=drop leaves .* out$"
    ):
        load_dataset(f"{path}?image=path&missing=mean")
    assert len(load_dataset(f"{path}?image=path&missing=drop")) == 3


@pytest.mark.parametrize("marker", ["", "NA", "n/a", "NULL", "?"])
def test_markers_of_a_missing_text(tmp_path: Path, marker: str) -> None:
    cells = ["red", "blue", "red", marker, "blue", "red"]
    path = write_csv(tmp_path, "a,color,label\n" + "".join(f"{k},{c},{k % 2}\n" for k, c in enumerate(cells)))
    with pytest.raises(
        InvalidInputError, match=r"'color' of .* no value in line 5; .*the column's frequencies"
    ):
        load_dataset(path)
    assert len(load_dataset(f"{path}?missing=drop")) == 5
    filled = load_dataset(f"{path}?missing=mean").preprocessing_spec.columns[1]
    assert filled.categories == ("blue", "red")
    if marker:
        named = load_dataset(f"{path}?categories=color").preprocessing_spec.columns[1]
        assert marker in named.categories, "a name if the column is declared as one"
    if marker:  # an empty text is a text
        with pytest.raises(InvalidInputError, match=r"'color' .* no value in line 5; .*takes an empty text"):
            load_dataset(f"{path}?x=color")
    texts = load_dataset(f"{path}?x=color&missing=mean").preprocessing_spec
    assert texts.vocabulary[1:] == ("red", "blue")


def test_missing_label_text_is_not_a_class(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "a,label\n1,x\n2,NA\n3,y\n4,x\n")
    with pytest.raises(InvalidInputError, match=r"'label' of .* has no value in line 3"):
        load_dataset(path)
    assert load_dataset(f"{path}?missing=drop").label_names == ("x", "y")


def test_dates_and_identifiers_are_named(tmp_path: Path) -> None:
    lines = "".join(f"{k + 100},2024-01-{k % 5 + 1:02},{k % 7 / 2},{k % 2}\n" for k in range(40))
    path = write_csv(tmp_path, f"id,day,size,label\n{lines}")
    note = load_dataset(path).note
    assert "'day' has dates and " in note
    assert "'id' has another value in each row, like an identifier" in note
    assert "?drop=day,id leaves columns out" in note
    shuffled_ids = write_csv(
        tmp_path, "id,label\n" + "".join(f"{99 + k * 7 % 40},{k % 2}\n" for k in range(40))
    )
    assert "'id' has another value" in load_dataset(shuffled_ids).note
    ids_with_gaps = write_csv(tmp_path, "id,label\n" + "".join(f"{k * k},{k % 2}\n" for k in range(40)))
    assert "'id' has another value" in load_dataset(ids_with_gaps).note
    weights = write_csv(
        tmp_path, "weight,label\n" + "".join(f"{k * 7 % 40 * 3},{k % 2}\n" for k in range(40))
    )
    assert load_dataset(weights).note == ""
    path = write_csv(tmp_path, f"id,day,size,label\n{lines}")
    dropped = load_dataset(f"{path}?drop=day,id")
    assert (dropped.x.shape, dropped.note) == ((40, 1), "")
    with pytest.raises(InvalidInputError, match="has no column 'dya'"):
        load_dataset(f"{path}?drop=dya")


def test_advice_for_mixed_columns_names_all_that_it_drops(tmp_path: Path) -> None:
    lines = "".join(f"{k % 3},user{k},note number {k},{k % 2}\n" for k in range(30))
    path = write_csv(tmp_path, f"a,user,remark,label\n{lines}")
    with pytest.raises(InvalidInputError, match=r"text in 'user', 'remark' .*: \?drop=user,remark, or use"):
        load_dataset(path)
    assert load_dataset(f"{path}?drop=user,remark").x.shape == (30, 1)
    dates = "".join(f"{k % 3},2024-{k % 12 + 1}-{k + 1},{k % 2}\n" for k in range(30))
    path = write_csv(tmp_path, f"a,day,label\n{dates}")
    with pytest.raises(InvalidInputError, match=r"; 'day' has dates; leave columns out: \?drop=day"):
        load_dataset(path)
