"""Tests of tokenization against torchtext's rules."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddbe.data.dataset import tokenize
from feddbe.data.rows import split_words

# torchtext.data.utils: each pattern in turn, then split at white space
PATTERNS = [
    (r"\'", " '  "), (r"\"", ""), (r"\.", " . "), (r"<br \/>", " "), (r",", " , "), (r"\(", " ( "),
    (r"\)", " ) "), (r"\!", " ! "), (r"\?", " ? "), (r"\;", " "), (r"\:", " "), (r"\s+", " "),
]  # fmt: skip


def basic_english(line: str) -> list[str]:
    line = line.lower()
    for pattern, replacement in PATTERNS:
        line = re.sub(pattern, replacement, line)
    return line.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It's a U.S. dollar", ["it", "'", "s", "a", "u", ".", "s", ".", "dollar"]),
        ('He said "no" (twice)!', ["he", "said", "no", "(", "twice", ")", "!"]),
        ("a;b:c<br />d\n e\\f #39;s", ["a", "b", "c", "d", "e\\f", "#39", "s"]),
        ('<b"r />x <br/>', ["x", "<br/>"]),
        (" \t", []),
    ],
)
def test_split_words(text: str, expected: list[str]) -> None:
    assert split_words(text) == expected == basic_english(text)


@given(st.lists(st.sampled_from([*"aB'\".,()!?;: \n\u00a0ß", "<br />", "<br", " />"])).map("".join))
def test_split_words_equals_torchtext(text: str) -> None:
    assert split_words(text) == basic_english(text)


def test_words_are_numbered_by_frequency_then_alphabet() -> None:
    x, vocabulary = tokenize(["b a c", "c b", "d. c"], length=4)
    assert vocabulary == ["<unk>", "c", "b", ".", "a", "d"]
    assert x.tolist() == [[2, 4, 1, 0], [1, 2, 0, 0], [5, 3, 1, 0]]
    assert x.dtype == np.int32


def test_long_texts_are_truncated_but_all_words_are_counted() -> None:
    x, vocabulary = tokenize(["a z z z", "b b", ""], length=2)
    assert vocabulary == ["<unk>", "z", "b", "a"]
    assert x.tolist() == [[3, 1], [2, 2], [0, 0]]


def test_unknown_word_is_zero_even_if_a_text_contains_it() -> None:
    x, vocabulary = tokenize(["<unk> a <unk>"], length=3)
    assert vocabulary == ["<unk>", "a"]
    assert x.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("texts", [[], [""]])
def test_texts_without_words(texts: list[str]) -> None:
    x, vocabulary = tokenize(texts, length=3)
    assert (x.tolist(), vocabulary) == ([[0, 0, 0]] * len(texts), ["<unk>"])


@given(st.lists(st.text(alphabet="abc .", max_size=12), max_size=6))
def test_numbering_equals_sorted_counter(texts: list[str]) -> None:
    """torchtext sorts a Counter by word, then stably by falling frequency."""
    counter = Counter(word for text in texts for word in basic_english(text))
    ranked = sorted(sorted(counter.items()), key=lambda item: item[1], reverse=True)
    number = {word: i for i, (word, _) in enumerate(ranked, start=1)}
    x, vocabulary = tokenize(texts, length=5)
    assert vocabulary[1:] == [word for word, _ in ranked]
    expected = [[number[word] for word in basic_english(text)][:5] for text in texts]
    assert x.tolist() == [row + [0] * (5 - len(row)) for row in expected]
