"""Lists of rows as one array: the same as a list of arrays, in every way that one is used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddbe.data.split import RaggedArray

LISTS = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8)


def lists(ragged: RaggedArray) -> list[list[int]]:
    return [rows.tolist() for rows in ragged]


@given(LISTS, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([None, 1, 2, -1]))
def test_it_is_a_list_of_arrays(parts: list[list[int]], start: int, stop: int, step: int | None) -> None:
    found = RaggedArray.from_lists(np.array(rows, np.int64) for rows in parts)
    assert lists(found) == parts
    assert [found[k].tolist() for k in range(-len(parts), len(parts))] == parts + parts
    assert lists(found[start:stop:step]) == parts[start:stop:step]
    assert found.sizes.tolist() == [len(rows) for rows in parts]
    assert found.owners.tolist() == [k for k, rows in enumerate(parts) for _ in rows]
    assert {rows.dtype for rows in found} <= {np.dtype(np.int64)}
    with pytest.raises(IndexError):
        found[len(parts)]


@given(LISTS, st.data())
def test_cut(parts: list[list[int]], data: st.DataObject) -> None:
    at = [data.draw(st.integers(0, len(rows))) for rows in parts]
    first, rest = RaggedArray.from_lists(np.array(rows, np.int64) for rows in parts).split_at(
        np.array(at, np.int64)
    )
    assert lists(first) == [rows[:k] for rows, k in zip(parts, at, strict=True)]
    assert lists(rest) == [rows[k:] for rows, k in zip(parts, at, strict=True)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_places_of_each_value(values: list[int]) -> None:
    found = RaggedArray.group_by_value(np.array(values))
    assert lists(found) == [[i for i, v in enumerate(values) if v == one] for one in sorted({*values})]


def test_counts() -> None:
    found = RaggedArray.from_lists([np.array([0, 1, 2]), np.array([], np.int64), np.array([3])])
    assert found.histogram(np.array([2, 0, 2, 1]), 3).tolist() == [[1, 0, 2], [0, 0, 0], [0, 1, 0]]
