"""Text as numbers: words by torchtext's `basic_english` rules, a vocabulary by frequency, rows of one length.

Number 0 is both the unknown word and the padding, as in the published experiments.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from feddbe.data.rows import words

__all__ = ["LENGTH", "UNKNOWN", "tokenize", "words"]

LENGTH = 200
"""Words kept of each text: the published experiments'."""
UNKNOWN = "<unk>"


def tokenize(texts: Iterable[str], length: int = LENGTH) -> tuple[npt.NDArray[np.int32], list[str]]:
    """The texts as rows of word numbers, cut or padded with 0 to `length`, and the vocabulary.

    Words are numbered from 1 by falling frequency in all the texts, equally frequent ones in alphabetical
    order; number 0 is `<unk>`, also where a text has that word itself.
    """
    first_seen = {UNKNOWN: 0}
    numbers, lengths = array("i"), array("q")
    for text in texts:
        row = [first_seen.setdefault(word, len(first_seen)) for word in words(text)]
        numbers.extend(row)
        lengths.append(len(row))
    flat, sizes = np.asarray(numbers), np.asarray(lengths)
    counts = np.bincount(flat, minlength=len(first_seen))
    vocabulary = sorted(first_seen, key=lambda w: (w != UNKNOWN, -counts[first_seen[w]], w))
    number = np.empty(len(vocabulary), np.int32)
    number[[first_seen[word] for word in vocabulary]] = np.arange(len(vocabulary), dtype=np.int32)

    x = np.zeros((len(sizes), length), np.int32)
    row_of = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(flat)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept = place < length
    x[row_of[kept], place[kept]] = number[flat[kept]]
    return x, vocabulary
