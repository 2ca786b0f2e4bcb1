"""Tests of `RaggedArray` against lists of arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddbe.data.split import RaggedArray

LISTS = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8)


def to_lists(ragged: RaggedArray) -> list[list[int]]:
    return [rows.tolist() for rows in ragged]


@given(LISTS, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([None, 1, 2, -1]))
def test_behaves_like_a_list_of_arrays(
    parts: list[list[int]], start: int, stop: int, step: int | None
) -> None:
    ragged = RaggedArray.from_lists(np.array(rows, np.int64) for rows in parts)
    assert to_lists(ragged) == parts
    assert [ragged[k].tolist() for k in range(-len(parts), len(parts))] == parts + parts
    assert to_lists(ragged[start:stop:step]) == parts[start:stop:step]
    assert ragged.sizes.tolist() == [len(rows) for rows in parts]
    assert ragged.owners.tolist() == [k for k, rows in enumerate(parts) for _ in rows]
    assert {rows.dtype for rows in ragged} <= {np.dtype(np.int64)}
    with pytest.raises(IndexError):
        ragged[len(parts)]


@given(LISTS, st.data())
def test_split_at(parts: list[list[int]], data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(0, len(rows))) for rows in parts]
    first, rest = RaggedArray.from_lists(np.array(rows, np.int64) for rows in parts).split_at(
        np.array(sizes, np.int64)
    )
    assert to_lists(first) == [rows[:k] for rows, k in zip(parts, sizes, strict=True)]
    assert to_lists(rest) == [rows[k:] for rows, k in zip(parts, sizes, strict=True)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_group_by_value(values: list[int]) -> None:
    groups = RaggedArray.group_by_value(np.array(values))
    assert to_lists(groups) == [
        [i for i, value in enumerate(values) if value == distinct] for distinct in sorted({*values})
    ]


def test_histogram() -> None:
    ragged = RaggedArray.from_lists([np.array([0, 1, 2]), np.array([], np.int64), np.array([3])])
    assert ragged.histogram(np.array([2, 0, 2, 1]), 3).tolist() == [[1, 0, 2], [0, 0, 0], [0, 1, 0]]
